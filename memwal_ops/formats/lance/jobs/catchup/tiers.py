"""Decide which segments of an index an update writes again, what that costs, and whether it is due.

Evidence, of answers and of the bounds of codes, has one built anew instead. pylance trains the bounds of IVF_SQ and
IVF_HNSW_SQ once, by at most 65,536 rows, and keeps them in updates. Components beyond them get the outermost code: rows
of which many components are far beyond are not found (recall 0.97 -> 0.00).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.figures import polled_options
from memwal_ops.errors import MemwalOpsError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance import policy
from memwal_ops.formats.lance.indexes.base_indexes import (
    BaseIndex,
    base_indexes,
    coverage,
    covered_by,
    fragments_held,
    index_folder,
    is_nested,
)
from memwal_ops.formats.lance.indexes.codebook import ScalarBounds, read_codebook, scalar_bounds
from memwal_ops.formats.lance.indexes.index_faults import FRAGMENTS_IN, dot_product_error, last_client, outdated_zones
from memwal_ops.formats.lance.options import CatchupOptions
from memwal_ops.formats.lance.wire.version_manifest import STABLE_ROW_IDS, had_moves
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.answers.asked_index import AskedIndex, Pinned
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


# The types of which pylance answers rightly by several segments, each with the first release whose own update was seen
# to keep that (tests/integration/contracts/test_segments.py).
_SEGMENTED = {"BTree": 9, "Bitmap": 9, "Inverted": 9, "NGram": 9, "BloomFilter": 9}
# Those of which an answer is what the index holds; by others, what is found is compared with the rows. What a segment
# holds of a fragment that it does not claim any more counts again once another segment claims the fragment: rows are
# found by values that they no longer have.
_EXACT = frozenset({"BTree", "Bitmap", "Inverted"})
# In place of a column in a data file: another file of its fragment has the column now.
_REPLACED = -2
# How many of the newest versions show the release of the table's own writers.
_VERSIONS = 8


def debts_of(table: Table, options: CatchupOptions) -> Mapping[str, policy.SegmentDebt]:
    """By index, what the next update of it would write. Requests: those of :func:`finds_old_values`."""
    debts = {
        name: _policy(table, index, options).debt(_sizes(table, index), _uncovered(table, index))
        for name, index in base_indexes(table).items()
    }
    return {
        name: replace(debt, excess=max(1, debt.excess), bytes=max(debt.bytes, bytes_of(index.segments)))
        if finds_old_values(table, index := base_indexes(table)[name])
        else debt
        for name, debt in debts.items()
    }


def catchup_figures(table: Table) -> Mapping[str, float]:
    """The backlog metrics of a catch-up: how far the index is behind that lacks most, and what a run would write.

    Where generations were merged, each index that is behind is due: ``gc`` keeps them until all cover them.
    """
    options = polled_options("catchup", CatchupOptions)
    fragments = table.manifest.manifest.fragments
    rows = sum(fragment.physical_rows - fragment.deletion_file.num_deleted_rows for fragment in fragments)
    sizes = {fragment.id: sum(file.file_size_bytes for file in fragment.files) for fragment in fragments}
    indexes = base_indexes(table)
    lacking = {name: coverage(one.covered, table.manifest) for name, one in indexes.items()}
    debts = debts_of(table, options)
    merged = len(table.index.merged_generations)
    behind = [name for name, one in debts.items() if one.uncovered_rows or one.excess]
    due = [
        name
        for name in behind
        if merged
        or debts[name].excess
        or policy.is_costly(sum(sizes[fragment] for fragment in lacking[name].uncovered), debts[name].bytes)
        or policy.is_due(rows - lacking[name].uncovered_rows, lacking[name].uncovered_rows,
                  anew=_policy(table, indexes[name], options).writes_anew)
    ]  # fmt: skip
    urgent = [name for name, one in lacking.items() if policy.is_urgent(rows - one.uncovered_rows, one.uncovered_rows)]
    return {
        "indexes": len(indexes),
        "uncovered_rows": max((lack.uncovered_rows for lack in lacking.values()), default=0),
        "uncovered_fragments": max((len(lack.uncovered) for lack in lacking.values()), default=0),
        "lookup_reads": max(
            (len(one.segments) + len(lacking[name].uncovered) for name, one in indexes.items()), default=len(fragments)
        ),
        "merged_regions": merged,
        "indexes_behind": len(behind),
        "indexes_due": len(due),
        "indexes_urgent": len({*urgent, *(name for name, one in indexes.items() if finds_old_values(table, one))}),
        "index_debt": sum(debt.bytes for debt in debts.values()),
        "index_debt_rows": sum(lack.uncovered_rows for lack in lacking.values()),
    }


def segments_to_merge(table: Table, index: BaseIndex, options: CatchupOptions) -> int:
    """How many of the newest segments of an index become one, together with the rows that none covers.

    All of an index that an older release may update, which fails where it has several. And each that holds rows of a
    fragment which another segment claims from then on: a merge leaves them out.
    """
    every = len(index.segments)
    again = _policy(table, index, options).merged(_sizes(table, index), _uncovered(table, index))
    if again == every or index.is_vector:
        return again
    if _release(table) < _SEGMENTED.get(index.type, 0):
        return every
    return max(again, _back_to_stale(table, index, table.fragment_ids)) if index.type in _EXACT else again


def unlike_segments(table: Table, index: BaseIndex, options: CatchupOptions) -> str:
    """Why the segments of a vector index that an update would merge cannot be merged; empty: they can.

    Lance 9's own update (LanceDB 0.36) trains one of several anew, and fails from then on, as pylance's merge does.
    """
    merged = index.segments[len(index.segments) - segments_to_merge(table, index, options) :]
    with suppress(MemwalOpsError):  # the update reports it
        if len(merged) > 1 and len({read_codebook(table, entry) for entry in merged}) > 1:
            return "its segments do not share centroids, and cannot be merged"
    return ""


def may_have_segments(table: Table, index: BaseIndex) -> bool:
    """Whether an index may have more than one segment."""
    if index.is_vector:
        return True
    if index.type not in _SEGMENTED or is_nested(index, table.manifest):
        return False
    return index.type not in _EXACT or _has_addresses(table)


def finds_old_values(table: Table, index: BaseIndex) -> bool:
    """Whether an index finds rows by values from before a column was changed in place: another program updated it.

    Requests: none where no fragment of it was; else its row addresses, or its zones, are read.
    """
    fragments = table.manifest.manifest.fragments
    changed = {one.id for one in fragments if any(_REPLACED in file.fields for file in one.files)}
    if index.covered.isdisjoint(changed):
        return False
    if index.type in FRAGMENTS_IN:
        return table.once(("old values", index.name), lambda: outdated_zones(table, index)) is not None
    if index.type not in _EXACT or len(index.segments) == 1 or not _has_addresses(table):
        return False
    return table.once(("old values", index.name), lambda: _back_to_stale(table, index, index.covered)) > 0


def has_too_many_segments(table: Table, index: BaseIndex, options: CatchupOptions) -> bool:
    """Whether segments of it are merged also without new rows."""
    return len(index.segments) > _policy(table, index, options).max_segments


def bytes_of(entries: Iterable[table_pb2.IndexMetadata]) -> int:
    """Size of the files of segments, as far as it is recorded."""
    return sum(file.size_bytes for entry in entries for file in entry.files)


def _has_addresses(table: Table) -> bool:
    """Whether what segments hold are addresses of the version's rows, of which it shows whose fragment they are in."""
    return not table.manifest.manifest.reader_feature_flags & STABLE_ROW_IDS and not had_moves(table.manifest)


