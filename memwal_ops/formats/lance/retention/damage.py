"""Find the damaged files of the base table: before anything below the newest version is deleted, or after an error.

Timeline of the loss without the check: a data file of version 6 is deleted by hand, or a deletion file is cut; versions
1 to 5 read; ``expire`` deletes them, since they are old, and ``gc`` the generations that version 6 has merged; no
version that reads is left, and no copy of the rows.

Names and sizes are compared with listings. A file of which the version records no size is opened: a deletion file is
read as a whole, a data or index file at its end (docs/jobs.md, "What is looked at"). So are files of older versions: a
clean-up that deletes data before manifests leaves some that cannot be read if it is killed.

pylance reads tags, data files and indexes without naming them in its errors: "EOF while parsing a value at
line 5", "Invalid range 0..1436 for object of size 718 bytes". After such an error the file is searched for.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from memwal_ops import errors
from memwal_ops.formats.lance.files import named_files, version_files
from memwal_ops.formats.lance.files.datasets import REFS_FOLDER, undecodable
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.storage.api import LinkError, ObjectMeta, concurrently
from memwal_ops.storage.export_file import NotExportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


Given = ParamSpec("Given")
Result = TypeVar("Result")

# All other classes name the cause.
_UNSPECIFIC = (errors.StorageError, errors.ObjectNotFoundError)
_CONCURRENT_READS = 16
_MAX_FILES = 10_000
_DECODED_BYTES = 1 << 30
_MISSING = f"{named_files.MISSING}, although the newest version refers to it"
_MISPLACED = "is missing: pylance's compaction of this branch or clone wrote the index to {}, where no reader looks"
_REBUILD = "memwal-ops catchup URI --rebuild builds the index anew; compact such tables by memwal-ops compact."
_REBUILD_INDEX = "Build the index anew: memwal-ops catchup URI --index {} --rebuild; or restore the file from a backup."
_PATH = re.compile(r"[\w./-]+")


def names_damage(job: Callable[Concatenate[Table, Given], Result]) -> Callable[Concatenate[Table, Given], Result]:
    """Decorate a plan or run of a job so that it raises ``TableCorruptError`` with the name of a damaged file."""

    @wraps(job)
    def wrapped(table: Table, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with naming_damage(table):
            return job(table, *args, **kwargs)

    return wrapped


@contextmanager
def naming_damage(table: Table, fragments: Callable[[], Collection[int]] | None = None) -> Iterator[None]:
    """Raise :func:`name_damage` of an error."""
    try:
        yield
    except errors.StorageError as error:
        if (named := name_damage(table, error, fragments)) is error:
            raise
        raise named from error


def name_damage(
    table: Table, error: errors.MemwalOpsError, fragments: Callable[[], Collection[int]] | None = None
) -> errors.MemwalOpsError:
    """The error itself, or ``TableCorruptError`` if a damaged file of the newest version is the cause.

    Requests, after an unspecific error: one listing, and one or two for each file, at most 10,000 files. If none of
    these is damaged, the rows of ``fragments``, by default of the first GiB, are read until some do not decode.
    """
    if type(error) is errors.ReadOnlyStoreError:
        return next(_refused_reads(table), error)
    if type(error) not in _UNSPECIFIC:
        return error
    try:
        newest = replace(table.newest(), sound=set())  # all are read again: one was damaged meanwhile, or read wrongly
        damage = _named_and_missing(newest, str(error)) or next(damages(newest, _MAX_FILES), None)
        if damage is None and type(error) is errors.StorageError:
            damage = next(_undecodable(newest, None if fragments is None else fragments()), None)
        # The files of a version that was expired meanwhile are not damaged but deleted.
        if damage is None or newest.store.head(version_files.version_path(newest.version, newest.naming)) is None:
            return error
        if damage.folder == version_files.DATA_FOLDER and (listed := newest_damage(newest)) is not None and listed.of:
            damage = listed
    except errors.MemwalOpsError:
        return error
    return type(damage.error)(f"{damage.what} ({error}).", remedy=damage.remedy)


def _refused_reads(table: Table) -> Iterator[errors.StorageCredentialsError]:
    """Why a data file may not be read: where pylance may not read one that it rewrites, it names neither."""
    with suppress(errors.ObjectNotFoundError):
        for file in islice(_places(table).data_files(table.manifest.manifest), _MAX_FILES):
            try:
                file.place.store.get_range(file.path, 0, 1)
            except errors.StorageCredentialsError as error:
                yield error


def _undecodable(table: Table, fragments: Collection[int] | None) -> Iterator[named_files.Damage]:
    size = 0
    for fragment in table.dataset.get_fragments():
        size += sum(file.file_size_bytes or 0 for file in fragment.data_files())
        if fragment.fragment_id in fragments if fragments is not None else size <= _DECODED_BYTES:
            for name, _ in undecodable(table.dataset, fragment):
                shown, why = shown_files(table)[name], "has rows that cannot be decoded"
                yield named_files.Damage(shown, version_files.DATA_FOLDER, why, named_files.RESTORE_DEEP)


def shown_files(table: Table) -> Mapping[str, str]:
    """By its name, each data file of the version as messages show it: by its path, or its URI in another table."""
    return {file.path.rpartition("/")[2]: str(file) for file in _places(table).data_files(table.manifest.manifest)}


def _named_and_missing(table: Table, text: str) -> named_files.Damage | None:
    """The file that an error names, if the newest version refers to it and it is missing."""
    for file in _places(table).data_files(table.manifest.manifest):
        if file.path in text and file.place.store.head(file.path) is None:
            return named_files.Damage(str(file), version_files.DATA_FOLDER, _MISSING)
    for key in version_files.references(table.manifest).own:
        at = text.find(key)
        path = _PATH.match(text, at) if at >= 0 else None
        if path is not None and table.store.head(path[0]) is None:
            return named_files.Damage(path[0], key.partition("/")[0], _MISSING, _rebuild_of(table, path[0]))
    return None


def _rebuild_of(table: Table, path: str) -> str:
    """What to do about a file of an index, by the index's name; empty: it is not of one that can be built."""
    for entry in table.manifest.index_entries:
        if version_files.index_key(entry) in path and not entry.name.startswith(version_manifest.SYSTEM_INDEX):
            return _REBUILD_INDEX.format(entry.name)
    return ""


