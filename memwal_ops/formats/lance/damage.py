"""Find the damaged file of the base table after an error of pylance that does not name it.

pylance reads tags, data files and indexes without naming them in its errors: "EOF while parsing a value at
line 5", "Invalid range 0..1436 for object of size 718 bytes". The files are checked only after such an error.
"""

from __future__ import annotations

import json
import re
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from memwal_ops.errors import (
    InvalidFormatError,
    InvalidUsageError,
    MemwalOpsError,
    ObjectNotFoundError,
    StorageError,
    TableCorruptError,
)
from memwal_ops.formats.lance.branch import REFS_FOLDER
from memwal_ops.formats.lance.referenced_files import DATA_FOLDER, missing_files, references
from memwal_ops.formats.lance.versions import version_path
from memwal_ops.formats.lance.wire.lance_file import check_lance_file
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.storage.concurrently import concurrently
from memwal_ops.storage.export_file import NotExportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

Given = ParamSpec("Given")
Result = TypeVar("Result")

# All other classes name the cause.
_UNSPECIFIC = (StorageError, ObjectNotFoundError)
_CONCURRENT_READS = 16
_MAX_FILES = 10_000
_TAIL_BYTES = 32 << 10
_MISSING = "is missing, although the newest version refers to it"
_PATH = re.compile(r"[\w./-]+")
# Files before Lance 2.0 (written as 0.3) have another footer.
_FOOTER_SINCE = (0, 3)
REMEDIES = {
    REFS_FOLDER: "Restore the file from a backup, or create the tag again at its version; before that, gc and expire "
    "delete nothing.",
    DATA_FOLDER: "Restore the file from a backup; do not run gc or expire before that.",
    INDICES_FOLDER: "Drop the index and build it again, or restore the file from a backup.",
}


def names_damage(job: Callable[Concatenate[Table, Given], Result]) -> Callable[Concatenate[Table, Given], Result]:
    """Decorate a plan or run of a job so that it raises ``TableCorruptError`` with the name of a damaged file."""

    @wraps(job)
    def wrapped(table: Table, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return job(table, *args, **kwargs)
        except StorageError as error:
            named = name_damage(table, error)
            if named is error:
                raise
            raise named from error

    return wrapped


def name_damage(table: Table, error: MemwalOpsError) -> MemwalOpsError:
    """The error itself, or ``TableCorruptError`` if a damaged file of the newest version is the cause.

    Requests, after an unspecific error: one listing, and one or two for each file, at most 10,000 files.
    """
    if type(error) not in _UNSPECIFIC:
        return error
    try:
        newest = table.newest()
        damage = _named_and_missing(newest, str(error)) or next(damages(newest), None)
        # The files of a version that was expired meanwhile are not damaged but deleted.
        if damage is None or newest.store.head(version_path(newest.version, newest.naming)) is None:
            return error
    except MemwalOpsError:
        return error
    path, why = damage
    text = f"{path} {why} ({error})"
    return TableCorruptError(text, remedy=REMEDIES.get(path.split("/", 1)[0]))


def _named_and_missing(table: Table, text: str) -> tuple[str, str] | None:
    """The file that an error names, if the newest version refers to it and it is missing."""
    for key in references(table.manifest).own:
        at = text.find(key)
        path = _PATH.match(text, at) if at >= 0 else None
        if path is not None and table.store.head(path[0]) is None:
            return path[0], _MISSING
    return None


def damages(table: Table) -> Iterator[tuple[str, str]]:
    """The path of each damaged file of the newest version, and its damage; at most 10,000 files are read."""
    yield from _damaged_references(table)
    for key in missing_files(table.store, islice(sorted(references(table.manifest).own), _MAX_FILES)):
        yield key, _MISSING
    yield from islice(_missing_of_indexes(table), _MAX_FILES)
    files = islice(_files(table), _MAX_FILES)
    for (path, _, _), why in concurrently(lambda file: _damage(table, *file), files, threads=_CONCURRENT_READS):
        if why is not None:
            yield path, f"is damaged: {why}"


def _damaged_references(table: Table) -> Iterator[tuple[str, str]]:
    try:
        root = table.branch.root
    except InvalidUsageError:
        return  # not known: what reads the tags reports that
    for meta in root.list(REFS_FOLDER):
        if meta.path.endswith(".json") and not _is_object(root.get(meta.path)):
            yield meta.path, "is damaged: it is not a JSON document of a tag or branch"


def _files(table: Table) -> Iterator[tuple[str, int, bool]]:
    """Data and index files below the table's own folders: path, size or 0, whether the file has a footer."""
    for fragment in table.manifest.manifest.fragments:
        for file in fragment.files:
            if not file.HasField("base_id"):
                footer = (file.file_major_version, file.file_minor_version) >= _FOOTER_SINCE
                yield f"{DATA_FOLDER}/{file.path}", file.file_size_bytes, footer
    for index in () if table.manifest.indexes is None else table.manifest.indexes.indices:
        if not index.HasField("base_id"):
            for meta in table.store.list(_index_folder(index)):
                if meta.path.endswith(".lance"):
                    yield meta.path, meta.size, True


def _index_folder(index: table_pb2.IndexMetadata) -> str:
    return f"{INDICES_FOLDER}/{UUID(bytes=index.uuid.uuid)}"


def _missing_of_indexes(table: Table) -> Iterator[tuple[str, str]]:
    """Missing files of indexes of which other files exist; releases before pylance 14 do not list an index's files."""
    for index in () if table.manifest.indexes is None else table.manifest.indexes.indices:
        if index.files and not index.HasField("base_id"):
            existing = {meta.path for meta in table.store.list(_index_folder(index))}
            for file in index.files:
                if existing and (path := f"{_index_folder(index)}/{file.path}") not in existing:
                    yield path, _MISSING


def _damage(table: Table, path: str, size: int, footer: bool) -> str | None:  # noqa: FBT001 - a row of _files
    meta = table.store.head(path)
    if meta is None:
        return None
    if size not in {0, meta.size}:
        return f"it has {meta.size:,} bytes, and {size:,} by the version's manifest"
    if not footer:
        return None
    try:
        check_lance_file(table.store.get_range(path, max(0, meta.size - _TAIL_BYTES), _TAIL_BYTES), meta.size)
    except InvalidFormatError as error:
        return str(error).rstrip(".")
    except NotExportedError:
        return None  # its size is right; verify reports that no more was checked
    return None


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
