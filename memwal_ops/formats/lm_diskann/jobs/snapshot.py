"""The snapshot job of index folders: a consistent copy to a folder or a store; and from a store back to a folder."""

from __future__ import annotations

import enum
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.context import Progress
from memwal_ops.core.documents import document
from memwal_ops.errors import InvalidUsageError, TableReplacedError
from memwal_ops.formats.lm_diskann import copying
from memwal_ops.formats.lm_diskann.copies import Copy
from memwal_ops.formats.lm_diskann.destinations import Identity, LocalFolder, destination_of
from memwal_ops.formats.lm_diskann.files import CURRENT, METADATA, base_path, log_path
from memwal_ops.formats.lm_diskann.folders import read_parameters
from memwal_ops.formats.lm_diskann.source import FOLLOW
from memwal_ops.formats.lm_diskann.store import LOG, NAME
from memwal_ops.text import counted, size_text

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.destinations import Destination
    from memwal_ops.formats.lm_diskann.options import SnapshotOptions
    from memwal_ops.formats.lm_diskann.table import Table


class Decision(enum.StrEnum):
    """How a run ended."""

    COPIED = "copied"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class Report:
    """The report of a copy.

    Attributes:
        decision: how it ended; unchanged: the destination has this epoch already.
        uri: the source.
        destination: the copy.
        epoch: of the copy.
        rows: in the copy.
        bytes: of all files of the copy; of a dry run, about as many.
        seconds: how long it took.
    """

    decision: Decision
    uri: str
    destination: str
    epoch: int
    rows: int
    bytes: int
    seconds: float

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``snapshot --json``."""
        return document(self)

    def describe(self) -> str:
        """The report as text for people."""
        what = f"{counted(self.rows, 'row')} ({size_text(self.bytes)}) to {self.destination}"
        match self.decision:
            case Decision.COPIED:
                return f"copied: {what}, as epoch {self.epoch}, {self.seconds:.2f} s."
            case Decision.UNCHANGED:
                return f"unchanged: {self.destination} has epoch {self.epoch} already."
            case _:
                return f"dry_run: would copy {what}; nothing was changed."


def plan(table: Table | Copy, options: SnapshotOptions, context: RunContext) -> Report:
    """Report what would be copied. Reads only; raises as :func:`apply`."""
    del context
    return _report(table, _destination(table, options), Decision.DRY_RUN)


def apply(table: Table | Copy, options: SnapshotOptions, context: RunContext) -> Report:
    """Copy. Safe to kill and to run again, and concurrently with writers, readers and jobs.

    Raises:
        IndexBusyError: another writer or job has the index, or another snapshot has the destination.
        InvalidUsageError: something else is at the destination.
        TableCorruptError: the index, or the copy, is damaged; nothing is at the destination.
        StorageError: the disk is full, or a store failed; nothing is at the destination.
    """
    started = time.monotonic()
    to = _destination(table, options)
    expected = _report(table, to, Decision.DRY_RUN)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        context.report(Progress("copying", "bytes", done, expected.bytes))
        context.checkpoint()

    if expected.decision is Decision.UNCHANGED:
        to.clean()
        return expected
    if isinstance(table, Copy):
        assert isinstance(to, LocalFolder)  # noqa: S101 - see _destination
        size = copying.restore(table, to, advance)
        epoch, rows = expected.epoch, expected.rows
    else:
        if read_parameters(table.location.uri).uuid != table.parameters.uuid:
            raise TableReplacedError(f"{table.location.uri} does not contain the same index as before.")
        wait = options.wait.total_seconds()
        identity, rows, size = copying.copy(table.location.uri, table.parameters, to, wait, advance)
        epoch = identity.epoch
    return Report(Decision.COPIED, table.location.uri, to.uri, epoch, rows, size, time.monotonic() - started)


def _destination(table: Table | Copy, options: SnapshotOptions) -> Destination:
    """The destination. Raises ``InvalidUsageError`` if there is none, or it cannot be one."""
    if not options.destination:
        raise InvalidUsageError(
            "snapshot of an index folder needs a destination.", remedy="Give one: memwal-ops snapshot FOLDER DEST."
        )
    step = table.step if isinstance(table, Copy) else table.durable
    to = destination_of(options.destination, table.location.lance_options, step)
    if not isinstance(table, Copy):
        copying.refuse_overlap(table.location.uri, to)
    elif not isinstance(to, LocalFolder):
        raise InvalidUsageError(
            f"{table.location.uri} is a copy already; it can be restored to a local folder, not to {to.uri}.",
            remedy="Copy the objects with the tools of the store.",
        )
    return to


def _report(table: Table | Copy, to: Destination, decision: Decision) -> Report:
    """The report of what a run would do; ``unchanged`` if the destination has this epoch.

    Raises:
        InvalidUsageError: something else is at the destination.
    """
    if isinstance(table, Copy):
        found = table.manifest
        wanted, rows, size = Identity(found.uuid, found.epoch), found.rows, found.size
    else:
        table.check_files()
        # The copy does not retain older epochs, by a commit of its own.
        wanted, rows = Identity(str(table.parameters.uuid), table.revision + 1), table.state.live
        size = _size(table)
    existing = to.existing()
    if existing is not None and existing != wanted:
        raise InvalidUsageError(
            f"{to.uri} exists already: epoch {existing.epoch} of index {existing.uuid}.",
            remedy="Choose another destination; nothing was changed there.",
        )
    if existing is not None:
        decision = Decision.UNCHANGED
    return Report(decision, table.location.uri, to.uri, wanted.epoch, rows, size, 0.0)


def _size(table: Table) -> int:
    folder, number = table.location.uri, table.view_number
    names = (METADATA, FOLLOW, NAME, LOG, CURRENT, base_path(number), log_path(number))
    paths = (os.path.join(folder, name) for name in names)
    slots = table.state.slot_count * table.parameters.layout.block_size
    return slots + sum(os.path.getsize(path) for path in paths if os.path.exists(path))