def damages(table: Table, limit: int | None = None) -> Iterator[named_files.Damage]:
    """Each damaged file of the newest version, wherever it is; of the first ``limit`` data files, or of all.

    Requests: a listing of the tags and branches, one of each index, and two for each data file. Raises
    ``MemwalOpsError``: a store failed, or that of a base path cannot be opened.
    """
    yield from _damaged_references(table)
    if (why := version_manifest.lost_dictionary(table.manifest)) is not None:
        yield named_files.Damage(
            version_files.version_path(table.version, table.naming), version_files.VERSIONS_FOLDER, why
        )
    places = _places(table)
    checks = chain(
        (partial(_damage_of, table, file) for file in islice(places.data_files(table.manifest.manifest), limit)),
        (partial(_damages_of_index, places, index) for index in table.manifest.index_entries),
    )
    for _, damage in concurrently(lambda check: check(), checks, threads=_CONCURRENT_READS):
        yield from damage


def _damaged_references(table: Table) -> Iterator[named_files.Damage]:
    try:
        root = table.branch.root
    except errors.InvalidUsageError:
        return  # not known: what reads the tags reports that
    for meta in root.list(REFS_FOLDER):
        if meta.path.endswith(".json") and not _is_object(root.get(meta.path)):
            yield named_files.Damage(meta.path, REFS_FOLDER, "is damaged: it is not a JSON document of a tag or branch")


def _places(table: Table) -> named_files.Places:
    return named_files.Places(table.location, table.store, table.manifest.manifest)


