"""One table's month under one way of maintenance, and what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.life import queries
from benchmarks.life.shapes import Shape, Writer
from benchmarks.life.store import BUCKET, CountingStore, Used

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LIMIT = 120  # seconds that a process has to end
_REST = 3  # days at the end without writes
_BUILT = "fresh.lance"


@dataclass(slots=True)
class Day:
    """The table at the end of a day.

    Attributes:
        written: bytes that were written for each that was appended, until now; without a log.
        kept: bytes of all its objects over those of its newest version.
        fragments: data fragments.
        segments: segments of all indexes.
        price: of the requests until now, in US dollars.
    """

    written: float
    kept: float
    fragments: int
    segments: int
    price: float


@dataclass(slots=True)
class Month:
    """What a month took, and what queries cost after it.

    Attributes:
        way: of maintenance.
        appended: Arrow bytes of the rows that were written to the table after its first ones.
        used: requests and bytes of writers and maintenance.
        begun: bytes of the table's objects when the month began, by part.
        kept: bytes of the table's objects, by part.
        needed: bytes of the newest version's files.
        fresh: bytes of a table that was built anew of the same rows, by part.
        cpu: processor seconds of maintenance.
        peak: the most memory of the process that maintains, in MiB.
        did: what was done, and how often.
        rows: a digest of the rows; empty if they are not all in the base.
        asked: requests of each query.
        asked_fresh: the same of the table that was built anew.
        ratios: processor seconds of each query over those of the table that was built anew.
        recall: of the vector index, and of that of the table that was built anew.
        rested: ``ratios`` after three days at rest.
        rested_written: bytes of data files that were written until then for each that was appended.
    """

    way: str
    appended: int = 0
    used: Used = field(default_factory=Used)
    begun: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    needed: int = 0
    fresh: Counter[str] = field(default_factory=Counter)
    cpu: float = 0.0
    peak: float = 0.0
    did: Counter[str] = field(default_factory=Counter)
    days: list[Day] = field(default_factory=list)
    rows: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    asked_fresh: dict[str, int] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    recall: list[float] = field(default_factory=list)
    rested: dict[str, float] = field(default_factory=dict)
    rested_written: float = 0.0

    def to_json(self) -> str:
        """Everything, for :meth:`from_json`."""
        return json.dumps(_fields(self), indent=1, default=_fields)

    @classmethod
    def from_json(cls, text: str) -> Month:
        """What :meth:`to_json` wrote."""
        found: dict[str, Any] = json.loads(text)
        used = found.pop("used")
        days = [Day(**day) for day in found.pop("days")]
        found |= {name: Counter(found[name]) for name in ("begun", "kept", "fresh", "did")}
        used = Used(Counter(used["requests"]), Counter(used["written"]), used["read"])
        return cls(**found, used=used, days=days)


@dataclass(frozen=True, slots=True)
class Place:
    """The store, the options that reach it, and the folder where its tables are seen without requests."""

    store: CountingStore
    options: dict[str, str]

    def uri(self, name: str) -> str:
        """The table in the store."""
        return f"s3://{BUCKET}/{name}"

    def path(self, name: str) -> str:
        """The table's folder."""
        return str(Path(self.store.folder) / name)


def live(place: Place, shape: Shape, way: str, process: Sequence[str], days: int, a_day: int) -> Month:
    """Make a table, write to it and maintain it for so many days, and ask it then.

    Args:
        place: where.
        shape: of the table.
        way: as printed.
        process: the command of the process that maintains it; empty: none.
        days: of the month.
        a_day: rounds of a day.
    """
    name, month = "table.lance", Month(way)
    uri = place.uri(name)
    writer = Writer(shape, uri, place.options, days * a_day, a_day)
    writer.make()
    month.begun = place.store.sizes(name)
    with _running(process, uri, place.options, a_day) as child:
        place.store.taken()
        for number in range(days * a_day):
            writer.write(number)
            if child is not None:
                _add(month, _round(child, way))
            month.used.add(place.store.taken())
            if (number + 1) % a_day == 0:
                month.appended = writer.appended
                month.days.append(_day(place, name, month))
        month.kept, month.needed = place.store.sizes(name), queries.needed(place.path(name))
        if not shape.log or process:
            _ask(place, shape, name, month)
        if child is not None:
            place.store.taken()
            for _ in range(_REST * a_day):
                _round(child, way)
            written = month.used.written["data"] + place.store.taken().written["data"]
            month.rested_written = written / month.appended
            month.rested = queries.processor_ratios(queries.queries(shape), place.path(name), place.path(_BUILT))
    return month


def _fields(value: Any) -> dict[str, Any]:
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _day(place: Place, name: str, month: Month) -> Day:
    path = place.path(name)
    fragments, segments = queries.size(path)
    written = month.used.written.total() - month.used.written["log"]
    kept = place.store.sizes(name).total() / queries.needed(path)
    return Day(written / month.appended, kept, fragments, segments, month.used.price)


def _ask(place: Place, shape: Shape, name: str, month: Month) -> None:
    """Compare the table with one that is built anew of its rows."""
    built = _BUILT
    month.rows = queries.fresh(shape, place.uri(built), place.path(name), place.options)
    month.fresh = place.store.sizes(built)
    chosen = queries.queries(shape)
    month.asked = queries.requests_of(place.store, chosen, place.uri(name), place.options)
    month.asked_fresh = queries.requests_of(place.store, chosen, place.uri(built), place.options)
    month.ratios = queries.processor_ratios(chosen, place.path(name), place.path(built))
    if shape.vectors:
        month.recall = [queries.recall(place.path(one)) for one in (name, built)]


@contextmanager
def _running(
    process: Sequence[str], uri: str, options: dict[str, str], a_day: int
) -> Iterator[subprocess.Popen[str] | None]:
    if not process:
        yield None
        return
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "RUST_LOG": "off", "LANCE_LOG": "error"}
    command = [*process, uri, json.dumps(options), str(a_day)]
    child = subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def _round(child: subprocess.Popen[str], way: str) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write("\n")
        child.stdin.flush()
        line = child.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise SystemExit(f"The process of {way} ended with {child.wait(_LIMIT)}; its own lines are above.")
    found: dict[str, Any] = json.loads(line)
    return found


def _add(month: Month, found: dict[str, Any]) -> None:
    month.cpu += found["cpu"]
    month.peak = max(month.peak, found["peak"])
    month.did.update(found["did"])


def own_process(way: str) -> list[str]:
    """The command of a way that runs in this environment."""
    return [sys.executable, "-W", "ignore", "-m", "benchmarks.life.ways", way]


def lancedb_process(python: str) -> list[str]:
    """The command of LanceDB's way, by an interpreter that has it."""
    return [python, "-W", "ignore", "-m", "benchmarks.life.with_lancedb"]
