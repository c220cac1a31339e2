"""The reasons for which commands end, each with its exit code and remedy.

Each class is one reason and has its own ``exit_code`` and the
``remedy`` that is printed under the message. An error that code or a page tells apart is a subclass beside
that code, with the same exit code. The module does no I/O and does not import the rest of the package.

Exit codes are a contract (runbooks/README.md): a code is never reused for another reason. 70 to 99 are left to errors
of other packages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any


class MemwalOpsError(Exception):
    """Base of all errors that this project raises deliberately.

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
    """An invalid option or argument (the same code that click uses)."""

    exit_code = 2
    reason = "invalid_usage"
    remedy = "See --help of the command."


class TableNotFoundError(MemwalOpsError):
    """No table found at the URI: the prefix is empty."""

    exit_code = 3
    reason = "table_not_found"
    remedy = "Check the URI (and --storage-option endpoint, region) for a typo."


class NotALanceTableError(MemwalOpsError):
    """The URI has objects, but no readable Lance version manifest."""

    exit_code = 4
    reason = "not_a_lance_table"
    remedy = (
        "Give the folder that contains _versions/, usually NAME.lance. "
        'If a pattern or a database finds it, leave it out there: exclude: ["NAME"].'
    )


class NoMemWalIndexError(MemwalOpsError):
    """The operation needs a log, and MemWAL was never initialised on this Lance table."""

    exit_code = 5
    reason = "no_memwal_index"
    remedy = "Run memwal-ops init URI if writers are to write through MemWAL; else use the jobs of plain tables."


class NoPrimaryKeyError(MemwalOpsError):
    """MemWAL without an unenforced primary key: rows to be upserted cannot be identified (S0-002)."""

    exit_code = 6
    reason = "no_primary_key"
    remedy = (
        "Run memwal-ops init URI --primary-key COLUMN, or mark the key column, which must not be nullable, with the "
        "field metadata lance-schema:unenforced-primary-key = true."
    )


class LegacyLayoutError(MemwalOpsError):
    """A job that does not apply to a legacy table: one with the MemWAL index of Lance 0.31 to 1.x (mem_wal_list)."""

    exit_code = 7
    reason = "legacy_layout"
    remedy = (
        "Run memwal-ops migrate URI, which shows what it would do, and with --apply brings the table into the present "
        "layout; pylance and all jobs then work on it. What applies before that: docs/legacy-memwal.md."
    )


class UnsupportedFeatureError(MemwalOpsError):
    """Feature flags, manifest fields or a naming scheme that this release must not touch (S3-012, S3-013)."""

    exit_code = 8
    reason = "unsupported_feature"
    remedy = "Upgrade memwal-ops to a release that supports it."


class TableCorruptError(MemwalOpsError):
    """The base table's own metadata cannot be decoded, or contradicts itself."""

    exit_code = 9
    reason = "table_corrupt"
    # pylance restores no version while the newest manifest does not open.
    remedy = (
        "Restore the named file from a backup or, if the newest version still opens, an older version "
        "(dataset.checkout_version(N); dataset.restore()), which reverts what was committed since; do not run gc "
        "before that."
    )


class RegionsBlockedError(MemwalOpsError):
    """A run completed, but at least one region is blocked."""

    exit_code = 10
    reason = "blocked"
    remedy = "See the blocked entries; runbooks/merge-blocked.md explains each reason."


class RegionManifestCorruptError(MemwalOpsError):
    """A region manifest is truncated, is not protobuf, or names another region or version (S0-040, S0-042)."""

    exit_code = 11
    reason = "region_manifest_corrupt"
    remedy = (
        "Keep the file, stop the region's writer, and restore the manifest version from a backup; without one, "
        "memwal-ops repair URI shows what is left of it, and what is lost."
    )


