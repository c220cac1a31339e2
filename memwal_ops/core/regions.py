"""The region manifest store: the newest version of a region's truth, and the next one.

A region's manifests are numbered from 1, immutable, and written by put-if-not-exists
(S0-050 to S0-053). Reading walks by HEAD from ``version_hint.json``; that walk stops at the
first missing number, so a gap would hide every later version. Whoever is about to act on a
region therefore asks for ``checked=True``, which lists the folder once and refuses a gap.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.layout import MEM_WAL_FOLDER, region_folder
from memwal_ops.errors import (
    InvalidUsageError,
    InvariantViolatedError,
    ObjectNotFoundError,
    RegionManifestCorruptError,
    RegionManifestGapError,
)
from memwal_ops.format.names import parse_generation_dir, parse_region_manifest_name, region_manifest_name
from memwal_ops.format.region_manifest import (
    RegionManifest,
    decode_region_manifest,
    decode_version_hint,
    encode_region_manifest,
    encode_version_hint,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.storage.api import ObjectMeta, Store

HINT = "version_hint.json"
_BEGINNING = re.compile(r"[0-9a-f]{8}[0-9a-f-]{0,27}")
_LISTINGS = 3
# What every store gives in one request.
_PAGE = 1000


class NoRegionManifestError(RegionManifestCorruptError):
    """A region's folder without any manifest: lost, or not claimed yet (:meth:`RegionManifestStore.is_claimed`)."""


class RegionManifestGoneError(RegionManifestCorruptError):
    """One version is not there: lost, or collected behind newer ones since it was listed."""


@dataclass(frozen=True, slots=True)
class RegionListing:
    """What stands under ``_mem_wal/``: region ids in ascending order, what is no region, and empty folders."""

    region_ids: tuple[UUID, ...]
    strays: tuple[str, ...]
    empty: tuple[str, ...] = ()

    def beginning(self, text: str) -> UUID | None:
        """The region whose id begins with a text that :func:`is_beginning` knows; None where none does.

        Raises:
            InvalidUsageError: several do.
        """
        found = [region_id for region_id in self.region_ids if str(region_id).startswith(text)]
        if len(found) > 1:
            raise InvalidUsageError(
                f"{len(found)} regions begin with {text}: {', '.join(map(str, found))}.", remedy="Write more of the id."
            )
        return found[0] if found else None


def is_beginning(text: str) -> bool:
    """Whether it is a part of a region's id as reports shorten it: the first 8 characters or more, not all."""
    return _BEGINNING.fullmatch(text) is not None


def list_regions(store: Store) -> RegionListing:
    """List the region directories (S0-170); one listing request per 1,000 regions.

    A directory whose name is no UUID, and a file beside the regions, is named as a stray and
    otherwise left alone.
    """
    level = store.list_level(MEM_WAL_FOLDER)
    ids: list[UUID] = []
    strays = [meta.path for meta in level.objects]
    for directory in level.directories:
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
    """What stands directly in a region's folder and belongs to no region; one request."""
    level = store.list_level(region_folder(region_id))
    return tuple(
        [meta.path for meta in level.objects]
        + [
            folder
            for folder in level.directories
            if (name := folder.rsplit("/", 1)[-1]) not in {"manifest", "wal"} and parse_generation_dir(name) is None
        ]
    )


@dataclass(frozen=True, slots=True)
class ManifestFolder:
    """What a listing of a region's manifests shows: ``newest`` is None where it does not tell."""

    newest: int | None
    strays: tuple[str, ...]


