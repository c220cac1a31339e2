"""Estimate the work of jobs on Lance tables, from the manifest and the indexes' entries alone.

The rates are those of ``python -m benchmarks.plain`` (2 cores, local files): 5,000 fragments, three indexes, 2,000
versions. On an object store each file costs requests, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.outlook import Work
from memwal_ops.formats.lance.wire.index_entries import SYSTEM_INDEX
from memwal_ops.storage.locations import LOCAL

if TYPE_CHECKING:
    from memwal_ops.core.report import Need
    from memwal_ops.formats.lance.table import Table

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


def work_of(table: Table, need: Need) -> Work:
    """See :class:`memwal_ops.core.outlook.EstimatesWork`."""
    fragments = table.manifest.manifest.fragments
    rows = sum(one.physical_rows for one in fragments)
    written = need.rows * _data_bytes(table) // max(rows, 1)
    remote = 0.0 if table.location.scheme in LOCAL else _REQUEST
    if need.versions:
        return Work(_LEAST + need.versions * (_VERSION + len(fragments) * _ENTRY + remote))
    if need.job not in _ROW:
        return Work(_LEAST)
    seconds = _LEAST + need.rows * _ROW[need.job] + written * _BYTE + len(fragments) * remote
    match need.job:
        case "catchup":
            written = _index_bytes(table, need.rows)
        case "compact":  # the indexes of rewritten rows are written anew, too
            written += _index_bytes(table, 0)
    return Work(seconds, written + _MANIFESTS * table.manifest.manifest.ByteSize())


def _data_bytes(table: Table) -> int:
    return sum(file.file_size_bytes for one in table.manifest.manifest.fragments for file in one.files)


def _index_bytes(table: Table, uncovered: int) -> int:
    """The size of all indexes once they cover that many more rows together; one that records no size counts 0."""
    entries = () if table.manifest.indexes is None else table.manifest.indexes.indices
    own = [entry for entry in entries if not entry.name.startswith(SYSTEM_INDEX)]
    size = sum(file.size_bytes for entry in own for file in entry.files)
    rows = sum(one.physical_rows for one in table.manifest.manifest.fragments) * len({entry.name for entry in own})
    return size * rows // max(rows - uncovered, 1)
