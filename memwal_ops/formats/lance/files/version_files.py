"""List and read version manifests, of the table or of a dataset below it, and the files to which they refer.

Every file of the base table has a key: a data file and its blob sidecars share one, as do all files of an index. A
manifest refers to keys, and a path has at most one. So files of all kinds are needed under the same condition: a
version that is kept refers to their key.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from uuid import UUID

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.names import (
    INDICES_FOLDER,
    JOB_PROPERTY,
    NamingScheme,
    parse_version_manifest_name,
    version_manifest_name,
)
from memwal_ops.formats.lance.wire.region_manifest import MERGED_ELSEWHERE
from memwal_ops.storage.api import LinkError, ObjectMeta, Store, concurrently
from memwal_ops.storage.locations import BRANCHES_FOLDER
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from memwal_ops.formats.lance.files.datasets import Branch


VERSIONS_FOLDER = "_versions"
TRANSACTIONS_FOLDER = "_transactions"
SET_ASIDE_FOLDER = "_mem_wal_ops/expired"
"""Where an expiry records manifests before it deletes them (:mod:`memwal_ops.formats.lance.retention.garbage`)."""
VERSION_HINT = f"{VERSIONS_FOLDER}/latest_version_hint.json"
CHECKED_MARK = f"{VERSIONS_FOLDER}/.checked-commits.json"
"""On S3: jobs compacted the table by versions that are staged first, to be checked
(:mod:`memwal_ops.formats.lance.commit.rebased_commit`)."""
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
    files = VersionFiles({}, {})
    for meta in store.list(folder):
        name = parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
        if name is not None:
            (files.detached if name.detached else files.numbered)[name.version] = meta
    return files


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
        transaction = version_manifest.decode_version_manifest(store.get(path)).transaction
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
) -> version_manifest.VersionManifest:
    """Read one version's manifest; without ``naming`` both schemes are tried, the common one first.

    Raises ``InvalidFormatError``: it does not decode, or is that of another version; ``ObjectNotFoundError``.
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


def parent_version(version: version_manifest.VersionManifest) -> int | None:
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


def transaction_of(store: Store, version: version_manifest.VersionManifest) -> table_pb2.Transaction | None:
    """The transaction that made a version, from inside its manifest or from its file; None where it is gone."""
    if version.transaction is not None or not (file := version.manifest.transaction_file):
        return version.transaction
    transaction = table_pb2.Transaction()
    try:
        transaction.ParseFromString(store.get(f"{TRANSACTIONS_FOLDER}/{file}"))
    except (ObjectNotFoundError, DecodeError):
        return None
    return transaction


def decode_named(path: str, data: bytes) -> version_manifest.VersionManifest:
    """Decode the manifest at a path.

    Raises ``InvalidFormatError``: it does not decode, or is of another version than in the file's name.
    """
    manifest, name = (
        version_manifest.decode_version_manifest(data),
        parse_version_manifest_name(path.rsplit("/", 1)[-1]),
    )
    if name is not None and manifest.manifest.version != name.version:
        raise InvalidFormatError(f"it contains version {manifest.manifest.version} instead of {name.version}")
    return manifest


DATA_FOLDER = "data"
DELETIONS_FOLDER = "_deletions"
BASE_FOLDERS = (DATA_FOLDER, DELETIONS_FOLDER, INDICES_FOLDER, TRANSACTIONS_FOLDER)
_CONCURRENT_READS = 16
_CHUNK = 4 * _CONCURRENT_READS
_DELETION_SUFFIX = {0: "arrow", 1: "bin"}
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# Files that Lance writes below the base folders; nothing else there is ever garbage.
_DATA = re.compile(rf"({DATA_FOLDER}/[^/]+\.lance)")
_SIDECAR = re.compile(rf"({DATA_FOLDER}/[^/]+)/[^/]+\.blob")
_INDEX = re.compile(rf"({INDICES_FOLDER}/{_UUID})/.+")
_OTHER = re.compile(rf"({DELETIONS_FOLDER}/[^/]+\.(?:arrow|bin)|{TRANSACTIONS_FOLDER}/[^/]+\.txn)")
_UNFINISHED = re.compile(rf"{DATA_FOLDER}/(?:[^/]+/)?\.tmp[^/]*|{VERSIONS_FOLDER}/\.tmp[^/]*")


class References(NamedTuple):
    """The keys to which one version refers.

    Attributes:
        own: keys below the table's own folders, of files that must exist for the version to be readable.
        all: ``own``, files at other base paths by the names that they would have here, and files that are not needed
            for reading: transaction files, and Lance's system indexes, which have none or name them by other rules.
    """

    own: frozenset[str]
    all: frozenset[str]


Known: TypeAlias = dict[bytes, tuple[set[str], set[str]]]
"""The keys of fragments, for a caller that reads many versions: most fragments are in many of them."""


