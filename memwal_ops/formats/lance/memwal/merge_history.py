"""Read from the existing versions when each region's generations were merged, and since when there is a MemWAL index.

Read only if no record of a merge shows it (:mod:`memwal_ops.formats.lance.wire.region_records`).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import RLock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from memwal_ops.errors import InvalidFormatError, LegacyLayoutError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.memwal.listed_log import unlisted
from memwal_ops.formats.lance.versions import VERSIONS_FOLDER
from memwal_ops.formats.lance.wire.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.formats.lance.wire.names import parse_version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.versions import VersionPage
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import ObjectMeta, Store

_CONCURRENT_READS = 16
# Bytes of a manifest that is kept decoded, and how many are.
_SMALL, _MAX_KEPT = 64 << 10, 64
# Coarser than any store's times: S3 has whole seconds.
_TICK = timedelta(seconds=1)
# A file whose stored time is this much later than the timestamp inside was copied.
_COPIED = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Moment:
    """When a file was written: by the store's clock, and by the timestamp inside the file, which a copy preserves."""

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


def is_earlier(one: Moment, other: Moment) -> bool | None:
    """Whether ``one`` was written before ``other``; None if that cannot be determined.

    The store has one clock, and timestamps inside files are from the clocks of several machines; but the stored times
    of a copied table are those of the copy.
    """
    copied = all(moment.stored - moment.inside > _COPIED for moment in (one, other))
    if not copied and abs(one.stored - other.stored) > _TICK:
        return one.stored < other.stored
    by_inside = one.inside < other.inside
    return by_inside if copied or one.stored == other.stored or (one.stored < other.stored) == by_inside else None


@dataclass(frozen=True, slots=True)
class _Version:
    """The time of a version and its merge progress; ``merged`` is None if it has no MemWAL index."""

    moment: Moment
    merged: Mapping[UUID, int] | None


# When each version was written and whether it has a MemWAL index, by its manifest as listed. Versions never change, and
# a table is opened again after each commit: until a region is merged for the first time, it needs all since it began.
_KNOWN: WeakKeyDictionary[Store, dict[ObjectMeta, tuple[Moment, bool]]] = WeakKeyDictionary()


class MergeHistory:
    """The merge progress in the existing versions; read only if there is no record, each version at most once."""

    def __init__(self, store: Store, listed: VersionPage, newest: VersionManifest) -> None:
        """Nothing is read before the first call.

        Args:
            store: the table's folder.
            listed: the versions, as listed before the newest was read.
            newest: its manifest.
        """
        self._store = store
        self._lock = RLock()
        self._listed: Mapping[int, ObjectMeta] | None = listed.versions if listed.complete else None
        self._read: dict[str, _Version | None] = {}
        meta = listed.versions.get(int(newest.manifest.version))
        self._manifests: dict[str, VersionManifest] = {} if meta is None else {meta.path: newest}

    def merged_at(self, region_id: UUID, generation: int) -> tuple[Moment, bool] | None:
        """The time of the first version in which a generation is merged, and whether it was merged in that version.

        The latter is unknown (False) if that version is the oldest that exists. None: it is merged in no version.
        """
        with self._lock:
            listed = [meta for _, meta in sorted(self._numbered().items())]
            low, high = 0, len(listed)
            while low < high:
                middle = (low + high) // 2
                found = self._version(listed[middle])
                if found is not None and (found.merged or {}).get(region_id, 0) >= generation:
                    high = middle
                else:
                    low = middle + 1
            found = self._version(listed[low]) if low < len(listed) else None
            before = self._version(listed[low - 1]) if low else None
            return None if found is None else (found.moment, before is not None)

    def without_index_since(self, created: datetime, *, after: int) -> Sequence[Moment]:
        """Times of the versions above ``after`` without a MemWAL index that may be younger than ``created``."""
        found: list[Moment] = []
        with self._lock, ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            numbered = self._numbered()
            newest_first = [numbered[version] for version in sorted(numbered, reverse=True) if version > after]
            for at in range(0, len(newest_first), _CONCURRENT_READS):
                read = pool.map(self._indexed, newest_first[at : at + _CONCURRENT_READS])
                younger = [one for one in read if one is not None and _may_be_younger(one[0], created)]
                if not younger:
                    break
                found += [moment for moment, has_index in younger if not has_index]
        return found

    def listed(self) -> Mapping[int, ObjectMeta]:
        """The manifests of main by version, as first listed; no proof of a deletion may use it."""
        with self._lock:
            return self._numbered()

    def _numbered(self) -> Mapping[int, ObjectMeta]:
        if self._listed is None:
            files = self._store.list(VERSIONS_FOLDER)
            named = ((parse_version_manifest_name(meta.path.rsplit("/", 1)[-1]), meta) for meta in files)
            self._listed = {name.version: meta for name, meta in named if name is not None and not name.detached}
        return self._listed

    def _indexed(self, meta: ObjectMeta) -> tuple[Moment, bool] | None:
        """When a version was written, and whether it has a MemWAL index; None if it cannot be read."""
        known = _KNOWN.setdefault(unlisted(self._store), {})
        if meta not in known:
            found = self._version(meta)
            if found is None:
                return None
            known[meta] = found.moment, found.merged is not None
        return known[meta]

    def _version(self, meta: ObjectMeta) -> _Version | None:
        """Read a version; None if that is not possible: expired meanwhile, or damaged."""
        if meta.path not in self._read:
            self._read[meta.path] = self._read_version(meta)
        return self._read[meta.path]

    def _read_version(self, meta: ObjectMeta) -> _Version | None:
        try:
            version = self.manifest(meta)
            entry = None if version.indexes is None else find_memwal_entry(version.indexes)
            merged = None if entry is None else decode_memwal_index(entry).merged_generations
        except (ObjectNotFoundError, InvalidFormatError, TableCorruptError, LegacyLayoutError):
            return None
        return _Version(Moment.of(meta, version.manifest), merged)

    def manifest(self, meta: ObjectMeta) -> VersionManifest:
        """The manifest of a listed version; small ones are read once.

        Raises:
            ObjectNotFoundError: the version was expired meanwhile.
            InvalidFormatError: the file does not decode.
        """
        if meta.path in self._manifests:
            return self._manifests[meta.path]
        version = decode_version_manifest(self._store.get(meta.path))
        if meta.size <= _SMALL and len(self._manifests) < _MAX_KEPT:
            self._manifests[meta.path] = version
        return version


def _may_be_younger(moment: Moment, than: datetime) -> bool:
    return moment.stored >= than - _TICK or moment.stored - moment.inside > _COPIED