class RegionManifestGapError(MemwalOpsError):
    """A version is missing between two manifest versions of a region (S0-050, S0-053)."""

    exit_code = 12
    reason = "region_manifest_gap"
    remedy = (
        "Restore the missing manifest version from a backup; without one, memwal-ops repair URI shows what fills the "
        "gap. Write nothing there by hand."
    )


_WRITE_AGAIN = (
    "Restore the generation's directory from a backup; without one, memwal-ops repair URI writes it again from the "
    "log, and shows what is lost if that lacks its rows, too."
)


class GenerationMissingError(MemwalOpsError):
    """An unmerged generation has no directory, or is missing from the region manifest's list (S0-038)."""

    exit_code = 13
    reason = "generation_missing"
    remedy = _WRITE_AGAIN


class DrainedElsewhereError(GenerationMissingError):
    """Another program took unmerged generations off their region's list, and recorded no progress."""

    exit_code = 66
    reason = "drained_elsewhere"
    remedy = (
        "memwal-ops adopt URI --drained shows which of their rows are in the base table; with --apply it records them "
        "as merged, and lists again what is not. Where both programs merge: memwal-ops merge URI --accept-drained."
    )


class GenerationCorruptError(MemwalOpsError):
    """A generation's directory exists, but does not open or read as a Lance table."""

    exit_code = 14
    reason = "generation_corrupt"
    remedy = _WRITE_AGAIN


class ForeignRootError(GenerationCorruptError):
    """A generation names another place than its own table for its rows, and this table has not all of their files."""

    exit_code = 65
    reason = "foreign_root"
    remedy = (
        "Copy the files that it lacks, under their names, into the same folder of this table: from a backup, or from "
        "the copy's origin if that is still the same table. memwal-ops adopt URI --moved shows whether it has all."
    )


_TABLE_REPLACED = (
    "Was the table overwritten, or removed and created again, since the generation was flushed? Then its rows belong "
    "to the previous table, and nothing below applies to them: stop the region's writer and move the region's folder "
    "to a place outside the table (runbooks/merge-blocked.md, region_replaced). Otherwise:"
)


class SchemaProjectionError(MemwalOpsError):
    """A generation's columns cannot be projected to the base table's current schema.

    A generation of a replaced table fails in the same way, and the remedy for the table's own generations would merge
    it. Every remedy therefore begins with that case.
    """

    exit_code = 15
    reason = "schema_projection"
    remedy = (
        "Change the base column back to the generation's type, merge, and change the schema afterwards; tag the newest "
        "version before, as a narrower type truncates values."
    )

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        own = self.remedy if remedy is None else remedy
        super().__init__(message, remedy=f"{_TABLE_REPLACED} {own}")


class DuplicateKeysError(MemwalOpsError):
    """One key in two regions, or twice in the base: it cannot be determined which row is newer (S0-009)."""

    exit_code = 16
    reason = "duplicate_keys"
    remedy = (
        "Merge the regions one by one with --region, in the order in which they should win; "
        "then fix the writers' routing."
    )


class InvalidFormatError(MemwalOpsError):
    """A file that does not decode as the format that its path requires; callers convert it to a specific error."""

    exit_code = 17
    reason = "invalid_format"
    remedy = "The file is damaged or was not written by Lance; restore it from a backup."


class IndexesBehindError(MemwalOpsError):
    """A run completed, but at least one index could not be brought up to date."""

    exit_code = 18
    reason = "indexes_behind"
    remedy = "See the failed entries; each has its reason, and the next run tries again."


class CodebookChangedError(MemwalOpsError):
    """An index was built with another codebook than the layers of the LSM tree share (S0-112)."""

    exit_code = 19
    reason = "codebook_changed"
    remedy = (
        "Build the index anew: memwal-ops catchup URI --index NAME --rebuild; to change a codebook on purpose, where "
        "there is a log, memwal-ops catchup URI --migrate-codebook OLD NEW."
    )


class StorageError(MemwalOpsError):
    """A failure of the store for which there is no more specific class."""

    exit_code = 20
    reason = "storage"
    remedy = "See the store's own message above, then run the command again; nothing was half-written."


