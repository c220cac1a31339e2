"""Check the files of unmerged generations without reading a row: manifests, and names and sizes of the rest.

A region manifest lists a generation by number, path and rows. Whether its files are still there, no listing of
generations shows: a merge would find it out, hours later. This check costs one listing for each region, in the region
layout one of its log as well, and one request for each generation.

A region's folder is listed in bounded memory: it may have a million WAL entries, which are kept as arrays of numbers,
and generations as one sum per directory. All other files are strays, which are reported and kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.errors import (
    ForeignRootError,
    GenerationCorruptError,
    InvalidFormatError,
    MemwalOpsError,
    ObjectNotFoundError,
)
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.files.named_files import Damage, FileRoot, NamedFile, Places, sizes_of
from memwal_ops.formats.lance.generations.backlog import Backlog, BlockedRegion, RegionBacklog, still_blocked
from memwal_ops.formats.lance.generations.generation import (
    GenerationRef,
    generation_ref,
    lacks_files,
    missing_generation,
)
from memwal_ops.formats.lance.layouts import Layout, refuse_mixed
from memwal_ops.formats.lance.regions.key_files import KEY_INDEX
from memwal_ops.formats.lance.regions.manifests import HINT, unlisted
from memwal_ops.formats.lance.wire import names
from memwal_ops.formats.lance.wire.version_manifest import SYSTEM_INDEX
from memwal_ops.storage.api import LinkError, ObjectMeta, Store, concurrently, results_of
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.storage.locations import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(slots=True)
class DirectoryContents:
    """What a generation's directory has. ``youngest``: when the newest object was written."""

    objects: int = 0
    bytes: int = 0
    youngest: datetime = _LONG_AGO


@dataclass(frozen=True, slots=True)
class FileState:
    """A file's size in bytes, and when it was written."""

    bytes: int
    modified: datetime


class WalEntries:
    """The WAL entries of a region, ascending by id."""

    def __init__(self) -> None:
        self._ids = array("Q")
        self._sizes = array("Q")
        self._times = array("d")

    def add(self, entry_id: int, meta: ObjectMeta) -> None:
        """Add one, in any order; call :meth:`sort` before any other method."""
        self._ids.append(entry_id)
        self._sizes.append(meta.size)
        self._times.append(meta.last_modified.timestamp())

    def sort(self) -> None:
        """Sort them by id."""
        order = np.argsort(np.asarray(self._ids))  # a list of Python integers would need five times the memory
        for numbers in (self._ids, self._sizes, self._times):
            view = np.asarray(numbers)
            view[:] = view[order]

    @property
    def ids(self) -> array[int]:
        """Their ids."""
        return self._ids

    def up_to(self, entry_id: int) -> int:
        """The number of entries with at most that id."""
        return bisect_left(self._ids, entry_id + 1)

    def size(self, at: int) -> int:
        """Bytes of the entry at an index."""
        return self._sizes[at]

    def state(self, at: int) -> FileState:
        """The size and time of the entry at an index."""
        return FileState(self._sizes[at], datetime.fromtimestamp(self._times[at], UTC))


@dataclass(slots=True)
class RegionContents:
    """The content of one region's folder: per version its manifest, and per name the directories like generations.

    ``strays``: paths of all other files and folders. ``hinted``: there is a ``version_hint.json``.
    """

    region_id: UUID
    manifests: dict[int, FileState] = field(default_factory=dict)
    hinted: bool = False
    wal: WalEntries = field(default_factory=WalEntries)
    directories: dict[str, DirectoryContents] = field(default_factory=dict)
    strays: dict[str, FileState] = field(default_factory=dict)

    @property
    def objects(self) -> int:
        """The number of listed objects."""
        directories = sum(directory.objects for directory in self.directories.values())
        return len(self.manifests) + self.hinted + len(self.wal.ids) + directories + len(self.strays)


def read_region_contents(store: Store, region_id: UUID, layout: Layout) -> RegionContents:
    """List a region's folder; one request per 1,000 objects. Memory: 24 bytes per WAL entry.

    Raises ``MixedLayoutsError``: its log has entries of another layout.
    """
    root = names.region_folder(region_id)
    contents = RegionContents(region_id)
    suffixes = {layout.wal_suffix}
    for meta in store.list(root):
        first, _, rest = meta.path[len(root) + 1 :].partition("/")
        if first == "wal" and (entry := names.parse_wal_entry_name(rest)) is not None:
            contents.wal.add(entry.entry_id, meta)
            suffixes.add(entry.suffix)
        elif first == "manifest" and (version := names.parse_region_manifest_name(rest)) is not None:
            contents.manifests[version] = FileState(meta.size, meta.last_modified)
        elif first == "manifest" and rest == HINT:
            contents.hinted = True
        elif rest and first not in {"manifest", "wal"}:
            directory = contents.directories.setdefault(first, DirectoryContents())
            directory.objects += 1
            directory.bytes += meta.size
            directory.youngest = max(directory.youngest, meta.last_modified)
        else:
            contents.strays[meta.path] = FileState(meta.size, meta.last_modified)
    refuse_mixed(root, suffixes)
    contents.wal.sort()
    return contents