def _back_to_stale(table: Table, index: BaseIndex, fragments: frozenset[int]) -> int:
    """How many of the newest segments there are back to the oldest that holds rows of one of these but claims it not.

    Read are the addresses in the files of all segments. All segments, if they cannot be read.
    """
    for at, entry in enumerate(index.segments):
        try:
            held = fragments_held(table, index, entry)
        except MemwalOpsError as error:
            get_logger(__name__).info("index_rows_unread", table=table.location.uri, index=index.name, error=str(error))
            return len(index.segments)
        if held & fragments - covered_by([entry]):
            return len(index.segments) - at
    return 0


def _policy(table: Table, index: BaseIndex, options: CatchupOptions) -> policy.SegmentPolicy:
    rows = [segment.rows for segment in _sizes(table, index)]
    joined = table.is_at_rest(options.rest_after) and policy.pays_at_rest(sum(rows), max(rows), options.tier_factor)
    most = options.max_segments if may_have_segments(table, index) and not joined else 1
    # A merge of few vectors may need a new graph of many.
    return policy.SegmentPolicy(most, options.tier_factor, 0 if index.is_vector else policy.SEGMENT_FLOOR)


def _release(table: Table) -> float:
    """The major release of the table's own writers; 0: it is not recorded; infinite: none of the newest is theirs."""
    client = table.once("last client", lambda: last_client(table, within=_VERSIONS))
    return float("inf") if client is None else client.major or 0


def _uncovered(table: Table, index: BaseIndex) -> int:
    """Rows that no segment covers; at least 1 if there is such a fragment."""
    covers = coverage(index.covered, table.manifest)
    return 0 if covers.complete else max(1, covers.uncovered_rows)


def _sizes(table: Table, index: BaseIndex) -> list[policy.SegmentSize]:
    fragments = table.manifest.manifest.fragments
    rows = {fragment.id: fragment.physical_rows - fragment.deletion_file.num_deleted_rows for fragment in fragments}
    return [
        policy.SegmentSize(sum(rows.get(fragment, 0) for fragment in covered_by([entry])), bytes_of([entry]))
        for entry in index.segments
    ]