def _damage_of(table: Table, file: named_files.NamedFile) -> Sequence[named_files.Damage]:
    if str(file) in table.sound:
        return ()
    try:
        why = damage_of(file)
    except LinkError:
        return ()  # a file behind a link is not missing; another finding reports the link
    if why is None:
        table.sound.add(str(file))
        return ()
    return (
        named_files.Damage(
            str(file), version_files.DATA_FOLDER if file.of is None else version_files.DELETIONS_FOLDER, why
        ),
    )


def damage_of(file: named_files.NamedFile) -> str | None:
    """The damage of a file, as the end of a sentence; None: it exists, and is as it should be. Two requests."""
    meta = file.place.store.head(file.path)
    if meta is None:
        return _MISSING
    why = file.damage(meta.size)
    return None if why is None else f"is damaged: {why}"


def _damages_of_index(places: named_files.Places, index: table_pb2.IndexMetadata) -> Sequence[named_files.Damage]:
    """Damaged and missing files of an index; releases before pylance 14 do not list an index's files."""
    place, folder = places.index_folder(index)
    fix = "" if index.name.startswith(version_manifest.SYSTEM_INDEX) else _REBUILD_INDEX.format(index.name)
    try:
        sizes = {meta.path: meta.size for meta in place.store.list(folder)}
    except LinkError:
        return ()
    if not sizes:
        if index.name.startswith(
            version_manifest.SYSTEM_INDEX
        ):  # those are in the manifest, or name their files themselves
            return ()
        own = places.own.path(INDICES_FOLDER, str(UUID(bytes=index.uuid.uuid)))
        if place.uri and next(places.own.store.list(own), None) is not None:
            # docs/upstream.md: a compaction by pylance writes there, and its entry still names the base path.
            return (named_files.Damage(place.shown(folder), INDICES_FOLDER, _MISPLACED.format(own), _REBUILD),)
        return (named_files.Damage(place.shown(folder), INDICES_FOLDER, _MISSING, fix),)
    named = {f"{folder}/{file.path}": file.size_bytes for file in index.files}
    files = (place.index_file(path, named.get(path, 0)) for path in sorted(named.keys() | sizes.keys()))
    return [
        named_files.Damage(str(file), INDICES_FOLDER, why, fix)
        for file in files
        if (why := damage_of(file)) is not None
    ]


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


_OLDER = 100
_OF_ROWS = (
    "Restore the file from a backup, and run this again. Keep the older versions and the generations until then: they "
    "may be all that has its rows. Without a backup, memwal-ops repair URI lists what else can be done."
)


