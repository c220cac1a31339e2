"""The expire job: delete old base versions, and the files and generations that only they need (the latter by gc).

Versions with tags, branches or holds are kept. pylance's own clean-up is not used: it ignores holds, deletes data
before the manifests that refer to it, follows directory links out of the table, and counts deletions that the store
refused as done.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.core.anchors import Anchor, delete_proven
from memwal_ops.core.context import RunContext
from memwal_ops.core.documents import document
from memwal_ops.core.holds import announced_expiry
from memwal_ops.core.options import SAFE_AGE
from memwal_ops.core.report import Need
from memwal_ops.errors import DeletesFailedError, InvalidUsageError, VersionGoneError, is_damage
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.generations.generation_files import checked_backlog
from memwal_ops.formats.lance.generations.wal import UnmergedFlushes
from memwal_ops.formats.lance.indexes.snapshots import covered_generations
from memwal_ops.formats.lance.options import ExpireOptions, RetentionOptions
from memwal_ops.formats.lance.retention.damage import NewestFiles, names_damage, require_complete
from memwal_ops.formats.lance.retention.garbage import (
    Garbage,
    Later,
    NeededFiles,
    find_garbage,
    put_back,
    read_set_aside,
    record,
    unreadable_versions,
)
from memwal_ops.formats.lance.retention.identity import anchored
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from memwal_ops.formats.lance.retention.merged_since import drop_overtaken
from memwal_ops.formats.lance.retention.schema_recorder import record_schema
from memwal_ops.formats.lance.wire.names import parse_version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import check_writable, decode_version_manifest
from memwal_ops.storage.clock import PLANNED_BY, store_time
from memwal_ops.text import counted, paragraph, size_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta


_SHOWN = 8
_CLONES = (
    "Shallow clones elsewhere that read these versions cannot be found from here, and break. Tag a version to keep it."
)


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that is kept, and why. ``old_enough``: when it becomes old enough, if only its age keeps it."""

    version: int
    because: str
    old_enough: datetime | None = None

    def to_json(self) -> dict[str, object]:
        """The entry of ``kept``; ``old_enough`` is a time as of ISO 8601, or null."""
        return document(self)