_TRAINED_BY = 65_536
# Up to here a new row is found as well as the others: the tails of a distribution that the bounds were trained by.
_MARGIN = 0.1
_FEW = 0.01
# Rows of the sample without which a training may miss all of their kind, and the next run would build anew again.
_SEEN = 16


def why_retrain(table: Table, index: BaseIndex, context: RunContext) -> str:
    """Why a vector index is to be trained anew; empty: it is not.

    Only one to which rows were appended since it was trained: otherwise each run would train it by the same rows.
    Raises ``UnsupportedFeatureError``, ``StorageError``: the index or the table cannot be read.
    """
    appended = len(index.segments) > 1
    if not appended and coverage(index.covered, table.manifest).complete:
        return ""
    if dot_product_error(table, index) is not None:
        return "rows that pylance adds to product quantization with the metric dot hide all others"
    return table.once(("why retrain", index.name), lambda: _why_low(table, index, context)) if appended else ""


def _why_low(table: Table, index: BaseIndex, context: RunContext) -> str:
    from memwal_ops.formats.lance.answers import asked_index, check, sample, vector  # noqa: PLC0415 - not for a look

    pinned = asked_index.Pinned(table.dataset, table.location.uri)
    asked = pinned.indexes.get(index.name)
    if asked is None:
        return ""
    drawn = sample.sample_queries(pinned, asked, seed=table.version)
    return next(check.why_low(vector.measure(pinned, asked, drawn, asked_index.RowReader(context.checkpoint))), "")


@dataclass(frozen=True, slots=True)
class Misfit:
    """New rows beyond the bounds, or unknown bounds. ``anew``: building the index anew helps."""

    why: str
    anew: bool


def misfit(table: Table, index: BaseIndex, context: RunContext) -> Misfit | None:
    """What is wrong with the bounds of an index for the rows that it does not cover; None: nothing.

    Reads their vectors once for a table value, by batches.
    """
    if not index.type.endswith("_SQ"):
        return None
    return table.once(("misfit", index.name), lambda: _misfit(table, index, context))


def _misfit(table: Table, index: BaseIndex, context: RunContext) -> Misfit | None:
    from memwal_ops.formats.lance.answers import asked_index  # noqa: PLC0415 - as above

    uncovered = coverage(index.covered, table.manifest).uncovered
    pinned = asked_index.Pinned(table.dataset, table.location.uri)
    asked = pinned.indexes.get(index.name)
    if not uncovered or asked is None:
        return None
    try:
        bounds = scalar_bounds(table.location, index_folder(table, index.segments[-1]), index.name)
        if not pa.types.is_fixed_size_list(asked.arrow):
            raise UnsupportedFeatureError(f"{asked.column} is of type {asked.arrow}.")
        counts = [*asked_index.RowReader(context.checkpoint).each(pinned, sorted(uncovered), _Beyond(asked, bounds))]
    except (StorageError, UnsupportedFeatureError) as error:
        return Misfit(f"whether new rows are within the bounds of its codes is not known: {error}", anew=False)
    beyond, rows = (sum(parts) for parts in zip(*counts, strict=True))
    if beyond <= _FEW * rows:
        return None
    why = (
        f"{beyond:,} of {rows:,} new rows are beyond the bounds of its codes ({bounds.low:.4g} to {bounds.high:.4g}), "
        "and would hardly be found"
    )
    if table.log.keeps_codebooks:
        return Misfit(f"{why}; beside a log it keeps them, so use --migrate-codebook {index.name} NEW.", anew=False)
    total = coverage(frozenset(), table.manifest).uncovered_rows
    if beyond * _TRAINED_BY < _SEEN * max(total, _TRAINED_BY):
        return Misfit(f"{why}; they are too few for a training to find them", anew=False)
    return Misfit(why, anew=True)


@dataclass(frozen=True, slots=True)
class _Beyond:
    """Counts vectors with a component far beyond the bounds."""

    index: AskedIndex
    bounds: ScalarBounds

    def __call__(self, pinned: Pinned, group: Sequence[int]) -> tuple[int, int]:
        """Of these fragments, how many, and of how many vectors."""
        from memwal_ops.formats.lance.answers.vector import batches, usable_rows  # noqa: PLC0415 - as above

        beyond = rows = 0
        for _, vectors in batches(pinned, self.index, group):
            usable = vectors[usable_rows(vectors, self.bounds.metric)].astype(np.float64)
            rows += len(usable)
            beyond += _beyond(usable, self.bounds)
        return beyond, rows


def _beyond(vectors: NDArray[Any], bounds: ScalarBounds) -> int:
    if not len(vectors):
        return 0
    lows, highs = vectors.min(axis=1), vectors.max(axis=1)
    if bounds.metric == "cosine":
        lengths = np.linalg.norm(vectors, axis=1)
        lows, highs = lows / lengths, highs / lengths
    margin = _MARGIN * (bounds.high - bounds.low)
    return int(np.count_nonzero((lows < bounds.low - margin) | (highs > bounds.high + margin)))
