"""Summarize a namespace: backlog metrics of its jobs, and damaged parts. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.polling import built_in_backlog, cached_for_poll
from memwal_ops.core.protocols import Blocked, TableSummary
from memwal_ops.formats.zeppelin import history
from memwal_ops.formats.zeppelin.completeness import Listed, damaged_parts, damaged_parts_of

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.namespace import Namespace


def summarize(table: Namespace) -> TableSummary:
    """Backlog metrics of all jobs, and the parts with an object that is missing or cut.

    Raises:
        StorageError: the store failed.
    """
    backlog = built_in_backlog(table)
    found = cached_for_poll(table, "damaged", lambda: damaged_parts(table)) if backlog.get("blocked_parts") else ()
    blocked = tuple(Blocked("", one.error.reason, str(one.error), one.to_json()) for one in found)
    return TableSummary(table.revision, backlog, len(table.manifest.fragments), blocked)


def missing_of(table: Namespace, revision: int, listed: Listed | None = None) -> str | None:
    """An object with rows that a revision lists and that is missing or cut; ``listed``: shared by several revisions."""
    if revision != table.revision and not table.has_revision(revision):
        return None
    manifest = table.manifest if revision == table.revision else history.read(table, revision)
    found = damaged_parts_of(table, manifest, listed or Listed(table.store))
    return next((one.path for one in found if one.has_rows), None)