class StorageCredentialsError(StorageError):
    """The store rejected the credentials, or none were found."""

    exit_code = 21
    reason = "storage_credentials"
    remedy = "Check the profile, role or keys (AWS_PROFILE, --storage-option); secrets are never printed."


class ReadOnlyStoreError(StorageError):
    """The store can be read but not written with these credentials."""

    exit_code = 22
    reason = "read_only_store"
    remedy = "Give this job write permission on the table's prefix."


class ConditionalWriteUnsupportedError(StorageError):
    """The store does not enforce put-if-absent, on which every commit depends (S3-044, S3-045)."""

    exit_code = 23
    reason = "conditional_write_unsupported"
    remedy = (
        "Use a store or endpoint that honours If-None-Match: *; concurrent commits would overwrite each other here."
    )


class StoreUnavailableError(StorageError):
    """Transient failures continued until the deadline."""

    exit_code = 24
    reason = "store_unavailable"
    remedy = "Wait for the store to recover and run the command again; it continues where it stopped."


class ObjectNotFoundError(StorageError):
    """An object is absent; callers convert it to a specific error."""

    exit_code = 25
    reason = "object_not_found"
    remedy = "The object may have been collected meanwhile; run the command again."


class VersionGoneError(MemwalOpsError):
    """A requested base version does not exist any more, or is being expired."""

    exit_code = 26
    reason = "version_gone"
    remedy = "Give one that exists: memwal-ops inspect URI shows the newest; or restore the file that is named."


class DeletesFailedError(MemwalOpsError):
    """A garbage collection completed, but the store refused some deletions."""

    exit_code = 27
    reason = "deletes_failed"
    remedy = "See the failed entries; the next run tries them again."


class TableReplacedError(MemwalOpsError):
    """The table at the URI is not certainly the one on which deletions were planned."""

    exit_code = 28
    reason = "table_replaced"
    remedy = "Check which table is at the URI now; if it is the expected one, run the command again: it plans again."


class RegionReplacedError(RegionManifestCorruptError):
    """A region may be another one. It is not certainly that for which the table records the merge progress.

    ``undecided``: the evidence will not last, so the table has to record that an operator must decide.
    """

    exit_code = 29
    reason = "region_replaced"
    remedy = "Decide with memwal-ops adopt; nothing of the region is merged or deleted before that."

    def __init__(self, message: str, *, remedy: str | None = None, undecided: bool = False) -> None:
        super().__init__(message, remedy=remedy)
        self.undecided = undecided


class CommitConflictError(MemwalOpsError):
    """Other writers published the next version first, until the attempts were used up."""

    exit_code = 30
    reason = "commit_conflict"
    remedy = "Run it again when fewer writers commit to the base table, or with a smaller --max-bytes."


class CommitStateUnknownError(MemwalOpsError):
    """The outcome of a commit is unknown: the store's response was lost, and reading back failed, too."""

    exit_code = 31
    reason = "commit_state_unknown"
    remedy = "Run the command again: it reads the progress first and repeats nothing that was committed."


class WriterFencedError(MemwalOpsError):
    """Another writer claimed the region: this writer is fenced (S0-153, S0-154)."""

    exit_code = 32
    reason = "writer_fenced"
    remedy = (
        "What was acknowledged is in the region's log. Stop one of the two writers; open the region again with the "
        "other, and write there what this one refused. If it happens repeatedly, see writer-fenced.md."
    )


class WalCorruptError(InvalidFormatError):
    """A region's write-ahead log lacks an entry in front of its end, or has one that cannot be read."""

    exit_code = 33
    reason = "wal_corrupt"
    remedy = (
        "Keep the file and restore the named entry from a backup; the entries after it were acknowledged. Without a "
        "copy, memwal-ops repair URI shows how to go on without it, and what is lost."
    )