def objects_in(store: Store, directory: str) -> Iterator[tuple[str, int]]:
    """Path and bytes of all objects below a directory."""
    return ((meta.path, meta.size) for meta in store.list(directory))


_CONCURRENT_READS = 8
MERGE_IT = "memwal-ops merge URI: the base table then has the rows, and gc removes the generation with its files."
"""What to do about a damaged file of a generation without which its rows can be read."""


@dataclass(frozen=True, slots=True)
class GenerationFiles:
    """The state of a region's unmerged generations, by their files.

    Attributes:
        written: per generation that has files, when the first of them was written.
        damaged: per generation that has files, but cannot be read, the error.
        fault: the first generation that is missing or damaged, and its error; None: there is none.
        foreign_roots: per generation whose manifest names another path as its table, that path.
        indexes: per generation that can be read, the damaged files of its indexes, if footers were checked.
        sizes: per generation that can be read its rows, and the bytes of its data files: some releases record none.
    """

    written: Mapping[int, datetime]
    damaged: Mapping[int, MemwalOpsError]
    fault: tuple[int, MemwalOpsError] | None
    foreign_roots: Mapping[int, str]
    indexes: Mapping[int, Sequence[Damage]]
    sizes: Mapping[int, tuple[int, int]]

    def state(self, generation: int) -> str:
        """``missing``, ``damaged`` or ``pending``."""
        if generation not in self.written:
            return "missing"
        return "damaged" if generation in self.damaged else "pending"


@dataclass(frozen=True, slots=True)
class CheckedBacklog:
    """A backlog with what its files showed. Also blocked are regions with a missing or damaged generation."""

    backlog: Backlog
    files: Mapping[UUID, GenerationFiles]


def checked_backlog(table: Table, backlog: Backlog, limit: int | None = None) -> CheckedBacklog:
    """Check the unmerged generations of a backlog, of each region the first ``limit``."""
    files = {
        region_id: look_at_generations(table, region, limit)
        for region_id, region in backlog.regions.items()
        if region.manifest.unmerged(region.merged)
    }
    known = {fault.region_id: fault for fault in backlog.blocked}
    states = [
        BlockedRegion(region_id, *state.fault)
        for region_id, state in files.items()
        if state.fault is not None and _is_first(state.fault[0], known.get(region_id))
    ]
    faults = {fault.region_id: fault for fault in still_blocked(table, states)}
    regions = {region_id: _sized(region, files.get(region_id)) for region_id, region in backlog.regions.items()}
    regions |= {region_id: regions[region_id].before(fault.generation or 0) for region_id, fault in faults.items()}
    blocked = tuple((known | faults)[region_id] for region_id in sorted({*known, *faults}))
    return CheckedBacklog(replace(backlog, regions=regions, blocked=blocked), files)


def _sized(region: RegionBacklog, files: GenerationFiles | None) -> RegionBacklog:
    """The same, with the sizes that its writer did not record, as far as the files told them."""
    sizes, flushed = {} if files is None else files.sizes, [*region.manifest.flushed_generations]
    for at, generation in enumerate(flushed):
        recorded = generation.physical_rows, generation.in_memory_bytes
        if None in recorded and (size := sizes.get(generation.generation)) is not None:
            rows, in_memory = (known if own is None else own for own, known in zip(recorded, size, strict=True))
            flushed[at] = replace(generation, physical_rows=rows, in_memory_bytes=in_memory)
    by_number = {generation.generation: generation for generation in flushed}
    pending = tuple(generation_ref(ref.region_id, by_number[ref.generation]) for ref in region.pending)
    return replace(region, manifest=replace(region.manifest, flushed_generations=tuple(flushed)), pending=pending)


def oldest_unmerged(table: Table, checked: CheckedBacklog) -> datetime | None:
    """When the oldest unmerged generation of a backlog was written; None: there is none.

    A generation whose files are gone was written before the first manifest that lists it: an age that alerts must not
    fall when it is lost. Of a region whose manifest cannot be read, directories above its progress count.
    """
    backlog = checked.backlog
    times = [_written_before(table, backlog.regions[region_id], files) for region_id, files in checked.files.items()]
    unread = (blocked.region_id for blocked in backlog.blocked if blocked.region_id not in backlog.regions)
    times += (_oldest_directory(table, region_id) for region_id in unread)
    return min(filter(None, times), default=None)


