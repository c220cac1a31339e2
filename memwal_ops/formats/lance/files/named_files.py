"""Find the data and deletion files that a manifest names: below the dataset's own root, or at one of its base paths.

A branch and a shallow clone name files of another table, and a generation of the region layout files of the log, by
base paths. A version that names a file is not readable without it, wherever that is. A generation's log is the one of
the table that was opened, whatever path its manifest names: the table may have been copied, moved or mounted elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from memwal_ops import errors
from memwal_ops.formats.lance.files.datasets import REFS_FOLDER, own_log
from memwal_ops.formats.lance.files.version_files import DATA_FOLDER, DELETIONS_FOLDER, VERSIONS_FOLDER, deletion_path
from memwal_ops.formats.lance.wire.lance_file import check_deletion_file, check_lance_file, is_first_format
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, log_folder
from memwal_ops.formats.lance.wire.version_manifest import LOST_VALUES
from memwal_ops.storage.api import LinkError, Store, concurrently
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.storage.locations import BRANCHES_FOLDER, Location, resolve_folder
from memwal_ops.storage.object_store import checked_path
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from memwal_ops.formats.lance.wire._pb import table_pb2

# Files before Lance 2.0 (written as 0.3) have another footer.
_FOOTER_SINCE = (0, 3)
_TAIL_BYTES = 32 << 10
# Fewer files of one folder are asked for one by one.
_FEW = 8
_CONCURRENT_READS = 16
_LANCE_FILES = (".lance", ".idx")
MISSING = "is missing"
"""Why a file is damaged that does not exist."""
_BITMAP = 1  # the type of a deletion file
RESTORE = (
    "Restore the file from a backup; do not run gc or expire before that. If there is none, memwal-ops repair URI "
    "lists what else can be done."
)
RESTORE_DEEP = RESTORE.replace("repair URI", "repair URI --deep")
_REMEDIES = {
    REFS_FOLDER: "Restore the file from a backup, or create the tag again at its version; before that, gc and expire "
    "delete nothing.",
    DATA_FOLDER: RESTORE,
    DELETIONS_FOLDER: RESTORE,
    VERSIONS_FOLDER: LOST_VALUES,
    INDICES_FOLDER: "Build the index anew: memwal-ops catchup URI --index NAME --rebuild; or restore the file.",
}


class IndexCorruptError(errors.TableCorruptError):
    """A file of an index is missing or damaged: all rows are there."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged file of the newest version.

    Attributes:
        path: relative to the table, or the URI of a file in another table.
        folder: the folder of a dataset that has such files.
        why: the damage, as the end of a sentence that begins with the path.
        fix: what to do, if that is not what helps for all files of the folder.
        of: what is wrong with all such files, if this is the first of several: ``3 data files are missing``.
    """

    path: str
    folder: str
    why: str
    fix: str = ""
    of: str = ""

    @property
    def what(self) -> str:
        """The damage, as the beginning of a sentence."""
        how = "" if self.why == MISSING else f", which {self.why}"
        return f"{self.of}, the first is {self.path}{how}" if self.of else f"{self.path} {self.why}"

    @property
    def named(self) -> str:
        """The path, as the subject of a sentence."""
        return f"{self.path} (the first of {self.of.partition(' ')[0]})" if self.of else self.path

    @property
    def remedy(self) -> str:
        """What to do."""
        return self.fix or _REMEDIES.get(self.folder) or errors.TableCorruptError.remedy

    @property
    def error(self) -> errors.TableCorruptError:
        """The error of a job that needs the file."""
        kind = IndexCorruptError if self.folder == INDICES_FOLDER else errors.TableCorruptError
        return kind(f"{self.what}.", remedy=self.remedy)


class _Entry(Protocol):
    """What may have a base path."""

    base_id: int

    def HasField(self, field_name: str, /) -> bool: ...  # noqa: N802 - protobuf's name


def _possible(path: str) -> str:
    try:
        return checked_path(path)
    except errors.InvalidUsageError as error:
        raise errors.InvalidFormatError(f"it names a file that cannot be: {error}") from error


@dataclass(frozen=True, slots=True)
class FileRoot:
    """A root of files: a folder of a store.

    ``has_folders``: data, deletion and index files have their folders there, as in a dataset's root. ``uri``: of a base
    path outside of the table; empty: the place is in the table.
    """

    store: Store
    folder: str
    has_folders: bool = True
    uri: str = ""

    def path(self, folder: str, name: str) -> str:
        """The path of a file in the store, by its folder in a dataset, and its name.

        Raises ``InvalidFormatError``: no file can have that name: a bit of the manifest was flipped, say.
        """
        return _possible("/".join(filter(None, (self.folder, folder if self.has_folders else "", name))))

    def index_file(self, path: str, size: int = 0) -> NamedFile:
        """A file of an index; ``size``: 0: not recorded. Raises: see :meth:`path`."""
        return NamedFile(self, _possible(path), size, has_footer=path.endswith(_LANCE_FILES))

    def shown(self, path: str) -> str:
        """A path of the store for messages: relative to the table, or a URI."""
        return f"{self.uri}/{path}" if self.uri else path


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that a manifest names, by its path in the place's store.

    ``size``: in bytes; 0: not recorded. ``has_footer``: it is a Lance file. ``of``: of a deletion file, the fragment of
    which it deletes rows.
    """

    place: FileRoot
    path: str
    size: int
    has_footer: bool = False
    of: table_pb2.DataFragment | None = None

    def __str__(self) -> str:
        return self.place.shown(self.path)

    def missing(self, size: int | None) -> str | None:
        """What is wrong by its size, as the end of a sentence; None: nothing. ``size``: None: it does not exist."""
        if size is None:
            return "it is missing, and the generation's manifest names it"
        if self.size not in {0, size}:
            return f"it has {size:,} bytes, and {self.size:,} by the generation's manifest"
        return "it is empty" if self.of is not None and not size else None

    def damage(self, size: int) -> str | None:
        """What is wrong with a file that has that many bytes, as a clause; None: nothing. At most one request.

        Of a data or index file the end is read, a deletion file as a whole. Raises ``ObjectNotFoundError``.
        """
        if self.size not in {0, size}:
            return f"it has {size:,} bytes, and {self.size:,} by the version's manifest"
        try:
            if self.of is not None:
                self._check_deletions(self.of)
            elif self.has_footer:
                tail = self.place.store.get_range(self.path, max(0, size - _TAIL_BYTES), _TAIL_BYTES)
                if not is_first_format(tail, size):
                    check_lance_file(tail, size)
        except errors.InvalidFormatError as error:
            return str(error).rstrip(".")
        except NotExportedError:
            return None  # its size is right; verify reports that no more was checked
        return None

    def _check_deletions(self, fragment: table_pb2.DataFragment) -> None:
        deleted, bitmap = int(fragment.deletion_file.num_deleted_rows), fragment.deletion_file.file_type == _BITMAP
        check_deletion_file(
            self.place.store.get(self.path), bitmap=bitmap, deleted=deleted, rows=int(fragment.physical_rows)
        )


