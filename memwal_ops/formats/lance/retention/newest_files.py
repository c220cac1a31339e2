"""Check that the newest version is complete, before anything below it is deleted.

Timeline of the loss without it: a data file of version 6 is deleted by hand, or a deletion file is cut; versions 1 to 5
read; ``expire`` deletes them, since they are old, and ``gc`` the generations that version 6 has merged; no version that
reads is left, and no copy of the rows.

Names and sizes are compared with listings. A file of which the version records no size is opened: a deletion file is
read as a whole, a data or index file at its end (docs/jobs.md, "What is looked at").
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError, TableCorruptError
from memwal_ops.formats.lance.files.named_files import Damage, Place, Places, files_of
from memwal_ops.formats.lance.files.referenced_files import (
    BASE_FOLDERS,
    DATA_FOLDER,
    file_key,
    index_key,
    read_references,
)
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER, version_path
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.formats.lance.wire.version_manifest import SYSTEM_INDEX, lost_dictionary
from memwal_ops.storage.api import LinkError
from memwal_ops.storage.concurrently import concurrently

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.formats.lance.files.named_files import NamedFile
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

_CONCURRENT_READS = 16
_OLDER = 100
_OF_AN_INDEX = "Drop the index and build it again, or restore the file from a backup; then run this again."
_OF_ROWS = (
    "Restore the file from a backup, and run this again. Keep the older versions and the generations until then: they "
    "may be all that has its rows. Without a backup, memwal-ops repair URI lists what else can be done."
)


class _Expected:
    """The files of a place that are not known to be right.

    Args:
        files: all that the version needs there.
        indexes: the folders of indexes whose files it does not list.
    """

    def __init__(self, place: Place, files: Iterable[NamedFile], indexes: Iterable[str] = ()) -> None:
        self.place = place
        self._files = {file.path: file for file in files}
        self._indexes = set(indexes)
        self._unseen = set(self._indexes)
        self._to_open: dict[str, tuple[NamedFile, int]] = {}
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
        elif not file.size:
            self._to_open[str(file)] = file, meta.size

    def wrong(self, sound: set[str]) -> dict[str, str]:
        """By its name what is wrong with each file, after the listings have ended; ``sound``: see ``Table.sound``.

        A listing is not a snapshot, so that each file that was not in one is asked for. What is behind a link is in
        none, and is not wrong.
        """
        for file, meta in concurrently(_listed_now, [*self._files.values()], threads=_CONCURRENT_READS):
            if meta is None:
                self._wrong[self._missing(file)] = "is missing"
            elif not isinstance(meta, LinkError):
                self.see(meta)
        for folder in sorted(self._unseen):
            with suppress(LinkError):
                for meta in self.place.store.list(folder):
                    self.see(meta)
                if folder in self._unseen:
                    self._wrong[self.place.shown(folder)] = "is missing"
        unread = [(file, size) for name, (file, size) in self._to_open.items() if name not in sound]
        for (file, _), why in concurrently(_damage, unread, threads=_CONCURRENT_READS):
            if why is None:
                sound.add(str(file))
            else:
                self._wrong[str(file)] = f"is damaged: {why}"
        return self._wrong

    def _missing(self, file: NamedFile) -> str:
        """The name of a missing file; of an index without any, that of its folder."""
        folder = file.path.rpartition("/")[0]
        is_whole = file.path.startswith(INDICES_FOLDER) and next(iter(self.place.store.list(folder)), None) is None
        return self.place.shown(folder) if is_whole else str(file)


def _listed_now(file: NamedFile) -> ObjectMeta | LinkError | None:
    try:
        return file.place.store.head(file.path)
    except LinkError as error:
        return error


def _damage(of: tuple[NamedFile, int]) -> str | None:
    file, size = of
    try:
        return file.damage(size)
    except LinkError:
        return None
    except ObjectNotFoundError:
        return "it was deleted while it was read"


class NewestFiles:
    """The files that a version needs, as far as no listing has shown them."""

    def __init__(self, table: Table) -> None:
        """Nothing is read: the table has its manifest."""
        self._table = table
        self.expected = _expected_here(table)

    def see(self, meta: ObjectMeta) -> None:
        """Take a file of a listing of the base folders into account."""
        self.expected.see(meta)

    def damage(self) -> Damage | None:
        """The worst file that is missing or damaged, after the listings have ended; None: there is none."""
        return _worst(self._wrong())

    def require(self) -> None:
        """Refuse to continue if the listing has ended without all files, or one is damaged.

        If there is a newer version, that is checked instead.

        Raises:
            TableCorruptError: with such a file, and the newest version that does not refer to it.
        """
        wrong = self._wrong()
        damage = _worst(wrong)
        if damage is None:
            return
        newest = self._table.newest()
        if newest.version != self._table.version:  # the files may have been deleted with this version
            require_complete(newest)
            return
        readable = self._newest_without(frozenset(filter(None, map(file_key, wrong))))
        kept = "" if readable is None else f" Version {readable} is the newest that does not need it."
        raise TableCorruptError(
            f"{damage.path} {damage.why}, and the newest version, {self._table.version}, needs it: nothing is deleted "
            f"while the newest version is not complete.{kept}",
            remedy=_OF_AN_INDEX if damage.folder == INDICES_FOLDER else _OF_ROWS,
        )

    def _wrong(self) -> dict[str, str]:
        """The wrong files by name; those in other tables only if all of the own ones are right."""
        wrong = dict(self.expected.wrong(self._table.sound))
        if (why := lost_dictionary(self._table.manifest)) is not None:
            wrong[version_path(self._table.version, self._table.naming)] = why
        return wrong or wrong_at_base_paths(self._table)

    def _newest_without(self, wrong: frozenset[str]) -> int | None:
        """The newest of the last 100 versions before this one that refers to none of these files."""
        if not wrong:
            return None
        older = sorted(version for version in self._table.history.listed() if version < self._table.version)
        paths = {version_path(version, self._table.naming): version for version in older[-_OLDER:]}
        try:
            readable = [
                paths[path] for path, refers in read_references(self._table.store, paths) if not refers.own & wrong
            ]
        except TableCorruptError:
            return None
        return max(readable, default=None)


def _expected_here(table: Table) -> _Expected:
    place = Place(table.store, "")
    files = [*files_of(table.manifest.manifest, lambda entry: None if entry.HasField("base_id") else place)]
    folders = []
    for index in table.manifest.index_entries:
        if index.HasField("base_id") or index.name.startswith(SYSTEM_INDEX):
            continue
        if index.files:
            files += (place.index_file(f"{index_key(index)}/{file.path}", file.size_bytes) for file in index.files)
        else:
            folders.append(index_key(index))
    return _Expected(place, files, folders)


def _worst(wrong: Mapping[str, str]) -> Damage | None:
    """A file with rows, before an index."""
    if not wrong:
        return None
    path = min(wrong, key=lambda path: (path.startswith(INDICES_FOLDER), path))
    others = f" (and {len(wrong) - 1:,} more like it)" if len(wrong) > 1 else ""
    folder = next((folder for folder in (*BASE_FOLDERS, VERSIONS_FOLDER) if f"/{folder}/" in f"/{path}"), DATA_FOLDER)
    return Damage(path, folder, f"{wrong[path]}{others}")


def wrong_at_base_paths(table: Table) -> dict[str, str]:
    """What is wrong with each file of the newest version that is in another table, as of a branch or a shallow clone.

    Requests: one for each page of a listing of the other table's files, and one for each that is opened.

    Raises:
        MemwalOpsError: the store of a base path failed, or cannot be opened.
    """
    manifest = table.manifest.manifest
    if not manifest.base_paths:
        return {}
    places = Places(table.location, table.store, manifest)
    there: dict[Place, list[NamedFile]] = {}
    for file in files_of(manifest, lambda entry: places.of(entry) if entry.HasField("base_id") else None):
        there.setdefault(file.place, []).append(file)
    wrong: dict[str, str] = {}
    for place, files in there.items():
        wrong |= _listed(_Expected(place, files)).wrong(table.sound)
    return wrong


def refuse_damaged_base_files(table: Table) -> None:
    """Refuse a branch or a shallow clone if a file that it needs of another table is missing or damaged.

    Raises:
        TableCorruptError: with the file's name.
        MemwalOpsError: see :func:`wrong_at_base_paths`.
    """
    damage = _worst(wrong_at_base_paths(table))
    if damage is not None:
        raise damage.error


def require_complete(table: Table) -> None:
    """Refuse to delete anything of a table whose newest version is not complete. A listing of the folders of its files.

    Args:
        table: any version of it, best the newest.

    Raises:
        TableCorruptError: see :meth:`NewestFiles.require`.
    """
    files = NewestFiles(table)
    _listed(files.expected)
    files.require()


def newest_damage(table: Table) -> Damage | None:
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
