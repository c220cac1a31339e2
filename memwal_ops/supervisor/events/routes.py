"""Find the tables that objects in a store belong to, by their keys."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import unquote

from memwal_ops.core.protocols import AnnouncesCommits
from memwal_ops.core.registry import formats, short_name
from memwal_ops.storage.locations import S3, is_database_table, scheme_of, split_query
from memwal_ops.supervisor.scheduling.discovery import is_wanted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.supervisor.config.effective import TableSettings
    from memwal_ops.supervisor.scheduling.discovery import FoundTable

_WILD = frozenset("*?[")
# What jobs write beside a table: leases, holds, records of runs.
_OURS = "_mem_wal_ops/"


class Routes:
    """The tables of a service that are in S3, by bucket and prefix.

    Args:
        tables: all that are known.
        entries: those of the configuration; a pattern may match tables that are not known yet.
    """

    def __init__(self, tables: Iterable[FoundTable] = (), entries: Iterable[TableSettings] = ()) -> None:
        """Send no request."""
        self._tables: dict[tuple[str, str], list[FoundTable]] = {}
        for table in tables:
            if (place := _place(table.uri)) is not None:
                self._tables.setdefault(place, []).append(table)
        globs = ((entry, _place(entry.pattern)) for entry in entries if entry.pattern is not None)
        self._globs = [(entry, place) for entry, place in globs if place is not None]

    def tables_of(self, bucket: str, key: str) -> tuple[list[FoundTable], str]:
        """Return the tables that an object belongs to, and its path below them; no tables: it belongs to none."""
        parts = key.split("/")
        for end in range(len(parts) - 1, -1, -1):
            if found := self._tables.get((bucket, "/".join(parts[:end]))):
                return found, "/".join(parts[end:])
        return [], ""

    def new_table(self, bucket: str, key: str) -> str | None:
        """Return the folder that an object of no known table is in, if a pattern matches it as a table."""
        for entry, (in_bucket, glob) in self._globs:
            wanted, parts = glob.split("/"), key.split("/")
            folder = "/".join(parts[: len(wanted)])
            if in_bucket != bucket or len(parts) <= len(wanted) or not _matches(parts, wanted, entry):
                continue
            fixed = next((number for number, part in enumerate(wanted) if _WILD & {*part}), len(wanted) - 1)
            name = short_name("/".join(parts[fixed : len(wanted)]))
            if is_wanted(entry, name, f"s3://{bucket}/{folder}"):
                return folder
        return None


def announces_commit(table: FoundTable, path: str) -> bool:
    """Return whether an object at that path below a table may come with a commit, or another change of its backlog."""
    if path.startswith(_OURS):
        return False
    kind: object = formats().get(table.settings.format or "")
    return not isinstance(kind, AnnouncesCommits) or kind.announces_commit(path)


def _place(uri: str) -> tuple[str, str] | None:
    """The bucket and the prefix of a table or a pattern in S3. Of a table in a catalog, only that knows them."""
    if scheme_of(uri) not in S3:
        return None
    bucket, _, prefix = split_query(uri)[0].split("://", 1)[1].partition("/")
    return bucket, unquote(prefix.rstrip("/"))


def _matches(parts: list[str], wanted: list[str], entry: TableSettings) -> bool:
    if entry.database:
        return parts[: len(wanted) - 1] == wanted[:-1] and is_database_table(parts[len(wanted) - 1])
    return all(map(fnmatchcase, parts, wanted))