def recorded_size(file: table_pb2.DataFile) -> int:
    """The size of a data file by its manifest; 0: not recorded.

    For files of the version "legacy", pylance 7 recorded less than it wrote.
    """
    is_first = (file.file_major_version, file.file_minor_version) < _FOOTER_SINCE
    return 0 if is_first else int(file.file_size_bytes)


def sizes_of(store: Store, files: Iterable[NamedFile], known: Mapping[str, int]) -> Mapping[str, int]:
    """By path the sizes of those of the files in a store that exist, except those that are ``known``.

    Requests: one for each of a few files in a folder, else a listing of it.
    """
    folders: dict[str, set[str]] = {}
    for file in files:
        if file.place.store is store and file.path not in known:
            folders.setdefault(file.path.rpartition("/")[0], set()).add(file.path)
    sizes: dict[str, int] = {}
    for folder, paths in folders.items():
        if len(paths) <= _FEW:
            sizes |= {path: meta.size for path in paths if (meta := store.head(path)) is not None}
            continue
        for meta in store.list(folder):
            if meta.path in paths:
                sizes[meta.path] = meta.size
                paths.discard(meta.path)
            if not paths:
                break
    return sizes


def absolute_base(uri: str, path: str) -> str:
    """A base path; a relative one of a branch is its table's root, if a relative URI created the branch.

    Raises ``UnsupportedFeatureError``: it is relative to what is not known.
    """
    if "://" in path or os.path.isabs(path):
        return path
    root, tree, _ = uri.partition(f"/{BRANCHES_FOLDER}/")
    if tree and f"{root}/".endswith(f"/{path.removeprefix('./')}/"):
        return root
    raise errors.UnsupportedFeatureError(
        f"The base path {path!r} of {uri} is relative: Lance looks for it below the folder in which a process works, "
        "so that another process finds other files, or none.",
        remedy="Give Lance absolute URIs: create the clone again, or write the rows again with an absolute base path.",
    )


