"""Follow a Lance table: its inserted, changed and deleted rows become inserts and deletes of the index.

The rows of a batch are one commit; the commit of the last batch also records the version of the table. After a killed
run, the next one begins again from the recorded version: rows that the index already has, with the same vector, are
skipped, and rows that the table does not have are deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann import merging, source
from memwal_ops.formats.lm_diskann.healing import around
from memwal_ops.formats.lm_diskann.inserting import insert
from memwal_ops.formats.lm_diskann.source import usable
from memwal_ops.formats.lm_diskann.vectors import lengths, storable, stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.files import Step
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.source import Source

BATCH = 100_000
_BUILD_BYTES = 1 << 30


@dataclass(frozen=True)
class Followed:
    """The result of one commit: rows inserted or replaced, rows deleted, rows without a usable vector, the epoch."""

    inserted: int
    deleted: int
    skipped: int
    epoch: int


def versions_behind(found: Source | None, followed: int) -> int:
    """How many versions the table is ahead of the index, which has version ``followed``; 0 if it follows none.

    Opens the table. A table with fewer versions than the index has seen is another one, all versions of which are new.
    """
    if found is None:
        return 0
    version = int(found.open().version)
    return version - followed if version >= followed else version


def follow(index: Index, found: Source, batch: int, step: Step, *, rebuild: bool = False) -> Iterator[Followed]:
    """Bring the index to the newest version of the table; each batch is committed and published when it is yielded.

    Args:
        index: writable, without an open transaction.
        found: the table.
        batch: rows of one commit; the first build, and a rebuild, use larger ones, within 1 GiB of vectors.
        step: performs durable steps.
        rebuild: compare all rows, regardless of the table's history.

    Raises:
        InvalidUsageError: a column was dropped, renamed, or is of another type now; or keys do not identify rows.
        IndexUnusableError: the table was restored, overwritten or replaced, or has expired versions that the index
            has not seen; this is recorded in the index.
    """
    state, table = index.writable().state, found.open()
    [recorded] = index.writable().texts("SELECT transaction FROM lmd_followed") or [""]
    whole = rebuild or not state.followed
    if not whole:
        usable(index.folder, state.unusable)
        why = source.check_history(table, state.followed, recorded)
        if why is not None:
            with index.staged() as staged:
                staged.unusable = why.value
            usable(index.folder, why.value)
        if table.version == state.followed:
            return
    dimension = found.dimension(table)
    if dimension != index.parameters.dimension:
        raise InvalidUsageError(
            f"{found.uri} now has vectors of {dimension} dimensions in {found.column}; the index has "
            f"{index.parameters.dimension}.",
            remedy="Build a new index of the table.",
        )
    present = source.row_ids(table, found)
    before = None if whole else source.at_version(table, state.followed)
    renamed = before is not None and source.renamed(before, table, found)
    fragments = table.get_fragments() if before is None or renamed else source.changed_fragments(before, table)
    # If the run is killed in between, the next one compares all rows: the columns may have their old names again.
    # An index that is not usable needs a rebuild anyway, and is not searched until the last commit of one.
    partly = (0, "") if renamed or (whole and not state.unusable) else None
    made = source.transaction_of(table, table.version)
    target = table.version, "" if made is None else made.uuid
    most = max(batch, _BUILD_BYTES // (4 * index.parameters.dimension)) if whole else batch
    gone = np.setdiff1d(_live(index), present)
    for chunk in np.array_split(gone, max(1, -(-len(gone) // most)))[:-1]:
        yield _commit(index, step, chunk, [], 0, partly)
        gone = np.setdiff1d(gone, chunk, assume_unique=True)
    waiting: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
    skipped = 0
    for ids, vectors in source.rows(table, found, fragments):
        good = storable(lengths(vectors), index.parameters.metric)
        skipped += int((~good).sum())
        gone = np.union1d(gone, ids[~good])
        new = _differ(index, ids[good], vectors[good])
        waiting.append((ids[good][new], vectors[good][new]))
        if sum(len(one) for one, _ in waiting) > most:
            yield _commit(index, step, gone, waiting, skipped, partly)
            gone, waiting, skipped = gone[:0], [], 0
    yield _commit(index, step, gone, waiting, skipped, target)


def _commit(
    index: Index, step: Step, gone: NDArray[np.int64],
    waiting: list[tuple[NDArray[np.int64], NDArray[np.float32]]], skipped: int, target: tuple[int, str] | None,
) -> Followed:  # fmt: skip
    merging.raise_horizon(index, step)
    ids = np.concatenate([one for one, _ in waiting]) if waiting else np.zeros(0, np.int64)
    with index.staged() as staged:
        deleted = staged.delete(gone)
        if len(ids):
            insert(staged, ids, stored(index.parameters, np.concatenate([one for _, one in waiting])))
        staged.followed = target
    return Followed(len(ids), deleted, skipped, index.epoch)


def _live(index: Index) -> NDArray[np.int64]:
    [rows] = index.writable().columns("SELECT row_id FROM lmd_lookup WHERE removed_epoch IS NULL")
    found: NDArray[np.int64] = rows.astype(np.int64)
    return found


def _differ(index: Index, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> NDArray[Any]:
    """Which rows the index does not have with the same vector: a compaction moves rows that did not change."""
    found, nodes = index.writable().columns(
        "SELECT row_id, node_id FROM lmd_lookup WHERE removed_epoch IS NULL AND row_id IN (SELECT id FROM wanted)",
        wanted=ids,
    )
    new = np.ones(len(ids), bool)
    if len(found):
        order = np.argsort(ids)
        at = order[np.searchsorted(ids, found, sorter=order)]
        held = around(index.view, index.writable(), nodes.astype(np.int64), index.epoch).vectors
        new[at] = (held != stored(index.parameters, vectors[at])).any(axis=1)
    return new
