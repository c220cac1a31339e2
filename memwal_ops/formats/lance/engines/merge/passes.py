"""The passes of a merge: open all generations, commit the written files; and the local engine, of one process.

Keys in two regions are refused over all generations that a run of several passes will merge. A pass sees only its own
generations. Region A's row of key 5 is merged in pass 1; region B's row of key 5, which was written earlier, overwrites
it in pass 2: an older write wins, silently (S0-009). So a run that needs several passes for several regions compares
their keys before the first one. Rows that earlier runs merged have no region any more: a key in the base from one
region, flushed later by another one, cannot be distinguished from an update.

The steps of a pass: open, collapse, locate, rewrite, commit. The first four only add files that no reader
sees; the last publishes data, deletions and progress of every region of the pass as one atomic version.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.core import tracing
from memwal_ops.errors import GenerationCorruptError, GenerationMissingError, MemwalOpsError, SchemaProjectionError
from memwal_ops.formats.lance.commit.commit import CommitNote, commit_strict
from memwal_ops.formats.lance.commit.publication import deleted_unless_named
from memwal_ops.formats.lance.engines.merge.collapse import (
    SHOWN_KEYS,
    BlockedRegionsError,
    MergePass,
    PassResult,
    collapse,
    read_all_keys,
    regions_by_key,
    shared_keys_error,
)
from memwal_ops.formats.lance.engines.merge.locate import key_code, locate
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, remove_files, rewrite
from memwal_ops.formats.lance.generations.generation import (
    Generation,
    GenerationCopies,
    GenerationRef,
    copies_of,
    open_generation,
)
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.storage.api import results_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from uuid import UUID

    import lance
    import numpy.typing as npt

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionRecord

    ReadKeys = Callable[[Table, MergePass], Iterator[tuple[UUID, pa.Table]]]


_CONCURRENT_OPENS = 8


def open_generations(table: Table, merge_pass: MergePass, copies: GenerationCopies | None = None) -> list[Generation]:
    """Open every generation before any work; with ``copies``, small ones are copied there first.

    Raises ``BlockedRegionsError``: all that are missing, damaged or cannot be projected, together.
    """
    history = SchemaHistory(table)
    generations: list[Generation] = []
    causes: dict[UUID, tuple[int | None, MemwalOpsError]] = {}

    def open_one(ref: GenerationRef) -> Generation | MemwalOpsError:
        try:
            return open_generation(table, ref, history, copies)
        except (GenerationMissingError, GenerationCorruptError, SchemaProjectionError) as error:
            return error

    opened = results_of(open_one, merge_pass.generations, threads=_CONCURRENT_OPENS)
    for ref, outcome in zip(merge_pass.generations, opened, strict=True):
        if isinstance(outcome, MemwalOpsError):
            causes.setdefault(ref.region_id, (ref.generation, outcome))
        else:
            generations.append(outcome)
    if causes:
        raise BlockedRegionsError(causes)
    return generations


def commit_pass(table: Table, change: Rewrite, merge_pass: MergePass, note: CommitNote) -> int:
    """Publish the files of a pass, with the progress of all its regions; returns the new version.

    Raises:
        CommitLostError: another writer published the next version first.
        MemwalOpsError: see :func:`memwal_ops.formats.lance.commit.commit.commit_strict`.
    """
    return commit_files(
        table, change.operation(), change.written_files(), merge_pass.progress, note, merge_pass.records
    )


def commit_files(
    table: Table,
    operation: lance.LanceOperation.BaseOperation,
    files: Sequence[str],
    progress: Mapping[UUID, int],
    note: CommitNote,
    records: Mapping[UUID, RegionRecord] = MappingProxyType({}),
) -> int:
    """Run :func:`memwal_ops.formats.lance.commit.commit.commit_strict`; if nothing was published, delete ``files``.

    ``files`` are those written for the commit.
    """
    with deleted_unless_named(lambda: remove_files(table, files)):
        return commit_strict(table, operation, progress, note, records=records)


_CONCURRENTLY_OPEN = 64
# Grouping by key needs about three times the memory of the keys.
_SHARE_OF_BUDGET = 4
_MAX_PARTS = 1 << 16
_REGION = "__memwal_ops_region"


def refuse_shared_keys(table: Table, whole: MergePass, read: ReadKeys | None = None) -> None:
    """Block every region that shares a key with another one; see ``Engine.refuse_shared_keys``.

    Reads the keys of all generations as many times as needed to hold those of one part of the hash values in a quarter
    of ``whole.max_bytes``.

    ``whole``: all generations of the run. ``read``: yields the key columns of each generation, with its region; by
    default those below ``_mem_wal/``.
    Raises ``BlockedRegionsError``: regions that share keys; or generations that cannot be read, and then only these.
    """
    region_numbers = {region_id: number for number, region_id in enumerate(whole.regions)}
    counts = dict.fromkeys(region_numbers, 0)
    examples: dict[UUID, list[dict[str, Any]]] = {region_id: [] for region_id in region_numbers}
    # Parts of the hash values, each as (modulus, remainder); a part that is too large is split in two.
    parts = [(1, 0)]
    while parts:
        modulus, remainder = parts.pop()
        tables: list[pa.Table] = []
        regions: list[npt.NDArray[np.int64]] = []
        size = 0
        for region_id, keys in (read or _keys)(table, whole):
            part = keys if modulus == 1 else keys.filter(pa.array(_in_part(table, keys, modulus, remainder)))
            tables.append(part)
            regions.append(np.full(part.num_rows, region_numbers[region_id]))
            size += part.nbytes
            while size > whole.max_bytes // _SHARE_OF_BUDGET and modulus < _MAX_PARTS:
                parts.append((2 * modulus, remainder + modulus))
                modulus *= 2
                masks = [_in_part(table, keys, modulus, remainder) for keys in tables]
                tables = [keys.filter(pa.array(mask)) for keys, mask in zip(tables, masks, strict=True)]
                regions = [numbers[mask] for numbers, mask in zip(regions, masks, strict=True)]
                size = sum(keys.nbytes for keys in tables)
        everything, region_of_row = pa.concat_tables(tables), np.concatenate(regions)
        del tables, regions
        if not _any_shared(everything, region_of_row):
            continue
        for region_id, (count, some) in regions_by_key(everything, region_of_row, region_numbers).items():
            counts[region_id] += count
            examples[region_id] = [*examples[region_id], *some][:SHOWN_KEYS]
    causes: dict[UUID, tuple[int | None, MemwalOpsError]] = {
        region_id: (None, shared_keys_error(region_id, count, examples[region_id]))
        for region_id, count in counts.items()
        if count
    }
    if causes:
        raise BlockedRegionsError(causes)


def _any_shared(keys: pa.Table, region_of_row: npt.NDArray[np.int64]) -> bool:
    """Whether any key is in two regions; much cheaper than finding which."""
    by_key = keys.append_column(_REGION, pa.array(region_of_row)).group_by(keys.column_names, use_threads=False)
    grouped = by_key.aggregate([(_REGION, "min"), (_REGION, "max")])
    return bool(pc.any(pc.not_equal(grouped.column(f"{_REGION}_min"), grouped.column(f"{_REGION}_max"))).as_py())


def _keys(table: Table, whole: MergePass) -> Iterator[tuple[UUID, pa.Table]]:
    """The key columns of each generation, with its region. ``BlockedRegionsError`` has all that cannot be read."""
    causes: dict[UUID, tuple[int | None, MemwalOpsError]] = {}
    for start in range(0, len(whole.generations), _CONCURRENTLY_OPEN):
        chunk = MergePass(whole.generations[start : start + _CONCURRENTLY_OPEN], whole.max_bytes)
        try:
            generations = open_generations(table, chunk)
            for generation, keys in zip(generations, read_all_keys(generations, table.primary_key), strict=True):
                yield generation.ref.region_id, keys.select(list(table.primary_key))
        except BlockedRegionsError as error:
            # Keep the first of a region: generations ascend.
            causes = {**error.causes, **causes}
    if causes:
        raise BlockedRegionsError(causes)


def _in_part(table: Table, keys: pa.Table, modulus: int, remainder: int) -> npt.NDArray[np.bool_]:
    codes = key_code(table.schema, table.primary_key).encode(keys)
    if pa.types.is_int64(codes.type):
        hashes = codes.to_numpy(zero_copy_only=False).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    else:
        hashes = np.fromiter((crc32(code) for code in codes.to_pylist()), np.uint64, len(codes))
    in_part: npt.NDArray[np.bool_] = hashes % np.uint64(modulus) == np.uint64(remainder)
    return in_part


class LocalMergeEngine:
    """Merges passes in this process."""

    name = "local"

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Publish one pass; see :meth:`memwal_ops.formats.lance.engines.merge.collapse.MergeEngine.run`."""
        started, phases = time.monotonic(), dict[str, float]()
        budget = merge_pass.max_bytes
        try:
            with copies_of(table, budget) as copies:
                with _timed(phases, "open"):
                    generations = open_generations(table, merge_pass, copies)
                with _timed(phases, "collapse"):
                    winners = collapse(generations, table.primary_key)
                with _timed(phases, "locate"):
                    superseded = locate(table, winners, max_bytes=budget)
                with _timed(phases, "rewrite"):
                    change = rewrite(table, generations, winners, superseded, budget, on_rows)
                with _timed(phases, "commit"):
                    version = commit_pass(table, change, merge_pass, note)
                return PassResult(
                    version=version,
                    rows_read=winners.rows_read,
                    rows_upserted=winners.num_upserts,
                    rows_deleted=superseded.deleted,
                    bytes_read=sum(generation.data_bytes for generation in generations),
                    use_index=superseded.use_index,
                    seconds=time.monotonic() - started,
                    phases=phases,
                )
        finally:
            # Return the memory of the pass to the system, so that passes do not add up.
            pa.default_memory_pool().release_unused()

    def refuse_shared_keys(self, table: Table, whole: MergePass) -> None:
        """See :meth:`memwal_ops.formats.lance.engines.merge.collapse.MergeEngine.refuse_shared_keys`."""
        try:
            refuse_shared_keys(table, whole)
        finally:
            pa.default_memory_pool().release_unused()


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        with tracing.phase(name):
            yield
    finally:
        phases[name] = round(time.monotonic() - started, 6)
