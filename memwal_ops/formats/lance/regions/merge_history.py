"""Read from the existing versions when each region's generations were merged, and since when there is a MemWAL index.

Read only if no record of a merge shows it (:mod:`memwal_ops.formats.lance.wire.region_manifest`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from memwal_ops.errors import InvalidFormatError, LegacyLayoutError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.regions.manifests import unlisted
from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex, decode_memwal_index, find_memwal_entry
from memwal_ops.formats.lance.wire.names import JOB_PROPERTY
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, decode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import ObjectMeta, Store

_CONCURRENT_READS = 16
# Bytes of a manifest that is kept decoded, and how many are.
_SMALL, _MAX_KEPT = 64 << 10, 64
# Coarser than any store's times: S3 has whole seconds.
_TICK = timedelta(seconds=1)
_UNREADABLE = (ObjectNotFoundError, InvalidFormatError, TableCorruptError, LegacyLayoutError)
# A file whose stored time is this much later than the timestamp inside was copied.
_COPIED = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Moment:
    """When a file was written. ``stored``: by the store's clock; ``inside``: by itself, which a copy preserves."""

    stored: datetime
    inside: datetime

    @classmethod
    def of(cls, meta: ObjectMeta, manifest: table_pb2.Manifest) -> Moment:
        """When a version's manifest was written."""
        return cls(meta.last_modified, manifest.timestamp.ToDatetime(UTC))

    @property
    def earliest(self) -> datetime:
        """The earlier of the two: a copy is stored later, and a writer's clock may be ahead."""
        return min(self.stored, self.inside)

    @property
    def copied(self) -> bool:
        """Whether the store's time is that of a copy."""
        return self.stored - self.inside > _COPIED


def is_earlier(one: Moment, other: Moment) -> bool | None:
    """Whether ``one`` was written before ``other``; None if that cannot be determined.

    The store has one clock, and timestamps inside files are from the clocks of several machines; but the stored times
    of a copied table are those of the copy.
    """
    copied = one.copied and other.copied
    if not copied and abs(one.stored - other.stored) > _TICK:
        return one.stored < other.stored
    by_inside = one.inside < other.inside
    return by_inside if copied or one.stored == other.stored or (one.stored < other.stored) == by_inside else None


@dataclass(frozen=True, slots=True)
class _Version:
    """What is kept of a version. ``parent``: the one that it changed (:func:`version_files.parent_version`).

    ``merged`` is None if it has no such index. ``specs``: ids of region specs. ``maintained``: names of indexes.
    """

    moment: Moment
    merged: Mapping[UUID, int] | None
    parent: int | None
    specs: frozenset[int] = frozenset()
    maintained: tuple[str, ...] = ()


# When each version was written and whether it has a MemWAL index, by its manifest as listed. Versions never change, and
# a table is opened again after each commit: until a region is merged for the first time, it needs all since it began.
_KNOWN: WeakKeyDictionary[Store, dict[ObjectMeta, tuple[Moment, bool]]] = WeakKeyDictionary()


