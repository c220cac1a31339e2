"""The jsonlog format: detect and open tables. Imports nothing heavy.

jsonlog.json           the marker of a table, with the release of the format
base/0000000007.json   version 7: all rows, and the last log entry that is in them ("merged")
log/0000000042.json    log entry 42: {key: row}, null for a delete
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.protocols import Blocked, Capability, TableSummary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_jsonlog.table import Table
    from memwal_ops.storage.api import Listing, Store
    from memwal_ops.storage.locations import Location

MARKER = "jsonlog.json"


class JsonLogFormat:
    """Tables with a log of JSON files and a base file."""

    name = "jsonlog"
    requires = frozenset({Capability.PUT_IF_ABSENT})

    suffix = ""
    init = None
    demo = None

    def part_of(self, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """A table has one log, which is blocked by an entry."""
        return "The log", f"entry {blocked['entry']}"

    def detect(self, root: Listing) -> bool:
        """Whether the marker exists: no request is made."""
        return any(meta.path == MARKER for meta in root.objects)

    def open(self, location: Location, store: Store) -> Table:
        """The newest version. Raises: see :func:`memwal_jsonlog.table.load`."""
        from memwal_jsonlog.table import load

        return load(location, store)

    def summarize(self, table: Table) -> TableSummary:
        """The waiting entries, and the missing one."""
        from memwal_jsonlog.table import blocked_at

        waiting, missing = table.waiting()
        figures = {"entries": len(waiting), "missing": int(missing is not None)}
        if missing is None:
            return TableSummary(table.revision, figures, 1)
        entry = blocked_at(missing)
        return TableSummary(table.revision, figures, 1, (Blocked("", entry["reason"], entry["detail"], entry),))

    def missing_of(self, table: Table, revision: int) -> str | None:
        """A version is one object."""
        return None


FORMAT = JsonLogFormat()
