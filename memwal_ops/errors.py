"""Every way this project says no, with the exit code that a script can rely on.

One flat tree: each class names one reason, each carries its own ``exit_code`` and the
``remedy`` that is printed under the message. Nothing here does I/O and nothing here
imports the rest of the package.

Exit codes are a contract (README, "Exit codes"): a code is never reused for another reason.
"""

from __future__ import annotations


class MemwalOpsError(Exception):
    """Base of all errors that this project raises on purpose.

    Args:
        message: what was refused and why, in one or two sentences.
        remedy: what the reader can do about it; overrides the class's own text.
    """

    exit_code: int = 1
    reason: str = "error"
    remedy: str = "This is a bug in memwal-ops: please report it with the command and the full output."

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        if remedy is not None:
            self.remedy = remedy


class InvalidUsageError(MemwalOpsError):
    """An option or argument that cannot be honoured (the same code that click uses)."""

    exit_code = 2
    reason = "invalid_usage"
    remedy = "See --help of the command."


class TableNotFoundError(MemwalOpsError):
    """Nothing stands at the URI."""

    exit_code = 3
    reason = "table_not_found"
    remedy = "Check the URI (and --storage-option endpoint, region) for a typing error."


class NotALanceTableError(MemwalOpsError):
    """Something stands at the URI, but it has no readable Lance version manifest."""

    exit_code = 4
    reason = "not_a_lance_table"
    remedy = "Give the folder that contains _versions/, usually NAME.lance."


class NoMemWalIndexError(MemwalOpsError):
    """A Lance table on which MemWAL was never initialised."""

    exit_code = 5
    reason = "no_memwal_index"
    remedy = "Run dataset.initialize_mem_wal(...) once; until then there is nothing to maintain."


class NoPrimaryKeyError(MemwalOpsError):
    """MemWAL without an unenforced primary key: upserts have no identity (S0-002)."""

    exit_code = 6
    reason = "no_primary_key"
    remedy = (
        "Mark the key column, which must not be nullable, with the field metadata "
        "lance-schema:unenforced-primary-key = true."
    )


class LegacyLayoutError(MemwalOpsError):
    """The MemWAL index of Lance 0.31 to 1.x (mem_wal_list), which this release does not maintain."""

    exit_code = 7
    reason = "legacy_layout"
    remedy = (
        "Merge and drop the legacy MemWAL index with the Lance release that wrote it, then initialise MemWAL again."
    )


class UnsupportedFeatureError(MemwalOpsError):
    """Feature flags, manifest fields or a naming scheme that this release must not touch (S3-012, S3-013)."""

    exit_code = 8
    reason = "unsupported_feature"
    remedy = "Upgrade memwal-ops to a release that knows the feature; the table was not changed."


class TableCorruptError(MemwalOpsError):
    """The base table's own metadata cannot be decoded, or contradicts itself."""

    exit_code = 9
    reason = "table_corrupt"
    # pylance restores no version while the newest manifest does not open.
    remedy = (
        "Restore the file that is named from a backup or, where the newest version still opens, an older version "
        "(dataset.checkout_version(N); dataset.restore()); do not run gc before that."
    )


class RegionsBlockedError(MemwalOpsError):
    """A run did all it could, but at least one region is blocked."""

    exit_code = 10
    reason = "blocked"
    remedy = "See the blocked entries; runbooks/merge-blocked.md goes through each reason."


class RegionManifestCorruptError(MemwalOpsError):
    """A region manifest is cut short, is no protobuf, or names another region or version (S0-040, S0-042)."""

    exit_code = 11
    reason = "region_manifest_corrupt"
    remedy = "Keep the file, stop the region's writer, and restore the manifest version from a backup."


class RegionManifestGapError(MemwalOpsError):
    """A version is missing between two manifest versions of a region (S0-050, S0-053)."""

    exit_code = 12
    reason = "region_manifest_gap"
    remedy = "Restore the missing manifest version from a backup; never write over the gap."


class GenerationMissingError(MemwalOpsError):
    """An unmerged generation has no directory, or is missing from the region manifest's list (S0-038)."""

    exit_code = 13
    reason = "generation_missing"
    remedy = "Restore the generation's directory from a backup; merging past it would lose its rows."


class GenerationCorruptError(MemwalOpsError):
    """A generation's directory stands, but it does not open or read as a Lance table."""

    exit_code = 14
    reason = "generation_corrupt"
    remedy = "Restore the generation's directory from a backup; merging past it would lose its rows."


class SchemaProjectionError(MemwalOpsError):
    """A generation's columns cannot be brought to the base table's present schema."""

    exit_code = 15
    reason = "schema_projection"
    remedy = "Bring the base column back to the generation's type, merge, and change the schema afterwards."


class DuplicateKeysError(MemwalOpsError):
    """One key in two regions, or twice in the base: which row is newer cannot be known (S0-009)."""

    exit_code = 16
    reason = "duplicate_keys"
    remedy = (
        "Merge the regions one by one with --region, in the order in which they should win; "
        "then mend the writers' routing."
    )


class InvalidFormatError(MemwalOpsError):
    """Bytes that are not what their place says; callers turn it into the error of that place."""

    exit_code = 17
    reason = "invalid_format"
    remedy = "The file is damaged or was not written by Lance; restore it from a backup."


class IndexesBehindError(MemwalOpsError):
    """A run did all it could, but at least one index could not be brought up to date."""

    exit_code = 18
    reason = "indexes_behind"
    remedy = "See the failed entries; each says why, and the next run tries again."