def _written_before(table: Table, region: RegionBacklog, files: GenerationFiles) -> datetime | None:
    first = region.manifest.unmerged(region.merged)[0].generation
    if first in files.written:
        return files.written[first]
    listed = table.region(region.manifest.region_id).listed_since(first)
    return min(filter(None, [listed, *files.written.values()]), default=None)


def _oldest_directory(table: Table, region_id: UUID) -> datetime | None:
    merged, times = table.index.merged_generations.get(region_id, 0), []
    with suppress(LinkError):
        for meta in table.store.list(names.region_folder(region_id)):
            directory = names.parse_generation_dir(meta.path.split("/")[2])
            if directory is not None and directory.generation > merged:
                times.append(meta.last_modified)
    return min(times, default=None)


def _is_first(generation: int, known: BlockedRegion | None) -> bool:
    """Whether a region is blocked before the generation that was known to block it; never if all of it is blocked."""
    return known is None or (known.generation is not None and generation < known.generation)


def look_at_generations(
    table: Table, region: RegionBacklog, limit: int | None = None, *, footers: bool = False
) -> GenerationFiles:
    """Check the files of the generations that a region lists above its progress, or of the first ``limit`` of them.

    ``footers``: check the end of each data file as well, and all of each deletion file, with one request for each, and
    the end of each index file. Whoever opens a generation reads its deletion files in any case.
    """
    region_id = region.manifest.region_id
    refs = [generation_ref(region_id, flushed) for flushed in region.manifest.unmerged(region.merged)][:limit]
    files = _listed(table, refs)
    existing = [ref for ref in refs if files[ref.path]]
    named = _all_named(table, existing, files)
    errors = _errors(table, existing, named, files, footers=footers)
    errors_of = {ref.generation: error for ref, error in zip(existing, errors, strict=True)}
    fault: tuple[int, MemwalOpsError] | None = None
    for ref in refs:
        if fault is not None:
            break
        suspect = ref.generation not in errors_of or errors_of[ref.generation] is not None
        if suspect and (error := _confirmed(table, ref, footers=footers)) is not None:
            fault = ref.generation, error
    written = {ref.generation: min(file.last_modified for file in files[ref.path].values()) for ref in existing}
    damaged = {generation: error for generation, error in errors_of.items() if error is not None}
    roots, indexes, sizes = dict[int, str](), dict[int, Sequence[Damage]](), dict[int, tuple[int, int]]()
    for ref, opened in zip(existing, named, strict=True):
        if isinstance(opened, MemwalOpsError):
            continue
        if opened.foreign_root is not None:
            roots[ref.generation] = opened.foreign_root
        if footers:
            indexes[ref.generation] = _damaged_indexes(table, ref, opened, files[ref.path])
        if opened.rows is not None and ref.generation not in damaged:
            sizes[ref.generation] = opened.rows, _bytes_of(opened, files[ref.path])
    return GenerationFiles(written, damaged, fault, roots, indexes, sizes)


def _damaged_indexes(
    table: Table, ref: GenerationRef, named: _Named, files: Mapping[str, ObjectMeta]
) -> Sequence[Damage]:
    """The damaged files of the indexes that a generation's manifest names, and of its key index.

    No merge reads them: the rows are right without.
    """
    place, folders = FileRoot(table.store, ref.folder), [f"{ref.folder}/{KEY_INDEX}"]
    sizes: dict[str, int] = {}
    for index in named.indexes:
        folder = f"{ref.folder}/{version_files.index_key(index)}"
        folders.append(folder)
        sizes |= {f"{folder}/{file.path}": int(file.size_bytes) for file in index.files}
        if not any(path.startswith(f"{folder}/") for path in (*files, *sizes)):
            sizes[folder] = 0
    there = {path for path in files if path.startswith(tuple(f"{folder}/" for folder in folders))}
    try:
        indexes = [place.index_file(path, sizes.get(path, 0)) for path in sorted(there | sizes.keys())]
    except InvalidFormatError as error:
        return [Damage(f"{ref.folder}/{version_files.VERSIONS_FOLDER}", names.INDICES_FOLDER, str(error), MERGE_IT)]

    def damage(file: NamedFile) -> str | None:
        meta = files.get(file.path)
        return file.missing(None) if meta is None else file.damage(meta.size)

    checked = concurrently(damage, indexes, threads=_CONCURRENT_READS)
    return [Damage(file.path, names.INDICES_FOLDER, why, MERGE_IT) for file, why in checked if why is not None]


def _confirmed(table: Table, ref: GenerationRef, *, footers: bool) -> MemwalOpsError | None:
    """The error of a generation by its own listing: that of the region may have been made while it was written."""
    fresh = replace(table, store=unlisted(table.store))
    try:
        files = {meta.path: meta for meta in fresh.store.list(ref.folder)}
    except LinkError:
        files = {}
    if not files:
        return missing_generation(table, ref)
    listed = {ref.path: files}
    return next(iter(_errors(fresh, [ref], _all_named(fresh, [ref], listed), listed, footers=footers)))


