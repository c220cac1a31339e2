"""Make the scheduler's tables and jobs match a new list of discovered tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.supervisor.state.tables import TableState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.supervisor.config.effective import JobSettings
    from memwal_ops.supervisor.scheduling.discovery import FoundTable
    from memwal_ops.supervisor.state.tables import TableJob


def reconcile(
    tables: dict[str, TableState],
    found: Iterable[FoundTable],
    new_entry: Callable[[FoundTable, JobSettings], TableJob],
) -> set[str]:
    """Update ``tables`` in place, and return the names of those that were removed.

    Entries that are kept keep their state; those that are removed are marked, because their run may be in flight.

    Args:
        tables: the scheduler's tables, by name.
        found: the tables to maintain from now on.
        new_entry: makes the entry of a job that is new on its table.
    """
    wanted = {table.name: table for table in found}
    removed = tables.keys() - wanted.keys()
    for name in removed:
        _mark_removed(tables.pop(name))
    for name, table in wanted.items():
        state = tables.get(name)
        if state is not None and state.table.uri != table.uri:
            _mark_removed(state)
            state = None
        if state is None:
            state = tables[name] = TableState(table)
        changed = state.table.settings.storage_options != table.settings.storage_options
        if changed:
            state.poll_not_before = 0.0
        state.table = table
        _reconcile_jobs(state, table, new_entry, changed=changed)
    return removed


def _reconcile_jobs(
    state: TableState, table: FoundTable, new_entry: Callable[[FoundTable, JobSettings], TableJob], *, changed: bool
) -> None:
    jobs = {job.name: job for job in table.settings.jobs.values() if job.enabled}
    for job in [job for job in state.entries if job not in jobs]:
        state.entries.pop(job).removed = True
    for job, settings in jobs.items():
        if job in state.entries:
            entry = state.entries[job]
            if changed or entry.settings != settings:
                entry.not_before = None  # the change may have fixed what made it fail
            entry.table, entry.settings = table, settings
        else:
            state.entries[job] = new_entry(table, settings)


def _mark_removed(state: TableState) -> None:
    for entry in state.entries.values():
        entry.removed = True