class CodebookChangedError(MemwalOpsError):
    """An index was built with another codebook than the layers of the LSM tree share (S0-112)."""

    exit_code = 19
    reason = "codebook_changed"
    remedy = "To change a codebook on purpose, run memwal-ops catchup URI --migrate-codebook OLD NEW."


class StorageError(MemwalOpsError):
    """The store failed in a way that no other class names."""

    exit_code = 20
    reason = "storage"
    remedy = "Look at the store's own message above, then run the command again; nothing was half-written."


class StorageCredentialsError(StorageError):
    """The store does not accept the credentials, or none were found."""

    exit_code = 21
    reason = "storage_credentials"
    remedy = "Check the profile, role or keys (AWS_PROFILE, --storage-option); secrets are never printed."


class ReadOnlyStoreError(StorageError):
    """The store can be read but not written with these credentials."""

    exit_code = 22
    reason = "read_only_store"
    remedy = "Give this job write permission on the table's prefix."


class ConditionalWriteUnsupportedError(StorageError):
    """The store does not enforce put-if-absent, on which every commit rests (S3-044, S3-045)."""

    exit_code = 23
    reason = "conditional_write_unsupported"
    remedy = (
        "Use a store or endpoint that honours If-None-Match: *; concurrent commits would overwrite each other here."
    )


class StoreUnavailableError(StorageError):
    """Transient failures did not end before the deadline."""

    exit_code = 24
    reason = "store_unavailable"
    remedy = "Wait for the store to recover and run the command again; it goes on where it stopped."


class ObjectNotFoundError(StorageError):
    """One object is absent; callers turn it into the error of their place."""

    exit_code = 25
    reason = "object_not_found"
    remedy = "The object may have been collected meanwhile; run the command again."


class VersionGoneError(MemwalOpsError):
    """A base version that was asked for does not exist any more, or is being expired."""

    exit_code = 26
    reason = "version_gone"
    remedy = "Choose one of the versions that still stand (dataset.versions() lists them)."


class DeletesFailedError(MemwalOpsError):
    """A collector did all it could, but the store refused some deletions."""

    exit_code = 27
    reason = "deletes_failed"
    remedy = "See the failed entries; the next run tries them again."


class CommitConflictError(MemwalOpsError):
    """Other writers won every race for the next version until the attempts were used up."""

    exit_code = 30
    reason = "commit_conflict"
    remedy = "Run it again when fewer writers commit to the base table, or with a smaller --max-bytes."


class CommitStateUnknownError(MemwalOpsError):
    """The store lost the answer to a commit, and reading back gave no answer either."""

    exit_code = 31
    reason = "commit_state_unknown"
    remedy = "Run the command again: it reads the progress first and repeats nothing that landed."


class InvariantViolatedError(MemwalOpsError):
    """A check of our own failed before anything was published; refusing is the safe end."""

    exit_code = 40
    reason = "invariant_violated"


class SparkUnavailableError(MemwalOpsError):
    """PySpark, Java or pandas is missing or of a version that does not fit, here or on the executors."""

    exit_code = 45
    reason = "spark_unavailable"
    remedy = "Install memwal-ops[spark] and Java 17 or later, or use --engine local."


class SparkJobFailedError(MemwalOpsError):
    """Spark gave a stage up after its retries, for a reason that is none of the table's; nothing was published."""

    exit_code = 46
    reason = "spark_job_failed"
    remedy = "Look at the executors' logs (often they ran out of memory), then run it again: nothing was half-written."


class InvalidConfigError(MemwalOpsError):
    """A configuration file that cannot be used; ``memwal-ops config check`` explains each line."""

    exit_code = 50
    reason = "invalid_config"
    remedy = "memwal-ops config check FILE explains every error with its line."


class JobPluginError(MemwalOpsError):
    """A package registers a job under the entry point memwal_ops.jobs that cannot be used, or breaks."""

    exit_code = 51
    reason = "job_plugin"
    remedy = "Mend or uninstall the package that the message names; docs/supervisor.md has the interface of a job."


class LeaseLostError(MemwalOpsError):
    """Another supervisor holds the lease of this table and job now, or somebody broke it."""

    exit_code = 52
    reason = "lease_lost"
    remedy = "Nothing is wrong with the table; the new holder goes on. memwal-ops lease list URI shows who that is."


class WorkerDiedError(MemwalOpsError):
    """The process that ran a job ended without an answer: killed, out of memory, or crashed."""

    exit_code = 53
    reason = "worker_died"
    remedy = (
        "Nothing is half-written. Look for the kernel's out-of-memory killer; see pools.POOL.memory, options.max_bytes."
    )


class JobHungError(MemwalOpsError):
    """A job made no progress for its limit, or ran longer than its timeout, and was ended."""

    exit_code = 54
    reason = "job_hung"
    remedy = "Nothing is half-written. Look at the store's health; hung_after and timeout set the limits."


class AlreadyRunningError(MemwalOpsError):
    """Another supervisor on this machine uses the same state folder."""

    exit_code = 55
    reason = "already_running"
    remedy = "Stop the other one, or give this one a state_dir of its own."


class HistoryError(MemwalOpsError):
    """The history of runs cannot be opened or written."""

    exit_code = 56
    reason = "history"
    remedy = "Check that the state folder can be written and that its disk is not full; the tables are not affected."


_RUNBOOKS = {
    found.exit_code: f"runbooks/errors/{found.exit_code:02}-{found.reason}.md"
    for found in list(globals().values())
    if isinstance(found, type) and issubclass(found, MemwalOpsError)
}


def runbook(exit_code: int) -> str | None:
    """The page about an exit code, from the project's root; None for a code that is none of these."""
    return _RUNBOOKS.get(exit_code)
