"""The jsonlog format: detect and open tables. Imports nothing heavy.

jsonlog.json           the marker of a table, with the release of the format
base/0000000007.json   version 7: all rows, and the last log entry that is in them ("merged")
log/0000000042.json    log entry 42: {key: row}, null for a delete
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.protocols import Blocked, TableSummary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_jsonlog.table import Table
    from memwal_ops.storage.api import Listing, Store
    from memwal_ops.storage.locations import Location

MARKER = "jsonlog.json"
SCHEME = "jsonlog+list"


class JsonLogFormat:
    """Tables with a log of JSON files and a base file."""

    name = "jsonlog"
    schemes = frozenset({SCHEME})
    suffix = ""
    init = None
    demo = None

    def part_of(self, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """A table has one log, which is blocked by an entry."""
        return "The log", f"entry {blocked['entry']}"

    def detect(self, root: Listing) -> bool:
        """Whether the marker exists: no request is made."""
        return any(meta.path == MARKER for meta in root.objects)

    def locate(self, uri: str, storage_options: Mapping[str, str]) -> Location:
        """The folder in a list of tables: ``jsonlog+list:///path/list.json#NAME``."""
        from memwal_jsonlog.table import read_json
        from memwal_ops.errors import TableNotFoundError
        from memwal_ops.storage.locations import resolve_folder
        from memwal_ops.storage.objects import open_store

        path, _, name = uri.partition("://")[2].partition("#")
        folder, _, file = path.rpartition("/")
        listed = read_json(open_store(resolve_folder(folder, storage_options)), file)
        if name not in listed:
            raise TableNotFoundError(f"{path} lists no table {name!r}.")
        return resolve_folder(listed[name], storage_options)

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
