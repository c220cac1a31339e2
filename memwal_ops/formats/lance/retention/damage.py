"""Find the damaged file of the base table after an error of pylance that does not name it.

pylance reads tags, data files and indexes without naming them in its errors: "EOF while parsing a value at
line 5", "Invalid range 0..1436 for object of size 718 bytes". The files are checked only after such an error.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial, wraps
from itertools import chain, islice
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from memwal_ops.errors import InvalidUsageError, MemwalOpsError, ObjectNotFoundError, StorageError
from memwal_ops.formats.lance.files.branch import REFS_FOLDER
from memwal_ops.formats.lance.files.named_files import Damage, NamedFile, Places
from memwal_ops.formats.lance.files.referenced_files import DATA_FOLDER, DELETIONS_FOLDER, references
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER, version_path
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.formats.lance.wire.version_manifest import SYSTEM_INDEX, lost_dictionary
from memwal_ops.storage.api import LinkError
from memwal_ops.storage.concurrently import concurrently

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

Given = ParamSpec("Given")
Result = TypeVar("Result")

# All other classes name the cause.
_UNSPECIFIC = (StorageError, ObjectNotFoundError)
_CONCURRENT_READS = 16
_MAX_FILES = 10_000
_MISSING = "is missing, although the newest version refers to it"
_MISPLACED = "is missing: pylance's compaction of this branch or clone wrote the index to {}, where no reader looks"
_REBUILD = "memwal-ops catchup URI --rebuild builds the index anew; compact such tables by memwal-ops compact."
_PATH = re.compile(r"[\w./-]+")


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
        newest = replace(table.newest(), sound=set())  # all are read again: one was damaged meanwhile, or read wrongly
        damage = _named_and_missing(newest, str(error)) or next(damages(newest, _MAX_FILES), None)
        # The files of a version that was expired meanwhile are not damaged but deleted.
        if damage is None or newest.store.head(version_path(newest.version, newest.naming)) is None:
            return error
    except MemwalOpsError:
        return error
    return replace(damage, why=f"{damage.why} ({error})".rstrip(".")).error


def _named_and_missing(table: Table, text: str) -> Damage | None:
    """The file that an error names, if the newest version refers to it and it is missing."""
    for file in _places(table).data_files(table.manifest.manifest):
        if file.path in text and file.place.store.head(file.path) is None:
            return Damage(str(file), DATA_FOLDER, _MISSING)
    for key in references(table.manifest).own:
        at = text.find(key)
        path = _PATH.match(text, at) if at >= 0 else None
        if path is not None and table.store.head(path[0]) is None:
            return Damage(path[0], key.partition("/")[0], _MISSING)
    return None


def damages(table: Table, limit: int | None = None) -> Iterator[Damage]:
    """Each damaged file of the newest version, wherever it is; of the first ``limit`` data files, or of all.

    Requests: a listing of the tags and branches, one of each index, and two for each data file.

    Raises:
        MemwalOpsError: a store failed, or that of a base path cannot be opened.
    """
    yield from _damaged_references(table)
    if (why := lost_dictionary(table.manifest)) is not None:
        yield Damage(version_path(table.version, table.naming), VERSIONS_FOLDER, why)
    places = _places(table)
    checks = chain(
        (partial(_damage_of, table, file) for file in islice(places.data_files(table.manifest.manifest), limit)),
        (partial(_damages_of_index, places, index) for index in table.manifest.index_entries),
    )
    for _, found in concurrently(lambda check: check(), checks, threads=_CONCURRENT_READS):
        yield from found


def _damaged_references(table: Table) -> Iterator[Damage]:
    try:
        root = table.branch.root
    except InvalidUsageError:
        return  # not known: what reads the tags reports that
    for meta in root.list(REFS_FOLDER):
        if meta.path.endswith(".json") and not _is_object(root.get(meta.path)):
            yield Damage(meta.path, REFS_FOLDER, "is damaged: it is not a JSON document of a tag or branch")


def _places(table: Table) -> Places:
    return Places(table.location, table.store, table.manifest.manifest)


def _damage_of(table: Table, file: NamedFile) -> Sequence[Damage]:
    if str(file) in table.sound:
        return ()
    try:
        why = damage_of(file)
    except LinkError:
        return ()  # a file behind a link is not missing; another finding reports the link
    if why is None:
        table.sound.add(str(file))
        return ()
    return (Damage(str(file), DATA_FOLDER if file.of is None else DELETIONS_FOLDER, why),)


def damage_of(file: NamedFile) -> str | None:
    """The damage of a file, as the end of a sentence; None: it exists, and is as it should be. Two requests."""
    meta = file.place.store.head(file.path)
    if meta is None:
        return _MISSING
    why = file.damage(meta.size)
    return None if why is None else f"is damaged: {why}"


def _damages_of_index(places: Places, index: table_pb2.IndexMetadata) -> Sequence[Damage]:
    """Damaged and missing files of an index; releases before pylance 14 do not list an index's files."""
    place, folder = places.index_folder(index)
    try:
        found = {meta.path: meta.size for meta in place.store.list(folder)}
    except LinkError:
        return ()
    if not found:
        if index.name.startswith(SYSTEM_INDEX):  # those are in the manifest, or name their files themselves
            return ()
        own = places.own.path(INDICES_FOLDER, str(UUID(bytes=index.uuid.uuid)))
        if place.uri and next(places.own.store.list(own), None) is not None:
            # docs/upstream.md: a compaction by pylance writes there, and its entry still names the base path.
            return (Damage(place.shown(folder), INDICES_FOLDER, _MISPLACED.format(own), _REBUILD),)
        return (Damage(place.shown(folder), INDICES_FOLDER, _MISSING),)
    named = {f"{folder}/{file.path}": file.size_bytes for file in index.files}
    files = (place.index_file(path, named.get(path, 0)) for path in sorted(named.keys() | found.keys()))
    return [Damage(str(file), INDICES_FOLDER, why) for file in files if (why := damage_of(file)) is not None]


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False
