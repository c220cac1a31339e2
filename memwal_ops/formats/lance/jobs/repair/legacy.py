"""The fixes of ``repair`` for tables with the legacy MemWAL index: restore the rows that a state commit dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.repair import Choice, Fix, FixAttempt, Keep, RepairJob, UnsafeError
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote
from memwal_ops.formats.lance.files.version_files import read_version_manifest
from memwal_ops.formats.lance.jobs.legacy import verify as legacy_verify
from memwal_ops.formats.lance.jobs.repair.choices import CHOICES, ROWS, fragments_of, place_of
from memwal_ops.formats.lance.jobs.repair.fixes import transaction_fix
from memwal_ops.formats.lance.legacy.index import Emptied, find_emptied, restore_emptied
from memwal_ops.formats.lance.retention.damage import missing_of_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.verification import Inconsistency
    from memwal_ops.formats.lance.table import Table


def fix_of_legacy(table: Table, finding: Inconsistency) -> Fix[Table] | None:
    """The fix of a finding; None: there is none for such findings. Reads only.

    Raises ``UnsafeError``: it is not safe here.
    """
    if finding.check == "transaction_file":
        return transaction_fix(table, finding)
    if finding.check not in {"emptied", "version_emptied"}:
        return None
    emptied = _emptied(table)

    def make(table: Table, keep: Keep) -> FixAttempt:
        if table.manifest.manifest.fragments:
            return FixAttempt.GONE
        again = _emptied(table)
        source = read_version_manifest(table.store, again.source or 0, table.naming)
        keep(ROWS, fragments_of(table.manifest.manifest), fragments_of(source.manifest))
        try:
            restore_emptied(table, again, CommitNote("repair"))
        except CommitLostError:
            return FixAttempt.CONFLICT
        return FixAttempt.DONE

    text = f"publish a version with the {emptied.rows:,} rows of version {emptied.source}, which a state commit lost"
    return Fix("rows:", text, make)


def _emptied(table: Table) -> Emptied:
    """The version that a state commit emptied, and a readable version that has the rows.

    Raises ``UnsafeError``: there is no such commit, or no such version.
    """
    emptied = find_emptied(table)
    if emptied is None or emptied.source is None:
        raise UnsafeError("It cannot be proven that a commit of MemWAL states lost the rows, or no version has them.")
    try:
        source = read_version_manifest(table.store, emptied.source, table.naming)
        gone = missing_of_manifest(table, source)
    except MemwalOpsError as error:
        raise UnsafeError(f"Version {emptied.source}, which has the rows, cannot be read: {error}") from error
    if gone or list(source.manifest.fields) != list(table.manifest.manifest.fields):
        raise UnsafeError(f"Version {emptied.source}, which has the rows, lacks files or has other columns.")
    return emptied


LEGACY_CHOICES: Mapping[str, tuple[Choice, ...]] = {
    **CHOICES,
    "emptied": (
        Choice("Restore the table from a backup.", "What was committed since the backup is lost."),
        Choice("If it never had rows: append one.", "None."),
    ),
    "mem_wal_states": (
        Choice("Let the region's writer seal and flush the lower generation.", "The writer has to be of that release."),
        Choice("memwal-ops migrate URI, which replays its log.", "Its writers have to be replaced."),
    ),
    "mem_wal_version": (
        Choice(
            "State what FLUSHED means: --flushed-means of merge and migrate.",
            "If you are wrong, rows are merged twice, or not at all.",
        ),
    ),
    "mem_wal_owner": (
        Choice("Stop the region's writers, and migrate.", "Its writers have to be replaced."),
        Choice("Leave it as it is.", "Two writers may write to it at once."),
    ),
    "wal_shared": (
        Choice(
            "Find out which writer wrote the log's entries, and stop the other one.",
            "Rows of the other writer are lost.",
        ),
        Choice("Leave it as it is.", "A replay gives the rows of both; gc keeps the log."),
    ),
}
LEGACY_JOB = RepairJob(legacy_verify.verified, fix_of_legacy, place_of, LEGACY_CHOICES)
