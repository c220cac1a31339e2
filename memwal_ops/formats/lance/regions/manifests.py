"""List the regions of a table, and read and commit region manifests.

A region's manifests are numbered from 1, immutable, and written by put-if-absent
(S0-050 to S0-053). The newest is found by HEAD requests from ``version_hint.json`` on; these stop at the
first missing number, so a gap would hide every later version. A job that changes a
region therefore passes ``checked=True``, which lists the folder once and refuses a gap.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import (
    InvalidUsageError,
    InvariantViolatedError,
    ObjectNotFoundError,
    RegionManifestCorruptError,
    RegionManifestGapError,
)
from memwal_ops.formats.lance.files.versions import PAGE
from memwal_ops.formats.lance.wire.names import (
    MEM_WAL_FOLDER,
    parse_generation_dir,
    parse_region_manifest_name,
    region_folder,
    region_manifest_name,
)
from memwal_ops.formats.lance.wire.region_manifest import (
    RegionManifest,
    decode_region_manifest,
    decode_version_hint,
    encode_region_manifest,
    encode_version_hint,
)
from memwal_ops.storage.api import LinkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from datetime import datetime

    from memwal_ops.storage.api import ObjectMeta, Store

HINT = "version_hint.json"
# Errors that block one region only.
REGION_FAULTS = (RegionManifestCorruptError, RegionManifestGapError, LinkError)
_ID_PREFIX = re.compile(r"[0-9a-f]{8}[0-9a-f-]{0,27}")
_LISTINGS = 3


class NoRegionManifestError(RegionManifestCorruptError):
    """A region has no manifest. They are lost, or it is not claimed yet (:meth:`RegionManifestStore.is_claimed`)."""


class RegionManifestGoneError(RegionManifestCorruptError):
    """A manifest version does not exist. It is lost, or was collected after newer ones were published."""


@dataclass(frozen=True, slots=True)
class RegionListing:
    """The content of ``_mem_wal/``: region ids in ascending order, strays, and empty folders."""

    region_ids: tuple[UUID, ...]
    strays: tuple[str, ...]
    empty: tuple[str, ...] = ()

    def by_prefix(self, text: str) -> UUID | None:
        """The region whose id starts with a prefix (:func:`is_id_prefix`); None if there is none.

        Raises:
            InvalidUsageError: there are several.
        """
        found = [region_id for region_id in self.region_ids if str(region_id).startswith(text)]
        if len(found) > 1:
            raise InvalidUsageError(
                f"{len(found)} regions begin with {text}: {', '.join(map(str, found))}.", remedy="Give a longer prefix."
            )
        return found[0] if found else None

    def named(self, name: str) -> UUID:
        """The region with that id, or with an id that starts with it (8 characters or more).

        Raises:
            InvalidUsageError: there is none, or there are several.
        """
        text = name.lower()
        try:
            # UUID() accepts the digits of other scripts, too; it refuses an empty text.
            found = self.by_prefix(text) if is_id_prefix(text) else UUID(text if text.isascii() else "")
        except ValueError:
            form = "a UUID, or its first 8 characters or more"
            raise InvalidUsageError(
                f"{name!r:.80} is not a region id ({form}).", remedy="memwal-ops inspect URI lists the regions."
            ) from None
        if found is None or found not in self.region_ids:
            raise InvalidUsageError(
                f"No region of the table begins with {name}."
                if is_id_prefix(text)
                else f"The table has no region {name}.",
                remedy="memwal-ops inspect URI lists the regions.",
            )
        return found


def is_id_prefix(text: str) -> bool:
    """Whether it is a prefix of a region id, as reports abbreviate it: the first 8 characters or more, not all."""
    return _ID_PREFIX.fullmatch(text) is not None


def list_regions(store: Store) -> RegionListing:
    """List the region directories (S0-170); one listing request per 1,000 regions.

    A directory whose name is not a UUID, and a file in ``_mem_wal/``, is returned as a stray and
    otherwise ignored. A symbolic link with the name of a region is returned as a region: reading it raises
    ``LinkError``, whereas an unlisted region would seem to have nothing to merge.

    Raises:
        LinkError: ``_mem_wal`` itself is a link.
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
    return tuple(
        [meta.path for meta in level.objects]
        + [*level.links]
        + [
            folder
            for folder in level.directories
            if (name := folder.rsplit("/", 1)[-1]) not in {"manifest", "wal"} and parse_generation_dir(name) is None
        ]
    )


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

    def latest(self, *, checked: bool = False) -> RegionManifest:
        """The newest manifest (S0-053).

        Args:
            checked: also list the folder and refuse a gap anywhere between the oldest and the
                newest version. One more request per 1,000 versions.

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

    def latest_from(self, version: int, known: RegionManifest | None = None) -> RegionManifest:
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
        self._store.put(f"{self.folder}/{HINT}", encode_version_hint(version))

    def hint(self) -> int | None:
        """The version in ``version_hint.json``; None if the file is missing or unreadable."""
        try:
            return decode_version_hint(self._store.get(f"{self.folder}/{HINT}"))
        except ObjectNotFoundError:
            return None

    def path(self, version: int) -> str:
        """The path of a version's manifest."""
        return f"{self.folder}/{region_manifest_name(version)}"

    def read(self, version: int) -> RegionManifest:
        """Read one manifest version. Raises ``RegionManifestCorruptError`` if it does not decode or exist."""
        path = self.path(version)
        try:
            data = self._store.get(path)
        except ObjectNotFoundError as error:
            raise RegionManifestGoneError(
                f"Region {self.region_id}: manifest version {version} ({path}) does not exist."
            ) from error
        return decode_region_manifest(data, region_id=self.region_id, version=version)

    def is_claimed(self) -> bool:
        """Whether the region's folder has any file besides unfinished first manifests.

        A writer first publishes manifest version 1. On a local file system the folder is created just before,
        and remains if the writer is killed in between: then nothing was written yet.
        """
        return any(
            not meta.path.startswith(f"{self.folder}/") for meta in self._store.list(region_folder(self.region_id))
        )

    def listed_since(self, generation: int) -> datetime | None:
        """When the oldest manifest that lists a generation was written; the newest one lists it. None: there is none.

        Reads some manifests, by bisection.
        """
        metas = sorted((meta for meta in self._store.list(self.folder) if _version(meta) is not None), key=_version_of)
        first = bisect_left(metas, True, key=lambda meta: self._lists(_version_of(meta), generation))  # noqa: FBT003
        return metas[min(first, len(metas) - 1)].last_modified if metas else None

    def _lists(self, version: int, generation: int) -> bool:
        try:
            return any(one.generation == generation for one in self.read(version).flushed_generations)
        except RegionManifestCorruptError:
            return False

    def versions(self) -> tuple[int, ...]:
        """All versions in the folder, ascending."""
        listed = [meta for meta in self._store.list(self.folder) if _version(meta) is not None]
        times = (meta.last_modified for meta in listed)
        self.created = min(times, default=None)
        return _versions(listed)

    def commit(
        self, manifest: RegionManifest, *, ours_if_equal: bool = True, check: Callable[[], None] | None = None
    ) -> bool:
        """Publish ``manifest`` under its version number; False if another writer published that version.

        Args:
            ours_if_equal: whether equal bytes under that number count as this run's: a put that is repeated after a
                lost response gets "exists". False if another process may publish identical bytes.
            check: called right before the put, after all other requests; what it raises ends the commit.

        Never leaves a gap: the previous version must exist, and be the one that ``manifest`` was made from. The
        hint is written afterwards, best effort (S0-052): readers probe onward from an older hint.
        """
        data = encode_region_manifest(manifest)
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
        """:meth:`commit` for a manifest that is encoded already.

        Args:
            version: the number in ``data``.
            data: the manifest.
            source: the bytes of the version before it, which it was made from.
            ours_if_equal: see :meth:`commit`.
            check: see :meth:`commit`.
        """
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
        except ObjectNotFoundError as error:
            raise InvariantViolatedError(
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
                raise RegionManifestGapError(
                    f"Region {self.region_id}: manifest version {missing} is missing (file "
                    f"{region_manifest_name(missing)}), although version "
                    f"{newest} {'exists' if newest == versions[-1] else 'is in ' + HINT}."
                )
        raise AssertionError  # pragma: no cover - the loop returns or raises


def _version_of(meta: ObjectMeta) -> int:
    return _version(meta) or 0


def _versions(listed: Iterable[ObjectMeta]) -> tuple[int, ...]:
    found = map(_version, listed)
    return tuple(sorted(version for version in found if version is not None))


def _version(meta: ObjectMeta) -> int | None:
    return parse_region_manifest_name(meta.path.rsplit("/", 1)[-1])


def _first_missing(versions: tuple[int, ...], newest: int) -> int:
    present = set(versions)
    return next(version for version in range(versions[0], newest + 1) if version not in present)
