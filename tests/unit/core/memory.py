"""A store in memory, whose clock moves by a minute at each write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.storage.api import DeleteReport, ObjectMeta

START = datetime(2026, 11, 21, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@dataclass
class MemoryStore:
    """Objects written one a minute; ``before_put`` and ``before_get`` are what others do meanwhile."""

    data: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, datetime] = field(default_factory=dict)
    now: datetime = START
    gets: int = 0
    puts: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    lose_answers: bool = False
    before_put: Callable[[], None] = lambda: None
    before_get: Callable[[str], None] = lambda _: None

    def list(self, prefix: str) -> Iterator[ObjectMeta]:
        for path, data in [*self.data.items()]:
            if path.startswith(f"{prefix}/"):
                yield ObjectMeta(path, len(data), self.times[path], None)

    def get(self, path: str) -> bytes:
        self.gets += 1
        self.before_get(path)
        if path not in self.data:
            raise ObjectNotFoundError(path)
        return self.data[path]

    def write(self, path: str, data: bytes) -> None:
        self.now += MINUTE
        self.data[path], self.times[path] = data, self.now

    def put(self, path: str, data: bytes) -> None:
        self.puts.append(path)
        self.write(path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.before_put()
        if path in self.data:
            return False
        self.write(path, data)
        return not self.lose_answers

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        self.deleted += (gone := [*paths])
        for path in gone:
            self.data.pop(path, None)
        return DeleteReport(len(gone), {})