class FlushedMeaningUnknownError(MemwalOpsError):
    """A legacy MemWAL is FLUSHED by an unknown release.

    Whether its rows are in the table depends on that release.
    """

    exit_code = 36
    reason = "flushed_meaning_unknown"
    remedy = (
        "Find out which release of Lance the region's writer had, or look for some of its rows in the table; then give "
        "--flushed-means merged (0.31 to 0.35) or --flushed-means unmerged (from 0.36)."
    )


class MemWalOrderError(MemwalOpsError):
    """A legacy MemWAL cannot be merged in order: one below it is not flushed, or one above it is merged (S1-009)."""

    exit_code = 37
    reason = "mem_wal_order"
    remedy = (
        "Read the rows of the generation that is late and decide for each which is the newer one; write those that are "
        "missing by your own program, and then mark the generation as merged (docs/legacy-memwal.md)."
    )


# The public names of these two, for programs that write into regions.
WriterFenced = WriterFencedError
WalCorrupt = WalCorruptError


class InvariantViolatedError(MemwalOpsError):
    """An internal check failed before anything was published; the run stopped to be safe."""

    exit_code = 40
    reason = "invariant_violated"


class AnswersWorseError(MemwalOpsError):
    """A new state of an index answers sampled queries worse than the state before; it was not published."""

    exit_code = 41
    reason = "answers_worse"
    remedy = "Build the index anew: memwal-ops catchup URI --index NAME --rebuild; or publish it by --answers off."


class SparkUnavailableError(MemwalOpsError):
    """PySpark, Java or pandas is missing or of an incompatible version, here or on the executors."""

    exit_code = 45
    reason = "spark_unavailable"
    remedy = "Install memwal-ops[spark] and Java 17 or later, or use --engine local."


class SparkJobFailedError(MemwalOpsError):
    """A Spark stage failed after its retries, for a reason that is not in the table; nothing was published."""

    exit_code = 46
    reason = "spark_job_failed"
    remedy = "See the executors' logs (often they ran out of memory), then run it again: nothing was half-written."


class InvalidConfigError(MemwalOpsError):
    """An invalid configuration file; ``memwal-ops config check`` explains each error."""

    exit_code = 50
    reason = "invalid_config"
    remedy = "memwal-ops config check FILE explains every error with its line."


class JobPluginError(MemwalOpsError):
    """A job of another package (entry point memwal_ops.jobs) cannot be used, or failed unexpectedly."""

    exit_code = 51
    reason = "job_plugin"
    remedy = "Fix or uninstall the package that the message names; docs/adding-a-job.md has the interface of a job."


class LeaseLostError(MemwalOpsError):
    """Another supervisor holds the lease of this table and job now, or an operator broke it."""

    exit_code = 52
    reason = "lease_lost"
    remedy = "The table is intact; the new holder continues. memwal-ops lease list URI shows the holder."


class WorkerDiedError(MemwalOpsError):
    """The worker process of a job died without a result: killed, out of memory, or crashed."""

    exit_code = 53
    reason = "worker_died"
    remedy = (
        "Nothing is half-written. Look for the kernel's out-of-memory killer; see pools.POOL.memory, options.max_bytes."
    )


class JobHungError(MemwalOpsError):
    """A job made no progress for ``hung_after``, or ran longer than its timeout, and was killed."""

    exit_code = 54
    reason = "job_hung"
    remedy = "Nothing is half-written. Check the store's health; hung_after and timeout set the limits."


class AlreadyRunningError(MemwalOpsError):
    """Another supervisor uses the same state folder, or the same name in the fleet."""

    exit_code = 55
    reason = "already_running"
    remedy = "Stop the other one, or give this one a state_dir of its own."


class HistoryError(MemwalOpsError):
    """The run history cannot be opened or written."""

    exit_code = 56
    reason = "history"
    remedy = "Check that the state folder can be written and that its disk is not full; the tables are not affected."


