"""Bugs of the region writer, planted on purpose; see :mod:`tests.campaigns.sim.planted`.

``python -m tests.campaigns.sim.region_planted`` hunts them all, and prints the seeds that tell them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import StorageError
from memwal_ops.formats.lance.log import region_files, region_writer
from memwal_ops.formats.lance.log.region_files import WalEntry
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from tests.campaigns.sim.planted import Bug, Patch, hunt
from tests.campaigns.sim.region_writer_steps import WriterHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LIMIT = 200
#: Per bug the history that tells it.
FOUND = {
    "no fencing check before the manifest": 3,
    "acknowledged before the put": 1,
    "recovery stops one entry early": 2,
    "recovery begins one entry late": 2,
    "what stands there is our own": 9,
    "a hole behind a failed put": 6,
    "entries in the wrong order": 2,
}
WRITER_BUGS: dict[str, Bug] = {}


def _bug(make: Callable[[], Iterable[Patch]]) -> Callable[[], Iterable[Patch]]:
    name = make.__name__.replace("_", " ")
    WRITER_BUGS[name] = Bug(name, (make.__doc__ or "").strip(), make)
    return make


@_bug
def no_fencing_check_before_the_manifest() -> Iterable[Patch]:
    """A writer publishes a generation without asking whether the region is still its own."""

    def newest(self: Any) -> Any:
        return self._manifests.latest(checked=True)

    yield Patch(RegionWriter, "_newest", newest)


@_bug
def acknowledged_before_the_put() -> Iterable[Patch]:
    """A durable write returns when it is in memory, and comes to the log later."""

    def append(self: Any, rows: Any) -> int:
        self._check_open(to_enter=True)
        return int(self._memtable.add_waiting(rows))

    yield Patch(RegionWriter, "_append", append)


@_bug
def recovery_stops_one_entry_early() -> Iterable[Patch]:
    """The replay takes the last entry for one that was not finished."""
    real = region_writer.read_log

    def read_log(store: Any, manifest: Any) -> Iterator[WalEntry]:
        yield from [*real(store, manifest)][:-1]

    yield Patch(region_writer, "read_log", read_log)


@_bug
def recovery_begins_one_entry_late() -> Iterable[Patch]:
    """The replay takes the first entry behind the last flush for one that is flushed."""
    real = region_writer.read_log

    def read_log(store: Any, manifest: Any) -> Iterator[WalEntry]:
        yield from [*real(store, manifest)][1:]

    yield Patch(region_writer, "read_log", read_log)


@_bug
def what_stands_there_is_our_own() -> Iterable[Patch]:
    """A put that finds its place taken believes that it was repeated by the store's client."""
    real = region_files.put_entry

    def put_entry(store: Any, region_id: Any, entry_id: int, rows: Any, epoch: int, columns: Any) -> WalEntry:
        made = real(store, region_id, entry_id, rows, epoch, columns)
        return made or WalEntry(entry_id, epoch, rows, columns.ids, 1)

    yield Patch(region_files, "put_entry", put_entry)


@_bug
def a_hole_behind_a_failed_put() -> Iterable[Patch]:
    """After a put whose outcome is unknown the writer goes on at the next place."""
    real = RegionWriter._put

    def put(self: Any, parts: Any, *, taken: int = 0) -> int:
        try:
            return real(self, parts, taken=taken)
        except StorageError:
            self._next_entry += 1
            raise

    yield Patch(RegionWriter, "_put", put)


@_bug
def entries_in_the_wrong_order() -> Iterable[Patch]:
    """A generation has its entries in the order of the newest first."""
    real = region_files.put_generation

    def put_generation(store: Any, location: Any, region_id: Any, path: str, entries: Any, columns: Any) -> bool:
        return real(store, location, region_id, path, entries[::-1], columns)

    yield Patch(region_files, "put_generation", put_generation)


def main() -> None:
    """Hunt those that are named, or all."""
    for name in sys.argv[1:] or WRITER_BUGS:
        found = hunt(WRITER_BUGS[name], range(1, LIMIT + 1), WriterHistory)
        sys.stdout.write(f"{name}: {found}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
