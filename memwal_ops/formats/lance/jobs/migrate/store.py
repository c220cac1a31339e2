"""Migrate a table whose versions are recorded in DynamoDB to plain S3: ``migrate --to s3``.

The proof that no writer is left: the entries of the versions to come are put into DynamoDB, if they are absent and if
the newest version is finished, in one transaction. They have no path, so that every commit of these versions is
refused, and no release of Lance repairs them or takes them for manifests. Before that transaction nothing has changed
for writers; after it, all versions are in S3 alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.core.context import RunContext
from memwal_ops.core.documents import document
from memwal_ops.errors import CommitConflictError, InvariantViolatedError
from memwal_ops.formats.lance.commit.publication import CommitNote
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER
from memwal_ops.formats.lance.jobs.migrate.report import MigrateDecision
from memwal_ops.storage.external_manifests import ManifestEntryStore, manifest_entries
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from memwal_ops.formats.lance.options import MigrateOptions
    from memwal_ops.formats.lance.table import Table

S3 = "s3"
FENCED_VERSIONS = 1000
"""For how many versions a dataset that was opened before the migration is kept from committing."""
_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Report of a migration off DynamoDB.

    ``before``: the scheme of the table's URI. ``moved_to``: the URI of the table in plain S3. ``branches``: the number
    of branches that are migrated with it. ``finished``: commits that a killed writer had left unfinished.
    """

    decision: MigrateDecision
    run_id: str
    uri: str
    before: str
    moved_to: str
    branches: int
    finished: int
    version: int
    seconds: float

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``migrate --json``."""
        none = dict.fromkeys(("primary_key", "regions", "blocked"), ()) | dict.fromkeys(("restored_version", "kept"))
        shown = {"from": self.before, "to": S3, "rollback": False, "finished_commits": self.finished}
        return document(self, "uri", "before", "finished", **shown, **none)

    def describe(self) -> str:
        """The report as text for people."""
        texts = {
            MigrateDecision.PLANNED: f"would migrate {self.uri}, version {self.version}, to {self.moved_to}",
            MigrateDecision.MIGRATED: f"{self.moved_to} has all versions, {self.version} is the newest",
            MigrateDecision.NOTHING_TO_MIGRATE: f"{self.uri} is in plain storage already",
        }
        parts = [paragraph(f"{self.decision}: {texts[self.decision]}.")]
        if self.branches:
            parts.append(f"{counted(self.branches, 'branch', 'branches')} with it.")
        if self.decision is MigrateDecision.PLANNED:
            text = (
                "Stop the writers before: from --apply on, each commit and each opening by s3+ddb:// fails, and what a "
                f"writer had not committed is for it to write again, by {self.moved_to}."
            )
            parts += [paragraph(text), "Nothing was changed; add --apply to do it."]
        if self.decision is MigrateDecision.MIGRATED:
            text = (
                f"Let all readers and writers open {self.moved_to}. A process that opened the table before fails to "
                f"commit for {FENCED_VERSIONS:,} versions: end it until then. When all tables of the DynamoDB table "
                "are migrated, delete that."
            )
            parts.append(paragraph(text))
        return "\n\n".join(parts)


def plan(table: Table, options: MigrateOptions, context: RunContext | None = None) -> StoreReport:
    """What :func:`apply` would do; reads only, but for unfinished commits, which every reader finishes.

    Raises:
        NoMemWalIndexError: another migration was requested of a plain table.
        OptionError: options for legacy tables were given.
    """
    del context
    note = CommitNote("migrate")
    store = _checked(table, options)
    decision = MigrateDecision.NOTHING_TO_MIGRATE if store is None else MigrateDecision.PLANNED
    branches = 0 if store is None else len(store.versions_folders()) - 1
    return _report(decision, table, note, branches, 0)


def apply(table: Table, options: MigrateOptions, context: RunContext | None = None) -> StoreReport:
    """Migrate. Safe to kill and to repeat: main comes after its branches, and is what decides.

    Branches that were created meanwhile follow: of a table that is fenced, no process that opens it can create one.

    Raises ``ConditionalWriteUnsupportedError``: the bucket does not enforce conditional writes, which plain S3 needs;
    ``CommitConflictError``: writers keep committing; ``MemwalOpsError``: as :func:`plan`; DynamoDB refused or failed.
    """
    note, context = CommitNote("migrate"), context or RunContext()
    store = _checked(table, options)
    if store is None:
        return _report(MigrateDecision.NOTHING_TO_MIGRATE, table, note, 0, 0)
    probe_conditional_writes(table.store, again=True)
    versions: dict[str, int] = {}
    finished = 0
    while folders := [folder for folder in store.versions_folders() if folder not in versions]:
        for folder in reversed(folders):
            finished += store.finish_all(folder)
            versions[folder] = _fence(table, store, folder, context)
    decision, branches = MigrateDecision.MIGRATED, len(versions) - 1
    return _report(decision, table, note, branches, finished, versions[VERSIONS_FOLDER])


def _checked(table: Table, options: MigrateOptions) -> ManifestEntryStore | None:
    """The table's store; None: its versions are not recorded in DynamoDB."""
    if options.to != S3:
        raise table.layout.why_not(table, "migrate") or InvariantViolatedError("No migration was requested.")
    options.refuse_legacy()
    return manifest_entries(table.store)


def _fence(table: Table, store: ManifestEntryStore, folder: str, context: RunContext) -> int:
    """Fence the versions after the newest, and return that; 0: an earlier run did."""
    for _ in range(_ATTEMPTS):
        context.checkpoint()
        if store.has_moved(folder):
            return 0
        newest = store.newest_entry(folder) or store.record_newest(folder)
        table.guard.check()  # here, since the store that is wrapped is asked
        if newest is not None and store.fence(folder, newest, FENCED_VERSIONS, table.location.folder):
            # A writer may have built on a version of its own that it had not finished.
            store.finish_all(folder)
            store.record_move(folder, table.location.folder)
            return newest.version
    raise CommitConflictError(
        f"Writers keep committing to {table.location.uri}: each time another version was the newest.",
        remedy="Stop them, and run it again. Nothing was changed for them.",
    )


def _report(
    decision: MigrateDecision, table: Table, note: CommitNote, branches: int, finished: int, version: int = 0
) -> StoreReport:
    location = table.location
    return StoreReport(
        decision, note.run_id, location.uri, location.scheme, location.folder, branches, finished,
        version or table.version, note.seconds,
    )  # fmt: skip
