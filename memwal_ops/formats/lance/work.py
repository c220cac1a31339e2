"""Summarize the backlog of a Lance table, and estimate the work of its jobs from the manifest and the indexes' entries.

The rates are those of ``python -m benchmarks.plain`` (2 cores, local files): 5,000 fragments, three indexes, 2,000
versions. On an object store each file costs requests, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.context import RunContext
from memwal_ops.core.figures import built_in_backlog
from memwal_ops.core.outlook import Work
from memwal_ops.core.protocols import Blocked, TableSummary
from memwal_ops.formats.lance.indexes.base_indexes import coverage, covered_by
from memwal_ops.formats.lance.options import InspectOptions
from memwal_ops.formats.lance.wire.version_manifest import by_name
from memwal_ops.storage.locations import LOCAL

if TYPE_CHECKING:
    from memwal_ops.core.report import Need
    from memwal_ops.formats.lance.table import Table


def summarize(table: Table) -> TableSummary:
    """The summary of a table.

    Raises:
        StorageError: the store failed.
    """
    metrics = built_in_backlog(table)
    blocked: tuple[Blocked, ...] = ()
    if metrics.get("blocked_regions"):
        inspection: Any = table.jobs["inspect"].job.plan(table, InspectOptions(), RunContext())
        blocked = tuple(
            Blocked(str(document["region_id"]), fault.error.reason, str(fault.error), document)
            for fault in inspection.faults
            if (document := fault.to_json())
        )
    return TableSummary(table.version, metrics, len(table.regions.region_ids), blocked)


# Seconds for each row that is merged, indexed (by one index), or rewritten; for each byte of these rows.
_ROW = {"merge": 2e-6, "catchup": 6e-6, "compact": 10e-6}
_BYTE = 1 / 150e6
# For each version that expire reads, and each fragment that it names.
_VERSION, _ENTRY = 1e-3, 7e-6
# For each file on an object store, with many requests in flight.
_REQUEST = 4e-3
_LEAST = 0.2
# Manifests and transactions that a step publishes, by the size of the present manifest.
_MANIFESTS = 4
# Of more files of indexes: their metadata.
_OVERHEAD = 1.1


def work_of(table: Table, need: Need) -> Work:
    """See :class:`memwal_ops.core.outlook.EstimatesWork`."""
    fragments = table.manifest.manifest.fragments
    rows = sum(fragment.physical_rows for fragment in fragments)
    moved = rows if need.rows is None else need.indexed or need.rows  # not known: no more than the table has is a guess
    written = moved * sum(file.file_size_bytes for one in fragments for file in one.files) // max(rows, 1)
    remote = 0.0 if table.location.scheme in LOCAL else _REQUEST
    if need.versions:
        return Work(_LEAST + need.versions * (_VERSION + len(fragments) * _ENTRY + remote))
    if need.job not in _ROW:
        return Work(_LEAST)
    seconds = _LEAST + moved * _ROW[need.job] + written * _BYTE + len(fragments) * remote
    match need.job:
        case "catchup":
            written = _index_bytes(table, moved / max(1, rows * len(by_name(table.manifest))))
        case "compact":  # the indexes of rewritten rows are written anew, too
            written += _index_bytes(table, moved / max(rows, 1))
    return Work(seconds, written + _MANIFESTS * table.manifest.manifest.ByteSize())


def _index_bytes(table: Table, share: float) -> int:
    """What is written of all indexes, which then cover all rows; one that records no size counts 0.

    Scalar indexes are written whole, of vector indexes the segments with the share of rows that are indexed or moved.
    """
    written = 0.0
    rows = sum(fragment.physical_rows for fragment in table.manifest.manifest.fragments)
    for entries in by_name(table.manifest).values():
        covered = coverage(covered_by(entries), table.manifest)
        size = sum(file.size_bytes for entry in entries for file in entry.files)
        whole = size * rows / max(1, rows - covered.uncovered_rows)
        is_vector = entries[0].index_details.type_url.endswith("VectorIndexDetails")
        written += whole * (min(1.0, share) if is_vector else 1.0)
    return int(written * _OVERHEAD)