class _Expected:
    """The files of a place that are not known to be right; those ``opened`` are read at their end, too."""

    def __init__(
        self,
        place: named_files.FileRoot,
        files: Iterable[named_files.NamedFile],
        indexes: Iterable[str] = (),
        opened: Collection[str] = frozenset(),
    ) -> None:
        self.place = place
        self._opened = opened
        self._files = {file.path: file for file in files}
        self._indexes = set(indexes)
        self._unseen = set(self._indexes)
        self._to_open: dict[str, tuple[named_files.NamedFile, int]] = {}
        self._wrong: dict[str, str] = {}

    @property
    def are_seen(self) -> bool:
        """Whether listings have shown all files; of an index whose files are not listed, there may be more."""
        return not self._files and not self._indexes

    @property
    def folders(self) -> frozenset[str]:
        """The folders of the files that no listing has shown."""
        of_files = {path.rpartition("/")[0] for path in self._files if not path.startswith(INDICES_FOLDER)}
        has_indexes = self._unseen or any(path.startswith(INDICES_FOLDER) for path in self._files)
        return frozenset(of_files | ({INDICES_FOLDER} if has_indexes else set()))

    def see(self, meta: ObjectMeta) -> None:
        """Take a file of a listing into account."""
        file = self._files.pop(meta.path, None)
        if file is None and self._indexes and (folder := "/".join(meta.path.split("/")[:2])) in self._indexes:
            self._unseen.discard(folder)
            file = self.place.index_file(meta.path)
        if file is None:
            return
        if file.size not in {0, meta.size}:
            self._wrong[str(file)] = f"has {meta.size:,} bytes instead of {file.size:,}"
        elif not file.size or version_files.file_key(meta.path) in self._opened:
            self._to_open[str(file)] = file, meta.size

    def wrong(self, sound: set[str]) -> dict[str, str]:
        """By its name what is wrong with each file, after the listings have ended; ``sound``: see ``Table.sound``.

        A listing is not a snapshot, so that each file that was not in one is asked for. What is behind a link is in
        none, and is not wrong.
        """
        for file, meta in concurrently(_listed_now, [*self._files.values()], threads=_CONCURRENT_READS):
            if meta is None:
                self._wrong[self._missing(file)] = named_files.MISSING
            elif not isinstance(meta, LinkError):
                self.see(meta)
        for folder in sorted(self._unseen):
            with suppress(LinkError):
                for meta in self.place.store.list(folder):
                    self.see(meta)
                if folder in self._unseen:
                    self._wrong[self.place.shown(folder)] = named_files.MISSING
        unread = [(file, size) for name, (file, size) in self._to_open.items() if name not in sound]
        for (file, _), why in concurrently(_damage, unread, threads=_CONCURRENT_READS):
            if why is None:
                sound.add(str(file))
            else:
                self._wrong[str(file)] = f"is damaged: {why}"
        return self._wrong

    def _missing(self, file: named_files.NamedFile) -> str:
        """The name of a missing file; of an index without any, that of its folder."""
        folder = file.path.rpartition("/")[0]
        is_whole = file.path.startswith(INDICES_FOLDER) and next(iter(self.place.store.list(folder)), None) is None
        return self.place.shown(folder) if is_whole else str(file)


def _listed_now(file: named_files.NamedFile) -> ObjectMeta | LinkError | None:
    try:
        return file.place.store.head(file.path)
    except LinkError as error:
        return error


def _damage(of: tuple[named_files.NamedFile, int]) -> str | None:
    file, size = of
    try:
        return file.damage(size)
    except LinkError:
        return None
    except errors.ObjectNotFoundError:
        return "it was deleted while it was read"


class NewestFiles:
    """The files that a version needs, as far as no listing has shown them."""

    def __init__(self, table: Table, since: int | None = None) -> None:
        """Nothing is read but the manifest of the version ``since``, see :func:`require_complete`."""
        self._table, self._since = table, since
        self.expected = _expected_here(table, frozenset() if since is None else _written_since(table, since))

    def see(self, meta: ObjectMeta) -> None:
        """Take a file of a listing of the base folders into account."""
        self.expected.see(meta)

    def damage(self) -> named_files.Damage | None:
        """The worst file that is missing or damaged, after the listings have ended; None: there is none."""
        return _worst(self._table, self._wrong())

    def require(self) -> None:
        """Refuse to continue if the listing has ended without all files, or one is damaged.

        If there is a newer version, that is checked instead. Raises ``TableCorruptError``: with such a file, and the
        newest version that does not refer to it.
        """
        wrong = self._wrong()
        damage = _worst(self._table, wrong)
        if damage is None:
            return
        newest = self._table.newest()
        if newest.version != self._table.version:  # the files may have been deleted with this version
            require_complete(newest, self._since)
            return
        readable = self._newest_without(frozenset(filter(None, map(version_files.file_key, wrong))))
        kept = "" if readable is None else f" Version {readable} is the newest that does not need it."
        raise errors.TableCorruptError(
            f"{damage.what}, and the newest version, {self._table.version}, needs {'them' if damage.of else 'it'}: "
            f"nothing is deleted while the newest version is not complete.{kept}",
            remedy=f"{damage.remedy} Then run this again." if damage.folder == INDICES_FOLDER else _OF_ROWS,
        )

    def _wrong(self) -> dict[str, str]:
        """The wrong files by name; those in other tables only if all of the own ones are right."""
        wrong = dict(self.expected.wrong(self._table.sound))
        if (why := version_manifest.lost_dictionary(self._table.manifest)) is not None:
            wrong[version_files.version_path(self._table.version, self._table.naming)] = why
        return wrong or wrong_at_base_paths(self._table)

    def _newest_without(self, wrong: frozenset[str]) -> int | None:
        """The newest of the last 100 versions before this one that refers to none of these files."""
        if not wrong:
            return None
        older = sorted(version for version in self._table.history.listed() if version < self._table.version)
        paths = {version_files.version_path(version, self._table.naming): version for version in older[-_OLDER:]}
        try:
            readable = [
                paths[path]
                for path, refers in version_files.read_references(self._table.store, paths)
                if not refers.own & wrong
            ]
        except errors.TableCorruptError:
            return None
        return max(readable, default=None)


