"""Decide which segments of an index are written again by an update, what that costs, and whether it is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.table_history import polled_options
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.indexes.base_indexes import (
    BaseIndex,
    base_indexes,
    coverage,
    covered_by,
    fragments_held,
    is_nested,
)
from memwal_ops.formats.lance.indexes.index_faults import last_client
from memwal_ops.formats.lance.options import CatchupOptions
from memwal_ops.formats.lance.policy import SEGMENT_FLOOR as FLOOR
from memwal_ops.formats.lance.policy import SegmentDebt, SegmentPolicy, SegmentSize, is_costly, is_due, is_urgent
from memwal_ops.formats.lance.wire.version_manifest import STABLE_ROW_IDS, had_moves
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

# The types of which pylance answers rightly by several segments, each with the first release whose own update was seen
# to keep that (tests/integration/contracts/test_segments.py).
_SEGMENTED = {"BTree": 9, "Bitmap": 9, "Inverted": 9, "NGram": 9, "BloomFilter": 9}
# Those of which an answer is what the index holds; by others, what is found is compared with the rows. What a segment
# holds of a fragment that it does not claim any more counts again once another segment claims the fragment: rows are
# found by values that they no longer have.
_EXACT = frozenset({"BTree", "Bitmap", "Inverted"})
# How many of the newest versions show the release of the table's own writers.
_VERSIONS = 8


def debts_of(table: Table, options: CatchupOptions) -> Mapping[str, SegmentDebt]:
    """By index, what the next update of it would write; read from the manifest alone."""
    return {
        name: _policy(table, index, options).debt(_sizes(table, index), _uncovered(table, index))
        for name, index in base_indexes(table).items()
    }


def catchup_figures(table: Table) -> Mapping[str, float]:
    """The backlog metrics of a catch-up: how far the index is behind that lacks most, and what a run would write.

    Where generations were merged, each index that is behind is due: ``gc`` keeps them until all cover them.
    """
    options = polled_options("catchup", CatchupOptions)
    fragments = table.manifest.manifest.fragments
    rows = sum(one.physical_rows - one.deletion_file.num_deleted_rows for one in fragments)
    sizes = {one.id: sum(file.file_size_bytes for file in one.files) for one in fragments}
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
        or is_costly(sum(sizes[one] for one in lacking[name].uncovered), debts[name].bytes)
        or is_due(rows - lacking[name].uncovered_rows, lacking[name].uncovered_rows,
                  anew=is_written_anew(table, indexes[name], options))
    ]  # fmt: skip
    return {
        "indexes": len(indexes),
        "uncovered_rows": max((one.uncovered_rows for one in lacking.values()), default=0),
        "uncovered_fragments": max((len(one.uncovered) for one in lacking.values()), default=0),
        "merged_regions": merged,
        "indexes_behind": len(behind),
        "indexes_due": len(due),
        "indexes_urgent": sum(is_urgent(rows - one.uncovered_rows, one.uncovered_rows) for one in lacking.values()),
        "index_debt": sum(one.bytes for one in debts.values()),
        "index_debt_rows": sum(one.uncovered_rows for one in lacking.values()),
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
    return max(again, _back_to_stale(table, index)) if index.type in _EXACT else again


def may_have_segments(table: Table, index: BaseIndex) -> bool:
    """Whether an index may have more than one segment."""
    if index.is_vector:
        return True
    if index.type not in _SEGMENTED or is_nested(index, table.manifest):
        return False
    return index.type not in _EXACT or _has_addresses(table)


def is_written_anew(table: Table, index: BaseIndex, options: CatchupOptions) -> bool:
    """Whether each update of an index writes all of it."""
    return _policy(table, index, options).writes_anew


def bytes_of(entries: Iterable[table_pb2.IndexMetadata]) -> int:
    """Size of the files of segments, as far as it is recorded."""
    return sum(file.size_bytes for entry in entries for file in entry.files)


def _has_addresses(table: Table) -> bool:
    """Whether what segments hold are addresses of the version's rows, of which it shows whose fragment they are in."""
    return not table.manifest.manifest.reader_feature_flags & STABLE_ROW_IDS and not had_moves(table.manifest)


def _back_to_stale(table: Table, index: BaseIndex) -> int:
    """How many of the newest segments there are back to the oldest that holds rows of a fragment it does not claim.

    Read are the addresses in the files of all segments. All segments, if they cannot be read.
    """
    for at, entry in enumerate(index.segments):
        try:
            held = fragments_held(table, index, entry)
        except MemwalOpsError as error:
            get_logger(__name__).info("index_rows_unread", table=table.location.uri, index=index.name, error=str(error))
            return len(index.segments)
        if held & table.fragment_ids - covered_by([entry]):
            return len(index.segments) - at
    return 0


def _policy(table: Table, index: BaseIndex, options: CatchupOptions) -> SegmentPolicy:
    most = options.max_segments if may_have_segments(table, index) else 1
    # A merge of few vectors may need a new graph of many.
    return SegmentPolicy(most, options.tier_factor, 0 if index.is_vector else FLOOR)


def _release(table: Table) -> float:
    """The major release of the table's own writers; 0: it is not recorded; infinite: none of the newest is theirs."""
    client = table.once("last client", lambda: last_client(table, within=_VERSIONS))
    return float("inf") if client is None else client.major or 0


def _uncovered(table: Table, index: BaseIndex) -> int:
    """Rows that no segment covers; at least 1 if there is such a fragment."""
    covers = coverage(index.covered, table.manifest)
    return 0 if covers.complete else max(1, covers.uncovered_rows)


def _sizes(table: Table, index: BaseIndex) -> list[SegmentSize]:
    fragments = table.manifest.manifest.fragments
    rows = {one.id: one.physical_rows - one.deletion_file.num_deleted_rows for one in fragments}
    return [
        SegmentSize(sum(rows.get(fragment, 0) for fragment in covered_by([entry])), bytes_of([entry]))
        for entry in index.segments
    ]