class Places:
    """The places of a dataset's files, of the table or of a generation in ``folder``, by its manifest.

    ``location`` is the table's, whose storage options are used for base paths outside of it. ``foreign_root``: the path
    of another table, or of this one by another mount, that a generation names as its own.
    """

    def __init__(self, location: Location, store: Store, manifest: table_pb2.Manifest, folder: str = "") -> None:
        """No request is made."""
        self._location, self._store = location, store
        self.own = FileRoot(store, folder)
        roots = (base.path.rstrip("/").removesuffix(f"/{log_folder(folder)}") for base in manifest.base_paths)
        self.foreign_root = next((root for root in roots if folder and root != location.uri), None)
        self._bases = {base.id: base for base in manifest.base_paths}
        self._opened: dict[int, FileRoot] = {}

    def of(self, entry: _Entry) -> FileRoot:
        """The place of a data file, deletion file or index.

        Raises:
            InvalidFormatError: the manifest does not define the base path.
            UnsupportedFeatureError: the base path is relative.
            ForeignRootError: see :func:`memwal_ops.formats.lance.files.datasets.own_log`.
            NotExportedError: the base path is outside of a table that is read from an export.
            MemwalOpsError: its store cannot be opened.
        """
        if not entry.HasField("base_id"):
            return self.own
        if entry.base_id not in self._opened:
            if entry.base_id not in self._bases:
                raise errors.InvalidFormatError(f"it names files in base {entry.base_id}, which it does not define")
            self._opened[entry.base_id] = self._open(self._bases[entry.base_id])
        return self._opened[entry.base_id]

    def _open(self, base: table_pb2.BasePath) -> FileRoot:
        if self.own.folder:
            own_log(self._location, self.own.folder, base.path)
            return FileRoot(self._store, log_folder(self.own.folder), base.is_dataset_root)
        path, own = absolute_base(self._location.folder, base.path.rstrip("/")), f"{self._location.folder}/"
        if path.startswith(own):
            return FileRoot(self._store, path.removeprefix(own), base.is_dataset_root)
        if self._location.files is not None:
            raise NotExportedError(f"The files at {path} are not in the export.")
        return FileRoot(open_store(resolve_folder(path, self._location.lance_options)), "", base.is_dataset_root, path)

    def data_files(self, manifest: table_pb2.Manifest) -> Iterator[NamedFile]:
        """The data and deletion files that the manifest names. Raises: see :meth:`of`."""
        return files_of(manifest, self.of)

    def index_folder(self, index: table_pb2.IndexMetadata) -> tuple[FileRoot, str]:
        """The place of an index, and its folder in the place's store. Raises: see :meth:`of`."""
        place = self.of(index)
        return place, place.path(INDICES_FOLDER, str(UUID(bytes=index.uuid.uuid)))


def files_of(manifest: table_pb2.Manifest, place_of: Callable[[_Entry], FileRoot | None]) -> Iterator[NamedFile]:
    """The data and deletion files of a manifest, but those that have no place.

    Raises ``InvalidFormatError``: a deletion file of an unknown type.
    """
    for fragment in manifest.fragments:
        for file in fragment.files:
            if (place := place_of(file)) is not None:
                yield NamedFile(place, place.path(DATA_FOLDER, file.path), recorded_size(file), has_footer=True)
        if fragment.HasField("deletion_file") and (place := place_of(fragment.deletion_file)) is not None:
            folder, _, name = deletion_path(fragment.id, fragment.deletion_file).partition("/")
            yield NamedFile(place, place.path(folder, name), 0, of=fragment)


def damaged_deletions(
    location: Location, store: Store, manifest: table_pb2.Manifest, sound: set[str], folder: str = ""
) -> Damage | None:
    """The first damaged deletion file of a dataset. One request for each that is not sound.

    pylance ends the process by a signal on some of them, and by others hides rows that were not deleted. One that is
    missing or behind a link is left to pylance, which reports it.

    ``sound``: those that were found to be sound before in this run; the ones that are found now are added.

    Raises: see :meth:`Places.of`.
    """

    def damage(file: NamedFile) -> str | None:
        try:
            return file.damage(0)
        except (errors.ObjectNotFoundError, LinkError):
            return None

    if not any(fragment.HasField("deletion_file") for fragment in manifest.fragments):
        return None
    files = Places(location, store, manifest, folder).data_files(manifest)
    unseen = (file for file in files if file.of is not None and str(file) not in sound)
    for file, why in concurrently(damage, unseen, threads=_CONCURRENT_READS):
        if why is not None:
            return Damage(str(file), DELETIONS_FOLDER, f"is damaged: {why}")
        sound.add(str(file))
    return None
