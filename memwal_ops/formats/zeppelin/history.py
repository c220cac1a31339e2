"""Record the manifests of a namespace as numbered revisions, kept for readers that still use them.

``native``: ``manifests/<version>.msgpack``, the manifest's bytes; a revision is the manifest version, and every
publication records its predecessor and itself.

``wiki``: the manifest has no version and no list of keys to be deleted later, so numbered records are kept in
``_mem_wal_ops/history/<n>.json``. A compaction records the manifest that it replaces, and its own. Manifests
published in between (appends, tokens) belong to the revision that the next compaction records, which lists no fewer
entries: only compactions remove any.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memwal_ops.errors import (
    CommitConflictError,
    InvalidFormatError,
    ObjectNotFoundError,
    TableCorruptError,
    VersionGoneError,
)
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE
from memwal_ops.formats.zeppelin.wire.manifest import decode_manifest
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from datetime import datetime

    from memwal_ops.formats.zeppelin.wire.manifest import Manifest
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

WIKI_FOLDER, NATIVE_FOLDER = "_mem_wal_ops/history", "manifests"
_NAME = re.compile(r"(?:_mem_wal_ops/history/([0-9]{20})\.json|manifests/([0-9]{20})\.msgpack)")
_ATTEMPTS = 100


class Published(Protocol):
    """A namespace at one manifest."""

    @property
    def location(self) -> Location:
        """Its URI."""

    @property
    def store(self) -> Store:
        """Its object store."""

    @property
    def manifest(self) -> Manifest:
        """The manifest."""

    @property
    def data(self) -> bytes:
        """The manifest's bytes."""


@dataclass(frozen=True)
class Entry:
    """A recorded revision: its number, its object, and when it was written, by the store's clock."""

    revision: int
    path: str
    written: datetime
    bytes: int = 0


def path_of(revision: int, dialect: str) -> str:
    """The path of a revision's object."""
    if dialect == NATIVE:
        return f"{NATIVE_FOLDER}/{revision:020}.msgpack"
    return f"{WIKI_FOLDER}/{revision:020}.json"


def entries(store: Store, dialect: str) -> list[Entry]:
    """All recorded revisions, oldest first. One listing."""
    folder = NATIVE_FOLDER if dialect == NATIVE else WIKI_FOLDER
    found = ((_NAME.fullmatch(meta.path), meta) for meta in store.list(folder))
    named = (
        Entry(int(match[1] or match[2]), meta.path, meta.last_modified, meta.size)
        for match, meta in found
        if match is not None
    )
    return sorted(named, key=lambda one: one.revision)


def position(store: Store, manifest: Manifest, data: bytes) -> tuple[int, bool]:
    """The revision of the live manifest, and whether it is recorded."""
    if manifest.dialect == NATIVE:
        version = manifest.version or 0
        return max(version, 1), store.head(path_of(version, NATIVE)) is not None
    newest = next(reversed(entries(store, manifest.dialect)), None)
    if newest is None:
        return 1, False
    recorded = _has(store, newest.path, data)
    return newest.revision + (not recorded), recorded


def has(table: Published, revision: int) -> bool:
    """Whether a revision is recorded. One request."""
    return table.store.head(path_of(revision, table.manifest.dialect)) is not None


def read(table: Published, revision: int) -> Manifest:
    """The manifest of a recorded revision.

    Raises:
        VersionGoneError: it is not recorded.
        TableCorruptError: the record cannot be read.
    """
    path = path_of(revision, table.manifest.dialect)
    try:
        data = _content(table.store, path)
        return decode_manifest(data, table.manifest.namespace, dialect=table.manifest.dialect)
    except ObjectNotFoundError as error:
        raise VersionGoneError(
            f"{table.location.uri} has no revision {revision}.", remedy=remedies.REVISIONS
        ) from error
    except InvalidFormatError as error:
        raise TableCorruptError(
            f"{path} of {table.location.uri} cannot be read: {error}", remedy=remedies.RECORD
        ) from error


def check_live(table: Published) -> None:
    """Compare the live manifest of a native namespace with the record of its version, if there is one.

    Raises:
        TableCorruptError: they differ: a server and memwal-ops record what they publish, byte by byte.
    """
    manifest = table.manifest
    if manifest.dialect == NATIVE and not _has_version(table.store, manifest, table.data):
        raise _other_manifest(manifest)


def _has_version(store: Store, manifest: Manifest, data: bytes) -> bool:
    """Whether the native version is not recorded, or with these bytes."""
    try:
        return store.get(path_of(manifest.version or 0, NATIVE)) == data
    except ObjectNotFoundError:
        return True


def _other_manifest(manifest: Manifest) -> TableCorruptError:
    version = manifest.version or 0
    return TableCorruptError(
        f"{path_of(version, NATIVE)} records a manifest of version {version} that differs from the live one.",
        remedy=remedies.TWO_MANIFESTS,
    )


def record(store: Store, manifest: Manifest, data: bytes) -> int:
    """Record a manifest, if it is not recorded yet, and return its revision.

    Raises:
        TableCorruptError: its native version is recorded with other content.
        CommitConflictError: other runs recorded theirs first too often.
    """
    if manifest.dialect == NATIVE:
        version = manifest.version or 0
        path = path_of(version, NATIVE)
        if not store.put_if_absent(path, data) and store.get(path) != data:
            raise _other_manifest(manifest)
        return version
    for _ in range(_ATTEMPTS):
        newest = next(reversed(entries(store, manifest.dialect)), None)
        if newest is not None and _has(store, newest.path, data):
            return newest.revision
        number = 1 if newest is None else newest.revision + 1
        document = {"revision": number, "manifest": data.decode()}
        path, record_ = path_of(number, manifest.dialect), encode_record(document)
        if store.put_if_absent(path, record_) or store.get(path) == record_:
            return number
    raise CommitConflictError(
        f"Other runs recorded {_ATTEMPTS} revisions before this one could.", remedy=remedies.RECORDING
    )


def _has(store: Store, path: str, data: bytes) -> bool:
    """Whether a record has a manifest; not, if it is damaged: no row is in it, and gc and verify report it."""
    try:
        return _content(store, path) == data
    except TableCorruptError:
        return False


def _content(store: Store, path: str) -> bytes:
    data = store.get(path)
    if path.startswith(NATIVE_FOLDER):
        return data
    try:
        return str(decode_record(data, path)["manifest"]).encode()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TableCorruptError(f"{path} cannot be read: {error!r:.120}.", remedy=remedies.RECORD) from error
