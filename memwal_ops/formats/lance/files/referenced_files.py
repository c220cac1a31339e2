"""Determine the files of the base table to which version manifests refer, and classify paths of the base table.

Every file has a key: a data file and its blob sidecars share one, as do all files of an index.
A manifest refers to keys, and a path has at most one. So files of all kinds are needed under the same condition:
a version that is kept refers to their key.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.files.versions import SET_ASIDE_FOLDER, TRANSACTIONS_FOLDER, VERSIONS_FOLDER, decode_named
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, parse_version_manifest_name
from memwal_ops.formats.lance.wire.version_manifest import SYSTEM_INDEX, check_writable
from memwal_ops.storage.api import LinkError
from memwal_ops.storage.concurrently import concurrently
from memwal_ops.storage.locations import BRANCHES_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.formats.lance.files.branch import Branch
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import ObjectMeta, Store

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


@dataclass(frozen=True, slots=True)
class References:
    """The keys to which one version refers.

    Attributes:
        own: keys below the table's own folders, of files that must exist for the version to be readable.
        all: ``own``, files at other base paths by the names that they would have here, and files that are not needed
            for reading: transaction files, and Lance's system indexes, which have none or name them by other rules.
    """

    own: frozenset[str]
    all: frozenset[str]


def references(version: VersionManifest) -> References:
    """The references of a manifest; on a branch, files of main have a base path, and only their names are used.

    Raises:
        InvalidFormatError: a deletion file of an unknown type.
    """
    own: set[str] = set()
    others: set[str] = set()
    for fragment in version.manifest.fragments:
        for file in fragment.files:
            (others if file.HasField("base_id") else own).add(f"{DATA_FOLDER}/{file.path}")
        if fragment.HasField("deletion_file"):
            deletion = fragment.deletion_file
            (others if deletion.HasField("base_id") else own).add(deletion_path(fragment.id, deletion))
    for index in version.index_entries:
        elsewhere = index.HasField("base_id") or index.name.startswith(SYSTEM_INDEX)
        (others if elsewhere else own).add(index_key(index))
    if version.manifest.transaction_file:
        others.add(f"{TRANSACTIONS_FOLDER}/{version.manifest.transaction_file}")
    return References(frozenset(own), frozenset(own | others))


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

    This includes branches without a reference file, and copies of manifests that are being expired there, since such a
    version may be put back. One listing of all branches' files; for a branch also one of main's versions.
    """
    own = (f"{branch.folder}/{VERSIONS_FOLDER}/", f"{branch.folder}/{SET_ASIDE_FOLDER}/")
    found = {
        meta.path: meta
        for meta in branch.root.list(BRANCHES_FOLDER)
        if (_is_manifest(meta.path) or _is_copy(meta.path)) and not meta.path.startswith(own)
    }
    return found if branch.name is None else found | list_manifests(branch.root)


def read_references(store: Store, paths: Iterable[str]) -> Iterator[tuple[str, References]]:
    """Read the references of each of these manifests, except those that no longer exist. One request for each.

    Raises:
        TableCorruptError: a manifest does not decode, so that its references are unknown.
        UnsupportedFeatureError: a manifest has unknown feature flags: it may have other references.
    """
    read = partial(_read, store)
    for path, refers in concurrently(read, paths, threads=_CONCURRENT_READS, chunk=_CHUNK):
        if refers is not None:
            yield path, refers


def refuse_linked_folders(store: Store) -> None:
    """Refuse a table with symbolic links in place of base folders (local files), before anything is deleted.

    Files behind a link are in no listing, so that they could not be distinguished from missing files. Object stores
    have no links: no request there.

    Raises:
        LinkError: a folder is a link.
    """
    if not store.root.startswith("/"):
        return
    for folder in (VERSIONS_FOLDER, *BASE_FOLDERS):
        store.head(f"{folder}/.memwal-ops")


def missing_files(store: Store, keys: Iterable[str]) -> list[str]:
    """The keys that have no file, ascending; a file behind a link is not missing."""
    ascending = sorted(keys)
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        results = pool.map(lambda key: _exists(store, key), ascending)
        return [key for key, exists in zip(ascending, results, strict=True) if not exists]


def _exists(store: Store, key: str) -> bool:
    try:
        if key.startswith(f"{INDICES_FOLDER}/"):
            return next(iter(store.list(key)), None) is not None
        return store.head(key) is not None
    except LinkError:
        return True


def _read(store: Store, path: str) -> References | None:
    try:
        version = decode_named(path, store.get(path))
        check_writable(version.manifest)
        return references(version)
    except ObjectNotFoundError:
        return None
    except InvalidFormatError as error:
        raise TableCorruptError(
            f"{path} cannot be read ({error}), so it is unknown which files its version needs."
        ) from error


def _is_manifest(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.rpartition("/")[2] == VERSIONS_FOLDER and parse_version_manifest_name(name) is not None


def _is_copy(path: str) -> bool:
    return path.rpartition("/")[0].endswith(f"/{SET_ASIDE_FOLDER}")


def deletion_path(fragment_id: int, deletion: table_pb2.DeletionFile) -> str:
    """The path of a deletion file, relative to the root of its dataset.

    Raises:
        InvalidFormatError: its type is unknown.
    """
    suffix = _DELETION_SUFFIX.get(deletion.file_type)
    if suffix is None:
        raise InvalidFormatError(f"deletion file type {deletion.file_type} is unknown")
    return f"{DELETIONS_FOLDER}/{fragment_id}-{deletion.read_version}-{deletion.id}.{suffix}"
