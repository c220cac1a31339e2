"""List and read version manifests, of the table or of a dataset below it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.wire.names import NamingScheme, parse_version_manifest_name, version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, decode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import ObjectMeta, Store

VERSIONS_FOLDER = "_versions"
TRANSACTIONS_FOLDER = "_transactions"
SET_ASIDE_FOLDER = "_mem_wal_ops/expired"
"""Where an expiry copies manifests before it deletes them (:mod:`memwal_ops.formats.lance.retention.set_aside`)."""
VERSION_HINT = f"{VERSIONS_FOLDER}/latest_version_hint.json"
CHECKED_MARK = f"{VERSIONS_FOLDER}/.checked-commits.json"
"""On S3: jobs compacted the table by versions that are staged first, to be checked
(:mod:`memwal_ops.formats.lance.commit.checked_commit`)."""
_CHECKED_OPERATIONS = frozenset({"rewrite", "reserve fragments"})
# Field numbers of the operations of a transaction (protos/transaction.proto of Lance).
_OPERATIONS: Mapping[int, str] = {
    100: "append",
    101: "delete",
    102: "overwrite",
    103: "create index",
    104: "rewrite",
    105: "merge columns",
    106: "restore",
    107: "reserve fragments",
    108: "update",
    109: "project",
    110: "update config",
    111: "replace data",
    112: "update MemWAL state",
    113: "clone",
    114: "update base paths",
}
PAGE = 1000
"""The page size of a listing on every store."""


@dataclass(frozen=True, slots=True)
class VersionPage:
    """One page of the listing of ``_versions/``.

    Attributes:
        files: the listed objects.
        complete: whether these are all files there.
        versions: the manifests of main among them, by version.
        has_detached: whether there are detached ones, or may be.
        newest: the newest version; None if the page does not determine it.
        at: when it was listed, by the local clock, which also counts while the machine is suspended.
    """

    files: tuple[ObjectMeta, ...]
    complete: bool
    versions: dict[int, ObjectMeta]
    newest: int | None
    has_detached: bool = True
    at: float = field(default_factory=time.time, compare=False)

    def has(self, path: str) -> bool:
        """Whether the page shows a file: certain for a name that sorts before all manifests, as those of marks do."""
        return any(meta.path == path for meta in self.files)

    def has_hint(self) -> bool | None:
        """Whether there is a hint of the newest version, as on local files; None: not known from this page."""
        return self.has(VERSION_HINT) or (False if self.complete else None)


class VersionFiles(NamedTuple):
    """The manifests of a dataset's versions, by version."""

    numbered: dict[int, ObjectMeta]
    detached: dict[int, ObjectMeta]


def list_versions(store: Store, folder: str = VERSIONS_FOLDER) -> VersionFiles:
    """List all versions of the table, or of a dataset below it; one request for each 1,000."""
    found = VersionFiles({}, {})
    for meta in store.list(folder):
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is not None:
            (found.detached if name.detached else found.numbered)[name.version] = meta
    return found


def list_page(store: Store) -> VersionPage:
    """List the versions, the newest of which V2 names put first. One request."""
    files = tuple(islice(store.list(VERSIONS_FOLDER), PAGE))
    names = [(parse_version_manifest_name(meta.path.rsplit("/", 1)[-1]), meta) for meta in files]
    versions = {name.version: meta for name, meta in names if name is not None and not name.detached}
    complete = len(files) < PAGE
    schemes = {name.scheme for name, _ in names if name is not None and not name.detached}
    first = complete or (schemes == {NamingScheme.V2} and is_ascending(files))
    detached = not complete or any(name is not None and name.detached for name, _ in names)
    return VersionPage(files, complete, versions, max(versions, default=None) if first else None, detached)


def is_left_by_checked_commit(store: Store, listed: VersionPage, path: str) -> bool:
    """Whether a staged manifest may be left by a compaction that was killed before it was checked.

    One request for each staged manifest of a table that has :data:`CHECKED_MARK`.
    """
    return listed.has(CHECKED_MARK) and is_of_checked_commit(store, path)


def is_of_checked_commit(store: Store, path: str) -> bool:
    """Whether a staged manifest is what a checked compaction stages, or is gone. One request."""
    try:
        transaction = decode_version_manifest(store.get(path)).transaction
    except ObjectNotFoundError:
        return True
    except InvalidFormatError:
        return False
    return transaction is not None and operation_of(transaction) in _CHECKED_OPERATIONS


def is_ascending(page: Sequence[ObjectMeta]) -> bool:
    """Whether a page is in order of its names, so that what follows sorts after it (S3 Express lists in no order)."""
    paths = [os.fsencode(meta.path) for meta in page]
    return paths == sorted(paths)


def is_same_file(one: ObjectMeta | None, other: ObjectMeta | None) -> bool:
    """Whether two listings show the same object, by its entity tag; False if that is not known."""
    if one is None or other is None or one.e_tag is None:
        return False
    return (one.path, one.size, one.e_tag) == (other.path, other.size, other.e_tag)


def version_path(version: int, naming: NamingScheme, *, folder: str = "") -> str:
    """Path of a version's manifest, relative to the table's root."""
    return "/".join(filter(None, (folder, VERSIONS_FOLDER, version_manifest_name(version, naming))))


def read_version_manifest(
    store: Store, version: int, naming: NamingScheme | None = None, *, folder: str = ""
) -> VersionManifest:
    """Read one version's manifest; without ``naming`` both schemes are tried, the common one first.

    Raises:
        InvalidFormatError: it does not decode, or is that of another version.
        ObjectNotFoundError: it does not exist.
    """
    if naming is not None:
        path = version_path(version, naming, folder=folder)
        try:
            return decode_named(path, store.get(path))
        except InvalidFormatError as error:
            raise InvalidFormatError(f"{path} is not the manifest of version {version}: {error}") from error
    try:
        return read_version_manifest(store, version, NamingScheme.V2, folder=folder)
    except ObjectNotFoundError:
        return read_version_manifest(store, version, NamingScheme.V1, folder=folder)


def parent_version(version: VersionManifest) -> int | None:
    """The version whose rows and columns this one changed: the one before it, or the one that it restores.

    0: none, as the table was overwritten. None: unknown, as its transaction is damaged, or not in the manifest.
    """
    number, transaction = int(version.manifest.version), version.transaction
    if transaction is None:
        return None
    if transaction.HasField("restore"):
        restored = int(transaction.restore.version)
        return restored if restored < number else None
    return 0 if transaction.HasField("overwrite") else number - 1


def operation_of(transaction: table_pb2.Transaction) -> str:
    """The name of the operation of a transaction; empty: unknown."""
    present = {field.number for field, _ in transaction.ListFields()}
    present |= {field.field_number for field in UnknownFieldSet(transaction)}  # type: ignore[attr-defined]  # iterable, missing in the stub
    return next((name for number, name in _OPERATIONS.items() if number in present), "")


def decode_named(path: str, data: bytes) -> VersionManifest:
    """Decode the manifest at a path; its version must be the one in the file's name.

    Raises:
        InvalidFormatError: it does not decode, or is that of another version.
    """
    manifest, name = decode_version_manifest(data), parse_version_manifest_name(path.rsplit("/", 1)[-1])
    if name is not None and manifest.manifest.version != name.version:
        raise InvalidFormatError(f"it contains version {manifest.manifest.version} instead of {name.version}")
    return manifest
