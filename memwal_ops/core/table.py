"""``Table``: one version of a MemWAL table, with everything that a job decides on.

A table is pinned: its dataset, its manifest, its merge progress all belong to the same version.
A job that lost a race takes a new one with :meth:`Table.newest` and decides again from the start;
nothing in here is ever updated in place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.core.datasets import open_dataset
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.layout import Layout, detect_layout
from memwal_ops.core.regions import RegionListing, RegionManifestStore, list_regions
from memwal_ops.core.versions import VERSIONS_FOLDER, read_version_manifest, version_path
from memwal_ops.errors import (
    InvalidFormatError,
    NoMemWalIndexError,
    NoPrimaryKeyError,
    NotALanceTableError,
    ObjectNotFoundError,
    StorageError,
    TableCorruptError,
    TableNotFoundError,
)
from memwal_ops.format.memwal_index import MemWalIndex, decode_memwal_index, find_memwal_entry
from memwal_ops.format.names import NamingScheme, naming_scheme, parse_version_manifest_name
from memwal_ops.format.version_manifest import VersionManifest, check_readable
from memwal_ops.storage.locations import Location, resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    import lance

    from memwal_ops.storage.api import Store

# Names looked at for a mixture of naming schemes: one page of a listing, not 50,000 versions.
_NAMES_CHECKED = 1000
_OPENINGS = 4


@dataclass(frozen=True)
class Table:
    """One version of one table.

    Attributes:
        location: where it is and how to get there; holds no secret in its ``repr``.
        store: the same place as an object store.
        dataset: pylance's handle, pinned to ``version``.
        manifest: the version manifest of exactly that version, unknown fields included.
        naming: the naming scheme of ``_versions/``.
        index: the MemWAL index of that version: configuration, merge progress, catch-up.
        primary_key: names of the key columns in key order.
    """

    location: Location
    store: Store
    dataset: lance.LanceDataset
    manifest: VersionManifest
    naming: NamingScheme
    index: MemWalIndex
    primary_key: tuple[str, ...]

    @property
    def version(self) -> int:
        """The base version that this table is pinned to."""
        return int(self.manifest.manifest.version)

    @cached_property
    def regions(self) -> RegionListing:
        """The region directories, listed once per table value."""
        return list_regions(self.store)

    @cached_property
    def layout(self) -> Layout:
        """The layout, told from the bytes."""
        return detect_layout(self.store, self.regions.region_ids)

    def region(self, region_id: UUID) -> RegionManifestStore:
        """The manifest store of one region; the region need not exist."""
        return RegionManifestStore(self.store, region_id)

    def newest(self) -> Table:
        """The newest version of the same table, everything read again."""
        return _load(self.location.refreshed(), self.store)


def open_table(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None) -> Table:
    """Open the newest version of a table that carries a MemWAL index.

    Args:
        uri: a path, ``file://``, ``s3://``, ``gs://``, ``az://`` or ``memory://``.
        storage_options: as pylance takes them; for S3, whatever is not given is resolved by boto3
            (session, profile, role, endpoint, region).

    Raises:
        TableNotFoundError: nothing stands there.
        NotALanceTableError: something stands there that is no Lance table.
        NoMemWalIndexError: MemWAL was never initialised on it.
        NoPrimaryKeyError: it has no unenforced primary key (S0-002).
        LegacyLayoutError: it carries the MemWAL index of older Lance releases.
        UnsupportedFeatureError: it needs a feature that this release does not know (S3-012).
        TableCorruptError: its newest manifest does not decode, or naming schemes are mixed (S3-047).
        StorageError: the store refused or failed, by kind.
    """
    location = resolve(uri, storage_options)
    return _load(location, open_store(location))


def _load(location: Location, store: Store) -> Table:
    scheme = _naming_scheme(location, store)
    dataset, manifest = _open_newest(location, store, scheme)
    check_readable(manifest.manifest)
    entry = None if manifest.indexes is None else find_memwal_entry(manifest.indexes)
    if entry is None:
        raise NoMemWalIndexError(f"{location.uri} is a Lance table without a MemWAL index.")
    index = decode_memwal_index(entry)
    primary_key = _primary_key(dataset)
    if not primary_key:
        raise NoPrimaryKeyError(f"{location.uri} has a MemWAL index, but no column is marked as its primary key.")
    return Table(location, store, dataset, manifest, scheme, index, primary_key)


def is_absent(store: Store) -> bool:
    """Whether nothing at all stands below a table's URI."""
    return next(iter(store.list("")), None) is None


def _naming_scheme(location: Location, store: Store) -> NamingScheme:
    entries = list(islice(store.list(VERSIONS_FOLDER), _NAMES_CHECKED))
    names = [meta.path.rsplit("/", 1)[-1] for meta in entries]
    scheme = naming_scheme(name for name in names if parse_version_manifest_name(name) is not None)
    if scheme is not None:
        return scheme
    if is_absent(store) and not os.path.isfile(location.uri):
        raise TableNotFoundError(f"Nothing stands at {location.uri}.")
    raise NotALanceTableError(f"{location.uri} has no {VERSIONS_FOLDER}/*.manifest, so it is no Lance table.")


def _open_newest(location: Location, store: Store, scheme: NamingScheme) -> tuple[lance.LanceDataset, VersionManifest]:
    """The newest version and its manifest.

    A clean-up may remove a version between the moment in which it is found to be the newest and
    the moment in which it is read, if others committed in between: then there is a newer one.
    """
    for attempt in range(_OPENINGS):
        try:
            with lance_errors("open the table", location.uri):
                dataset = open_dataset(location)
            return dataset, _read_manifest(store, dataset.version, scheme)
        except (ObjectNotFoundError, TableNotFoundError) as error:
            if attempt == _OPENINGS - 1:
                _diagnose(store, scheme)
                raise NotALanceTableError(f"{location.uri} does not open as a Lance table: {error}") from error
        except StorageError:
            _diagnose(store, scheme)
            raise
    raise AssertionError  # pragma: no cover - the loop returns or raises


def _diagnose(store: Store, scheme: NamingScheme) -> None:
    """Why pylance cannot open the table, where its newest manifest tells: it says all of this in one class."""
    names = (parse_version_manifest_name(meta.path.rsplit("/", 1)[-1]) for meta in store.list(VERSIONS_FOLDER))
    newest = max((name.version for name in names if name is not None and name.scheme is scheme), default=0)
    check_readable(_read_manifest(store, newest, scheme).manifest)


def _read_manifest(store: Store, version: int, scheme: NamingScheme) -> VersionManifest:
    try:
        manifest = read_version_manifest(store, version, scheme)
    except InvalidFormatError as error:
        raise TableCorruptError(f"The manifest of version {version} cannot be read: {error}") from error
    if manifest.manifest.version != version:
        raise TableCorruptError(
            f"{version_path(version, scheme)} says that it is version {manifest.manifest.version}, not {version}."
        )
    return manifest


def _primary_key(dataset: lance.LanceDataset) -> tuple[str, ...]:
    """Names of the key columns, by their position where the metadata gives one (S0-002)."""
    marked: list[tuple[int, str]] = []
    for order, field in enumerate(dataset.schema):
        metadata = field.metadata or {}
        position = metadata.get(b"lance-schema:unenforced-primary-key:position")
        flag = metadata.get(b"lance-schema:unenforced-primary-key", b"").lower()
        if position is not None and position.isdigit() and int(position) > 0:
            marked.append((int(position), field.name))
        elif flag in {b"true", b"1", b"yes"}:
            marked.append((10_000 + order, field.name))
    return tuple(name for _, name in sorted(marked))
