"""Find the end of a region's write-ahead log, writer epochs, and which entries generations have or refer to.

Entries are numbered without a gap (S0-122), and a manifest's ``wal_id_last_seen`` is a hint that only rises. From there
on the end is found by HEAD requests in doubling steps, so that a hint that is a thousand entries old costs twenty
requests and not a thousand.

Only a writer flushes entries. A writer that died and does not come back leaves acknowledged rows there: they are
durable, and not in the base table.

A generation has the columns of the version at its flush. Whether one of them was dropped and added again since is shown
by the versions from then on (:mod:`memwal_ops.formats.lance.retention.schema_history`): ``UnmergedFlushes`` names them.
This applies to the newest version, and to each that may be restored, since a tag, branch or hold keeps it: then its
unmerged generations are merged. Of the latter, only the versions up to it are needed: its data files are older than
what was flushed after it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError, MemwalOpsError, ObjectNotFoundError, WalCorruptError
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER, list_manifests
from memwal_ops.formats.lance.generations.backlog import Backlog, RegionBacklog, read_backlog
from memwal_ops.formats.lance.generations.generation import GenerationRef, generation_ref, read_flush
from memwal_ops.formats.lance.regions.manifests import ListedLog
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.formats.lance.wire.names import U64_MAX, parse_wal_entry_name, region_folder, wal_entry_name
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest
from memwal_ops.storage.api import ObjectMeta, Store, results_of
from memwal_ops.storage.export_file import NotExportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.layouts import Layout
    from memwal_ops.formats.lance.retention.live_versions import LiveVersions
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest


_NUMBER = re.compile(rb"[0-9]{1,20}")
_CONCURRENT_READS = 8
MOST_READ = 100
"""Entries of a log that :func:`log_fault` reads."""
# Entries by which writers claim have no rows. Whether the first entries are such ones is read once the log is quiet:
# until then the next flush counts them.
_QUIET, _MAX_CLAIMS = timedelta(minutes=10), 8


def wal_entry_path(region_id: UUID, entry_id: int, layout: Layout) -> str:
    """Path of a WAL entry, relative to the table's root (S0-034)."""
    return f"{region_folder(region_id)}/wal/{wal_entry_name(entry_id, layout.wal_suffix)}"


def last_wal_entry(
    store: Store,
    region_id: UUID,
    replay_after_wal_id: int | None,
    wal_id_last_seen: int | None,
    layout: Layout,
    head: Callable[[str], ObjectMeta | None] | None = None,
) -> int:
    """The id of the region's last WAL entry, at least that of its manifest (S0-171, S0-172).

    Entries up to ``replay_after_wal_id`` may be collected, so entries at or below the hint are not
    checked. 0: no entry yet. One request if nothing was written since the hint. ``head``: asked instead of the store.
    """
    head = store.head if head is None else head
    known = max(wal_id_last_seen or 0, replay_after_wal_id or 0)

    def exists(entry_id: int) -> bool:
        return entry_id <= U64_MAX and head(wal_entry_path(region_id, entry_id, layout)) is not None

    step = 1
    while exists(known + step):
        known += step
        step *= 2
    while step > 1:
        step //= 2
        if exists(known + step):
            known += step
    return known


def unflushed_entries(table: Table, manifest: RegionManifest) -> int:
    """The number of entries in a region's log that are in no generation, including the entries of claims."""
    flushed, seen = manifest.replay_after_wal_id, manifest.wal_id_last_seen
    layout = table.layout_of(manifest.region_id)
    return last_wal_entry(table.store, manifest.region_id, flushed, seen, layout) - (flushed or 0)


def unflushed_rows(table: Table, manifest: RegionManifest) -> int:
    """The number of rows in a region's log that are in no generation. One request per entry.

    Raises ``InvalidFormatError``: an entry cannot be read.
    """
    flushed, layout = manifest.replay_after_wal_id or 0, table.layout_of(manifest.region_id)
    entries = range(flushed + 1, flushed + unflushed_entries(table, manifest) + 1)
    return sum(layout.entry_rows(table.store, wal_entry_path(manifest.region_id, entry, layout)) for entry in entries)


