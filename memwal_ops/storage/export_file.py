"""The file of an export: a table's metadata without values, and a read-only store that reads it.

A ZIP archive: ``export.json`` (what it is), ``objects.jsonl`` (all objects with sizes and times, one a line), and below
``files/`` the contents of those that are exported.
"""

from __future__ import annotations

import json
import os
import tempfile
import zipfile
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any, NoReturn

from memwal_ops import errors
from memwal_ops.storage import api
from memwal_ops.storage.object_store import checked_path

FORMAT = 1
_ABOUT, _OBJECTS, _FILES = "export.json", "objects.jsonl", "files/"
_KEY = "memwal_ops_export"
_MADE_AT = (1980, 1, 1, 0, 0, 0)
# What a file may unpack to: a hundred times what the largest table of the tests needs.
_MAX_BYTES = 8 << 30
_ARCHIVE = b"PK"
_REMEDY = "Ask for the file again: memwal-ops export-support URI writes it."


class NotExportedError(errors.InvalidUsageError):
    """The contents of an object that an export leaves out."""

    remedy = "Run the command on the table itself."


@dataclass(frozen=True, slots=True)
class ExportedObject:
    """An object of the table.

    ``contents``: without values; None: they are left out. ``opened``: whether a library that opens files by itself
    needs the contents.
    """

    meta: api.ObjectMeta
    contents: bytes | None = None
    listed: bool = True
    opened: bool = False


def write_export(file: IO[bytes], about: Mapping[str, Any], objects: Iterable[ExportedObject]) -> tuple[int, int]:
    """Write an export; returns the number of objects, and of those with contents. Memory: one object at a time."""
    listed = kept = 0
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryFile() as listing:
        archive.writestr(_member(_ABOUT), json.dumps({_KEY: FORMAT, **about}, indent=1))
        for meta in objects:
            line = {"path": meta.meta.path, "size": meta.meta.size, "modified": meta.meta.last_modified.isoformat()}
            for name in ("listed", "opened"):
                if getattr(meta, name) != (name == "listed"):
                    line[name] = getattr(meta, name)
            listing.write(json.dumps(line).encode() + b"\n")
            listed += 1
            if meta.contents is not None:
                kept += 1
                archive.writestr(_member(_FILES + meta.meta.path), meta.contents)
        listing.seek(0)
        with archive.open(_member(_OBJECTS), "w", force_zip64=True) as member:
            while part := listing.read(1 << 20):
                member.write(part)
    return listed, kept


def _member(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _MADE_AT)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


