"""Find the newest row of each key of a pass, from keys and row addresses alone.

Newest is the highest (generation, row address) (S0-192). Reading keys first costs a few bytes a row and spares the
payload of every row that a later generation supersedes; it also means that the base is joined once, however many
generations wrote a key. Memory: the key columns of the pass and 16 bytes a row.

It is the first step of every engine, so that the interface (:class:`MergeEngine`) is here, too: an engine carries out
one pass as one base version, or raises. The job (``jobs.merge``) decides which generations make a pass, in which order,
and how errors are handled. Engines differ in where the work runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, Self
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops import errors
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, readable
from memwal_ops.formats.lance.generations.projection import TOMBSTONE
from memwal_ops.formats.lance.wire.region_manifest import RegionRecord, mark_of
from memwal_ops.storage.api import results_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.generations.generation import Generation, GenerationRef
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True, slots=True)
class MergePass:
    """A pass that is to be carried out.

    ``generations``: ascending within each region (S0-039). ``max_bytes``: its memory budget.
    """

    generations: tuple[GenerationRef, ...]
    max_bytes: int

    @property
    def progress(self) -> Mapping[UUID, int]:
        """Region id to the highest generation of the pass: what its commit records."""
        return {ref.region_id: ref.generation for ref in self.generations}

    @property
    def records(self) -> Mapping[UUID, RegionRecord]:
        """Region id to the record of its highest generation, committed with the progress: an id may be used again."""
        return {ref.region_id: RegionRecord(ref.generation, mark_of(ref.path)) for ref in self.generations}

    @property
    def regions(self) -> Mapping[UUID, tuple[int, int]]:
        """Region id to its first and last generation."""
        spans: dict[UUID, tuple[int, int]] = {}
        for ref in self.generations:
            first = spans.get(ref.region_id, (ref.generation, 0))[0]
            spans[ref.region_id] = (first, ref.generation)
        return spans


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did.

    Attributes:
        version: the base version that it published.
        rows_read: live rows in its generations.
        rows_upserted: rows written to the base.
        rows_deleted: base rows that a tombstone removed.
        bytes_read: size of the generations' data files.
        use_index: whether superseded base rows were found through the key index.
        phases: seconds per phase, for reports and benchmarks.
        metrics: other counts of the engine (Spark: tasks, lost attempts, shuffled and spilled bytes).
    """

    version: int
    rows_read: int
    rows_upserted: int
    rows_deleted: int
    bytes_read: int
    use_index: bool
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class BlockedRegionsError(errors.RegionsBlockedError):
    """Some regions cannot be merged. The pass was abandoned before anything was published.

    ``causes`` maps a region id to the generation at fault (None: the region as a whole) and the error.
    """

    def __init__(self, causes: Mapping[UUID, tuple[int | None, errors.MemwalOpsError]]) -> None:
        super().__init__("; ".join(str(error) for _, error in causes.values()))
        self.causes = causes

    def packed(self, pack: Callable[[errors.MemwalOpsError], dict[str, Any]]) -> list[dict[str, Any]]:
        """For the driver of a Spark task."""
        return [{"region": str(key), "generation": at, **pack(cause)} for key, (at, cause) in self.causes.items()]

    @classmethod
    def unpacked(cls, causes: list[dict[str, Any]], unpack: Callable[[Any], errors.MemwalOpsError]) -> Self:
        """The reverse of :meth:`packed`."""
        return cls({UUID(one["region"]): (one["generation"], unpack(one)) for one in causes})