def _written_since(table: Table, version: int) -> frozenset[str]:
    """The keys of the files of the table's version that an older version does not have; of all, if that is gone."""
    try:
        older = version_files.references(version_files.read_version_manifest(table.store, version, table.naming)).own
    except (errors.ObjectNotFoundError, errors.InvalidFormatError, errors.TableCorruptError):
        older = frozenset()
    return version_files.references(table.manifest).own - older


def _expected_here(table: Table, opened: Collection[str] = frozenset()) -> _Expected:
    place = named_files.FileRoot(table.store, "")
    files = [*named_files.files_of(table.manifest.manifest, lambda entry: None if entry.HasField("base_id") else place)]
    folders = []
    for index in table.manifest.index_entries:
        if index.HasField("base_id") or index.name.startswith(version_manifest.SYSTEM_INDEX):
            continue
        if index.files:
            files += (
                place.index_file(f"{version_files.index_key(index)}/{file.path}", file.size_bytes)
                for file in index.files
            )
        else:
            folders.append(version_files.index_key(index))
    return _Expected(place, files, folders, opened)


def _worst(table: Table, wrong: Mapping[str, str]) -> named_files.Damage | None:
    if not wrong:
        return None
    path = min(wrong, key=lambda path: (path.startswith(INDICES_FOLDER), path))
    nouns = {_NOUNS.get(_folder_of(name), "") for name in wrong}
    noun = f"{nouns.pop() if len(nouns) == 1 else ''} files".lstrip()
    state = "missing" if {*wrong.values()} == {named_files.MISSING} else "missing or damaged"
    several = f"{len(wrong):,} {noun} are {state}" if len(wrong) > 1 else ""
    return named_files.Damage(path, _folder_of(path), wrong[path], _rebuild_of(table, path), several)


_NOUNS = {version_files.DATA_FOLDER: "data", version_files.DELETIONS_FOLDER: "deletion", INDICES_FOLDER: "index"}


def _folder_of(path: str) -> str:
    folders = (
        folder for folder in (*version_files.BASE_FOLDERS, version_files.VERSIONS_FOLDER) if f"/{folder}/" in f"/{path}"
    )
    return next(folders, version_files.DATA_FOLDER)


def wrong_at_base_paths(table: Table) -> dict[str, str]:
    """What is wrong with each file of the newest version that is in another table, as of a branch or a shallow clone.

    Requests: one for each page of a listing of the other table's files, and one for each that is opened. Raises
    ``MemwalOpsError``: the store of a base path failed, or cannot be opened.
    """
    manifest = table.manifest.manifest
    if not manifest.base_paths:
        return {}
    places = named_files.Places(table.location, table.store, manifest)
    there: dict[named_files.FileRoot, list[named_files.NamedFile]] = {}
    for file in named_files.files_of(manifest, lambda entry: places.of(entry) if entry.HasField("base_id") else None):
        there.setdefault(file.place, []).append(file)
    wrong: dict[str, str] = {}
    for place, files in there.items():
        wrong |= _listed(_Expected(place, files)).wrong(table.sound)
    return wrong