def log_fault(table: Table, manifest: RegionManifest, unflushed: int) -> WalCorruptError | None:
    """The first entry in no generation that is missing or cannot be read; of a longer log, the first 100 are read.

    ``unflushed`` is :func:`unflushed_entries`, which ends before an entry that is missing.
    """
    region_id, first = manifest.region_id, (manifest.replay_after_wal_id or 0) + 1
    entries = range(first, first + min(unflushed, MOST_READ))
    for _, error in read_epochs(table, region_id, entries):
        if isinstance(error, InvalidFormatError | ObjectNotFoundError):
            return WalCorruptError(str(error))
    return log_gap(table, region_id, first + unflushed)


def log_gap(table: Table, region_id: UUID, end: int) -> WalCorruptError | None:
    """The error if the entry at the end of a log is missing, and a later one exists: its rows would be left out."""
    layout = table.layout_of(region_id)
    gap, later = (wal_entry_path(region_id, number, layout) for number in (end, end + 1))
    if table.store.head(later) is not None and table.store.head(gap) is None:
        return WalCorruptError(f"WAL entry {gap} is missing, and later entries exist.")
    return None


def has_unflushed_rows(table: Table, manifest: RegionManifest) -> bool:
    """Whether an entry in no generation has rows, or cannot be read. An entry by which a writer claims has none."""
    try:
        return unflushed_rows(table, manifest) > 0
    except (InvalidFormatError, ObjectNotFoundError):
        return True


def read_writer_epoch(table: Table, region_id: UUID, entry_id: int) -> int:
    """The writer epoch of a WAL entry (S0-032); read by ranges, one request for most.

    Raises:
        InvalidFormatError: it is not a readable entry, or has no epoch.
        ObjectNotFoundError: it does not exist.
    """
    layout = table.layout_of(region_id)
    path = wal_entry_path(region_id, entry_id, layout)
    try:
        epoch = layout.writer_epoch(table.store, path)
    except InvalidFormatError as error:
        raise InvalidFormatError(f"WAL entry {path} cannot be read: {error}") from error
    if epoch is None or _NUMBER.fullmatch(epoch) is None:
        raise InvalidFormatError(f"WAL entry {path} has no writer epoch.")
    return int(epoch)


def read_epochs(table: Table, region_id: UUID, entries: Sequence[int]) -> Iterator[tuple[int, int | MemwalOpsError]]:
    """For each entry its writer epoch, or why it cannot be read, or that it does not exist."""

    def read(entry_id: int) -> int | MemwalOpsError:
        try:
            return read_writer_epoch(table, region_id, entry_id)
        except (InvalidFormatError, ObjectNotFoundError, NotExportedError) as error:
            return error

    yield from zip(entries, results_of(read, entries, threads=_CONCURRENT_READS), strict=True)


@dataclass(frozen=True, slots=True)
class Unflushed:
    """What the logs have that no generation has, and when the oldest of it was written.

    ``entries``: of a log that was quiet for 10 minutes, those from the first one with rows on. ``newest``: when the
    newest entry was written, flushed or not; None: there is none.
    """

    entries: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None


def read_unflushed(table: Table, backlog: Backlog) -> Unflushed:
    """Read the ends of all logs of a backlog.

    Requests: none for a table whose log was listed (``listed_log``), else 2 to 4 for each region. And of a log that is
    quiet, the first entries that are not flushed.
    """
    manifests = [region.manifest for region in backlog.regions.values()]
    logs = results_of(lambda manifest: _of_region(table, manifest), manifests, threads=_CONCURRENT_READS)
    return Unflushed(
        sum(log.entries for log in logs),
        min(filter(None, (log.oldest for log in logs)), default=None),
        max(filter(None, (log.newest for log in logs)), default=None),
    )


def _of_region(table: Table, manifest: RegionManifest) -> Unflushed:
    store, layout, region_id = table.store, table.layout_of(manifest.region_id), manifest.region_id
    head = store.head_of_page if isinstance(store, ListedLog) else store.head
    flushed = manifest.replay_after_wal_id or 0
    last = last_wal_entry(store, region_id, flushed, manifest.wal_id_last_seen, layout, head)

    def written(entry: int) -> datetime | None:
        meta = head(wal_entry_path(region_id, entry, layout)) if entry else None
        return None if meta is None else meta.last_modified

    newest = written(last)
    first = flushed + 1
    if newest is not None and datetime.now(UTC) - newest >= _QUIET:
        while first <= min(last, flushed + _MAX_CLAIMS) and not _has_rows(table, manifest, first):
            first += 1
    return Unflushed(max(0, last - first + 1), written(first) if first <= last else None, newest)