def references(version: version_manifest.VersionManifest, known: Known | None = None) -> References:
    """The references of a manifest; on a branch, files of main have a base path, and only their names are used.

    Raises ``InvalidFormatError``: a deletion file of an unknown type.
    """
    known = {} if known is None else known
    keys = [
        known.get(content := fragment.SerializeToString()) or known.setdefault(content, _keys_of(fragment))
        for fragment in version.manifest.fragments
    ]
    own: set[str] = set().union(*[here for here, _ in keys])
    others: set[str] = set().union(*[away for _, away in keys if away])
    for index in version.index_entries:
        elsewhere = index.HasField("base_id") or index.name.startswith(version_manifest.SYSTEM_INDEX)
        (others if elsewhere else own).add(index_key(index))
    if version.manifest.transaction_file:
        others.add(f"{TRANSACTIONS_FOLDER}/{version.manifest.transaction_file}")
    return References(frozenset(own), frozenset(own | others))


def _keys_of(fragment: table_pb2.DataFragment) -> tuple[set[str], set[str]]:
    """The keys of a fragment's files below the table's own folders, and at other base paths."""
    keys: tuple[set[str], set[str]] = (set(), set())
    for file in fragment.files:
        keys[file.HasField("base_id")].add(f"{DATA_FOLDER}/{file.path}")
    if fragment.HasField("deletion_file"):
        deletion = fragment.deletion_file
        keys[deletion.HasField("base_id")].add(deletion_path(fragment.id, deletion))
    return keys


def index_key(entry: table_pb2.IndexMetadata) -> str:
    """The key of an index's files."""
    return f"{INDICES_FOLDER}/{UUID(bytes=entry.uuid.uuid)}"


def file_key(path: str) -> str | None:
    """The key of a path below the table's root; None for files that Lance does not write there."""
    if sidecar := _SIDECAR.fullmatch(path):
        return f"{sidecar[1]}.lance"
    match = _DATA.fullmatch(path) or _INDEX.fullmatch(path) or _OTHER.fullmatch(path)
    return match[1] if match else None


def version_of_main(path: str) -> int | None:
    """The numbered version that has its manifest at a path of the table's own branch; None for all other files."""
    folder, _, name = path.rpartition("/")
    parsed = parse_version_manifest_name(name) if folder == VERSIONS_FOLDER else None
    return None if parsed is None or parsed.detached else parsed.version


def is_unfinished(path: str) -> bool:
    """Whether it is a local writer's temporary file, to which no version can refer."""
    return _UNFINISHED.fullmatch(path) is not None


def list_manifests(store: Store, folder: str = VERSIONS_FOLDER) -> dict[str, ObjectMeta]:
    """The manifests of the table's own branch by path, numbered and detached; or those below another folder."""
    return {meta.path: meta for meta in store.list(folder) if _is_manifest(meta.path)}


def list_manifests_of_others(branch: Branch) -> dict[str, ObjectMeta]:
    """The manifests of all other branches of the table, main among them, by path below the root.

    This includes branches without a reference file, and records of manifests that are being expired there, since such a
    version may be put back. One listing of all branches' files; for a branch also one of main's versions.
    """
    own = (f"{branch.folder}/{VERSIONS_FOLDER}/", f"{branch.folder}/{SET_ASIDE_FOLDER}/")
    manifests = {
        meta.path: meta
        for meta in branch.root.list(BRANCHES_FOLDER)
        if (_is_manifest(meta.path) or _is_record(meta.path)) and not meta.path.startswith(own)
    }
    return manifests if branch.name is None else manifests | list_manifests(branch.root)


def decode_manifests(path: str, data: bytes) -> list[version_manifest.VersionManifest]:
    """The manifest at a path, or those in the record of an expiry; raises as :func:`decode_named`."""
    if not _is_record(path):
        return [decode_named(path, data)]
    manifests = [
        (version, version_manifest.decode_version_manifest(one)) for version, one in decode_set_aside(data, path)
    ]
    if any(shown.manifest.version != version for version, shown in manifests):
        raise InvalidFormatError("it has manifests of other versions than it names")
    return [shown for _, shown in manifests]


def encode_set_aside(manifests: Sequence[tuple[int, bytes]]) -> bytes:
    """The record of manifests that are being expired, each with its version: a line of JSON, then their bytes."""
    lengths = [[version, len(data)] for version, data in manifests]
    return b"".join((encode_record({"manifests": lengths}), b"\n", *(data for _, data in manifests)))


def decode_set_aside(data: bytes, path: str) -> list[tuple[int, bytes]]:
    """The manifests of a record, each with its version; raises ``InvalidFormatError``, ``UnsupportedFeatureError``."""
    end, manifests = data.find(b"\n") + 1, []
    try:
        for version, length in decode_record(data[:end], path)["manifests"]:
            if type(version) is not int or length <= 0:
                raise ValueError(f"it has {length!r:.40} bytes of version {version!r:.40}")
            manifests.append((version, data[end : end + length]))
            end += length
        if end != len(data):
            raise ValueError(f"its manifests end at {end} of {len(data)} bytes")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidFormatError(f"{path} is no record of expired manifests: {error}") from error
    return manifests


