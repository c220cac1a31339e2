"""List the regions of a table, and read and commit region manifests.

A region's manifests are numbered from 1, immutable, and written by put-if-absent (S0-050 to S0-053). The newest is
found by HEAD requests from ``version_hint.json`` on; these stop at the first missing number, so a gap would hide every
later version. A job that changes a region therefore passes ``checked=True``, which lists the folder once and refuses a
gap.

Jobs that read every region list many folders below ``_mem_wal/``. If there are fewer than 1,000 objects, the first page
of a listing of ``_mem_wal/`` has all of them: one request for all regions instead of several for each.
"""

from __future__ import annotations

import hashlib
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from uuid import UUID

from memwal_ops import errors
from memwal_ops.formats.lance.files.version_files import PAGE, VERSIONS_FOLDER, is_same_file
from memwal_ops.formats.lance.wire import region_manifest
from memwal_ops.formats.lance.wire.names import (
    MEM_WAL_FOLDER,
    parse_generation_dir,
    parse_region_manifest_name,
    parse_wal_entry_name,
    region_folder,
    region_manifest_name,
)
from memwal_ops.storage.api import LinkError, Listing, ObjectMeta, Store
from memwal_ops.storage.locations import LOCAL
from memwal_ops.storage.wrapper import StoreWrapper

HINT = "version_hint.json"
# Errors that block one region only.
REGION_FAULTS = (errors.RegionManifestCorruptError, errors.RegionManifestGapError, LinkError)
_ID_PREFIX = re.compile(r"[0-9a-f]{8}[0-9a-f-]{0,27}")
_LISTINGS = 3


class NoRegionManifestError(errors.RegionManifestCorruptError):
    """A region has no manifest. They are lost, or it is not claimed yet (:meth:`RegionManifestStore.is_claimed`)."""


class RegionManifestGoneError(errors.RegionManifestCorruptError):
    """A manifest version does not exist. It is lost, or was collected after newer ones were published."""


@dataclass(frozen=True, slots=True)
class RegionListing:
    """The content of ``_mem_wal/``: region ids in ascending order, strays, and empty folders."""

    region_ids: tuple[UUID, ...]
    strays: tuple[str, ...]
    empty: tuple[str, ...] = ()

    def by_prefix(self, text: str) -> UUID | None:
        """The region whose id starts with a prefix (:func:`is_id_prefix`); None if there is none.

        Raises ``InvalidUsageError``: there are several.
        """
        regions = [region_id for region_id in self.region_ids if str(region_id).startswith(text)]
        if len(regions) > 1:
            raise errors.InvalidUsageError(
                f"{len(regions)} regions begin with {text}: {', '.join(map(str, regions))}.",
                remedy="Give a longer prefix.",
            )
        return regions[0] if regions else None

    def all_named(self, names: Iterable[object]) -> tuple[UUID, ...] | None:
        """Each region that is :meth:`named`, once; None: no name was given."""
        return tuple(dict.fromkeys(self.named(str(name)) for name in names)) or None

    def named(self, name: str) -> UUID:
        """The region with that id, or with an id that starts with it (8 characters or more).

        Raises ``InvalidUsageError``: there is none, or there are several.
        """
        text = name.lower()
        try:
            # UUID() accepts the digits of other scripts, too; it refuses an empty text.
            region_id = self.by_prefix(text) if is_id_prefix(text) else UUID(text if text.isascii() else "")
        except ValueError:
            form = "a UUID, or its first 8 characters or more"
            raise errors.InvalidUsageError(
                f"{name!r:.80} is not a region id ({form}).", remedy="memwal-ops inspect URI lists the regions."
            ) from None
        if region_id is None or region_id not in self.region_ids:
            raise errors.InvalidUsageError(
                f"No region of the table begins with {name}."
                if is_id_prefix(text)
                else f"The table has no region {name}.",
                remedy="memwal-ops inspect URI lists the regions.",
            )
        return region_id


def is_id_prefix(text: str) -> bool:
    """Whether it is a prefix of a region id, as reports abbreviate it: the first 8 characters or more, not all."""
    return _ID_PREFIX.fullmatch(text) is not None


