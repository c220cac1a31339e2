"""Open what an interrupted drop or creation left at a table's URI, for ``repair`` alone.

LanceDB lists every folder ``NAME.lance`` as a table. One without any version is a *stub*: no reader can open it, and a
table cannot be told from it by its name. A stub without data is deleted once it is older than any creation in
progress. Data files without a version are kept: they may be all that is left of the rows.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core import registry
from memwal_ops.core.anchors import CommitGuard, GuardedTable, Unguarded
from memwal_ops.core.leases import LEASES_FOLDER
from memwal_ops.core.repair import Choice, Fixed, OpenDecision, Outcome, RepairReport
from memwal_ops.core.verification import Inconsistency, Severity
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER
from memwal_ops.formats.lance.retention.garbage import UNFINISHED_AGE
from memwal_ops.formats.lance.specs import REPAIR
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.locations import Location, decoded_name
from memwal_ops.storage.objects import open_store
from memwal_ops.text import counted, duration_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.options import RepairOptions
    from memwal_ops.core.protocols import TableFormat
    from memwal_ops.storage.api import ObjectMeta, Store

# Below the first two, and nowhere else, Lance writes before it writes rows; the others are written beside each job.
_OWN = ("_mem_wal_ops/clock/", "_mem_wal_ops/probe/", f"{LEASES_FOLDER}/")
_WITHOUT_ROWS = ("_transactions/", f"{VERSIONS_FOLDER}/", *_OWN)
# A catalog declared the table: a client writes it later, or drops it there.
_RESERVED = ".lance-reserved"
_CHECK = "stub"


@dataclass(frozen=True)
class StubTable(GuardedTable):
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

    def why_not(self, job: str) -> errors.MemwalOpsError | None:
        """A job applies to tables."""
        refused = job in registry.job_specs("lance").keys() - self.jobs.keys()
        return errors.NotALanceTableError(self.evidence) if refused else None

    def has_revision(self, revision: int) -> bool:
        """It has none."""
        del revision
        return False

    def newest(self) -> StubTable:
        """The same, listed again.

        Raises:
            TableReplacedError: it is a table now, or gone.
        """
        stub = find_stub(self.location, self.store)
        if stub is None:
            raise errors.TableReplacedError(f"{self.location.uri} is a table now, or gone: nothing of it was deleted.")
        return replace(stub, guard=self.guard)

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


def find_stub(location: Location, store: Store) -> StubTable | None:
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
    return StubTable(location, store, objects, max(times, default=None), _beside(location))


def _beside(location: Location) -> str | None:
    folder, _, name = location.uri.rpartition("/")
    if (decoded := decoded_name(name)) is None:
        return None
    beside = replace(location, uri=f"{folder}/{decoded}")
    listed = open_store(beside).list(VERSIONS_FOLDER)
    return beside.uri if any(meta.path.endswith(".manifest") for meta in listed) else None


class StubRepair:
    """``repair`` of a stub: delete it if it cannot have rows."""

    def plan(self, stub: StubTable, options: RepairOptions, context: RunContext | None = None) -> RepairReport:
        """What would be deleted, or why it is not. Reads only."""
        del context
        _refuse_undo(options)
        return _report(stub, datetime.now(UTC), apply=False)

    def apply(self, stub: StubTable, options: RepairOptions, context: RunContext | None = None) -> RepairReport:
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
                fixed.error = errors.DeletesFailedError(f"{path} could not be deleted: {why}")
            elif stub.location.scheme == "file":
                _remove_empty(stub.location.uri)
        return report


JOB = StubRepair()


def _report(stub: StubTable, now: datetime, *, apply: bool) -> RepairReport:
    report = RepairReport(0, apply=apply)
    young = stub.written is None or now - stub.written < UNFINISHED_AGE
    finding = Inconsistency(
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


def _why(stub: StubTable) -> str:
    if stub.with_data:
        return "Without a version it cannot be proven that its files are unreferenced."
    if stub.beside is not None:
        return f"A catalog uses it, and dropping it there would drop {stub.beside}."
    if stub.declared:
        return "The catalog's entry must be removed with it."
    age = duration_text(UNFINISHED_AGE)
    return f"Something was written to it within {age}: a creation may be in progress. Run it again later."


def _choices(stub: StubTable) -> tuple[Choice, ...]:
    if stub.beside is not None and not stub.with_data:
        return (Choice("Leave it as it is.", "It has no rows."),)
    drop = Choice("Drop the table in LanceDB.", "All of its files are deleted.")
    leave = Choice("Leave it as it is.", "LanceDB lists a table that cannot be opened.")
    if not stub.with_data:
        return (drop, leave)
    return (Choice(f"Restore {VERSIONS_FOLDER}/ from a backup.", "What was committed since it is lost."), drop, leave)


def _refuse_undo(options: RepairOptions) -> None:
    if options.undo:
        raise errors.InvalidUsageError("There is nothing to undo: this is not a table.")


def _remove_empty(root: str) -> None:
    """Remove folders from the deepest on; one that is not empty any more stays."""
    for folder, _, _ in os.walk(root, topdown=False):
        with suppress(OSError):
            os.rmdir(folder)
