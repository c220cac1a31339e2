"""What compaction and catch-up have to do by their policies, as backlog metrics: from the manifest alone."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from memwal_ops.core.next_run import NextRun, next_run, rates_of
from memwal_ops.core.polling import polled_options
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.jobs.catchup.tiers import debts_of, is_written_anew
from memwal_ops.formats.lance.jobs.compact.indexes import unchecked_segments
from memwal_ops.formats.lance.jobs.compact.planning import Planner
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions
from memwal_ops.formats.lance.policy.indexing import is_costly, is_due, is_urgent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.past_runs import PastRuns
    from memwal_ops.formats.lance.table import Table


def compaction_debt(table: Table) -> Mapping[str, float]:
    """What a compaction would rewrite; nothing if a setting of the table is invalid, which the job names."""
    with suppress(InvalidUsageError):
        planner = Planner(table, polled_options("compact", CompactOptions))
        due = planner.debt()
        return {
            "debt": due.bytes_written,
            "debt_read": due.bytes_read,
            "debt_rows": due.rows,
            "due_fragments": due.fragments,
            "urgent_fragments": planner.urgent().fragments if due.fragments else 0,
            "unchecked_segments": unchecked_segments(table),
        }
    return {}


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


def next_runs(table: Table, past: PastRuns) -> Mapping[str, NextRun]:
    """What the next runs of these jobs cost, by their names; nothing of one that does not apply, or is refused."""
    found: dict[str, NextRun] = {}
    for name, figures in {"compact": compaction_debt(table), "catchup": catchup_figures(table)}.items():
        spec = table.jobs.get(name)
        if spec is not None and figures:
            why = Planner(table, CompactOptions()).why() if name == "compact" else None
            run = next_run(spec, figures, rates_of(name, past(table.location.address, name)), why)
            found |= {} if run is None else {name: run}
    return found