def _has_rows(table: Table, manifest: RegionManifest, entry: int) -> bool:
    """Whether an entry has rows, or cannot be read."""
    layout = table.layout_of(manifest.region_id)
    try:
        return layout.entry_rows(table.store, wal_entry_path(manifest.region_id, entry, layout)) > 0
    except (InvalidFormatError, ObjectNotFoundError):
        return True


def wal_references(store: Store, folder: str) -> frozenset[int] | None:
    """Ids of the WAL entries to which a generation refers: fragments of the dataset at ``folder``, in any version.

    A file is identified by its name, regardless of its base path: a copied table still has the base paths
    of its origin. None: the generation has no manifest, and its references are unknown.

    Raises:
        InvalidFormatError: a manifest does not decode, and its references are unknown.
        ObjectNotFoundError: a manifest was deleted meanwhile.
    """
    entries: set[int] = set()
    manifests = [*list_manifests(store, f"{folder}/{VERSIONS_FOLDER}")]
    for path in manifests:
        for fragment in decode_version_manifest(store.get(path)).manifest.fragments:
            for file in fragment.files:
                entry = parse_wal_entry_name(file.path.rsplit("/", 1)[-1])
                if entry is not None:
                    entries.add(entry.entry_id)
    return frozenset(entries) if manifests else None


@dataclass
class UnmergedFlushes:
    """When unmerged generations were flushed; each generation is read once."""

    _flushed: dict[GenerationRef, int | None] = field(default_factory=dict)

    def needed(self, table: Table, retention: LiveVersions, protected: Collection[int]) -> Mapping[int, str]:
        """The versions that show the columns of unmerged generations, each with the version that has not merged them.

        Regions with an unreadable manifest, and missing generations, are not considered.

        Args:
            table: the newest version.
            protected: those that may be restored.

        Requests: as :func:`read_backlog`, and up to five for each region and each progress in it, the first time.

        Raises:
            InvalidFormatError: the manifest of a generation that the newest version has not merged is damaged.
        """
        regions = read_backlog(table).regions
        if not regions:
            return {}
        first = {version: _first_unmerged(regions, retention.progress(version)) for version in protected}
        newest = first[table.version] = _first_unmerged(regions, table.index.merged_generations)
        self._read(table, {ref for refs in first.values() for ref in refs}, frozenset(newest))
        reasons: dict[int, str] = {}
        versions = retention.versions
        for version, refs in sorted(first.items(), reverse=True):
            flushed = min((time for ref in refs if (time := self._flushed[ref]) is not None), default=None)
            if flushed is None:
                continue
            is_newest = version == table.version
            of = "an unmerged generation" if is_newest else f"a generation that version {version} has not merged"
            for older, following in reversed(list(pairwise(versions[: bisect_right(versions, version)]))):
                if nanoseconds(retention.written(following)) > flushed:
                    reasons.setdefault(older, f"has the schema of {of}")
                elif not is_newest:
                    break  # there may be many such versions, and many tags
        return reasons

    def _read(self, table: Table, refs: Collection[GenerationRef], newest: Collection[GenerationRef]) -> None:
        def read(ref: GenerationRef) -> int | None:
            try:
                return read_flush(table, ref)
            except InvalidFormatError:
                if ref in newest:
                    raise
                return 0  # not known: it may be restored from a backup

        missing = [ref for ref in refs if ref not in self._flushed]
        self._flushed.update(zip(missing, results_of(read, missing, threads=_CONCURRENT_READS), strict=True))


def _first_unmerged(regions: Mapping[UUID, RegionBacklog], merged: Mapping[UUID, int]) -> tuple[GenerationRef, ...]:
    unmerged = {region_id: region.manifest.unmerged(merged.get(region_id, 0)) for region_id, region in regions.items()}
    return tuple(generation_ref(region_id, waiting[0]) for region_id, waiting in unmerged.items() if waiting)
