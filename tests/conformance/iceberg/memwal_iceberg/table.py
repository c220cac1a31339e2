"""Open a table as an immutable ``Table``: one metadata file."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memwal_iceberg import FORMAT, catalog
from memwal_ops.core.anchors import GuardedStore
from memwal_ops.core.registry import job_specs
from memwal_ops.errors import TableReplacedError, UnsupportedFeatureError
from memwal_ops.storage.locations import resolve_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyiceberg.table import Table as IcebergTable

    from memwal_ops.core.anchors import CommitGuard
    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import TableSummary
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_NUMBERED = re.compile(r"(\d+)-[^/]*\.metadata\.json$")


@dataclass(frozen=True)
class Table:
    """A revision: the number of the metadata file that the catalog had when it was opened."""

    location: Location
    store: Store
    revision: int
    iceberg: IcebergTable

    format = FORMAT

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        return job_specs(FORMAT.name)

    @property
    def metadata_files(self) -> Mapping[int, str]:
        """The paths of the metadata files that are still listed, by revision."""
        logged = [one.metadata_file for one in self.iceberg.metadata.metadata_log]
        files = [*logged, self.iceberg.metadata_location]
        return {number_of(one): path for one in files if (path := self.path_of(one)) is not None}

    def has_revision(self, revision: int) -> bool:
        return revision in self.newest().metadata_files

    def newest(self) -> Table:
        return load(self.location, self.store)  # the guard is in the store

    def with_guard(self, guard: CommitGuard) -> Table:
        return replace(self, store=GuardedStore(self.store, guard))

    def summary(self) -> TableSummary:
        return FORMAT.summarize(self)

    def path_of(self, uri: str) -> str | None:
        """The path of a file in the store; None: it is outside of the table's folder."""
        root, path = f"{self.location.uri}/", resolve_folder(uri).uri
        return path.removeprefix(root) if path.startswith(root) else None


def load(location: Location, store: Store) -> Table:
    """Open the table that the catalog has now.

    Raises:
        MemwalOpsError: as :func:`memwal_iceberg.catalog.load`.
        TableReplacedError: the catalog has it at another location than when it was located.
        UnsupportedFeatureError: its metadata file has no number.
    """
    iceberg = catalog.load(str(location.catalog))
    if resolve_folder(iceberg.location()).uri != location.uri:
        raise TableReplacedError(f"The catalog now has {location.catalog} at {iceberg.location()}.")
    return Table(location, store, number_of(iceberg.metadata_location), iceberg)


def number_of(metadata_file: str) -> int:
    """The number in the name of a metadata file. Raises ``UnsupportedFeatureError``."""
    found = _NUMBERED.search(metadata_file)
    if found is None:
        raise UnsupportedFeatureError(f"The metadata file {metadata_file} has no number, which is the revision.")
    return int(found[1])
