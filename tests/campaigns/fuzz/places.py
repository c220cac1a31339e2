"""A store of a few objects in memory, as quick as a dictionary, that counts what is asked of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.errors import InvariantViolatedError, ObjectNotFoundError
from memwal_ops.storage.api import DeleteReport, Listing, ObjectMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WRITTEN = datetime(2024, 2, 29, 12, tzinfo=UTC)
_MOST_CALLS = 1000


class FewObjects:
    """Implements the whole store interface; refuses to be asked without end."""

    root = "memory://few"

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects
        self.calls = 0

    def _count(self) -> None:
        self.calls += 1
        assert self.calls <= _MOST_CALLS, "one input leads to requests without end"

    def get(self, path: str) -> bytes:
        self._count()
        if path not in self.objects:
            raise ObjectNotFoundError(f"{path} is not there.")
        return self.objects[path]

    def get_range(self, path: str, start: int, length: int) -> bytes:
        return self.get(path)[start : start + length]

    def head(self, path: str) -> ObjectMeta | None:
        self._count()
        data = self.objects.get(path)
        return None if data is None else ObjectMeta(path, len(data), WRITTEN, "tag")

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        self._count()
        for path, data in sorted(self.objects.items()):
            if path.startswith(f"{prefix}/") and (after is None or path > after):
                yield ObjectMeta(path, len(data), WRITTEN, "tag")

    def list_level(self, prefix: str = "") -> Listing:
        return Listing((), tuple(self.list(prefix)))

    def put(self, path: str, data: bytes) -> None:
        self.objects[path] = data

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self.objects.setdefault(path, data) is data

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        raise InvariantViolatedError(path)

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        return DeleteReport(sum(self.objects.pop(path, None) is not None or True for path in paths), {})