def list_regions(store: Store) -> RegionListing:
    """List the region directories (S0-170); one listing request per 1,000 regions.

    A directory whose name is not a UUID, and a file in ``_mem_wal/``, is returned as a stray and otherwise ignored. A
    symbolic link with the name of a region is returned as a region: reading it raises ``LinkError``, whereas an
    unlisted region would seem to have nothing to merge. So does a link in place of ``_mem_wal``.
    """
    level = store.list_level(MEM_WAL_FOLDER)
    ids: list[UUID] = []
    strays = [meta.path for meta in level.objects]
    for directory in (*level.directories, *level.links):
        name = directory.rsplit("/", 1)[-1]
        try:
            region_id = UUID(name)
        except ValueError:
            strays.append(directory)
            continue
        if str(region_id) == name:
            ids.append(region_id)
        else:
            strays.append(directory)
    return RegionListing(tuple(sorted(ids)), tuple(sorted(strays)), level.empty)


def list_region_strays(store: Store, region_id: UUID) -> tuple[str, ...]:
    """The strays directly in a region's folder; one request."""
    level = store.list_level(region_folder(region_id))
    names = {folder: folder.rsplit("/", 1)[-1] for folder in level.directories}
    others = [
        folder for folder, name in names.items() if name not in {"manifest", "wal"} and not parse_generation_dir(name)
    ]
    return (*(meta.path for meta in level.objects), *level.links, *others)


@dataclass(frozen=True, slots=True)
class Drop:
    """A generation that left its region's list: as it was listed last, by which manifest version, and when.

    ``kept``: the paths that this version still lists.
    """

    flushed: region_manifest.FlushedGeneration
    version: int
    at: datetime
    kept: frozenset[str]


@dataclass(frozen=True, slots=True)
class ManifestFolder:
    """The result of listing a region's manifests. ``newest`` is None if one page does not determine it.

    ``created``: when the oldest of them was written, by the store's clock; None if there is none.
    """

    newest: int | None
    strays: tuple[str, ...]
    created: datetime | None


