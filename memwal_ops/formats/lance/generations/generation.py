"""Open a flushed generation, and read its keys and rows; in both layouts it is a Lance table with ``_tombstone``.

A region-layout generation may have several rows of one key: the highest row address is the newest (S0-192), so keys are
always read with their row addresses.

Releases of Lance wrote them differently, and a table may have generations that were flushed long ago (measured in
tests/integration/contracts/old_pylance.md). Read like current ones, two differences would lose data:

* up to release 12, a generation's fields are numbered from 0, regardless of the base table's ids;
* release 7 wrote rows newest first and hid no older ones, so the highest row address of a key is its oldest write.

Small generations of an object store are copied to local files first: pylance makes nine requests or more to open a
generation of one data file and to read its keys and rows, a copy a listing and one request for each file. Files of a
generation never change, so a copy reads like the original.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from memwal_ops import errors
from memwal_ops.formats.lance.files.blobs import holds_blobs, holds_blobs_in_lists, with_payload, written_schema
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, STORE_ERRORS, lance_errors, open_dataset
from memwal_ops.formats.lance.files.named_files import FileRoot, NamedFile, Places, damaged_deletions, sizes_of
from memwal_ops.formats.lance.files.version_files import (
    DATA_FOLDER,
    VERSIONS_FOLDER,
    file_key,
    list_versions,
    read_version_manifest,
    references,
    version_of_main,
    version_path,
)
from memwal_ops.formats.lance.generations.projection import (
    TOMBSTONE,
    Node,
    Projection,
    SameField,
    nodes,
    plan_projection,
    renumbered,
)
from memwal_ops.formats.lance.retention.schema_history import OPENED, Flush, SchemaHistory, WriterVersion
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, NamingScheme, log_folder, region_folder
from memwal_ops.storage.api import LinkError, ObjectMeta, Store
from memwal_ops.storage.locations import LOCAL, Location, resolve_folder
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    import lance
    from numpy.typing import NDArray

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.bloom_filter import BloomFilter
    from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration


@dataclass(frozen=True, slots=True)
class GenerationRef:
    """A generation as its region manifest lists it (S0-049), not opened.

    ``bytes`` and ``rows`` are those in the manifest; None if the writer's release did not record them.
    """

    region_id: UUID
    generation: int
    path: str
    rows: int | None
    bytes: int | None

    @property
    def folder(self) -> str:
        """The path of its directory, relative to the table's root."""
        return f"{region_folder(self.region_id)}/{self.path}"

    def __str__(self) -> str:
        return f"generation {self.generation} of region {self.region_id} ({self.path})"


def generation_ref(region_id: UUID, flushed: FlushedGeneration) -> GenerationRef:
    """The reference to one entry of a region manifest."""
    return GenerationRef(region_id, flushed.generation, flushed.path, flushed.physical_rows, flushed.accounted_bytes)


FLUSHED = "memwal-ops.flushed"
"""In the metadata of a generation whose manifest was written again: when the first one was, in nanoseconds."""
_FIRST_WITH_BASE_IDS = 13
_NEWEST_FIRST = 7


@dataclass(frozen=True, slots=True)
class WrittenBy:
    """The release that wrote a generation, and the manifest of its dataset.

    Attributes:
        flush: when it was written.
        logged: in the region layout, when the first WAL entry was put to which it refers, by the store's clock; else as
            ``flush``.
        major: major release number of Lance; None if the manifest does not name a Lance release.
    """

    manifest: table_pb2.Manifest
    flush: Flush
    logged: Flush
    major: int | None

    @property
    def numbers_fields_from_zero(self) -> bool:
        """Whether field ids are numbered within the generation, rather than being the base table's."""
        return self.major is not None and self.major < _FIRST_WITH_BASE_IDS

    @property
    def newest_row_first(self) -> bool:
        """Whether the lowest row address of a key is its newest write.

        False in the region layout (generations that refer to ``wal/`` by base paths), for which the specification
        defines the order for every writer (S0-192).
        """
        return self.major == _NEWEST_FIRST and not self.manifest.base_paths


