"""The Lance table format: detect and open tables. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.formats.lance.specs import DEMO, INIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.anchors import CommitGuard
    from memwal_ops.core.export import Exported
    from memwal_ops.core.outlook import Work
    from memwal_ops.core.protocols import TableBranch, TableSummary
    from memwal_ops.core.report import Need
    from memwal_ops.core.row_sink import RowSink
    from memwal_ops.core.table_history import TableHistory
    from memwal_ops.formats.lance.stub import StubTable
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Listing, Store
    from memwal_ops.storage.locations import Location

_VERSIONS, _MEM_WAL = "_versions", "_mem_wal"


class LanceFormat:
    """The format of Lance tables with a MemWAL index."""

    name = "lance"

    suffix = ".lance"
    init = INIT
    demo = DEMO
    beside = "This is safe beside writers and readers: none of them has to stop, and it can be stopped at any time."

    def part_of(self, blocked: Mapping[str, Any]) -> tuple[str, str]:
        """The names of the blocked region and generation in messages; the second is empty if the region is blocked."""
        generation = blocked.get("generation")
        return f"Region {blocked['region_id']}", "" if generation is None else f"generation {generation}"

    def detect(self, root: Listing) -> bool:
        """Whether there is a folder of version manifests."""
        return _VERSIONS in root.directories

    def open(self, location: Location, store: Store) -> Table:
        """The newest version. Raises: see :func:`memwal_ops.formats.lance.table.load`."""
        from memwal_ops.formats.lance.table import load  # noqa: PLC0415 - pylance: not before a table is opened

        return load(location, store)

    def open_to_inspect(self, location: Location, store: Store) -> Table:
        """As ``open``, also a table with regions that are not its own."""
        from memwal_ops.formats.lance.table import load  # noqa: PLC0415 - as above

        return load(location, store, refuse_regions=False)

    def branches(self, store: Store) -> tuple[TableBranch, ...]:
        """See :class:`memwal_ops.core.protocols.HasBranches`. A listing, and one request for each branch."""
        from memwal_ops.formats.lance.files.datasets import list_branches  # noqa: PLC0415 - as above

        return list_branches(store)

    def find_stub(self, location: Location, store: Store) -> StubTable | None:
        """See :class:`memwal_ops.core.protocols.FindsStubs`."""
        from memwal_ops.formats.lance.stub import find_stub  # noqa: PLC0415 - as above

        return find_stub(location, store)

    def last_writer(self, table: Table) -> str | None:
        """See :class:`memwal_ops.core.protocols.NamesWriters`."""
        from memwal_ops.formats.lance.indexes.index_faults import last_writer  # noqa: PLC0415 - pylance, as above

        return last_writer(table)

    def record_revisions(self, table: Table) -> None:
        """See :class:`memwal_ops.core.protocols.RecordsRevisions`."""
        from memwal_ops.formats.lance.retention.schema_recorder import try_to_record_schema  # noqa: PLC0415 - as above

        try_to_record_schema(table)

    def work_of(self, table: Table, need: Need) -> Work:
        """See :class:`memwal_ops.core.outlook.EstimatesWork`."""
        from memwal_ops.formats.lance.work import work_of  # noqa: PLC0415 - pylance, as above

        return work_of(table, need)

    def summarize(self, table: Table) -> TableSummary:
        """Backlog metrics of all jobs, and the blocked regions."""
        from memwal_ops.formats.lance.work import summarize  # noqa: PLC0415 - pylance, as above

        return summarize(table)

    def missing_of(self, table: Table, revision: int) -> str | None:
        """One request for each file that the version does not share with the opened one."""
        from memwal_ops.formats.lance.retention.damage import missing_of_version  # noqa: PLC0415 - as above

        return missing_of_version(table, revision)

    def recent_history(self, table: Table, limit: int) -> TableHistory:
        """See :class:`memwal_ops.core.table_history.HasRecentHistory`."""
        from memwal_ops.formats.lance.retention.recent_history import recent_history  # noqa: PLC0415 - as above

        return recent_history(table, limit)

    def fingerprint(self, table: Table) -> str | None:
        """See :class:`memwal_ops.core.protocols.DetectsChanges`."""
        from memwal_ops.formats.lance.retention.recent_history import fingerprint  # noqa: PLC0415 - protobuf: not for a listing

        return fingerprint(table)

    def is_unchanged(self, store: Store, fingerprint: str) -> bool:
        """See :class:`memwal_ops.core.protocols.DetectsChanges`."""
        from memwal_ops.formats.lance.retention.recent_history import is_unchanged  # noqa: PLC0415 - protobuf, as above

        return is_unchanged(store, fingerprint)

    def announces_commit(self, path: str) -> bool:
        """Whether it is the manifest of a version or of a region: no job acts on what no manifest names."""
        folders = path.split("/")[:-1]
        return folders == [_VERSIONS] or (folders[:1] == [_MEM_WAL] and folders[2:] == ["manifest"])

    def exported(self, store: Store, versions: int) -> Iterable[Exported]:
        """See :class:`memwal_ops.core.export.ExportsMetadata`."""
        from memwal_ops.formats.lance.export import exported  # noqa: PLC0415 - pylance, as above

        return exported(store, versions)

    def open_sink(self, location: Location, store: Store, guard: CommitGuard, source: str) -> RowSink:
        """See :class:`memwal_ops.core.row_sink.ReceivesRows`."""
        from memwal_ops.formats.lance.export import LanceSink  # noqa: PLC0415 - see above

        return LanceSink(location, store, guard, source)


FORMAT = LanceFormat()