def read_references(store: Store, paths: Iterable[str], known: Known | None = None) -> Iterator[tuple[str, References]]:
    """Read the references of each of these manifests or records, unless it is gone. One request for each.

    Raises ``TableCorruptError``, ``UnsupportedFeatureError``: the references of one are not known.
    """
    known = {} if known is None else known
    for path, data in contents(store, paths):
        yield path, decoded_references(path, data, known)


def contents(store: Store, paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Read each of these files, unless it is gone. One request for each, 16 at a time."""
    for path, data in concurrently(partial(_content, store), paths, threads=_CONCURRENT_READS, chunk=_CHUNK):
        if data is not None:
            yield path, data


def refuse_linked_folders(store: Store) -> None:
    """Raise ``LinkError`` for symbolic links in place of base folders (local files), before anything is deleted.

    Files behind a link are in no listing, so that they could not be distinguished from missing files. Object stores
    have no links: no request there.
    """
    if not store.root.startswith("/"):
        return
    for folder in (VERSIONS_FOLDER, *BASE_FOLDERS):
        store.head(f"{folder}/.memwal-ops")


def missing_files(store: Store, keys: Iterable[str]) -> list[str]:
    """The keys that have no file, ascending; a file behind a link is not missing."""
    checked = concurrently(partial(_exists, store), sorted(keys), threads=_CONCURRENT_READS, chunk=PAGE)
    return [key for key, exists in checked if not exists]


def _exists(store: Store, key: str) -> bool:
    try:
        if key.startswith(f"{INDICES_FOLDER}/"):
            return next(iter(store.list(key)), None) is not None
        return store.head(key) is not None
    except LinkError:
        return True


def decoded_references(path: str, data: bytes, known: Known) -> References:
    """The references of the manifest at a path, or of all in a record; raises as :func:`read_references`."""
    try:
        versions = decode_manifests(path, data)
        for version in versions:
            version_manifest.check_writable(version.manifest)
        parts = [references(version, known) for version in versions]
    except InvalidFormatError as error:
        raise TableCorruptError(
            f"{path} cannot be read ({error}), so it is unknown which files its version needs."
        ) from error
    if len(parts) == 1:
        return parts[0]
    own, everything = (part.own for part in parts), (part.all for part in parts)
    return References(frozenset().union(*own), frozenset().union(*everything))


def _content(store: Store, path: str) -> bytes | None:
    try:
        return store.get(path)
    except ObjectNotFoundError:
        return None


def _is_manifest(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.rpartition("/")[2] == VERSIONS_FOLDER and parse_version_manifest_name(name) is not None


def _is_record(path: str) -> bool:
    return f"/{path}".rpartition("/")[0].endswith(f"/{SET_ASIDE_FOLDER}")


def deletion_path(fragment_id: int, deletion: table_pb2.DeletionFile) -> str:
    """The path of a deletion file in its dataset. Raises ``InvalidFormatError``: an unknown type."""
    suffix = _DELETION_SUFFIX.get(deletion.file_type)
    if suffix is None:
        raise InvalidFormatError(f"deletion file type {deletion.file_type} is unknown")
    return f"{DELETIONS_FOLDER}/{fragment_id}-{deletion.read_version}-{deletion.id}.{suffix}"


# Fields of a transaction: create index, rewrite, reserve fragments.
_MAINTENANCE = frozenset({103, 104, 107})


class VersionWriter(NamedTuple):
    """Who wrote a version. ``writes``: whether rows may have changed; ``indexes``: names and versions."""

    version: int
    major: int | None
    release: str
    ours: bool
    writes: bool
    indexes: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, manifest: version_manifest.VersionManifest) -> VersionWriter:
        """From a version's manifest."""
        writer, transaction = manifest.manifest.writer_version, manifest.transaction
        return cls(
            int(manifest.manifest.version),
            version_manifest.lance_major(manifest.manifest),
            f"{writer.library} {writer.version}".strip() or "an unknown release",
            transaction is not None and JOB_PROPERTY in transaction.transaction_properties,
            transaction is None or not _maintains(transaction),
            frozenset((entry.name, int(entry.index_version)) for entry in manifest.index_entries),
        )


def _maintains(transaction: table_pb2.Transaction) -> bool:
    """Whether a commit only built an index or compacted: ours of plain tables have no properties that tell them."""
    numbers = {field.number for field, _ in transaction.ListFields()}
    numbers |= {field.field_number for field in UnknownFieldSet(transaction)}  # type: ignore[attr-defined]  # iterable, missing in the stub
    return not numbers.isdisjoint(_MAINTENANCE)


def is_shared(manifest: version_manifest.VersionManifest) -> bool:
    """Whether another program is known to merge the table, too, or wrote rows of this, its newest version."""
    transaction = manifest.transaction
    if MERGED_ELSEWHERE in manifest.manifest.config or transaction is None:
        return True
    return JOB_PROPERTY not in transaction.transaction_properties and not _maintains(transaction)