class ExportedStore:
    """The store of a table as an export has it. Contents that were left out raise ``NotExportedError``.

    Attributes:
        about: the document that describes the export.
        folder: a local folder with the files that a library opens by itself, until :meth:`close`.
        left_out: the paths whose contents were asked for and are not in the export.
    """

    def __init__(self, path: str) -> None:
        """Open the file at ``path``. Raises if it is unreadable, no export, damaged, or of a later release."""
        self._path = path
        with ExitStack() as opened:
            self._archive = opened.enter_context(self._opened())
            self.about: Mapping[str, Any] = self._document()
            self.taken = self._time(self.about.get("taken"))
            self.left_out: set[str] = set()
            self._objects, hidden, needed = self._read_objects()
            self._names = sorted(self._objects.keys() - hidden)
            names = self._archive.namelist()
            self._contents = frozenset(name.removeprefix(_FILES) for name in names if name.startswith(_FILES))
            folder = tempfile.TemporaryDirectory(prefix="memwal-ops-export-", ignore_cleanup_errors=True)
            self.folder = opened.enter_context(folder)
            self._unpack(needed & self._contents)
            self._resources = opened.pop_all()

    def close(self) -> None:
        """Close the file, and remove the folder."""
        self._resources.close()

    @property
    def root(self) -> str:
        """The URI of the table that was exported."""
        return str(self.about.get("uri"))

    def get(self, path: str) -> bytes:
        """The contents as exported."""
        if path not in self._objects:
            raise errors.ObjectNotFoundError(f"{path} does not exist in {self.root}, as exported.")
        if path not in self._contents:
            self.left_out.add(path)
            raise NotExportedError(f"The contents of {path} are not in the export {self._path}.")
        return self._member(_FILES + path)

    def put_back(self, path: str, data: bytes) -> bool:
        """Refused, as all that changes anything."""
        return self.put_if_absent(path, data)

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """Bytes of the contents as exported."""
        return self.get(path)[start : start + length]

    def get_with_tag(self, path: str) -> NoReturn:
        """Refused: an export has no entity tags."""
        raise self._read_only(path)

    def head(self, path: str) -> api.ObjectMeta | None:
        """The object's size and time in the table; also of one that listings leave out."""
        return self._objects.get(path)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[api.ObjectMeta]:
        """The objects below a folder, in order."""
        begin = f"{prefix.removesuffix('/')}/" if prefix else ""
        for at in range(bisect_left(self._names, begin), len(self._names)):
            name = self._names[at]
            if not name.startswith(begin):
                return
            if after is None or name > after:
                yield self._objects[name]

    def list_level(self, prefix: str = "") -> api.Listing:
        """The entries directly in a folder."""
        begin = f"{prefix.removesuffix('/')}/" if prefix else ""
        directories: list[str] = []
        objects: list[api.ObjectMeta] = []
        at = bisect_left(self._names, begin)
        while at < len(self._names) and self._names[at].startswith(begin):
            name = self._names[at]
            first, slash, _ = name[len(begin) :].partition("/")
            if slash:
                directories.append(begin + first)
                at = bisect_left(self._names, f"{begin}{first}0")  # the character after the slash
            else:
                objects.append(self._objects[name])
                at += 1
        return api.Listing(tuple(directories), tuple(objects))

    def put(self, path: str, data: bytes) -> NoReturn:
        """Refused."""
        del data
        raise self._read_only(path)

    def put_if_absent(self, path: str, data: bytes) -> NoReturn:
        """Refused."""
        del data
        raise self._read_only(path)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> NoReturn:
        """Refused."""
        del data, e_tag
        raise self._read_only(path)

    def delete_many(self, paths: Iterable[str]) -> api.DeleteReport:
        """Refused."""
        raise self._read_only(next(iter(paths), ""))

    def _unpack(self, names: Iterable[str]) -> None:
        for name in names:
            local = os.path.join(self.folder, name)
            os.makedirs(os.path.dirname(local), exist_ok=True)
            with open(local, "xb") as file:
                file.write(self.get(name))

    def _read_only(self, path: str) -> NotExportedError:
        return NotExportedError(f"{path} cannot be changed: {self._path} is an export.")

    def _opened(self) -> zipfile.ZipFile:
        try:
            with open(self._path, "rb") as file:
                head = file.read(len(_ARCHIVE))
            archive = zipfile.ZipFile(self._path)
        except OSError as error:
            raise errors.InvalidUsageError(
                f"{self._path} cannot be read: {error.strerror}.", remedy="Give the path of an export."
            ) from error
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            what = "is cut short or damaged" if head == _ARCHIVE else "is not an export of memwal-ops"
            raise self._invalid(f"{what}.") from error
        size = sum(member.file_size for member in archive.infolist())
        if size > _MAX_BYTES:
            raise self._invalid(f"unpacks to {size:,} bytes, more than an export may have.")
        return archive

    def _member(self, name: str) -> bytes:
        try:
            return self._archive.read(name)
        except KeyError as error:
            raise self._invalid(f"is not an export of memwal-ops: it has no {name}.") from error
        except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            raise self._invalid(f"is damaged at {name}.") from error
        except Exception as error:  # zlib.error, which derives from Exception alone
            raise self._invalid(f"is damaged at {name}: {error}.") from error

    def _document(self) -> Mapping[str, Any]:
        document = self._json(self._member(_ABOUT))
        number = document.get(_KEY)
        if type(number) is not int or number < 1:
            raise self._invalid("is not an export of memwal-ops.")
        if number > FORMAT:
            raise errors.UnsupportedFeatureError(
                f"{self._path} was written by a later release ({str(document.get('release'))[:40]}).",
                remedy="Read it with that release of memwal-ops, or a later one.",
            )
        return document

    def _read_objects(self) -> tuple[dict[str, api.ObjectMeta], set[str], set[str]]:
        """All objects, the paths that listings leave out, and those of which a library needs the contents."""
        objects: dict[str, api.ObjectMeta] = {}
        hidden: set[str] = set()
        needed: set[str] = set()
        for line in self._member(_OBJECTS).splitlines():
            entry = self._json(line)
            path, size = entry.get("path"), entry.get("size")
            if not isinstance(path, str) or type(size) is not int or size < 0:
                raise self._invalid("has an entry that is not an object.")
            objects[path] = api.ObjectMeta(path, size, self._time(entry.get("modified")), None)
            if entry.get("listed") is False:
                hidden.add(path)
            if entry.get("opened") is True:
                needed.add(self._safe(path))
        return objects, hidden, needed

    def _safe(self, path: str) -> str:
        try:
            return checked_path(path)
        except errors.InvalidUsageError as error:
            raise self._invalid(f"has a file outside of the table: {path!r}.") from error

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._invalid("is damaged: a part of it is not JSON.") from error
        if not isinstance(document, dict):
            raise self._invalid("is damaged: a part of it is not a JSON object.")
        return document

    def _time(self, text: object) -> datetime:
        try:
            return datetime.fromisoformat(str(text)).astimezone(UTC)
        except (ValueError, OverflowError) as error:
            raise self._invalid("has an entry without a time.") from error

    def _invalid(self, what: str) -> errors.InvalidFormatError:
        return errors.InvalidFormatError(f"{self._path} {what}", remedy=_REMEDY)