@dataclass
class ExpireReport:
    """Report of an expire run.

    Attributes:
        versions: planned: those that would be deleted. Applied: those that were planned and are not listed
            afterwards. Ascending.
        objects: files that would be, or were, deleted, manifests included.
        frees: generations that gc may delete once these versions are deleted, and their bytes.
        failed: per path the error of the store.
        unreadable: listed versions of which files are missing, each with one of those files.
        put_back: versions that a tag, branch or hold named during their deletion, and that are listed again.
        later: bytes that only their age keeps, and when the last of them are old enough; None: there are none.
        for_branches: files of deleted versions, kept since a branch or a detached version refers to them.
    """

    decision: str
    applied: bool
    versions: tuple[int, ...]
    kept: tuple[KeptVersion, ...]
    newest: int
    branches: int
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    objects: int = 0
    bytes: int = 0
    frees: tuple[int, int] = (0, 0)
    failed: dict[str, str] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    put_back: tuple[int, ...] = ()
    for_branches: int = 0
    later: Later | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """27 if the store refused deletions."""
        return DeletesFailedError.exit_code if self.failed else 0

    def needs(self) -> Iterator[Need]:
        """What a run would delete now, and what it can delete later."""
        later = 0 if self.later is None else self.later.bytes
        by = None if self.later is None else self.later.by.isoformat(timespec="seconds")
        if self.objects:
            what = f"delete {counted(len(self.versions), 'version')}, {counted(self.objects, 'object')} in all"
            read = len(self.versions) + len(self.kept)
            yield Need("expire", what, frees=self.bytes, later=later, by=by, versions=read)
        elif by is not None:
            yield Need("expire", "nothing yet", later=later, by=by, now=False)

    def to_json(self, *, limit: int = 100) -> dict[str, object]:
        """The document of ``expire --json``; ``limit`` bounds all lists."""
        lists = (self.versions, self.kept, self.failed, self.unreadable, self.put_back)
        return {
            "decision": self.decision,
            "apply": self.applied,
            "counts": {
                "expire": len(self.versions),
                "kept": len(self.kept),
                "failed": len(self.failed),
                "unreadable": len(self.unreadable),
            },
            "expire": list(self.versions[:limit]),
            "kept": [version.to_json() for version in self.kept[-limit:]],
            "failed": [{"path": path, "error": why} for path, why in islice(sorted(self.failed.items()), limit)],
            "unreadable": [
                {"version": version, "missing": path} for version, path in islice(self.unreadable.items(), limit)
            ],
            "put_back": list(self.put_back[:limit]),
            "truncated": any(len(entries) > limit for entries in lists),
            "objects": self.objects,
            "bytes": self.bytes,
            "later": None if self.later is None else self.later.to_json(),
            "frees_for_gc": {"generations": self.frees[0], "bytes": self.frees[1]},
            "branches": {"count": self.branches, "files_kept": self.for_branches},
            "version": self.newest,
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }

    def describe(self) -> str:
        """The report as text for people."""
        parts = [_headline(self)]
        named = [version for version in self.kept if version.because.startswith(("tag", "hold", "branch"))]
        parts += [
            paragraph(f"  version {kept.version} is kept: {kept.because}", hanging="    ") for kept in named[:_SHOWN]
        ]
        if self.frees[0]:
            freed = f"{counted(self.frees[0], 'generation')} ({size_text(self.frees[1])})"
            word = "were" if self.applied and self.frees[0] > 1 else "was" if self.applied else "would be"
            parts.append(f"{freed} {word} kept only by these versions; memwal-ops gc can drain and delete them.")
        if self.later is not None:
            size, by = size_text(self.later.bytes), self.later.by
            of = "young versions, and files that no version needs,"
            parts.append(paragraph(f"Up to {size} more of {of} are old enough by {by:%Y-%m-%d %H:%M} UTC."))
        if self.for_branches:
            files = counted(self.for_branches, "file")
            verb = "is" if self.for_branches == 1 else "are"
            parts.append(
                f"{files} of these versions {verb} kept: {counted(self.branches, 'branch', 'branches')} may read them."
            )
        if self.put_back:
            versions = ", ".join(map(str, self.put_back))
            parts.append(paragraph(f"Listed again, since a tag, branch or hold named them meanwhile: {versions}."))
        for path, why in list(self.failed.items())[:_SHOWN]:
            parts.append(paragraph(f"NOT DELETED: {path}: {why}", hanging="  "))
        if len(self.failed) > _SHOWN:
            parts.append(f"NOT DELETED: {counted(len(self.failed) - _SHOWN, 'file')} more; see --json.")
        for version, path in list(self.unreadable.items())[:_SHOWN]:
            parts.append(paragraph(f"UNREADABLE: version {version} is listed, but {path} is missing.", hanging="  "))
        parts += [paragraph(f"WARNING: {warning}", hanging="  ") for warning in self.warnings]
        if self.versions:
            parts.append(paragraph(_CLONES))
        if self.decision == "planned":
            parts += [PLANNED_BY, "Add --apply to do it."]
        return "\n".join(parts)


def _headline(report: ExpireReport) -> str:
    versions, kept = counted(len(report.versions), "version"), counted(len(report.kept), "version")
    match report.decision:
        case "planned":
            return f"planned: {versions} would be deleted ({size_text(report.bytes)} of base files), {kept} kept."
        case "expired" | "incomplete" as word:
            return f"{word}: {versions} ({size_text(report.bytes)} of base files), {kept} kept, {report.seconds:.2f} s."
        case _:
            first = min((kept.old_enough for kept in report.kept if kept.old_enough is not None), default=None)
            when = "" if first is None else f" The first is old enough at {first:%Y-%m-%d %H:%M} UTC."
            return f"nothing_to_expire: {kept} kept: young, the newest, or held by a tag, branch or hold.{when}"


# Half of an announcement's lifetime.
_PROVEN_FOR = timedelta(hours=12).total_seconds()
_BATCH = 1000
_BATCH_BYTES = 16 << 20
_MISSING = (
    "Files of listed versions are missing, so that those cannot be read: a clean-up was killed, or files were deleted "
    "by hand. The versions are deleted when they are old enough; to keep one, restore its file from a backup before."
)

__all__ = ["ExpireOptions", "ExpireReport", "apply", "backlog", "plan"]