def refuse_damaged_base_files(table: Table) -> None:
    """Raise ``TableCorruptError`` if a file that a branch or shallow clone needs of another table is wrong.

    Raises otherwise: see :func:`wrong_at_base_paths`.
    """
    damage = _worst(table, wrong_at_base_paths(table))
    if damage is not None:
        raise damage.error


def require_complete(table: Table, since: int | None = None) -> None:
    """Refuse to delete anything of a table whose newest version is not complete. A listing of the folders of its files.

    Args:
        table: any version of it, best the newest.
        since: the oldest version that is to be deleted: files that it lacks are read at their end, one request each,
            as it may be the last that has their rows in other files.

    Raises:
        TableCorruptError: see :meth:`NewestFiles.require`.
    """
    files = NewestFiles(table, since)
    _listed(files.expected)
    files.require()


def newest_damage(table: Table) -> named_files.Damage | None:
    """A file that is missing or damaged, though the table's version needs it. Requests: as above."""
    files = NewestFiles(table)
    _listed(files.expected)
    return files.damage()


def _listed(expected: _Expected) -> _Expected:
    for folder in expected.folders:
        with suppress(LinkError):
            for meta in expected.place.store.list(folder):
                expected.see(meta)
                if expected.are_seen:
                    break
    return expected


_MANIFEST_BYTES = 32 << 20
_FILES = 1000
_VERSIONS = 1000


@dataclass(slots=True)
class VersionsCheck:
    """The result of checking the versions of main.

    Attributes:
        listed: the number of versions.
        checked: how many of them were checked, the oldest first; this includes the newest, which is open.
        unreadable: one missing or damaged file for each unreadable version.
        newest: a damaged file of the newest version, which is not among these.
    """

    listed: int
    checked: int = 1
    unreadable: dict[int, str] = field(default_factory=dict)
    newest: named_files.Damage | None = None

    def to_json(self, *, limit: int = 100) -> dict[str, object]:
        """The ``versions`` entry of ``inspect --json``."""
        entries = [{"version": version, "missing": path} for version, path in sorted(self.unreadable.items())]
        return {
            "listed": self.listed,
            "checked": self.checked,
            "unreadable": entries[:limit],
            "damaged": None if self.newest is None else self.newest.path,
        }


def missing_of_version(table: Table, version: int) -> str | None:
    """A missing or damaged file to which the version refers; None if there is none, or no such version.

    One request for each file that the version does not share with ``table``'s. Of ``table``'s own, a listing of the
    folders of its files; an index does not count. Raises ``TableCorruptError``: the version's manifest does not decode.
    """
    if version == table.version:
        damage = newest_damage(table)
        return None if damage is None or damage.folder == INDICES_FOLDER else damage.named
    path = version_files.version_path(version, table.naming)
    try:
        decoded = version_files.decode_named(path, table.store.get(path))
        version_manifest.check_writable(decoded.manifest)
        return missing_of_manifest(table, decoded, besides=_needed_files(table, table.manifest))
    except errors.ObjectNotFoundError:
        return None
    except errors.InvalidFormatError as error:
        raise errors.TableCorruptError(f"{path} cannot be read: {error}") from error


def missing_of_manifest(
    table: Table, version: version_manifest.VersionManifest, besides: Collection[str] = ()
) -> str | None:
    """A missing or damaged file that a version of the table needs, but for ``besides``. One request for each file.

    Raises ``InvalidFormatError``: the manifest contradicts itself.
    """
    needed = _needed_files(table, version)
    return min(_unreadable(table, {key: file for key, file in needed.items() if key not in besides}), default=None)