class MergeEngine(Protocol):
    """Carries out passes."""

    @property
    def name(self) -> str:
        """The value of ``--engine`` that selects it."""

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Publish one pass as exactly ``table.version + 1``.

        ``table``: the pinned version that the pass was planned on. ``on_rows``: called with the number of generation
        rows that were processed since the last call.
        Raises ``BlockedRegionsError``: generations that are missing, damaged or cannot be projected;
        ``CommitLostError``: another writer published that version first; plan again on the newest one;
        ``MemwalOpsError``: any other refusal; nothing was published.
        """

    def refuse_shared_keys(self, table: Table, whole: MergePass) -> None:
        """Compare the keys of all regions of a run before its first pass; a pass compares only its own keys.

        ``table``: the pinned version that the run begins on. ``whole``: every generation that the run will merge, and
        its memory budget.
        Raises ``BlockedRegionsError``: regions that share a key, and generations that cannot be read.
        """


_AGE = "__memwal_ops_age"
_CONCURRENT_READS = 4
_REGION = "__memwal_ops_region"
SHOWN_KEYS = 3


@dataclass(frozen=True, slots=True)
class KeysOf:
    """The keys of one source. It is a generation, or rows in memory that will be one.

    ``region_id``: of its region. ``keys``: key columns under the base's names, ``_tombstone`` (bool) and ``_rowaddr``
    (uint64), in row order. ``newest_row_first``: whether the first row of a key is its newest write, not the last.
    """

    region_id: UUID
    keys: pa.Table
    newest_row_first: bool = False


@dataclass(frozen=True, slots=True)
class Winners:
    """The newest row of every key in a pass.

    Attributes:
        keys: key columns under the base's names, of upserts and tombstones, one row per key.
        rows: row number of each key's winner in the pass, aligned with ``keys``.
        is_tombstone: whether the winner deletes its key, aligned with ``keys``.
        upserts: per generation of the pass, a mask over its live rows: True if the row wins and is not a tombstone.
        rows_read: live rows in the pass.
    """

    keys: pa.Table
    rows: npt.NDArray[np.int64]
    is_tombstone: npt.NDArray[np.bool_]
    upserts: tuple[npt.NDArray[np.bool_], ...]
    rows_read: int

    @property
    def num_upserts(self) -> int:
        """Rows that the pass writes."""
        return int(len(self.is_tombstone) - self.is_tombstone.sum())


def collapse(generations: Sequence[Generation], primary_key: Sequence[str]) -> Winners:
    """Read the keys of all generations and find each key's newest row.

    ``generations``: grouped by region, ascending within each region. ``primary_key``: the base's names of the key
    columns.
    Raises ``BlockedRegionsError``: a generation's keys cannot be read, or a key is in two regions (S0-009), so that the
    order of its writes is not known.
    """
    return newest_of(keys_of_all(generations, primary_key), primary_key)


def keys_of_all(generations: Sequence[Generation], primary_key: Sequence[str]) -> list[KeysOf]:
    """The keys of each generation; raises as :func:`collapse`."""
    pairs = zip(generations, read_all_keys(generations, primary_key), strict=True)
    return [KeysOf(one.ref.region_id, keys, one.newest_row_first) for one, keys in pairs]


def newest_of(parts: Sequence[KeysOf], primary_key: Sequence[str]) -> Winners:
    """Find the newest row of each key among these, grouped by region, ascending within each.

    Raises ``BlockedRegionsError``: a key is in two regions.
    """
    tables = [one.keys for one in parts]
    bounds = np.cumsum([0, *(table.num_rows for table in tables)])
    everything = pa.concat_tables(tables)
    total = everything.num_rows
    ages = _ages([one.newest_row_first for one in parts], bounds)
    ranked = everything.select(list(primary_key)).append_column(_AGE, pa.array(ages))
    grouped = ranked.group_by(list(primary_key), use_threads=False).aggregate([(_AGE, "max"), (_AGE, "min")])
    newest = ages[grouped.column(f"{_AGE}_max").to_numpy()]
    oldest = ages[grouped.column(f"{_AGE}_min").to_numpy()]
    region_ids = [one.region_id for one in parts]
    _refuse_shared_keys(region_ids, bounds, everything.select(list(primary_key)), newest, oldest)

    # NULL means that the row is not deleted: the column may be nullable.
    tombstones = pc.fill_null(everything.column(TOMBSTONE), fill_value=False).to_numpy()
    is_winner = np.zeros(total, dtype=np.bool_)
    is_winner[newest] = True
    if int(is_winner.sum()) != grouped.num_rows:
        raise errors.InvariantViolatedError(
            "Two keys of a pass share one row: the collapse is wrong, nothing was merged."
        )
    is_upsert = is_winner & ~tombstones
    return Winners(
        keys=grouped.select(list(primary_key)),
        rows=newest,
        is_tombstone=tombstones[newest],
        upserts=tuple(is_upsert[start:end] for start, end in pairwise(bounds)),
        rows_read=total,
    )


def read_all_keys(generations: Sequence[Generation], primary_key: Sequence[str]) -> list[pa.Table]:
    """:func:`read_keys` of each generation. All errors are raised together: each raise costs a pass."""

    def read_one(generation: Generation) -> pa.Table | BlockedRegionsError:
        try:
            return read_keys(generation, primary_key)
        except BlockedRegionsError as error:
            return error

    tables: list[pa.Table] = []
    causes: dict[UUID, tuple[int | None, errors.MemwalOpsError]] = {}
    for outcome in results_of(read_one, generations, threads=_CONCURRENT_READS):
        if isinstance(outcome, BlockedRegionsError):
            # Keep the first of a region: generations ascend.
            causes = {**outcome.causes, **causes}
        else:
            tables.append(outcome)
    if causes:
        raise BlockedRegionsError(causes)
    return tables


def read_keys(generation: Generation, primary_key: Sequence[str]) -> pa.Table:
    """Key columns under the base's names, ``_tombstone`` and ``_rowaddr``, in row order.

    Raises:
        BlockedRegionsError: they cannot be read.
        InvariantViolatedError: rows did not come in the order of their addresses.
    """
    try:
        table = generation.read_keys()
    except errors.GenerationCorruptError as error:
        raise BlockedRegionsError({generation.ref.region_id: (generation.ref.generation, error)}) from error
    addresses = table.column(ROW_ADDRESS).to_numpy()
    if len(addresses) > 1 and not bool(np.all(addresses[1:] > addresses[:-1])):
        raise errors.InvariantViolatedError(f"{generation.ref} was not read in the order of its row addresses.")
    return table.rename_columns([*primary_key, TOMBSTONE, ROW_ADDRESS])


def _ages(newest_first: Sequence[bool], bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The age of each row of the pass, newest highest: its number, reversed in newest-first ones; its own inverse."""
    ages = np.arange(bounds[-1], dtype=np.int64)
    for is_reversed, (start, end) in zip(newest_first, pairwise(bounds), strict=True):
        if is_reversed:
            ages[start:end] = ages[start:end][::-1].copy()
    return ages