@names_damage
def plan(table: Table, options: ExpireOptions, context: RunContext | None = None) -> ExpireReport:
    """Which versions would be deleted, which are kept and why, and what that would free. Reads only.

    Raises:
        StorageError: the store failed, or a base folder is a link.
        TableCorruptError: the newest version lacks a file, or a manifest does not decode, so that the files that it
            refers to are not known.
        UnsupportedFeatureError: writers need a feature that this release does not support (S3-013).
    """
    del context
    started = time.monotonic()
    check_writable(table.manifest.manifest)
    version_files.refuse_linked_folders(table.store)
    retention = _retention(table)
    now = datetime.now(UTC)
    retention.refresh(table, now)
    expired, kept = _choose(table, retention, options, now, UnmergedFlushes())
    _require_expirable(table, options, kept)
    needed = NeededFiles()
    needed.read(table, _young(table, kept), without=_paths(table, expired))
    for batch in _batches(retention, expired):
        needed.set_aside(table, batch, apply=False)
    needed.read_records(table)
    newest = NewestFiles(table, min(expired, default=None))
    garbage = find_garbage(table.store, needed, now, newest=newest)
    newest.require()
    if expired:
        _refuse_lost_rows(table)
    report = _report("nothing_to_expire", table, retention, options, expired, kept)
    if expired or garbage.objects:
        report.decision = "planned"
        report.objects = garbage.objects + len(expired)
        report.bytes = garbage.bytes + sum(map(retention.manifest_bytes, expired))
        report.for_branches = garbage.for_branches
        report.frees = _frees(table, retention, expired)
    _note_later(report, retention, garbage)
    _note_missing(report, table, garbage)
    report.seconds = time.monotonic() - started
    return report


@names_damage
def apply(
    table: Table, options: ExpireOptions, context: RunContext | None = None, *, only: Collection[int] | None = None
) -> ExpireReport:
    """Delete old versions. Safe to kill, to repeat and to run twice concurrently; completes what a killed run left.

    With ``only``, no other versions are deleted than these. Of a version the manifest is deleted first
    (:mod:`memwal_ops.formats.lance.retention.garbage`). Each batch has its own proof: tags, branches and holds as
    read just before, and that the table is the one that the plan was made from.

    Raises:
        StorageError: the store failed, or a base folder is a link. No version is listed without its files, and the
            next run continues.
        TableCorruptError: the newest version lacks a file, or a manifest does not decode, so that the files that it
            refers to are not known: of a version that is kept, before anything is deleted.
        TableReplacedError: another table was created or restored at the URI; nothing of it was deleted.
        UnsupportedFeatureError: see :func:`plan`.
    """
    started = time.monotonic()
    context = context or RunContext()
    check_writable(table.manifest.manifest)
    version_files.refuse_linked_folders(table.store)
    table, anchor = anchored(table)
    run = _Run(table, options, anchor, context, store_time(table.store), only, _retention(table))
    planned, kept = run.choose()
    _require_expirable(table, options, kept)
    suspects = (path for path in run.retention.unreadable if path.endswith(".manifest"))
    for _ in version_files.read_references(table.store, suspects):
        pass  # raises: older versions may be needed to restore the table from
    run.needed.read(table, _young(table, kept), without=_paths(table, planned))
    run.oldest = min(planned, default=None)
    record_schema(table)
    frees = _frees(table, run.retention, planned)
    if planned and table.log.versions_hold_generations:
        drop_overtaken(table.store, run.retention)
    for batch in _batches(run.retention, planned):
        context.checkpoint()
        run.retire(batch)
        context.advance("expiring", "versions", len(batch), total=len(planned))
    garbage = run.delete_files()
    if planned or run.objects or run.needed.records:
        _, kept = run.choose()
        run.delete_records()
        _require_expirable(table, options, kept)
    deleted = tuple(sorted(set(planned) - set(run.retention.versions)))
    decision = "incomplete" if run.failed else "expired" if run.objects else "nothing_to_expire"
    report = _report(decision, table, run.retention, options, deleted, kept, applied=True)
    report.objects, report.bytes, report.failed = run.objects, run.bytes, run.failed
    report.put_back = tuple(sorted(run.put_back))
    report.for_branches = garbage.for_branches
    report.frees = frees if deleted else (0, 0)
    _note_later(report, run.retention, garbage)
    _note_missing(report, table, garbage)
    context.figures["bytes_collected"] += report.bytes
    context.figures["versions_expired"] += len(report.versions)
    report.seconds = time.monotonic() - started
    return report