def read_written_by(store: Store, folder: str, version: int) -> WrittenBy:
    """Read the release that wrote the dataset at ``folder``, and the times; two requests, three in the region layout.

    Raises ``InvalidFormatError``: its manifest does not decode; ``ObjectNotFoundError``: it has no such version.
    """
    manifest: version_manifest.VersionManifest = read_version_manifest(store, version, folder=folder)
    paths = (version_path(version, naming, folder=folder) for naming in (NamingScheme.V2, NamingScheme.V1))
    meta = next((meta for path in paths if (meta := store.head(path)) is not None), None)
    if meta is None:
        raise errors.ObjectNotFoundError(f"Version {version} of {folder} was removed while it was read.")
    kept = manifest.manifest.table_metadata.get(FLUSHED, "")
    by_store = int(kept) if kept.isdecimal() else nanoseconds(meta.last_modified)
    opened = WriterVersion.parsed(manifest.manifest.table_metadata.get(OPENED))
    flush = Flush(manifest.manifest.timestamp.ToNanoseconds(), by_store, opened)
    logged = _logged(store, folder, manifest.manifest, flush)
    return WrittenBy(manifest.manifest, flush, logged, version_manifest.lance_major(manifest.manifest))


def _logged(store: Store, folder: str, manifest: table_pb2.Manifest, flush: Flush) -> Flush:
    if not manifest.base_paths or not manifest.fragments:
        return flush
    log = FileRoot(store, log_folder(folder), has_folders=False)
    entry = store.head(log.path("", manifest.fragments[0].files[0].path))
    return flush if entry is None else Flush(None, nanoseconds(entry.last_modified), flush.opened)


MAX_BYTES = 8 << 20
"""Larger generations are not copied: their bytes need most of pylance's requests anyway."""
_SHARE_OF_BUDGET = 4