def check_versions(table: Table, first: Collection[int] = ()) -> VersionsCheck:
    """Check the versions for missing and damaged files: these first, then the oldest, as a clean-up begins there.

    Bounded: it ends after 1,000 versions, 32 MiB of manifests, or 1,000 files that are not of the first ones; one
    request for each. A manifest that does not decode is counted as unreadable by its own path.
    """
    manifests = {version: meta for version, meta in table.history.listed().items() if version < table.version}
    check = VersionsCheck(len(manifests) + 1, newest=_damage_of_version(table))
    newest = _needed_files(table, table.manifest).keys()
    is_unreadable: dict[str, bool] = {}
    oldest = sorted(manifests.items(), key=lambda listed: (listed[0] not in first, listed[0]))[:_VERSIONS]
    sizes = accumulate(meta.size for _, meta in oldest)
    bounded = [listed for listed, size in zip(oldest, sizes, strict=True) if size <= _MANIFEST_BYTES]
    read = partial(_listed_files, table)
    for (version, meta), missing in concurrently(read, bounded, threads=_CONCURRENT_READS):
        if missing is None:
            check.unreadable[version] = meta.path
            check.checked += 1
            continue
        older = missing.keys() - newest
        fresh = {key: missing[key] for key in older - is_unreadable.keys()}
        if version not in first and len(is_unreadable) + len(fresh) > _FILES:
            break
        lost = _unreadable(table, fresh)
        is_unreadable |= {key: key in lost for key in fresh}
        if gone := [key for key in older if is_unreadable[key]]:
            check.unreadable[version] = min(gone)
        check.checked += 1
    # The files of a version that was expired meanwhile are not missing but deleted.
    for version in [*check.unreadable]:
        if table.store.head(manifests[version].path) is None:
            del check.unreadable[version]
    return check


def _damage_of_version(table: Table) -> named_files.Damage | None:
    """A damaged file of the newest version; None: there is none, or it was expired since."""
    try:
        damage = newest_damage(table)
    except NotExportedError:
        return None
    return (
        None
        if damage is None or table.store.head(version_files.version_path(table.version, table.naming)) is None
        else damage
    )


def _listed_files(table: Table, listed: tuple[int, ObjectMeta]) -> Mapping[str, named_files.NamedFile | None] | None:
    """The files of a listed version, none if it was expired meanwhile; None if its manifest does not decode."""
    try:
        version = table.history.manifest(listed[1])
        version_manifest.check_writable(version.manifest)
        return _needed_files(table, version)
    except errors.ObjectNotFoundError:
        return {}
    except (errors.InvalidFormatError, errors.TableCorruptError):
        return None


def _needed_files(
    table: Table, version: version_manifest.VersionManifest
) -> Mapping[str, named_files.NamedFile | None]:
    """The files without which a version is not readable, by name; None: the folder of an index of the table.

    Raises ``InvalidFormatError``: its manifest contradicts itself.
    """
    manifest = version.manifest
    folders = dict.fromkeys(
        key for key in version_files.references(version).own if key.startswith(f"{INDICES_FOLDER}/")
    )
    try:
        files = [*named_files.Places(table.location, table.store, manifest).data_files(manifest)]
    except NotExportedError:
        own = named_files.FileRoot(table.store, "")
        files = [*named_files.files_of(manifest, lambda entry: None if entry.HasField("base_id") else own)]
    return folders | {str(file): file for file in files}


def _unreadable(table: Table, files: Mapping[str, named_files.NamedFile | None]) -> frozenset[str]:
    gone = version_files.missing_files(table.store, [key for key, file in files.items() if file is None])
    unread = [file for key, file in files.items() if file is not None and key not in table.sound]
    checked = concurrently(_is_readable, unread, threads=_CONCURRENT_READS)
    return frozenset([*gone, *(str(file) for file, readable in checked if not readable)])


def _is_readable(file: named_files.NamedFile) -> bool:
    try:
        if file.of is not None:
            return file.damage(0) is None
        meta = file.place.store.head(file.path)
    except errors.ObjectNotFoundError:
        return False
    except LinkError:
        return True
    return meta is not None and file.size in {0, meta.size}
