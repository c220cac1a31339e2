"""Read the legacy MemWAL index of a table version: its MemWALs, what FLUSHED means for each, and the unmerged ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from memwal_ops.errors import (
    FlushedMeaningUnknownError,
    InvalidFormatError,
    InvariantViolatedError,
    MemwalOpsError,
    MemWalOrderError,
    ObjectNotFoundError,
)
from memwal_ops.formats.lance.files.versions import read_version_manifest
from memwal_ops.formats.lance.generations.backlog import blocked_entry
from memwal_ops.formats.lance.wire.legacy_index import MemWal, State, decode_mem_wals
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry, is_legacy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

Meaning = Literal["merged", "unmerged"]
_FLUSHED_IS_UNMERGED_SINCE = (0, 36)
_RELEASE = re.compile(r"(\d+)\.(\d+)\.")


def legacy_entry(table: Table) -> table_pb2.IndexMetadata:
    """The MemWAL entry of a table of the legacy layout.

    Raises:
        NoMemWalIndexError: a plain table.
    """
    entry = find_memwal_entry(table.manifest.indexes)
    if entry is None:
        table.require_memwal("A reader or writer of MemWAL")
    if entry is None or not is_legacy(entry):
        raise InvariantViolatedError(f"{table.location.uri} has no legacy MemWAL index.")
    return entry


def mem_wals_of(table: Table) -> tuple[MemWal, ...]:
    """The MemWALs of a table version, in their stored order. Raises ``TableCorruptError``."""
    return decode_mem_wals(legacy_entry(table).index_details.value)


@dataclass(frozen=True, slots=True)
class FlushedMeaning:
    """What FLUSHED means for a MemWAL.

    Attributes:
        meaning: merged: the rows are in the table already (Lance 0.31 to 0.35, S1-021). unmerged: they are on disk
            only (from 0.36, S1-019). None: it is not known.
        release: of Lance that wrote the state; None: not known.
    """

    meaning: Meaning | None
    release: str | None


class Meanings:
    """What FLUSHED means. It follows from the release that wrote the version in which a MemWAL changed last.

    Args:
        given: the user's ``--flushed-means``, used if the release is not known; None: not given.
    """

    def __init__(self, table: Table, given: str | None = None) -> None:
        """Nothing is read yet."""
        self._table, self._given = table, given
        self._release = lru_cache(maxsize=None)(self._read_release)

    def of(self, mem_wal: MemWal) -> FlushedMeaning:
        """The meaning for one MemWAL; one request for each version that none of the others named."""
        release = self._release(mem_wal.last_updated_dataset_version)
        match = None if release is None else _RELEASE.match(release)
        if match is None:
            return FlushedMeaning(self._given, release)  # type: ignore[arg-type]  # the option has these two words
        since = (int(match[1]), int(match[2])) >= _FLUSHED_IS_UNMERGED_SINCE
        return FlushedMeaning("unmerged" if since else "merged", release)

    def unknown(self, mem_wal: MemWal) -> FlushedMeaningUnknownError:
        """The error of a MemWAL whose meaning is None."""
        return FlushedMeaningUnknownError(
            f"Generation {mem_wal.id.generation} of region {mem_wal.id.region!r} is FLUSHED since version "
            f"{mem_wal.last_updated_dataset_version}, which does not exist or does not record the Lance release that "
            "wrote it: before 0.36 that means merged, and since 0.36 not."
        )

    def _read_release(self, version: int) -> str | None:
        table = self._table
        if version == table.version:
            writer = table.manifest.manifest.writer_version
        else:
            try:
                writer = read_version_manifest(table.store, version, table.naming).manifest.writer_version
            except (ObjectNotFoundError, InvalidFormatError):
                return None
        return writer.version if writer.library == "lance" else None


@dataclass(frozen=True, slots=True)
class BlockedMemWal:
    """Why a region cannot be merged completely. ``generation`` is the first faulty one, None: the whole region."""

    region: str
    generation: int | None
    error: MemwalOpsError

    def to_json(self) -> dict[str, object]:
        """The ``blocked`` entry of a report."""
        return blocked_entry(self.region, self.generation, self.error)


@dataclass(frozen=True, slots=True)
class RegionWork:
    """The work of a merge in one region.

    Attributes:
        region: its name.
        mem_wals: all of it, ascending.
        pending: FLUSHED and not merged, in the order in which they are to be merged; before the first fault.
        merged_already: FLUSHED by a release for which that means merged: only their state is to be changed.
        blocked: why no more of it can be merged.
    """

    region: str
    mem_wals: tuple[MemWal, ...]
    pending: tuple[MemWal, ...]
    merged_already: tuple[MemWal, ...]
    blocked: BlockedMemWal | None

    @property
    def waiting(self) -> tuple[MemWal, ...]:
        """Those that a writer has not flushed yet."""
        return tuple(one for one in self.mem_wals if one.state < State.FLUSHED)


def read_work(mem_wals: Sequence[MemWal], meanings: Meanings) -> Mapping[str, RegionWork]:
    """The work of each region, by name: its lowest FLUSHED generation first, and none above one that waits."""
    regions = sorted({one.id.region for one in mem_wals})
    return {region: _work(region, mem_wals, meanings) for region in regions}


def _work(region: str, mem_wals: Sequence[MemWal], meanings: Meanings) -> RegionWork:
    ascending = tuple(sorted((one for one in mem_wals if one.id.region == region), key=lambda one: one.id))
    pending: list[MemWal] = []
    already: list[MemWal] = []
    fault: BlockedMemWal | None = None
    done = last_done(ascending)
    waits: MemWal | None = None
    for one in ascending:
        if one.state < State.FLUSHED:
            waits = waits or one
        elif one.state is State.FLUSHED:
            meaning = meanings.of(one).meaning
            error = meanings.unknown(one) if meaning is None else None if waits is None else _ahead(one, waits)
            if error is not None:
                fault = BlockedMemWal(region, one.id.generation, error)
                break
            (already if meaning == "merged" else pending).append(one)
    done = max([done, *(one.id.generation for one in already)])
    late = next((one for one in pending if one.id.generation < done), None)
    if late is not None:
        fault = BlockedMemWal(region, late.id.generation, _late(late, done))
        pending = [one for one in pending if one.id < late.id]
    return RegionWork(region, ascending, tuple(pending), tuple(already), fault)


@dataclass(frozen=True, slots=True)
class Unmerged:
    """The unmerged MemWALs of a region, flushed or not.

    Attributes:
        mem_wals: ascending; empty where there is a fault.
        done: the highest generation whose rows are in the base table; -1: none.
        fault: why it is not known which rows are newer.
    """

    mem_wals: tuple[MemWal, ...]
    done: int
    fault: BlockedMemWal | None = None


def unmerged(mem_wals: Sequence[MemWal], region: str, meanings: Meanings) -> Unmerged:
    """The unmerged MemWALs of a region, in the order in which they were written."""
    ascending = sorted((one for one in mem_wals if one.id.region == region), key=lambda one: one.id)
    done = last_done(ascending)
    waiting: list[MemWal] = []

    def blocked(one: MemWal, error: MemwalOpsError) -> Unmerged:
        return Unmerged((), done, BlockedMemWal(region, one.id.generation, error))

    for one in ascending:
        meaning = meanings.of(one).meaning if one.state is State.FLUSHED else "unmerged"
        if meaning is None:
            return blocked(one, meanings.unknown(one))
        if meaning == "merged":
            done = max(done, one.id.generation)
        elif one.state is not State.MERGED:
            waiting.append(one)
    unsealed = [one for one in waiting if one.state is State.OPEN]
    if len(unsealed) > 1:
        numbers = ", ".join(str(one.id.generation) for one in unsealed)
        return blocked(unsealed[1], MemWalOrderError(f"Region {region!r} has several OPEN generations: {numbers}."))
    if waiting and waiting[0].id.generation < done:
        return blocked(waiting[0], _late(waiting[0], done))
    return Unmerged(tuple(waiting), done)


def _late(mem_wal: MemWal, done: int) -> MemWalOrderError:
    return MemWalOrderError(
        f"Generation {mem_wal.id.generation} of region {mem_wal.id.region!r} is not merged, and generation {done} "
        "after it is: its rows would replace newer ones."
    )


def last_done(ascending: Sequence[MemWal]) -> int:
    """The highest generation of a region that is MERGED, or was: one that is missing is trimmed; -1: none."""
    merged = [one.id.generation for one in ascending if one.state is State.MERGED]
    trimmed = [b.id.generation - 1 for a, b in pairwise(ascending) if b.id.generation - a.id.generation > 1]
    return max([ascending[0].id.generation - 1, *merged, *trimmed])


def _ahead(mem_wal: MemWal, waits: MemWal) -> MemWalOrderError:
    return MemWalOrderError(
        f"Generation {mem_wal.id.generation} of region {mem_wal.id.region!r} is FLUSHED, and generation "
        f"{waits.id.generation} before it only {waits.state.name}: merged first, its rows would be replaced by older "
        "ones.",
        remedy=f"Let the writer of the region, {waits.owner_id!r}, flush generation {waits.id.generation}; or, if it "
        "will never run again, let memwal-ops migrate replay its log.",
    )