@dataclass
class _Run:
    """State of one run.

    ``now`` is the store's time when the run began. Later in the run, files and versions count as younger than they are,
    and holds that have ended since as held: more is kept, never less.
    """

    table: Table
    options: ExpireOptions
    anchor: Anchor
    context: RunContext
    now: datetime
    only: Collection[int] | None
    retention: LiveVersions
    needed: NeededFiles = field(default_factory=NeededFiles)
    objects: int = 0
    bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    put_back: set[int] = field(default_factory=set)
    oldest: int | None = None
    _complete: bool = False
    _has_listed: bool = False  # all base files, and deleted those that are garbage
    _outlived: bool = False  # whether holds may have been granted during a deletion, after its announcement ended
    _flushes: UnmergedFlushes = field(default_factory=UnmergedFlushes)
    _kept: tuple[KeptVersion, ...] = ()

    def choose(self) -> tuple[tuple[int, ...], tuple[KeptVersion, ...]]:
        """The versions to delete and those to keep, by the store's current state; restores versions needed again.

        Called after manifests were deleted and before their files are. Timeline of the loss without it: tags are
        listed; a user tags version 3; version 3 is deleted, and then its files, although it is tagged.

        A hold restores a version only if it was granted, which the announcement prevents as long as it is in force.
        Timeline otherwise: the manifest of version 3 is deleted; a hold on it is written; gc, which reads no version 3,
        takes a generation that it lacks off the list; version 3 is restored, and the hold is refused. The next one is
        granted, and its reads of version 3 lack rows, without an error.
        """
        self.retention.refresh(self.table, self.now)
        needed = self.retention.protected() if self._outlived else self.retention.named()
        if back := put_back(self.table, needed, self.retention.versions):
            self.put_back.update(back)
            self.retention.refresh(self.table, self.now)
        chosen, self._kept = _choose(self.table, self.retention, self.options, self.now, self._flushes, self.only)
        return chosen, self._kept

    def retire(self, batch: tuple[int, ...]) -> None:
        """Announce these versions, check them again, set them aside, and delete their manifests."""
        if not self._complete:
            newest = self.table.newest()
            _refuse_lost_rows(newest)
            self._require_complete(newest)
        began = _uptime()
        with announced_expiry(self.table.store, batch):
            # A hold that was taken before the announcement is read here.
            deletable = frozenset(self.choose()[0])
            batch = tuple(version for version in batch if version in deletable)
            batch = tuple(self.needed.set_aside(self.table, batch))
            sizes = {
                version_files.version_path(one, self.table.naming): self.retention.manifest_bytes(one) for one in batch
            }
            if _uptime() - began < _PROVEN_FOR:
                self._delete(sizes)
                self._outlived = self._outlived or _uptime() - began >= _PROVEN_FOR
                return
        # The process was stopped, or the machine suspended: holds are granted again after an announcement has ended.
        self.retire(batch)

    def delete_files(self) -> Garbage:
        """Delete files that only deleted versions refer to, of this run and of killed ones."""
        self.needed.read(self.table, _young(self.table, self._kept))
        self.needed.read_records(self.table)
        self.choose()
        newest = NewestFiles(self.table)
        garbage = find_garbage(self.table.store, self.needed, self.now, self._delete_batch, newest)
        if not self._complete:
            newest.require()  # a run that deletes nothing reports it by the same listing
        self._has_listed = garbage.complete
        return garbage

    def delete_records(self) -> None:
        """Delete the records of versions without files. Those of a listed version are kept: a run may use them.

        For each file that is kept only for branches and detached versions, one manifest that refers to it is kept: when
        those are deleted, nothing else shows that the file does not belong to a commit in progress. What is kept is
        written anew without the others: those may be many, and have values that an erase must find deleted.
        """
        needed = self.needed
        if self.failed or not self._has_listed:
            return
        listed = needed.listed.union(self.retention.versions)
        kept = (needed.expired & needed.on_branches) - needed.own
        lasting = set()
        for path in needed.records:
            left = []
            for version, data in read_set_aside(self.table.store, path):
                refers = version_files.references(decode_version_manifest(data)).all if kept else frozenset()
                if version in listed or refers & kept:
                    kept -= refers
                    left.append((version, data))
            if left:
                lasting.add(record(self.table.store, left))
        gone = [path for path in needed.records if path not in lasting]
        self.failed |= delete_proven(self.table.store, gone, [self.anchor]).failed

    def _require_complete(self, newest: Table | None = None) -> None:
        """Refuse to delete anything below a newest version that is not complete; checked once, before the first."""
        if not self._complete:
            require_complete(newest or self.table.newest(), self.oldest)
            self._complete = True

    def _delete_batch(self, batch: list[ObjectMeta]) -> bool:
        self.context.checkpoint()
        self._require_complete()
        # Also what was committed or restored since, for example by a restore of an old version.
        self.needed.read(self.table)
        sizes = {meta.path: meta.size for meta in batch if version_files.file_key(meta.path) not in self.needed.keys}
        before = self.objects
        self._delete(sizes)
        # If the store refuses a whole batch, it would refuse the next one too.
        return not sizes or self.objects > before

    def _delete(self, sizes: Mapping[str, int]) -> None:
        outcome = delete_proven(self.table.store, list(sizes), [self.anchor])
        self.failed |= outcome.failed
        deleted = sizes.keys() - outcome.failed.keys()
        self.objects += len(deleted)
        self.bytes += sum(sizes[path] for path in deleted)


