"""Keep copies of the manifests of expired versions until the files that only they refer to are deleted.

A version is expired in this order: a copy of its manifest is set aside, the manifest is deleted, the files to which no
other version refers are deleted, the copy is deleted. So every listed version can be read; a killed
run leaves a copy, from which the next run reads which files were the version's own; and a version that turns
out to be needed while its files exist (a tag made in the same moment) is put back.

Timeline of the loss in any other order: the data files of version 3 are deleted, the process is killed,
version 3 is still listed; a reader opens it, and its files are missing.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import InvariantViolatedError, ObjectNotFoundError
from memwal_ops.formats.lance.files.referenced_files import missing_files, references
from memwal_ops.formats.lance.files.versions import SET_ASIDE_FOLDER, version_path
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta, Store

_NAME = re.compile(rf"{SET_ASIDE_FOLDER}/([0-9]{{20}})-[0-9a-f]{{16}}\.manifest")
_CONCURRENT = 16


@dataclass(frozen=True, slots=True)
class SetAside:
    """The copy of one version's manifest: the version and the object."""

    version: int
    meta: ObjectMeta


def list_set_aside(store: Store) -> tuple[SetAside, ...]:
    """All copies, ascending by version: those of this run, of concurrent runs, and of killed runs."""
    copies = [
        SetAside(int(name[1]), meta) for meta in store.list(SET_ASIDE_FOLDER) if (name := _NAME.fullmatch(meta.path))
    ]
    return tuple(sorted(copies, key=lambda copy: (copy.version, copy.meta.path)))


def set_aside(table: Table, versions: Iterable[int]) -> dict[str, int]:
    """Copy manifests of main, and return the size in bytes of each by path, except those that no longer exist.

    Raises:
        StorageError: a copy could not be written; nothing was deleted.
    """
    with ThreadPoolExecutor(_CONCURRENT) as pool:
        copied = pool.map(lambda version: _copy(table, version), versions)
        return dict(path_and_size for path_and_size in copied if path_and_size is not None)


def put_back(table: Table, needed: Collection[int], listed: Collection[int]) -> tuple[int, ...]:
    """Publish needed versions again that were set aside and are not listed, and return their numbers.

    Only a version that can be read is put back. If two manifests of the same number were set aside, it is ambiguous
    which one is needed, and neither is put back: gc still reports the tag that refers to it.
    """
    copies: dict[int, list[SetAside]] = {}
    for copy in list_set_aside(table.store):
        if copy.version in needed and copy.version not in listed:
            copies.setdefault(copy.version, []).append(copy)
    done = []
    for version, candidates in copies.items():
        if len(candidates) > 1:
            continue
        try:
            data = table.store.get(candidates[0].meta.path)
        except ObjectNotFoundError:
            continue
        if not missing_files(table.store, references(decode_version_manifest(data)).own):
            table.store.put_back(version_path(version, table.naming), data)
            done.append(version)
    return tuple(done)


def _copy(table: Table, version: int) -> tuple[str, int] | None:
    path = version_path(version, table.naming)
    try:
        data = table.store.get(path)
    except ObjectNotFoundError:
        return None
    copy = f"{SET_ASIDE_FOLDER}/{version:020d}-{hashlib.sha256(data).hexdigest()[:16]}.manifest"
    if not table.store.put_if_absent(copy, data) and table.store.get(copy) != data:
        raise InvariantViolatedError(f"The content of {copy} does not match the hash in its name.")
    return path, len(data)