class RegionManifestStore:
    """The manifests of one region."""

    def __init__(self, store: Store, region_id: UUID) -> None:
        self._store = store
        self.region_id = region_id
        self.folder = f"{region_folder(region_id)}/manifest"

    def latest(self, *, checked: bool = False) -> RegionManifest:
        """The newest manifest (S0-053).

        Args:
            checked: also list the folder and refuse a gap anywhere between the oldest and the
                newest version. One more request per 1,000 versions.

        Raises:
            RegionManifestGapError: a version is missing between two others.
            RegionManifestCorruptError: the newest version cannot be decoded, or the region has
                no manifest at all.
        """
        for _ in range(_LISTINGS - 1):
            try:
                return self.read(self._newest_listed() if checked else self._newest_by_walk())
            except RegionManifestGoneError:
                continue  # it was the newest a moment ago: writers went on, and a collector took it
        return self.read(self._newest_listed())

    def look(self) -> ManifestFolder:
        """The newest version's number, where one request tells it, and what is no manifest.

        For whoever looks at every region at once. A listing alone does not tell where the folder has
        1,000 versions and more, none, or a gap: :meth:`latest` finds out, or says what is wrong.
        """
        page = list(islice(self._store.list(self.folder), _PAGE))
        versions = _versions(page)
        plain = len(page) < _PAGE and versions and versions[-1] - versions[0] + 1 == len(versions)
        names = ((meta.path, meta.path.rsplit("/", 1)[-1]) for meta in page)
        strays = tuple(path for path, name in names if name != HINT and parse_region_manifest_name(name) is None)
        return ManifestFolder(versions[-1] if plain else None, strays)

    def latest_from(self, version: int) -> RegionManifest:
        """The newest manifest, by HEAD from a version that stood; two requests where it is the newest."""
        while self._store.head(self._path(version + 1)) is not None:
            version += 1
        try:
            return self.read(version)
        except RegionManifestGoneError:
            return self.latest()  # writers went on, and a collector took it with those behind it

    def write_hint(self, version: int) -> None:
        """Point ``version_hint.json`` at a version that stands."""
        self._store.put(f"{self.folder}/{HINT}", encode_version_hint(version))

    def hint(self) -> int | None:
        """The version that ``version_hint.json`` names; None where there is none that can be read."""
        return self._hint()

    def path(self, version: int) -> str:
        """Where a version stands."""
        return self._path(version)

    def read(self, version: int) -> RegionManifest:
        """One manifest version. Raises ``RegionManifestCorruptError`` where it does not decode, or is gone."""
        path = self._path(version)
        try:
            data = self._store.get(path)
        except ObjectNotFoundError as error:
            raise RegionManifestGoneError(
                f"Region {self.region_id}: manifest version {version} ({path}) is not there."
            ) from error
        return decode_region_manifest(data, region_id=self.region_id, version=version)

    def is_claimed(self) -> bool:
        """Whether anything stands in the region's folder but attempts at its first manifest.

        A writer's first act is manifest version 1. On local files the folder is there a moment
        earlier, and for ever if the writer is killed in that moment: then nothing was written yet.
        """
        return any(
            not meta.path.startswith(f"{self.folder}/") for meta in self._store.list(region_folder(self.region_id))
        )

    def versions(self) -> tuple[int, ...]:
        """All versions that stand in the folder, ascending. Memory: one integer per version."""
        return _versions(self._store.list(self.folder))

    def commit(self, manifest: RegionManifest) -> bool:
        """Publish ``manifest`` as its own version number; False where another writer has it.

        Never leaves a gap: the version before must exist. The hint is written after, best
        effort (S0-052): a reader walks on from an older hint.
        """
        previous = manifest.version - 1
        if previous > 0 and self._store.head(self._path(previous)) is None:
            raise InvariantViolatedError(
                f"Region {self.region_id}: refusing to write manifest version {manifest.version} "
                f"over a gap: version {previous} does not exist."
            )
        data = encode_region_manifest(manifest)
        path = self._path(manifest.version)
        if not self._store.put_if_absent(path, data) and self._store.get(path) != data:
            return False
        self._store.put(f"{self.folder}/{HINT}", encode_version_hint(manifest.version))
        return True

    def _newest_by_walk(self) -> int:
        version = self._hint()
        if version is None or self._store.head(self._path(version)) is None:
            # A hint that names nothing is worthless, and version 1 may be collected: ask the folder.
            return self._newest_listed()
        while self._store.head(self._path(version + 1)) is not None:
            version += 1
        return version

    def _newest_listed(self) -> int:
        for attempt in range(_LISTINGS):
            # The hint is read before the listing: a version that is published between the two
            # is then newer than the hint, never a hint that names what the listing lacks.
            hint = self._hint() or 0
            versions = self.versions()
            if not versions:
                raise NoRegionManifestError(f"Region {self.region_id}: {self.folder} holds no manifest version.")
            newest = max(versions[-1], hint)
            if newest - versions[0] + 1 == len(versions):
                return newest
            # A listing is no snapshot: a writer that publishes, or a collector that deletes the
            # oldest versions, while it runs can look like a gap. A real gap is still there next time.
            if attempt == _LISTINGS - 1:
                missing = _first_missing(versions, newest)
                raise RegionManifestGapError(
                    f"Region {self.region_id}: manifest version {missing} is missing (file "
                    f"{region_manifest_name(missing)}), although version "
                    f"{newest} {'stands' if newest == versions[-1] else 'is named by ' + HINT}."
                )
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _hint(self) -> int | None:
        try:
            return decode_version_hint(self._store.get(f"{self.folder}/{HINT}"))
        except ObjectNotFoundError:
            return None

    def _path(self, version: int) -> str:
        return f"{self.folder}/{region_manifest_name(version)}"


def _versions(listed: Iterable[ObjectMeta]) -> tuple[int, ...]:
    found = (parse_region_manifest_name(meta.path.rsplit("/", 1)[-1]) for meta in listed)
    return tuple(sorted(version for version in found if version is not None))


def _first_missing(versions: tuple[int, ...], newest: int) -> int:
    present = set(versions)
    return next(version for version in range(versions[0], newest + 1) if version not in present)