class MergeHistory:
    """The merge progress in the existing versions. Read only if there is no record, each version at most once."""

    def __init__(self, store: Store, listed: version_files.VersionPage, newest: VersionManifest) -> None:
        """``listed``: the versions, as listed before the newest was read. Nothing is read before the first call."""
        self._store = store
        self._lock = RLock()
        self._listed: Mapping[int, ObjectMeta] | None = listed.versions if listed.complete else None
        self._read: dict[str, _Version | None] = {}
        meta = listed.versions.get(int(newest.manifest.version))
        self._manifests: dict[str, VersionManifest] = {} if meta is None else {meta.path: newest}

    def merged_at(self, region_id: UUID, generation: int, *, until: int | None = None) -> tuple[Moment, bool] | None:
        """The time of the first version in which a generation is merged, and whether it was merged in that version.

        The latter is unknown (False) if that version is the oldest that exists. None: it is merged in no version.
        ``until``: the last version with the progress, if the MemWAL index was removed after it.
        """
        with self._lock:
            listed = [meta for number, meta in sorted(self._numbered().items()) if until is None or number <= until]
            low, high = 0, len(listed)
            while low < high:
                middle = (low + high) // 2
                version = self._version(listed[middle])
                if version is not None and (version.merged or {}).get(region_id, 0) >= generation:
                    high = middle
                else:
                    low = middle + 1
            version = self._version(listed[low]) if low < len(listed) else None
            before = self._version(listed[low - 1]) if low else None
            return None if version is None else (version.moment, before is not None)

    def newest_without(self, region_id: UUID, generation: int, at: datetime) -> int | None:
        """The newest version at a time of the store's clock, if a generation is merged in none since then.

        None: it is merged in one of them, as before a restore; or they do not show it: some are gone, or were copied.
        """
        with self._lock:
            numbered, newest = self._numbered(), None
            number = max(numbered, default=0)
            while (meta := numbered.get(number)) is not None and (version := self._version(meta)) is not None:
                if (version.merged or {}).get(region_id, 0) >= generation:
                    return None
                stored = version.moment.stored
                newest = number if newest is None and stored <= at else newest
                if number == 1 or (stored < at - _TICK and not version.moment.copied):
                    return newest or number
                number -= 1
            return None

    def written_elsewhere(self, since: datetime, until: datetime) -> bool:
        """Whether a version of that time, by the store's clock, is of another program that may have changed rows."""
        for meta in (meta for meta in self._numbered().values() if since <= meta.last_modified <= until):
            with suppress(*_UNREADABLE):
                writer = version_files.VersionWriter.of(self.manifest(meta))
                if writer.writes and not writer.ours:
                    return True
        return False

    def line(self, version: int) -> Iterator[tuple[int, Moment]]:
        """A version and those from which it descends, newest first, as far as they exist: not what a restore left."""
        numbered = self._numbered()
        while (meta := numbered.get(version)) is not None and (read := self._version(meta)) is not None:
            yield version, read.moment
            version = read.parent or 0

    def program(self, version: int) -> str:
        """What wrote a version, and how: ``lance 9.0.0, update``; of ours, or if it is gone, that it is not known."""
        with suppress(KeyError, *_UNREADABLE):
            manifest = self.manifest(self.listed()[version])
            transaction, writer = manifest.transaction, manifest.manifest.writer_version
            if transaction is not None and JOB_PROPERTY not in transaction.transaction_properties:
                return f"{writer.library} {writer.version}, {version_files.operation_of(transaction)}"
        return "which one is not known"

    def without_index_since(self, created: datetime, *, after: int) -> Mapping[int, Moment]:
        """The versions above ``after`` without a MemWAL index that may be younger than ``created``, and their times."""
        moments: dict[int, Moment] = {}
        with self._lock, ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            numbered = self._numbered()
            newest_first = [version for version in sorted(numbered, reverse=True) if version > after]
            for at in range(0, len(newest_first), _CONCURRENT_READS):
                chunk = newest_first[at : at + _CONCURRENT_READS]
                read = zip(chunk, pool.map(lambda version: self._indexed(numbered[version]), chunk), strict=True)
                younger = [
                    (version, *moment)
                    for version, moment in read
                    if moment and (moment[0].stored >= created - _TICK or moment[0].copied)
                ]
                if not younger:
                    break
                moments |= {version: moment for version, moment, has_index in younger if not has_index}
        return moments

    def indexed_before(self, version: int) -> tuple[int, Mapping[UUID, int]] | None:
        """The last version with a MemWAL index from which a version descends, and its progress.

        The rows of a version are those of the one that it descends from, with what was changed since. None: it descends
        from none, as the table was overwritten since, or that is not known: a version in between does not exist.
        """
        with self._lock:
            numbered = self._numbered()
            while (meta := numbered.get(version)) is not None and (read := self._version(meta)) is not None:
                if read.merged is not None:
                    return version, read.merged
                version = read.parent or 0
            return None

    def progress_before(self, region_id: UUID, *, since: Moment | None = None) -> tuple[int, int] | None:
        """The last version that has progress for a region and from which the newest descends, and that progress.

        None: there is no such version, or that is not known. ``since``: no version before that time has any.
        """
        progress = self._last(lambda version: bool((version.merged or {}).get(region_id, 0)), since)
        return None if progress is None else (progress[0], (progress[1].merged or {})[region_id])

    def index_with(self, spec_id: int) -> MemWalIndex | None:
        """The MemWAL index of the last version that has a region spec and from which the newest descends.

        None: there is no such version, or that is not known.
        """
        with self._lock:
            indexed = self._last(lambda version: spec_id in version.specs)
            return None if indexed is None else self.index_of(indexed[0])

    def last_maintained(self) -> tuple[str, ...]:
        """The last names of indexes that writers were to maintain, in a version from which the newest descends."""
        maintained = self._last(lambda version: bool(version.maintained))
        return () if maintained is None else maintained[1].maintained

    def last_with_index(self) -> int | None:
        """The last version that has a MemWAL index, whether or not the newest one descends from it."""
        with self._lock:
            numbered = sorted(self._numbered().items(), reverse=True)
            read = ((number, self._version(meta)) for number, meta in numbered)
            return next(
                (number for number, version in read if version is not None and version.merged is not None), None
            )

    def index_of(self, version: int) -> MemWalIndex | None:
        """The MemWAL index of a version; None: it has none, or cannot be read."""
        with self._lock:
            try:
                return _index(self.manifest(self._numbered()[version]))
            except (KeyError, *_UNREADABLE):
                return None

    def _last(self, has: Callable[[_Version], bool], since: Moment | None = None) -> tuple[int, _Version] | None:
        """The last version with a MemWAL index that ``has`` it and from which the newest descends; see above."""
        with self._lock:
            numbered = self._numbered()
            number = max(numbered, default=0)
            while (indexed := self.indexed_before(number)) is not None:
                number = indexed[0]
                version = self._version(numbered[number])
                if version is not None and has(version):
                    return number, version
                if version is None or (since is not None and is_earlier(version.moment, since)):
                    return None
                number = version.parent or 0
            return None

    def listed(self) -> Mapping[int, ObjectMeta]:
        """The manifests of main by version, as first listed; no proof of a deletion may use it."""
        with self._lock:
            return self._numbered()

    def _numbered(self) -> Mapping[int, ObjectMeta]:
        if self._listed is None:
            self._listed = version_files.list_versions(self._store).numbered
        return self._listed

    def _indexed(self, meta: ObjectMeta) -> tuple[Moment, bool] | None:
        """When a version was written, and whether it has a MemWAL index; None if it cannot be read."""
        known = _KNOWN.setdefault(unlisted(self._store), {})
        if meta not in known:
            version = self._version(meta)
            if version is None:
                return None
            known[meta] = version.moment, version.merged is not None
        return known[meta]

    def _version(self, meta: ObjectMeta) -> _Version | None:
        """Read a version; None if that is not possible: expired meanwhile, or damaged."""
        if meta.path not in self._read:
            self._read[meta.path] = self._read_version(meta)
        return self._read[meta.path]

    def _read_version(self, meta: ObjectMeta) -> _Version | None:
        try:
            version = self.manifest(meta)
            index = _index(version)
        except _UNREADABLE:
            return None
        moment, parent = Moment.of(meta, version.manifest), version_files.parent_version(version)
        if index is None:
            return _Version(moment, None, parent)
        specs = frozenset(spec.spec_id for spec in index.region_specs)
        return _Version(moment, index.merged_generations, parent, specs, index.maintained_indexes)

    def manifest(self, meta: ObjectMeta) -> VersionManifest:
        """The manifest of a listed version; small ones are read once.

        Raises ``ObjectNotFoundError``: it was expired meanwhile; ``InvalidFormatError``: it does not decode.
        """
        if meta.path in self._manifests:
            return self._manifests[meta.path]
        version = decode_version_manifest(self._store.get(meta.path))
        if meta.size <= _SMALL and len(self._manifests) < _MAX_KEPT:
            self._manifests[meta.path] = version
        return version


def _index(version: VersionManifest) -> MemWalIndex | None:
    entry = find_memwal_entry(version.indexes)
    return None if entry is None else decode_memwal_index(entry)