def _uptime() -> float:
    """Seconds on a monotonic clock; one that also counts while the machine is suspended, if there is one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _batches(retention: LiveVersions, versions: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Batches, bounded by number, and by the bytes that their record needs for a short time, even on a full disk."""
    batch: list[int] = []
    size = 0
    for version in versions:
        manifest_bytes = retention.manifest_bytes(version)
        if batch and (len(batch) == _BATCH or size + manifest_bytes > _BATCH_BYTES):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(version)
        size += manifest_bytes
    if batch:
        yield tuple(batch)


def _retention(table: Table) -> LiveVersions:
    """What reads the progress of versions only where there can be any."""
    return LiveVersions(progress=table.log.versions_hold_generations or bool(table.regions.region_ids))


def _note_missing(report: ExpireReport, table: Table, found: Garbage) -> None:
    if found.missing:
        report.unreadable = unreadable_versions(table.store, found.missing)
    if report.unreadable:
        report.warnings += (_MISSING,)


def _young(table: Table, kept: Iterable[KeptVersion]) -> frozenset[str]:
    """The manifests of versions that only their age keeps."""
    return _paths(table, (version.version for version in kept if version.old_enough is not None))


def _paths(table: Table, versions: Iterable[int]) -> frozenset[str]:
    return frozenset(version_files.version_path(version, table.naming) for version in versions)


def _note_later(report: ExpireReport, retention: LiveVersions, found: Garbage) -> None:
    young = {version.version: version.old_enough for version in report.kept if version.old_enough is not None}
    size = found.later + sum(map(retention.manifest_bytes, young))
    times = [*young.values(), *([] if found.until is None else [found.until])]
    report.later = Later(size, max(times)) if times else None


def _report(
    decision: str,
    table: Table,
    retention: LiveVersions,
    options: ExpireOptions,
    expired: tuple[int, ...],
    kept: tuple[KeptVersion, ...],
    *,
    applied: bool = False,
) -> ExpireReport:
    warnings = options.dangers() if expired else ()
    if options.version is not None and options.version not in {*expired, *retention.versions}:
        warnings += (f"Version {options.version} is not listed: it expired before.",)
    return ExpireReport(decision, applied, expired, kept, table.version, retention.branches, warnings=warnings)


def _choose(
    table: Table,
    retention: LiveVersions,
    options: ExpireOptions,
    now: datetime,
    flushes: UnmergedFlushes,
    only: Collection[int] | None = None,
) -> tuple[tuple[int, ...], tuple[KeptVersion, ...]]:
    expired: list[int] = []
    kept: list[KeptVersion] = []
    versions = retention.versions
    newest = set(versions[-options.newest :])
    protected = retention.protected()
    unmerged = flushes.needed(table, retention, protected)
    shows_progress = _shows_progress(table, retention)
    for version, following in zip(versions, [*versions[1:], *versions[-1:]], strict=True):
        if options.version not in {None, version}:
            kept.append(KeptVersion(version, f"not version {options.version}"))
        elif only is not None and version not in only:
            kept.append(KeptVersion(version, "not asked for"))
        elif version >= table.version:
            kept.append(KeptVersion(version, "the newest version"))
        elif version in newest:
            kept.append(KeptVersion(version, f"one of the newest {options.newest}"))
        elif version in protected:
            kept.append(KeptVersion(version, protected[version]))
        elif shows_progress is not None and version >= shows_progress:
            kept.append(KeptVersion(version, f"version {shows_progress} and the later ones show what is merged"))
        elif version in unmerged:
            kept.append(KeptVersion(version, unmerged[version]))
        elif options.age and now < (until := retention.written(version) + options.age):
            because = f"published {retention.written(version):%Y-%m-%d %H:%M} UTC, too young"
            kept.append(KeptVersion(version, because, until))
        elif options.age and now < (until := retention.written(following) + min(options.age, SAFE_AGE)):
            # It may be old, but it was the newest until then: readers may have just opened it.
            because = f"the newest until {retention.written(following):%Y-%m-%d %H:%M} UTC"
            kept.append(KeptVersion(version, because, until))
        else:
            expired.append(version)
    return tuple(expired), tuple(kept)


