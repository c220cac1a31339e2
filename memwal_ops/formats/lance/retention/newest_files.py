"""Check that the newest version is complete, before anything below it is deleted.

Timeline of the loss without it: a data file of version 6 is deleted by hand; versions 1 to 5 read; ``expire`` deletes
them, since they are old, and ``gc`` the generations that version 6 has merged; no version that reads is left, and no
copy of the rows.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from memwal_ops.errors import TableCorruptError
from memwal_ops.formats.lance.files.named_files import recorded_size
from memwal_ops.formats.lance.files.referenced_files import (
    DATA_FOLDER,
    file_key,
    missing_files,
    read_references,
    references,
)
from memwal_ops.formats.lance.files.versions import version_path
from memwal_ops.formats.lance.retention.damage import Damage, missing_at_base_paths
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.formats.lance.wire.version_manifest import lost_dictionary
from memwal_ops.storage.api import LinkError

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

_OLDER = 100
_OF_AN_INDEX = "Drop the index and build it again, or restore the file from a backup; then run this again."
_OF_ROWS = (
    "Restore the file from a backup, and run this again. Keep the older versions and the generations until then: they "
    "may be all that has its rows."
)


class NewestFiles:
    """The files that a version needs, as far as no listing has shown them."""

    def __init__(self, table: Table) -> None:
        """Nothing is read: the table has its manifest."""
        self._table = table
        self._sizes = {
            f"{DATA_FOLDER}/{file.path}": recorded_size(file)
            for fragment in table.manifest.manifest.fragments
            for file in fragment.files
            if not file.HasField("base_id")
        }
        self._unseen = set(references(table.manifest).own)
        self._wrong: dict[str, str] = {}
        if (why := lost_dictionary(table.manifest)) is not None:
            self._wrong[version_path(table.version, table.naming)] = why

    @property
    def folders(self) -> frozenset[str]:
        """The folders of the files that no listing has shown."""
        return frozenset(key.partition("/")[0] for key in self._unseen)

    def see(self, file: ObjectMeta) -> None:
        """Take a file of a listing of the base folders into account."""
        key = file_key(file.path)
        if key not in self._unseen:
            return
        size = self._sizes.get(key, 0) if key == file.path else 0
        if size in {0, file.size}:
            self._unseen.remove(key)
        else:
            self._wrong[key] = f"has {file.size:,} bytes instead of {size:,}"

    def damage(self) -> Damage | None:
        """The worst file that is missing or has another size, after the listings have ended; None: there is none."""
        return self._damage_of(self._found_wrong())

    def require(self) -> None:
        """Refuse to continue if the listing has ended without all files, or one has another size than recorded.

        If there is a newer version, that is checked instead.

        Raises:
            TableCorruptError: with such a file, and the newest version that does not refer to it.
        """
        wrong = self._found_wrong()
        found = self._damage_of(wrong)
        if found is None:
            return
        newest = self._table.newest()
        if newest.version != self._table.version:  # the files may have been deleted with this version
            require_complete(newest)
            return
        readable = self._newest_without(frozenset(wrong))
        kept = "" if readable is None else f" Version {readable} is the newest that does not need it."
        raise TableCorruptError(
            f"{found.path} {found.why}, and the newest version, {self._table.version}, needs it: nothing is deleted "
            f"while the newest version is not complete.{kept}",
            remedy=_OF_AN_INDEX if found.folder == INDICES_FOLDER else _OF_ROWS,
        )

    def _found_wrong(self) -> dict[str, str]:
        # A listing is not a snapshot. What is behind a link is in none.
        missing = missing_files(self._table.store, self._unseen - self._wrong.keys())
        return {**self._wrong, **dict.fromkeys(missing, "is missing")}

    def _damage_of(self, wrong: dict[str, str]) -> Damage | None:
        """The worst: a file with rows, before an index; in another table, if all of the own ones are right."""
        if not wrong:
            return missing_at_base_paths(self._table)
        path = min(wrong, key=lambda one: (one.startswith(INDICES_FOLDER), one))
        others = f" (and {len(wrong) - 1:,} more like it)" if len(wrong) > 1 else ""
        return Damage(path, path.partition("/")[0], f"{wrong[path]}{others}")

    def _newest_without(self, wrong: frozenset[str]) -> int | None:
        """The newest of the last 100 versions before this one that refers to none of these files."""
        if not wrong:
            return None
        older = sorted((one for one in self._table.history.listed() if one < self._table.version), reverse=True)
        paths = {version_path(one, self._table.naming): one for one in older[:_OLDER]}
        try:
            found = [
                paths[path] for path, refers in read_references(self._table.store, paths) if not refers.own & wrong
            ]
        except TableCorruptError:
            return None
        return max(found, default=None)


def require_complete(table: Table) -> None:
    """Refuse to delete anything of a table whose newest version lacks a file. A listing of the folders of its files.

    Args:
        table: any version of it, best the newest.

    Raises:
        TableCorruptError: see :meth:`NewestFiles.require`.
    """
    _listed(table).require()


def newest_damage(table: Table) -> Damage | None:
    """A file that is missing or cut, by its name and size, though the table's version needs it. Requests: as above."""
    return _listed(table).damage()


def _listed(table: Table) -> NewestFiles:
    files = NewestFiles(table)
    for folder in files.folders:
        with suppress(LinkError):
            for meta in table.store.list(folder):
                files.see(meta)
    return files