@contextmanager
def copies_of(table: Table, max_bytes: int) -> Iterator[GenerationCopies | None]:
    """A temporary folder for copies; None if the table is not in an object store, or without a temporary folder.

    Copies use at most a quarter of the memory budget, ``max_bytes``, as the folder may be in memory.
    """
    if table.location.scheme in LOCAL:
        yield None
        return
    try:
        # Errors of its removal are ignored: they do not affect the result.
        place = tempfile.TemporaryDirectory(prefix="memwal-ops-copies-", ignore_cleanup_errors=True)
    except OSError:
        yield None
        return
    with place as folder:
        yield GenerationCopies(table, folder, max_bytes // _SHARE_OF_BUDGET)


class GenerationCopies:
    """Copies of generations in a folder (``location``). Paths are those below the table's root. Safe in threads."""

    def __init__(self, table: Table, folder: str, max_bytes: int) -> None:
        self.location = resolve_folder(folder)
        self.store = open_store(self.location)
        self._table = table
        self._room = max_bytes
        self._lock = Lock()

    def add(self, ref: GenerationRef) -> bool:
        """Copy a generation: a listing, and one request for each file. Returns whether it was copied.

        It is not if it is large, if not all of its files are in its folder, if it has several versions, or if the
        folder is full; reading the original reports what is missing.
        """
        if (ref.bytes or 0) > MAX_BYTES:
            return False
        listed = {meta.path.removeprefix(f"{ref.folder}/"): meta for meta in self._table.store.list(ref.folder)}
        manifests = [meta for path, meta in listed.items() if version_of_main(path) is not None]
        # In the region layout, the rows are in the log's folder.
        if len(manifests) != 1 or not any(path.startswith(f"{DATA_FOLDER}/") for path in listed):
            return False
        try:
            content = self._table.store.get(manifests[0].path)
            files = _needed(content, listed)
            if files is None or not self._fits(sum(file.size for file in files)):
                return False
            for file in files:
                self._write(file, self._table.store.get(file.path))
            self._write(manifests[0], content)
        except (errors.ObjectNotFoundError, errors.InvalidFormatError, OSError):
            return False
        return True

    def _fits(self, size: int) -> bool:
        with self._lock:
            if size > min(MAX_BYTES, self._room):
                return False
            self._room -= size
            return True

    def _write(self, meta: ObjectMeta, content: bytes) -> None:
        path = Path(self.location.uri, meta.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        moment = nanoseconds(meta.last_modified)
        os.utime(path, ns=(moment, moment))


def _needed(content: bytes, listed: dict[str, ObjectMeta]) -> list[ObjectMeta] | None:
    """The data and deletion files of a version by its manifest; None if some are not in the listing or elsewhere."""
    version = version_manifest.decode_version_manifest(content)
    if version.manifest.base_paths:
        return None
    keys = {key for key in references(version).own if not key.startswith(f"{INDICES_FOLDER}/")}
    files = {path: meta for path, meta in listed.items() if file_key(path) in keys}
    return list(files.values()) if keys <= files.keys() else None


_MAX_BATCH_ROWS = 8192
# Of filters that lack one key of a hundred, 1 in 30,000 has so many.
_SAMPLED_KEYS = 1024
# Lance decodes up to 16 batches ahead of the reader.
_BATCHES_IN_BUDGET = 128
_MIN_READ_AHEAD = 8 << 20
# More rows at once make no scan faster, and would be most of the memory of a merge of wide rows.
_MOST_IN_FLIGHT = 256 << 20


def reading_bounds(row_bytes: int, max_bytes: int) -> tuple[int, int]:
    """Rows of a batch, and bytes that are read ahead, so that rows in flight take a quarter of the budget.

    ``row_bytes`` is the average size of a row. Of a budget of more than 256 MiB no more is used.
    """
    budget, width = min(max_bytes, _MOST_IN_FLIGHT), max(1, row_bytes)
    batch_rows = min(_MAX_BATCH_ROWS, max(1, budget // _BATCHES_IN_BUDGET // width))
    # A buffer below the size of a batch would never be filled, and the scan would not end.
    return batch_rows, max(budget // 8, _MIN_READ_AHEAD, 4 * batch_rows * width)


@dataclass(frozen=True, slots=True)
class Generation:
    """An opened generation. Its projection is onto the base table's current schema.

    Attributes:
        data_bytes: size of its data files.
        physical_rows: rows in its data files, including superseded ones.
        newest_row_first: whether the lowest row address of a key is its newest write, not the highest.
    """

    ref: GenerationRef
    dataset: lance.LanceDataset
    projection: Projection
    data_bytes: int
    physical_rows: int
    newest_row_first: bool

    def read_keys(self) -> pa.Table:
        """Key columns, ``_tombstone`` (bool) and ``_rowaddr`` (uint64), in row order."""
        return self.find_keys()

    def find_keys(
        self, condition: str | None = None, fragments: Sequence[lance.LanceFragment] | None = None
    ) -> pa.Table:
        """:meth:`read_keys` of rows that meet a condition in SQL over its columns, in all fragments or these.

        No index is used: a key that a damaged one does not find would be read as an older row of it.
        """
        columns = [*self.projection.keys, *([TOMBSTONE] if self.projection.has_tombstones else [])]
        with _as_corrupt(self.ref), lance_errors("read the keys of", self.ref.folder):
            table = self.dataset.scanner(
                columns=columns,
                filter=condition,
                fragments=fragments,
                with_row_address=True,
                scan_in_order=True,
                use_scalar_index=False,
            ).to_table()
        if not self.projection.has_tombstones:
            table = table.append_column(TOMBSTONE, pa.repeat(pa.scalar(value=False), table.num_rows))
        names = [*self.projection.keys, TOMBSTONE, ROW_ADDRESS]
        # In the same schema for all: generations of other writers differ in what may be NULL.
        return pa.table([table.column(name) for name in names], names)

    def unknown_to(self, bloom: BloomFilter, kinds: Sequence[pa.DataType]) -> int:
        """How many keys of a sample a bloom filter lacks: it was damaged, or is that of other rows.

        ``kinds`` are the types of the base's key columns, as which keys are asked for.
        """
        with _as_corrupt(self.ref), lance_errors("read keys of", self.ref.folder):
            live = int(self.dataset.count_rows())
            places = np.unique(np.linspace(0, live - 1, min(live, _SAMPLED_KEYS)).astype(np.int64))
            rows = self.dataset.take(places.tolist(), columns=[*self.projection.keys]).drop_null()
            columns = zip(rows.columns, kinds, strict=True)
            keys = [column.combine_chunks().cast(kind) for column, kind in columns]
        return int(np.count_nonzero(~bloom.may_have(keys))) if rows.num_rows else 0

    def selected(self, names: Sequence[str]) -> Generation:
        """The same generation, of which only these columns of the base are read, in this order."""
        return replace(self, projection=self.projection.select(names))

    def read_rows(
        self, *, max_bytes: int, condition: str | None = None, addresses: NDArray[np.uint64] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """All live rows in row order, with the columns ``projection.source_columns``, in batches.

        Blobs are descriptors, with ``_rowaddr``: :meth:`projected` reads their bytes.

        Args:
            max_bytes: memory budget; see :func:`reading_bounds`.
            condition: SQL over the generation's columns; rows that do not meet it are left out.
            addresses: of the rows to read; None: all.
        """
        batch_rows, read_ahead = reading_bounds(self.data_bytes // max(1, self.physical_rows), max_bytes)
        if any(map(holds_blobs_in_lists, self._fields)):
            batch_rows, read_ahead = _MAX_BATCH_ROWS, max(max_bytes // 8, _MIN_READ_AHEAD)
        with _as_corrupt(self.ref), lance_errors("read the rows of", self.ref.folder):
            yield from self.dataset.scanner(
                columns=self.projection.source_columns,
                filter=condition,
                # Those of a generation are its row ids: no writer gives it stable ones.
                row_addr_allowlist=None if addresses is None else version_manifest.encode_row_ids(addresses),
                use_scalar_index=False,  # see find_keys
                batch_size=batch_rows,
                scan_in_order=True,
                io_buffer_size=read_ahead,
                with_row_address=self._has_blobs,
            ).to_batches()

    def projected(self, rows: pa.RecordBatch, *, max_bytes: int, references: bool = True) -> Iterator[pa.RecordBatch]:
        """Convert rows of :meth:`read_rows` to the base's current schema, in one batch or more.

        Args:
            rows: the rows to convert; only their blobs are read.
            max_bytes: memory budget; a quarter of it is for blobs, but a row is never split.
            references: whether external blobs stay references, as the base's writer needs them; otherwise they are
                read, and all blobs are plain bytes.

        Raises ``SchemaProjectionError``: NULL in a column that is required in the base.
        """
        if not self._has_blobs:
            with named(self.ref):
                yield self.projection.apply(rows)
            return
        projection = self.projection if references else self.projection.with_blobs_as_bytes()
        with named(self.ref), _as_corrupt(self.ref), lance_errors("read the blobs of", self.ref.folder):
            for part in with_payload(self.dataset, rows, max(1, max_bytes // 4), references=references):
                yield projection.apply(part)

    @property
    def _fields(self) -> list[pa.Field]:
        schema = self.dataset.schema
        return [schema.field(name) for name in self.projection.source_columns]

    @property
    def _has_blobs(self) -> bool:
        return any(map(holds_blobs, self._fields))

    def sealed(self) -> SealedGeneration:
        """The picklable form, from which another process can open it; rows are counted from metadata."""
        with _as_corrupt(self.ref), lance_errors("count the rows of", self.ref.folder):
            live = int(self.dataset.count_rows())
        return SealedGeneration(
            self.ref, int(self.dataset.version), self.projection, self.data_bytes, self.physical_rows, live,
            self.newest_row_first,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SealedGeneration:
    """An opened generation without its handle. By it another process opens the same dataset version.

    ``live_rows``: rows that no deletion vector hides; every later read must return as many.
    """

    ref: GenerationRef
    version: int
    projection: Projection
    data_bytes: int
    physical_rows: int
    live_rows: int
    newest_row_first: bool

    def open(self, location: Location) -> Generation:
        """Open it again; ``location`` is the table's.

        Raises ``GenerationCorruptError``: it does not open any more; ``StorageError``: the store failed.
        """
        with _as_corrupt(self.ref), lance_errors("open", self.ref.folder):
            dataset = open_dataset(location, self.ref.folder, version=self.version)
        return Generation(
            self.ref, dataset, self.projection, self.data_bytes, self.physical_rows, self.newest_row_first
        )


def open_generation(
    table: Table, ref: GenerationRef, history: SchemaHistory, copies: GenerationCopies | None = None
) -> Generation:
    """Open a generation, or its copy if it is small, and plan its projection onto the base table's current schema.

    Raises:
        GenerationMissingError: no directory, or an empty one.
        GenerationCorruptError: a directory that does not open, or a damaged deletion file.
        ForeignRootError: its manifest names another table, and this one has not all of its files.
        SchemaProjectionError: columns that cannot be projected onto the base schema.
        StorageError: the store failed; the generation may be intact.
    """
    try:
        place = copies if copies is not None and copies.add(ref) else table
        with lance_errors("open", ref.folder):
            dataset = open_dataset(place.location, ref.folder)
            fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        written = read_written_by(place.store, ref.folder, dataset.version)
        _refuse_lacking_files(table, ref, written.manifest)
        # What is in a copy may differ from what was checked in the original.
        sound = table.sound if place is table else set()
        damage = damaged_deletions(place.location, place.store, written.manifest, sound, ref.folder)
    except errors.InvalidFormatError as error:
        raise errors.GenerationCorruptError(f"The manifest of {ref} does not decode: {error}") from error
    except (errors.StorageError, errors.TableNotFoundError) as error:
        if isinstance(error, STORE_ERRORS):
            raise
        if (missing := missing_generation(table, ref)) is not None:
            raise missing from error
        raise errors.GenerationCorruptError(f"{ref} does not open as a Lance table: {error}") from error
    if damage is not None:
        raise errors.GenerationCorruptError(f"{ref} is damaged: {damage.path} {damage.why}.")
    source = nodes(dataset)
    if written.numbers_fields_from_zero:
        source = _with_base_ids(source, written, history)

    is_same = same_fields(table, history, ref.region_id, written.logged, written.flush)
    base = nodes(table.handle.get())
    projection = plan_projection(source, base, written_schema(table.schema), table.primary_key, is_same)
    data_bytes = sum(file.file_size_bytes or 0 for fragment in fragments for file in fragment.files)
    rows = sum(fragment.physical_rows for fragment in fragments)
    return Generation(ref, dataset, projection, data_bytes, rows, written.newest_row_first)


def _refuse_lacking_files(table: Table, ref: GenerationRef, manifest: table_pb2.Manifest) -> None:
    places = Places(table.location, table.store, manifest, ref.folder)
    if places.foreign_root is None:
        return
    files = tuple(places.data_files(manifest))
    lacking = lacks_files(ref, places.foreign_root, files, sizes_of(table.store, files, {}))
    if lacking is not None:
        raise lacking


def lacks_files(
    ref: GenerationRef, foreign_root: str, files: Iterable[NamedFile], sizes: Mapping[str, int]
) -> errors.ForeignRootError | None:
    """The error if the table has not all files of a generation that names another root; ``sizes``: by path."""
    for file in files:
        if (why := file.missing(sizes.get(file.path))) is not None:
            return errors.ForeignRootError(
                f"{ref} names {foreign_root} as its table, and nothing is read there, as it may be another table now. "
                f"Of {file} in this table: {why}."
            )
    return None


def same_fields(
    table: Table, history: SchemaHistory, region_id: UUID, logged: Flush, flushed: Flush | None = None
) -> SameField:
    """What decides whether a field is the one that a region's rows were written with.

    When they were put into the log (``logged``) decides, if the versions show it; else when they were flushed.
    """
    record = table.records.get(region_id)
    adopted = 0 if record is None else record.adopted

    def is_same(field_id: int, renamed: bool) -> bool | None:  # noqa: FBT001 - the shape of a callback
        # Timeline by the flush alone: a writer puts column ``note`` and is killed; ``note`` is dropped, and ``email``
        # added under its id; the next writer replays the log and flushes it: the notes would become e-mails.
        verdict = history.is_same_field(field_id, logged, renamed=renamed, adopted=adopted)
        if verdict is not None or flushed in {None, logged}:
            return verdict
        verdict = history.is_same_field(field_id, flushed or logged, renamed=renamed, adopted=adopted)
        return None if verdict and history.has_time_of_copy(logged) else verdict

    return is_same


def missing_generation(table: Table, ref: GenerationRef) -> errors.MemwalOpsError | None:
    """The error if a generation's directory is missing, or is a link, which is not followed; None if it exists."""
    try:
        if next(iter(table.store.list(ref.folder)), None) is not None:
            return None
    except LinkError as error:
        return errors.GenerationMissingError(f"The directory of {ref} is missing: {error}", remedy=error.remedy)
    return errors.GenerationMissingError(f"The directory of {ref} is missing or empty.")


def read_flush(table: Table, ref: GenerationRef) -> int | None:
    """When the oldest rows of a generation were logged or flushed, by the earliest of the known times, in ns.

    None if it does not exist. Two to five requests. Raises ``InvalidFormatError``: its manifest does not decode.
    """
    versions = list_versions(table.store, f"{ref.folder}/{VERSIONS_FOLDER}").numbered
    if not versions:
        return None
    written = read_written_by(table.store, ref.folder, max(versions))
    return min(written.flush.earliest, written.logged.earliest)


def _with_base_ids(source: tuple[Node, ...], written: WrittenBy, history: SchemaHistory) -> tuple[Node, ...]:
    """The fields with the ids that the base table had for them when the generation was flushed."""
    ids = history.base_ids(written.manifest, ignore=TOMBSTONE)
    if ids is None:
        raise errors.SchemaProjectionError(
            f"Lance {written.manifest.writer_version.version} numbered the generation's fields independently of the "
            "base table's, and no existing version had these fields when it was flushed.",
            remedy="Change the base table back to the generation's columns, merge, and change them again.",
        )
    return tuple(node if node.name == TOMBSTONE else renumbered(node, ids) for node in source)


@contextmanager
def named(source: object) -> Iterator[None]:
    """Errors of columns name the generation or log that has them."""
    try:
        yield
    except errors.SchemaProjectionError as error:
        error.args = (f"{source}: {error}",)
        raise


@contextmanager
def _as_corrupt(ref: GenerationRef) -> Iterator[None]:
    """Raise an error for a damaged generation: it opened and cannot be read, and the store did not fail."""
    try:
        yield
    except errors.StorageError as error:
        if isinstance(error, STORE_ERRORS):
            raise
        raise errors.GenerationCorruptError(f"{ref} cannot be read: {error}") from error