def _refuse_lost_rows(table: Table) -> None:
    """Refuse to delete versions while unmerged rows cannot be read: an older version may be all that helps then."""
    if not table.log.versions_hold_generations:
        return
    for fault in checked_backlog(table, read_backlog(table)).backlog.blocked:
        if is_damage(fault.error.exit_code) or fault.drops:  # versions show what the base had of what was dropped
            raise fault.error


def _require_expirable(table: Table, options: ExpireOptions, kept: Iterable[KeptVersion]) -> None:
    """Raise ``VersionGoneError`` if there was never such a version, ``InvalidUsageError`` with why one is kept."""
    if options.version is None:
        return
    if options.version > table.version:
        raise VersionGoneError(
            f"{table.location.uri} has no version {options.version}: the newest is {table.version}.",
            remedy="Give one that expire lists: memwal-ops expire URI --json.",
        )
    for version in kept:
        if version.version == options.version:
            until = (
                "" if version.old_enough is None else f"; it is old enough at {version.old_enough:%Y-%m-%d %H:%M} UTC"
            )
            raise InvalidUsageError(
                f"Version {version.version} of {table.location.uri} does not expire: {version.because}{until}.",
                remedy="Delete the tag or branch, release the hold, merge, or wait until it is old enough.",
            )


def _shows_progress(table: Table, retention: LiveVersions) -> int | None:
    """The first version without which it is not known what of the regions is merged, or that they are the table's."""
    regions = table.regions.region_ids
    shown = (retention.last_with(regions), table.index_removed_after if regions else None)
    return min((version for version in shown if version is not None), default=None)


def _frees(table: Table, retention: LiveVersions, versions: Collection[int]) -> tuple[int, int]:
    """Number of generations that only these versions keep, and their bytes."""
    if not versions or not table.log.versions_hold_generations:
        return 0, 0
    from memwal_ops.formats.lance.jobs.gc import collectors, evidence as proofs, wal  # noqa: PLC0415 - beside a log only

    evidence = proofs.GcEvidence(table, retention, covered_generations(table), datetime.now(UTC), RetentionOptions())
    left = retention.without(frozenset(versions))
    count = size = 0
    for _, log in collectors.views(evidence):
        for candidate in log.view.directories() if isinstance(log, wal.WalView) else ():
            region_id, generation = candidate.region_id, candidate.generation
            if candidate.kind is not proofs.CandidateKind.GENERATION or generation is None or region_id is None:
                continue
            unmet = [gate for gate in evidence.generation_gates(region_id, generation) if not gate.met]
            without = replace(evidence, retention=left).generation_gates(region_id, generation)
            if unmet and all(gate.met for gate in without):
                count += 1
                size += candidate.bytes
    return count, size


def backlog(table: Table) -> Mapping[str, float]:
    """Number of base versions; of a plain table also the bytes that its newest version does not need.

    One listing for each 1,000 versions; of a plain table, one for each 1,000 files.
    """
    figures = {"versions": 0, "bytes_held": 0}
    for meta in table.store.list(version_files.VERSIONS_FOLDER):
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is not None and not name.detached:
            figures["versions"] += 1
            figures["bytes_held"] += meta.size if name.version != table.version else 0
    if table.log.versions_hold_generations:
        return {"versions": figures["versions"]}
    needed = version_files.references(table.manifest).all
    files = (meta for folder in version_files.BASE_FOLDERS for meta in table.store.list(folder))
    figures["bytes_held"] += sum(meta.size for meta in files if version_files.file_key(meta.path) not in needed)
    return figures
