"""The Iceberg format, read-only: tables in a SQL catalog in a local file. Imports nothing heavy.

A URI is ``iceberg+sql:///path/catalog.db#namespace.table``. A commit becomes visible by one update in the catalog: of
the table's metadata file, whose name has the number of the revision. A folder alone does not show which metadata file
is the current one, so no folder is detected as a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.protocols import TableSummary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_iceberg.table import Table
    from memwal_ops.storage.api import Listing, Store
    from memwal_ops.storage.locations import Location

SCHEME = "iceberg+sql"


class IcebergFormat:
    """Tables whose commits a catalog decides."""

    name = "iceberg"
    schemes = frozenset({SCHEME})

    suffix = ""
    init = None
    demo = None

    def part_of(self, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """No part of a table is blocked: there is no job that could be."""
        return "", ""

    def detect(self, root: Listing) -> bool:
        """No folder: see the module."""
        return False

    def locate(self, uri: str, storage_options: Mapping[str, str]) -> Location:
        """The folder that the catalog has. Raises: see :func:`memwal_iceberg.table.load`."""
        from memwal_iceberg.catalog import load
        from memwal_ops.storage.locations import resolve_folder

        return resolve_folder(load(uri).location(), storage_options)

    def open(self, location: Location, store: Store) -> Table:
        """The current metadata file. Raises: see :func:`memwal_iceberg.table.load`."""
        from memwal_iceberg.table import load

        return load(location, store)

    def summarize(self, table: Table) -> TableSummary:
        """No job has a backlog."""
        return TableSummary(table.revision, {}, 1)

    def missing_of(self, table: Table, revision: int) -> str | None:
        """The metadata file of a revision, if it is missing; ``verify`` reads the files that it names."""
        path = table.metadata_files.get(revision)
        return path if path is not None and table.store.head(path) is None else None


FORMAT = IcebergFormat()
