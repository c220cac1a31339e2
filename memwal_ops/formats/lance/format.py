"""The Lance table format: detect and open tables. Imports nothing heavy.

Summarize a Lance table: backlog metrics of its jobs, and blocked regions. Reads only.

Estimate the work of jobs on Lance tables, from the manifest and the indexes' entries alone.

The rates are those of ``python -m benchmarks.plain`` (2 cores, local files): 5,000 fragments, three indexes, 2,000
versions. On an object store each file costs requests, too.

Open what an interrupted drop or creation left at a table's URI, for ``repair`` alone.

LanceDB lists every folder ``NAME.lance`` as a table. One without any version is a *stub*: no reader can open it, and a
table cannot be told from it by its name. A stub without data is deleted once it is older than any creation in
progress. Data files without a version are kept: they may be all that is left of the rows.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core import registry
from memwal_ops.core.context import RunContext
from memwal_ops.core.guard import CommitGuard, GuardedTable, Unguarded
from memwal_ops.core.outlook import Work
from memwal_ops.core.polling import built_in_backlog
from memwal_ops.core.protocols import Blocked, TableSummary
from memwal_ops.core.repair_report import Choice, Fixed, OpenDecision, Outcome, RepairReport
from memwal_ops.core.verification import Finding, Severity
from memwal_ops.errors import DeletesFailedError, InvalidUsageError, NotALanceTableError, TableReplacedError
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER
from memwal_ops.formats.lance.indexes.base_indexes import coverage, covered_by
from memwal_ops.formats.lance.options import InspectOptions
from memwal_ops.formats.lance.retention.garbage import UNFINISHED_AGE
from memwal_ops.formats.lance.specs import DEMO, INIT, REPAIR
from memwal_ops.formats.lance.wire.version_manifest import by_name
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.locations import LOCAL, decoded_name
from memwal_ops.storage.objects import open_store
from memwal_ops.text import counted
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.export import Exported
    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import TableBranch, TableFormat
    from memwal_ops.core.repair_spec import RepairOptions
    from memwal_ops.core.report import Need
    from memwal_ops.core.row_sink import RowSink
    from memwal_ops.core.table_history import TableHistory
    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import Listing, ObjectMeta, Store
    from memwal_ops.storage.locations import Location


def summarize(table: Table) -> TableSummary:
    """The summary of a table.

    Raises:
        StorageError: the store failed.
    """
    metrics = built_in_backlog(table)
    blocked: tuple[Blocked, ...] = ()
    if metrics.get("blocked_regions"):
        inspection: Any = table.jobs["inspect"].job.plan(table, InspectOptions(), RunContext())
        blocked = tuple(
            Blocked(str(document["region_id"]), fault.error.reason, str(fault.error), document)
            for fault in inspection.faults
            if (document := fault.to_json())
        )
    return TableSummary(table.version, metrics, len(table.regions.region_ids), blocked)


# Seconds for each row that is merged, indexed (by one index), or rewritten; for each byte of these rows.
_ROW = {"merge": 2e-6, "catchup": 6e-6, "compact": 10e-6}
_BYTE = 1 / 150e6
# For each version that expire reads, and each fragment that it names.
_VERSION, _ENTRY = 1e-3, 7e-6
# For each file on an object store, with many requests in flight.
_REQUEST = 4e-3
_LEAST = 0.2
# Manifests and transactions that a step publishes, by the size of the present manifest.
_MANIFESTS = 4
# Of more files of indexes: their metadata.
_OVERHEAD = 1.1


def work_of(table: Table, need: Need) -> Work:
    """See :class:`memwal_ops.core.outlook.EstimatesWork`."""
    fragments = table.manifest.manifest.fragments
    rows = sum(one.physical_rows for one in fragments)
    written = need.rows * _data_bytes(table) // max(rows, 1)
    remote = 0.0 if table.location.scheme in LOCAL else _REQUEST
    if need.versions:
        return Work(_LEAST + need.versions * (_VERSION + len(fragments) * _ENTRY + remote))
    if need.job not in _ROW:
        return Work(_LEAST)
    seconds = _LEAST + need.rows * _ROW[need.job] + written * _BYTE + len(fragments) * remote
    match need.job:
        case "catchup":
            written = _index_bytes(table, need.rows / max(1, rows * len(by_name(table.manifest))))
        case "compact":  # the indexes of rewritten rows are written anew, too
            written += _index_bytes(table, need.rows / max(rows, 1))
    return Work(seconds, written + _MANIFESTS * table.manifest.manifest.ByteSize())


def _data_bytes(table: Table) -> int:
    return sum(file.file_size_bytes for one in table.manifest.manifest.fragments for file in one.files)


def _index_bytes(table: Table, share: float) -> int:
    """What is written of all indexes, which then cover all rows; one that records no size counts 0.

    Scalar indexes are written whole, of vector indexes the segments with the share of rows that are indexed or moved.
    """
    written = 0.0
    rows = sum(one.physical_rows for one in table.manifest.manifest.fragments)
    for entries in by_name(table.manifest).values():
        covered = coverage(covered_by(entries), table.manifest)
        size = sum(file.size_bytes for entry in entries for file in entry.files)
        whole = size * rows / max(1, rows - covered.uncovered_rows)
        written += whole * (min(1.0, share) if _is_vector(entries[0]) else 1.0)
    return int(written * _OVERHEAD)


def _is_vector(entry: table_pb2.IndexMetadata) -> bool:
    return entry.index_details.type_url.endswith("VectorIndexDetails")


# Below these, and nowhere else, Lance writes before it writes rows.
_WITHOUT_ROWS = ("_transactions/", f"{VERSIONS_FOLDER}/", "_mem_wal_ops/clock/", "_mem_wal_ops/probe/")
# A catalog declared the table: a client writes it later, or drops it there.
_RESERVED = ".lance-reserved"
_CHECK = "stub"


@dataclass(frozen=True)
class Stub(GuardedTable):
    """A folder without any version, of which only ``repair`` applies.

    Attributes:
        objects: all of them.
        written: when the last of them was written, or an empty folder changed; None: there is none.
        beside: the table whose folder has the name that this one's name encodes; None: there is none.
    """

    location: Location
    store: Store
    objects: tuple[ObjectMeta, ...]
    written: datetime | None
    beside: str | None = None
    guard: CommitGuard = field(default_factory=Unguarded, compare=False)
    revision: int = 0

    @property
    def format(self) -> TableFormat:
        """The Lance format."""
        return registry.formats()["lance"]

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        """``repair``, with the code for stubs."""
        return {REPAIR.name: replace(REPAIR, load=f"{__name__}:JOB")}

    def why_not(self, job: str) -> MemwalOpsError | None:
        """A job applies to tables."""
        return NotALanceTableError(self.evidence) if job in registry.job_specs("lance") else None

    def has_revision(self, revision: int) -> bool:
        """It has none."""
        del revision
        return False

    def newest(self) -> Stub:
        """The same, listed again.

        Raises:
            TableReplacedError: it is a table now, or gone.
        """
        found = find_stub(self.location, self.store)
        if found is None:
            raise TableReplacedError(f"{self.location.uri} is a table now, or gone: nothing of it was deleted.")
        return replace(found, guard=self.guard)

    @property
    def declared(self) -> bool:
        """Whether a catalog declared the table."""
        return any(meta.path == _RESERVED for meta in self.objects)

    @property
    def with_data(self) -> int:
        """The number of objects that may have rows, or that Lance does not write."""
        return sum(not meta.path.startswith(_WITHOUT_ROWS) and meta.path != _RESERVED for meta in self.objects)

    @property
    def evidence(self) -> str:
        """What it is, as a sentence."""
        uri = self.location.uri
        if self.with_data:
            files = counted(self.with_data, "file")
            return f"{uri} has no version, but {files} that may have rows: a drop or a creation was interrupted."
        if self.beside is not None:
            return f"{uri} is no table: a catalog writes its marks there, under the encoded name of {self.beside}."
        if self.declared:
            return f"{uri} has no version: a catalog declared the table, and it was never written."
        return f"{uri} is a stub: it has no version, and no file with rows."


def find_stub(location: Location, store: Store) -> Stub | None:
    """The stub at a location; None: a version exists, or nothing at all. One listing.

    Raises:
        StorageError: the store failed.
    """
    objects = tuple(store.list())
    folders = [folder for folder, _, _ in os.walk(location.uri)] if location.scheme == "file" else []
    if not (objects or folders):
        return None
    if any(meta.path.startswith(f"{VERSIONS_FOLDER}/") and meta.path.endswith(".manifest") for meta in objects):
        return None
    times = [meta.last_modified for meta in objects]
    times += [datetime.fromtimestamp(os.stat(folder).st_mtime, UTC) for folder in folders]
    return Stub(location, store, objects, max(times, default=None), _beside(location))


def _beside(location: Location) -> str | None:
    """The table for which a catalog writes marks there."""
    folder, _, name = location.uri.rpartition("/")
    if (decoded := decoded_name(name)) is None:
        return None
    beside = replace(location, uri=f"{folder}/{decoded}")
    listed = open_store(beside).list(VERSIONS_FOLDER)
    return beside.uri if any(meta.path.endswith(".manifest") for meta in listed) else None


class StubRepair:
    """``repair`` of a stub: delete it if it cannot have rows."""

    def plan(self, stub: Stub, options: RepairOptions, context: RunContext | None = None) -> RepairReport:
        """What would be deleted, or why it is not. Reads only."""
        del context
        _refuse_undo(options)
        return _report(stub, datetime.now(UTC), apply=False)

    def apply(self, stub: Stub, options: RepairOptions, context: RunContext | None = None) -> RepairReport:
        """Delete a stub without rows that is old enough. Safe to kill, and to repeat.

        Raises:
            StorageError: the store failed.
        """
        del context
        _refuse_undo(options)
        # A local folder is as young as what was written into it last.
        now = datetime.now(UTC) if stub.location.scheme == "file" else store_time(stub.store)
        stub = stub.newest()
        report = _report(stub, now, apply=True)
        for fixed in report.fixes:
            outcome = stub.store.delete_many(meta.path for meta in stub.objects)
            fixed.outcome = Outcome.FAILED if outcome.failed else Outcome.REPAIRED
            if outcome.failed:
                path, why = next(iter(outcome.failed.items()))
                fixed.error = DeletesFailedError(f"{path} could not be deleted: {why}")
            elif stub.location.scheme == "file":
                _remove_empty(stub.location.uri)
        return report


JOB = StubRepair()


def _report(stub: Stub, now: datetime, *, apply: bool) -> RepairReport:
    report = RepairReport(0, apply=apply)
    young = stub.written is None or now - stub.written < UNFINISHED_AGE
    finding = Finding(
        Severity.ERROR if stub.with_data else Severity.WARNING,
        _CHECK,
        stub.location.uri,
        stub.evidence,
        "The table itself is whole." if stub.beside else "LanceDB lists it as a table, and cannot open it.",
        "See the choices.",
    )
    if not (stub.with_data or stub.declared or stub.beside or young):
        number = counted(len(stub.objects), "object")
        report.fixes.append(Fixed(f"delete the folder ({number}, none with rows)", [finding]))
    else:
        report.decisions.append(OpenDecision(finding, _why(stub), _choices(stub)))
    return report


def _why(stub: Stub) -> str:
    if stub.with_data:
        return "Without a version it cannot be proven that its files are unreferenced."
    if stub.beside is not None:
        return f"A catalog uses it, and dropping it there would drop {stub.beside}."
    if stub.declared:
        return "The catalog's entry must be removed with it."
    age = duration_text(UNFINISHED_AGE)
    return f"Something was written to it within {age}: a creation may be in progress. Run it again later."


def _choices(stub: Stub) -> tuple[Choice, ...]:
    if stub.beside is not None and not stub.with_data:
        return (Choice("Leave it as it is.", "It has no rows."),)
    drop = Choice("Drop the table in LanceDB.", "All of its files are deleted.")
    leave = Choice("Leave it as it is.", "LanceDB lists a table that cannot be opened.")
    if not stub.with_data:
        return (drop, leave)
    return (Choice(f"Restore {VERSIONS_FOLDER}/ from a backup.", "What was committed since it is lost."), drop, leave)


def _refuse_undo(options: RepairOptions) -> None:
    if options.undo:
        raise InvalidUsageError("There is nothing to undo: this is not a table.")


def _remove_empty(root: str) -> None:
    """Remove folders from the deepest on; one that is not empty any more stays."""
    for folder, _, _ in os.walk(root, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)


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
        from memwal_ops.formats.lance.files.branch import list_branches  # noqa: PLC0415 - as above

        return list_branches(store)

    def find_stub(self, location: Location, store: Store) -> Stub | None:
        """See :class:`memwal_ops.core.protocols.FindsStubs`."""
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
        return work_of(table, need)

    def summarize(self, table: Table) -> TableSummary:
        """Backlog metrics of all jobs, and the blocked regions."""
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
        from memwal_ops.formats.lance.row_sink import LanceSink  # noqa: PLC0415 - see above

        return LanceSink(location, store, guard, source)


FORMAT = LanceFormat()