def _refuse_shared_keys(
    region_ids: Sequence[UUID],
    bounds: npt.NDArray[np.int64],
    keys: pa.Table,
    newest: npt.NDArray[np.int64],
    oldest: npt.NDArray[np.int64],
) -> None:
    """Block every region that shares a key with another one; ``bounds``: first row of each generation, and the end."""
    region_numbers = {region_id: number for number, region_id in enumerate(dict.fromkeys(region_ids))}
    if len(region_numbers) == 1:
        return
    region_of_row = np.repeat(np.array([region_numbers[region_id] for region_id in region_ids]), np.diff(bounds))
    # Rows of one region are consecutive, so the first and the last row of a key show whether it is in two regions.
    shared = region_of_row[newest] != region_of_row[oldest]
    if not bool(shared.any()):
        return
    # They do not show the regions in between: from those two rows alone, each attempt would block only two regions.
    shared_by_region = regions_by_key(keys, region_of_row, region_numbers)
    raise BlockedRegionsError(
        {region_id: (None, shared_keys_error(region_id, *keys_of)) for region_id, keys_of in shared_by_region.items()}
    )


def regions_by_key(
    keys: pa.Table, region_of_row: npt.NDArray[np.int64], region_numbers: Mapping[UUID, int]
) -> dict[UUID, tuple[int, list[dict[str, Any]]]]:
    """Per region that shares keys with others: how many, and at most :data:`SHOWN_KEYS` of them.

    ``keys``: of all rows. ``region_of_row``: the number of each row's region. ``region_numbers``: the number of each
    region.
    """
    names = keys.column_names
    by_key = keys.append_column(_REGION, pa.array(region_of_row)).group_by(names, use_threads=False)
    grouped = by_key.aggregate([(_REGION, "distinct")]).rename_columns([*names, _REGION])
    shared_keys = grouped.filter(pc.greater(pc.list_value_length(grouped.column(_REGION)), 1))
    lists = shared_keys.column(_REGION).combine_chunks()
    of_region, key_of = lists.flatten().to_numpy(), pc.list_parent_indices(lists).to_numpy()
    shared: dict[UUID, tuple[int, list[dict[str, Any]]]] = {}
    for region_id, number in region_numbers.items():
        keys_of_region = key_of[of_region == number]
        if len(keys_of_region):
            examples = readable(shared_keys.select(names).take(pa.array(keys_of_region[:SHOWN_KEYS])))
            shared[region_id] = (len(keys_of_region), examples)
    return shared


def shared_keys_error(region_id: UUID, count: int, examples: Sequence[Mapping[str, Any]]) -> errors.DuplicateKeysError:
    """The error of a region that shares ``count`` keys with other regions of the pass."""
    subject = "1 key of region {} is" if count == 1 else f"{count:,} keys of region {{}} are"
    return errors.DuplicateKeysError(
        f"{subject.format(region_id)} in another region as well, for example {list(examples)}; "
        "the order of their writes is not known."
    )