def _listed(table: Table, refs: Sequence[GenerationRef]) -> Mapping[str, dict[str, ObjectMeta]]:
    listed: dict[str, dict[str, ObjectMeta]] = {ref.path: {} for ref in refs}
    for meta in _files(table, refs):
        directory = meta.path.split("/")[2]
        if directory in listed and meta.path.count("/") > 2:  # noqa: PLR2004 - a file in the directory, and no link
            listed[directory][meta.path] = meta
    return listed


def _files(table: Table, refs: Sequence[GenerationRef]) -> Iterator[ObjectMeta]:
    """The files of the generations, and others: from a listing of the region, up to the last directory.

    In order of names, the log comes behind the generations. Local files are listed in no order, and by directory.
    """
    if table.location.scheme in LOCAL:
        for ref in refs:
            try:
                yield from table.store.list(ref.folder)
            except LinkError:
                continue  # as if it were missing
        return
    last = max((f"{ref.folder}0" for ref in refs), default="")  # "0" sorts behind "/"
    listing = table.store.list(names.region_folder(refs[0].region_id)) if refs else iter(())
    while page := list(islice(listing, version_files.PAGE)):
        yield from page
        if version_files.is_ascending(page) and page[-1].path > last:  # not on S3 Express
            return


def _all_named(
    table: Table, refs: Sequence[GenerationRef], files: Mapping[str, Mapping[str, ObjectMeta]]
) -> Sequence[_Named | MemwalOpsError]:
    """For each generation with files, the files that it names, or why they cannot be read. A request for each."""
    return results_of(lambda ref: _named(table, ref, files[ref.path]), refs, threads=_CONCURRENT_READS)


def _errors(
    table: Table,
    refs: Sequence[GenerationRef],
    named: Sequence[_Named | MemwalOpsError],
    files: Mapping[str, Mapping[str, ObjectMeta]],
    *,
    footers: bool,
) -> Sequence[MemwalOpsError | None]:
    sizes = {path: meta.size for listed in files.values() for path, meta in listed.items()}
    try:
        read = (file for opened in named if isinstance(opened, _Named) for file in opened.files)
        sizes |= sizes_of(table.store, read, sizes)
        pairs = zip(refs, named, strict=True)
        return results_of(lambda it: _damage(table, *it, sizes, footers=footers), pairs, threads=_CONCURRENT_READS)
    except LinkError as error:
        return [error for _ in refs]


@dataclass(frozen=True, slots=True)
class _Named:
    """The files and indexes that the newest manifest of a generation names; none if an export has no manifest."""

    files: tuple[NamedFile, ...]
    foreign_root: str | None
    indexes: Sequence[table_pb2.IndexMetadata] = ()
    rows: int | None = None


def _bytes_of(named: _Named, listed: Mapping[str, ObjectMeta]) -> int:
    """The bytes of its data files. A manifest of old releases has no sizes, and files in its folder alone."""
    return sum(file.size or listed[file.path].size for file in named.files if file.size or file.path in listed)


def _named(table: Table, ref: GenerationRef, files: Mapping[str, ObjectMeta]) -> _Named | MemwalOpsError:
    start = len(ref.folder) + 1
    versions = {version: path for path in files if (version := version_files.version_of_main(path[start:])) is not None}
    if not versions:
        return GenerationCorruptError(f"{ref} has files, and no manifest.")
    path = versions[max(versions)]
    try:
        manifest = version_files.decode_named(path, table.store.get(path))
        places = Places(table.location, table.store, manifest.manifest, ref.folder)
        indexes = [index for index in manifest.index_entries if not index.name.startswith(SYSTEM_INDEX)]
        rows = sum(fragment.physical_rows for fragment in manifest.manifest.fragments)
        return _Named(tuple(places.data_files(manifest.manifest)), places.foreign_root, indexes, rows)
    except NotExportedError:
        return _Named((), None)
    except ForeignRootError as error:
        return error
    except (InvalidFormatError, ObjectNotFoundError) as error:
        return GenerationCorruptError(f"The manifest of {ref} does not decode: {error}")


def _damage(
    table: Table, ref: GenerationRef, named: _Named | MemwalOpsError, sizes: Mapping[str, int], *, footers: bool
) -> MemwalOpsError | None:
    if isinstance(named, MemwalOpsError):
        return named
    if named.foreign_root is not None and (lacking := lacks_files(ref, named.foreign_root, named.files, sizes)):
        return lacking
    for file in named.files:
        size = sizes.get(file.path)
        why = file.missing(size)
        if why is None and footers and size is not None:
            why = file.damage(size)
        if why is not None:
            return GenerationCorruptError(f"{ref} is damaged: {file}: {why}.")
        if footers and file.of is not None:
            table.sound.add(str(file))
    return None
