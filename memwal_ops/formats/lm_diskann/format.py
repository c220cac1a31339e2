"""The LM-DiskANN format: detect and open index folders. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.figures import built_in_backlog
from memwal_ops.core.protocols import TableSummary
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lm_diskann.errors import COPY, need_extra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.demo import DemoSpec
    from memwal_ops.core.job import InitSpec
    from memwal_ops.formats.lm_diskann.copies import Copy
    from memwal_ops.formats.lm_diskann.table import Table
    from memwal_ops.storage.api import Listing, Store
    from memwal_ops.storage.locations import Location

MARKER = "metadata.lmd"
_OTHERS = frozenset({"graph.lmd", "diskann_store.duckdb"})


class LmDiskAnnFormat:
    """A graph index of vectors: delta blocks in a DuckDB store, and a page file."""

    name = "lm_diskann"
    suffix = ""
    beside = "This is safe beside readers; a writer and a job wait for each other, and it can be stopped at any time."

    @property
    def init(self) -> InitSpec:
        """How ``memwal-ops init`` makes an index folder."""
        from memwal_ops.formats.lm_diskann.specs import INIT  # noqa: PLC0415 - tables of other formats need no specs

        return INIT

    @property
    def demo(self) -> DemoSpec:
        """Its demo."""
        from memwal_ops.formats.lm_diskann.specs import DEMO  # noqa: PLC0415 - as above

        return DEMO

    def part_of(self, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """The names of the blocked part in messages: an index folder is one part."""
        del blocked
        return "The index folder", ""

    def detect(self, root: Listing) -> bool:
        """Whether the marker file exists, or the manifest of a copy, or the other files without it: no request."""
        names = {meta.path for meta in root.objects}
        return bool(names & {MARKER, COPY}) or names >= _OTHERS

    def open(self, location: Location, store: Store) -> Table | Copy:
        """The newest published epoch; or a copy, which ``snapshot`` restores.

        Raises:
            UnsupportedFeatureError: the folder is not on a file system.
            ExtraMissingError: the extra is not installed.
            MemwalOpsError: see :func:`memwal_ops.formats.lm_diskann.table.load`.
        """
        if store.head(COPY) is not None and store.head(MARKER) is None:
            need_extra()
            from memwal_ops.formats.lm_diskann.copies import load_copy  # noqa: PLC0415

            return load_copy(location, store)
        if location.scheme != "file":
            raise UnsupportedFeatureError(
                f"{location.uri} is an LM-DiskANN index, which needs a file system: pages of one file are "
                "written in place and synced, which object stores do not support.",
                remedy="Copy the folder to a local disk, and use it there.",
            )
        need_extra()
        from memwal_ops.formats.lm_diskann.table import load  # noqa: PLC0415

        return load(location, store)

    def summarize(self, table: Table | Copy) -> TableSummary:
        """The backlog metrics; a copy has none. Blocked: what stops readers or jobs."""
        return TableSummary(table.revision, built_in_backlog(table), 1, table.blocked)

    def warm(self) -> int:
        """Compile what searches and jobs call. Raises ``ExtraMissingError``, ``StorageError``."""
        need_extra()
        from memwal_ops.formats.lm_diskann.jobs.init import warm  # noqa: PLC0415

        return warm()

    def missing_of(self, table: Table | Copy, revision: int) -> str | None:
        """None: an epoch has no files of its own, and ``snapshot`` checks the parts of a copy."""
        del table, revision
        return None


FORMAT = LmDiskAnnFormat()