class BusyError(MemwalOpsError):
    """Another writer holds the format's own single-writer lock, which this job respects."""

    exit_code = 57
    reason = "busy"
    remedy = "Run it again when the holder is done or its lock has expired."


class ExtraMissingError(MemwalOpsError):
    """The packages of an extra are not installed."""

    exit_code = 58
    reason = "extra_missing"
    remedy = "Install the extra that the message names."


def import_extra(name: str, extra: str, what: str) -> Any:
    """Import a module of an extra's package, which ``what`` needs.

    Raises ``ExtraMissingError``: it is not installed; the remedy names the extra.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ExtraMissingError(
            f"{what} need the package {name}, which is not installed.", remedy=f"pip install 'memwal-ops[{extra}]'"
        ) from error


class FragmentMissingError(MemwalOpsError):
    """A Zeppelin manifest lists a WAL fragment that does not exist."""

    exit_code = 60
    reason = "fragment_missing"
    remedy = "Restore the fragment's object from a backup; compacting past it would lose its writes."


class FragmentCorruptError(MemwalOpsError):
    """A WAL fragment is truncated, foreign, or has another checksum than it states (S4-006)."""

    exit_code = 61
    reason = "fragment_corrupt"
    remedy = "Restore the fragment's object from a backup; compacting past it would lose its writes."


class SegmentCorruptError(MemwalOpsError):
    """An object of a live Zeppelin segment is missing, or cannot be read."""

    exit_code = 62
    reason = "segment_corrupt"
    remedy = "Restore the named object from a backup; do not run gc --apply before that."


class HeldError(MemwalOpsError):
    """Rows that must be gone are kept. The report names each tag, hold, branch or log that keeps them."""

    exit_code = 63
    reason = "held"
    remedy = (
        "Delete the tag or the branch, release the hold, or let the writer flush, as the report says; run it again."
    )


class CertificateError(MemwalOpsError):
    """A certificate of an erasure is not valid: it was changed, or the table is not as it states."""

    exit_code = 64
    reason = "certificate"
    remedy = "Run memwal-ops erase again with the same rows: it reads the table and writes a new certificate."


_DAMAGE = (
    RegionManifestCorruptError,
    RegionManifestGapError,
    GenerationMissingError,
    GenerationCorruptError,
    InvalidFormatError,
    WalCorruptError,
    FragmentMissingError,
    FragmentCorruptError,
    SegmentCorruptError,
)
_RANKS = {
    TableCorruptError.exit_code: 0,
    **{damage.exit_code: 1 for damage in _DAMAGE},
    IndexesBehindError.exit_code: 3,
    RegionsBlockedError.exit_code: 4,
}


def is_damage(code: int) -> bool:
    """Return whether an exit code is that of damaged or missing data."""
    return _RANKS.get(code, 2) < 2  # noqa: PLR2004 - the rank of failures without damage


def worst_exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of what ended with several: damage, then failures, then what is behind, then blocked parts.

    Among equals the first decides. 0: all succeeded.
    """
    return min((code for code in codes if code), key=lambda code: _RANKS.get(code, 2), default=0)


_RUNBOOKS: dict[int | str, str] = {
    key: f"runbooks/errors/{error_class.exit_code:02}-{error_class.reason}.md"
    for error_class in list(globals().values())
    if isinstance(error_class, type) and issubclass(error_class, MemwalOpsError)
    for key in (error_class.exit_code, error_class.reason)
} | {"disk_full": "runbooks/disk-full.md"}


def add_pages(pages: Mapping[str, str]) -> None:
    """Add the URLs of pages for the reasons of another package's errors; those of this project stay."""
    for reason, page in pages.items():
        _RUNBOOKS.setdefault(reason, page)


def runbook(exit_code: int, reason: str | None = None) -> str | None:
    """The page of a reason, else of an exit code: a path relative to the project's root, or another package's URL."""
    return _RUNBOOKS.get(reason or "") or _RUNBOOKS.get(exit_code)