class RegionManifestStore:
    """The store of one region's manifests."""

    def __init__(self, store: Store, region_id: UUID) -> None:
        self._store = store
        self.region_id = region_id
        self.folder = f"{region_folder(region_id)}/manifest"
        self.created: datetime | None = None
        """When the oldest manifest of the last listing was written, by the store's clock; None before a listing."""

    def latest(self, *, checked: bool = False) -> region_manifest.RegionManifest:
        """The newest manifest (S0-053).

        ``checked``: also list the folder and refuse a gap anywhere between the oldest and the newest version. One more
        request per 1,000 versions.

        Raises:
            RegionManifestGapError: a version is missing between two others.
            RegionManifestCorruptError: the newest version cannot be decoded, or the region has no manifest at all.
        """
        for _ in range(_LISTINGS - 1):
            try:
                return self.read(self._newest_listed() if checked else self._newest_by_walk())
            except RegionManifestGoneError:
                continue  # it was the newest: since then, writers published newer ones, and gc deleted it
        return self.read(self._newest_listed())

    def list_page(self) -> ManifestFolder:
        """The newest version's number, if one listing request determines it, and the strays.

        For jobs that read every region. One request is not sufficient if the folder has
        1,000 versions or more, none, or a gap: then :meth:`latest` is called, which raises the specific error.
        """
        page = list(islice(self._store.list(self.folder), PAGE))
        versions = _versions(page)
        plain = len(page) < PAGE and versions and versions[-1] - versions[0] + 1 == len(versions)
        names = ((meta.path, meta.path.rsplit("/", 1)[-1]) for meta in page)
        strays = tuple(path for path, name in names if name != HINT and parse_region_manifest_name(name) is None)
        created = min((meta.last_modified for meta in page if _version(meta) is not None), default=None)
        return ManifestFolder(versions[-1] if plain else None, strays, created)

    def latest_from(
        self, version: int, known: region_manifest.RegionManifest | None = None
    ) -> region_manifest.RegionManifest:
        """The newest manifest, by HEAD requests from a listed version on; two requests if that is the newest.

        ``known``: that version's manifest, if it was read before. Then it is one request, and the caller verifies that
        the file still exists before anything is written or deleted for it.
        """
        first = version
        while self._store.head(self.path(version + 1)) is not None:
            version += 1
        if known is not None and version == first:
            return known
        try:
            return self.read(version)
        except RegionManifestGoneError:
            return self.latest()  # since then, writers published newer ones, and gc deleted it and the next ones

    def write_hint(self, version: int) -> None:
        """Write ``version_hint.json`` for a version that exists."""
        self._store.put(f"{self.folder}/{HINT}", region_manifest.encode_version_hint(version))

    def hint(self) -> int | None:
        """The version in ``version_hint.json``; None if the file is missing or unreadable."""
        try:
            return region_manifest.decode_version_hint(self._store.get(f"{self.folder}/{HINT}"))
        except errors.ObjectNotFoundError:
            return None

    def path(self, version: int) -> str:
        """The path of a version's manifest."""
        return f"{self.folder}/{region_manifest_name(version)}"

    def read(self, version: int) -> region_manifest.RegionManifest:
        """Read one manifest version. Raises ``RegionManifestCorruptError`` if it does not decode or exist."""
        path = self.path(version)
        try:
            data = self._store.get(path)
        except errors.ObjectNotFoundError as error:
            raise RegionManifestGoneError(
                f"Region {self.region_id}: manifest version {version} ({path}) does not exist."
            ) from error
        return region_manifest.decode_region_manifest(data, region_id=self.region_id, version=version)

    def is_claimed(self) -> bool:
        """Whether the region's folder has any file besides unfinished first manifests.

        A writer first publishes manifest version 1. On a local file system the folder is created just before,
        and remains if the writer is killed in between: then nothing was written yet.
        """
        return any(
            not meta.path.startswith(f"{self.folder}/") for meta in self._store.list(region_folder(self.region_id))
        )

    def drops_from(self, generation: int) -> Iterator[Drop]:
        """The generations from one on that are not listed any more, each proven by two versions; up to one that is not.

        The writer that dropped it had claimed the region, and published the next version. Some requests, by bisection.
        """
        metas = self._metas()
        with suppress(errors.RegionManifestCorruptError):
            while True:
                first = bisect_left(metas, generation + 1, key=lambda meta: self._current(_version_of(meta)))
                last = bisect_left(
                    metas,
                    True,  # noqa: FBT003 - a key of bisection
                    first,
                    key=lambda meta: not self._lists(_version_of(meta), generation),
                )
                if not first < last < len(metas):
                    return
                before, after = (self.read(_version_of(meta)) for meta in metas[last - 1 : last + 1])
                if after.version != before.version + 1 or not 1 <= before.writer_epoch <= after.writer_epoch:
                    return
                listed = {flushed.generation: flushed for flushed in before.flushed_generations}
                kept = frozenset(flushed.path for flushed in after.flushed_generations)
                while (flushed := listed.get(generation)) is not None and flushed.path not in kept:
                    yield Drop(flushed, after.version, metas[last].last_modified, kept)
                    generation += 1

    def flushes(self, generation: int, until: int) -> Mapping[int, tuple[int, datetime]]:
        """The last log entry of each generation from one on, and when it was flushed, by versions up to ``until``."""
        metas = [meta for meta in self._metas() if _version_of(meta) <= until]
        first = bisect_left(metas, generation + 1, key=lambda meta: self._current(_version_of(meta)))
        ends: dict[int, tuple[int, datetime]] = {}
        for meta in metas[first:]:
            manifest = self.read(_version_of(meta))
            ends.setdefault(manifest.current_generation - 1, (manifest.replay_after_wal_id or 0, meta.last_modified))
        return ends

    def _metas(self) -> list[ObjectMeta]:
        return sorted((meta for meta in self._store.list(self.folder) if _version(meta) is not None), key=_version_of)

    def _current(self, version: int) -> int:
        return self.read(version).current_generation

    def listed_since(self, generation: int) -> datetime | None:
        """When the oldest manifest that lists a generation was written; the newest one lists it. None: there is none.

        Reads some manifests, by bisection.
        """
        metas = self._metas()
        first = bisect_left(metas, True, key=lambda meta: self._lists(_version_of(meta), generation))  # noqa: FBT003
        return metas[min(first, len(metas) - 1)].last_modified if metas else None

    def _lists(self, version: int, generation: int) -> bool:
        try:
            return any(flushed.generation == generation for flushed in self.read(version).flushed_generations)
        except errors.RegionManifestCorruptError:
            return False

    def versions(self) -> tuple[int, ...]:
        """All versions in the folder, ascending."""
        listed = [meta for meta in self._store.list(self.folder) if _version(meta) is not None]
        times = (meta.last_modified for meta in listed)
        self.created = min(times, default=None)
        return _versions(listed)

    def commit(
        self,
        manifest: region_manifest.RegionManifest,
        *,
        ours_if_equal: bool = True,
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Publish ``manifest`` under its version number; False if another writer published that version.

        Args:
            ours_if_equal: whether equal bytes under that number count as this run's: a put that is repeated after a
                lost response gets "exists". False if another process may publish identical bytes.
            check: called right before the put, after all other requests; what it raises ends the commit.

        Never leaves a gap: the previous version must exist, and be the one that ``manifest`` was made from. The hint is
        written afterwards, best effort (S0-052): readers probe onward from an older hint.
        """
        data = region_manifest.encode_region_manifest(manifest)
        return self.publish(manifest.version, data, manifest.source, ours_if_equal=ours_if_equal, check=check)

    def publish(
        self,
        version: int,
        data: bytes,
        source: bytes,
        *,
        ours_if_equal: bool = True,
        check: Callable[[], None] | None = None,
    ) -> bool:
        """:meth:`commit` for an encoded manifest, which was made from the version before it (``source``)."""
        previous = version - 1
        if previous > 0 and not self._is_next_to(previous, source):
            return False
        if check is not None:
            check()
        path = self.path(version)
        if not self._store.put_if_absent(path, data) and not (ours_if_equal and self._store.get(path) == data):
            return False
        self.write_hint(version)
        return True

    def _is_next_to(self, previous: int, source: bytes) -> bool:
        """Whether the previous version is the one that was read; False if it is that of another region.

        Timeline: version 7 is read; the region is removed with its table and created again, up to another version 7.
        A version 8 based on the manifest that was read would list deleted generations, and none of the new ones.
        """
        try:
            stored = self._store.get(self.path(previous))
        except errors.ObjectNotFoundError as error:
            raise errors.InvariantViolatedError(
                f"Region {self.region_id}: manifest version {previous + 1} must not be written, because it would leave "
                f"a gap: version {previous} does not exist."
            ) from error
        return not source or stored == source

    def _newest_by_walk(self) -> int:
        version = self.hint()
        if version is None or self._store.head(self.path(version)) is None:
            # The hint's version is gone, and version 1 may be collected: list the folder.
            return self._newest_listed()
        while self._store.head(self.path(version + 1)) is not None:
            version += 1
        return version

    def _newest_listed(self) -> int:
        for attempt in range(_LISTINGS):
            # The hint is read before the listing: a version that is published between the two
            # is then newer than the hint; the hint never refers to a version that the listing lacks.
            hint = self.hint() or 0
            versions = self.versions()
            if not versions:
                raise NoRegionManifestError(f"Region {self.region_id}: {self.folder} has no manifest version.")
            newest = max(versions[-1], hint)
            if newest - versions[0] + 1 == len(versions):
                return newest
            # A listing is not a snapshot: a writer that publishes, or gc that deletes the
            # oldest versions, during the listing can cause an apparent gap. A real gap persists.
            if attempt == _LISTINGS - 1:
                missing = _first_missing(versions, newest)
                raise errors.RegionManifestGapError(
                    f"Region {self.region_id}: manifest version {missing} is missing (file "
                    f"{region_manifest_name(missing)}), although version "
                    f"{newest} {'exists' if newest == versions[-1] else 'is in ' + HINT}."
                )
        raise AssertionError  # pragma: no cover - the loop returns or raises


def _version_of(meta: ObjectMeta) -> int:
    return _version(meta) or 0


def _versions(listed: Iterable[ObjectMeta]) -> tuple[int, ...]:
    versions = map(_version, listed)
    return tuple(sorted(version for version in versions if version is not None))


def _version(meta: ObjectMeta) -> int | None:
    return parse_region_manifest_name(meta.path.rsplit("/", 1)[-1])


def _first_missing(versions: tuple[int, ...], newest: int) -> int:
    present = set(versions)
    return next(version for version in range(versions[0], newest + 1) if version not in present)


_MANIFESTS = frozenset({"manifest", VERSIONS_FOLDER})
_SMALL = 64 << 10
_MAX_BYTES = 4 << 20


def listed_log(store: Store, scheme: str) -> Store:
    """A store that serves the first listing of each folder of the log from one page, where the log fits into one.

    For planning alone: no proof of a deletion, and no check before a region manifest is published, may use it.
    Requests: one; none on local files, where folders and links are listed as they are.
    """
    if scheme in LOCAL:
        return store
    before = store if isinstance(store, ListedLog) else None
    store = unlisted(store)
    page = list(islice(store.list(MEM_WAL_FOLDER), PAGE))
    # A key that ends in "/", as consoles create them, is listed as an object where others list a folder.
    if len(page) == PAGE or any(meta.path.count("/") == 1 for meta in page):
        return store
    return ListedLog(store, page, before)


def log_suffixes(store: Store, region_id: UUID) -> frozenset[str]:
    """The suffixes of a region's log entries, of the first 1,000; empty where that would need a request."""
    folder = f"{region_folder(region_id)}/wal"
    paths: Iterable[str] = ()
    if isinstance(store, ListedLog):
        paths = (path for path in store.listed if path.startswith(f"{folder}/"))
    elif store.root.startswith("/"):
        with suppress(LinkError):
            paths = [meta.path for meta in islice(store.list(folder), PAGE)]
    names = (parse_wal_entry_name(path.rsplit("/", 1)[-1]) for path in paths)
    return frozenset(name.suffix for name in names if name is not None)


def unlisted(store: Store) -> Store:
    """The store itself, if it is one of :func:`listed_log`."""
    return store.listed_store if isinstance(store, ListedLog) else store


class ListedLog(StoreWrapper):
    """A store that serves listings of the log from one page. Safe in threads.

    A folder's first listing comes from the page. The second one comes from the store, as a caller that lists again has
    found a contradiction; from then on, so do all of that region. A folder that the page lacks is always listed.
    Manifests are immutable: one that is listed as it was when it was read is not read again.
    """

    def __init__(self, store: Store, page: Iterable[ObjectMeta], before: ListedLog | None = None) -> None:
        """``before``: an earlier page, whose manifests are kept where they are the same files."""
        super().__init__(store)
        self.listed_store = store
        self._lock = threading.Lock()
        self._files = {meta.path: meta for meta in page}
        self._asked: set[str] = set()
        self._content: dict[str, bytes] = {}
        self._content.update(self._hints())
        for meta, data in () if before is None else before.kept():
            if is_same_file(meta, self._files.get(meta.path)):
                self._content[meta.path] = data

    @property
    def listed(self) -> Iterable[str]:
        """The paths of the page."""
        return self._files

    def _hints(self) -> Iterator[tuple[str, bytes]]:
        """The hints that name the newest manifest that the page has, as their entity tags show: their MD5 sums."""
        newest: dict[str, int] = {}
        for path in self._files:
            folder, _, name = path.rpartition("/")
            if folder.endswith("/manifest") and (version := parse_region_manifest_name(name)) is not None:
                newest[folder] = max(newest.get(folder, 0), version)
        for folder, version in newest.items():
            meta = self._files.get(f"{folder}/{HINT}")
            # As encoded by pylance's writer, and by this package's.
            for data in (b'{"version":%d}' % version, region_manifest.encode_version_hint(version)):
                if meta is not None and meta.e_tag == hashlib.md5(data, usedforsecurity=False).hexdigest():
                    yield meta.path, data

    def kept(self) -> Sequence[tuple[ObjectMeta, bytes]]:
        """The manifests that were read."""
        with self._lock:
            return [(self._files[path], data) for path, data in self._content.items()]

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        """See the class."""
        # The log as a whole is listed to make a page: never from an older one.
        known = None if after is not None or prefix.strip("/") == MEM_WAL_FOLDER else self._known(prefix)
        return super().list(prefix, after=after) if known is None else iter(known)

    def list_level(self, prefix: str = "") -> Listing:
        """See the class."""
        known = self._known(prefix)
        if known is None:
            return super().list_level(prefix)
        start = len(prefix) + 1
        directories = {prefix + "/" + meta.path[start:].partition("/")[0] for meta in known if "/" in meta.path[start:]}
        return Listing(tuple(sorted(directories)), tuple(meta for meta in known if "/" not in meta.path[start:]))

    def get(self, path: str) -> bytes:
        """See the class."""
        with self._lock:
            known = self._content.get(path)
            meta = self._files.get(path)
        if known is not None:
            return known
        data = super().get(path)
        if meta is not None and meta.size <= _SMALL and path.split("/")[-2] in _MANIFESTS:
            with self._lock:
                if path in self._files and sum(map(len, self._content.values())) < _MAX_BYTES:
                    self._content[path] = data
        return data

    def head_of_page(self, path: str) -> ObjectMeta | None:
        """The object at a path as it was listed, without a request; once its region is listed again, by one."""
        region = "/".join(path.split("/")[:2]) + "/"
        with self._lock:
            if path in self._files or any(known.startswith(region) for known in self._files):
                return self._files.get(path)
        return super().head(path)

    def _known(self, prefix: str) -> Sequence[ObjectMeta] | None:
        """The page's objects below a folder; None if the store must be listed."""
        folder = prefix.removesuffix("/") + "/"
        if not folder.startswith(f"{MEM_WAL_FOLDER}/"):
            return None
        with self._lock:
            metas = [meta for path, meta in self._files.items() if path.startswith(folder)]
            if not metas:
                return None
            if folder not in self._asked:
                self._asked.add(folder)
                return metas
            region = "/".join(folder.split("/")[:2]) + "/"
            for path in [path for path in self._files if path.startswith(region)]:
                del self._files[path]
                self._content.pop(path, None)
            return None
