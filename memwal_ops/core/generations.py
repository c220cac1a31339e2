"""One flushed generation: open it, read who is in it, read what its winners say.

Both layouts look alike from here (a Lance table with a ``_tombstone`` column); what differs is
that a region-layout generation may hold several rows of one key. Row addresses decide between
those: the highest is the newest (S0-192), so every key read carries them.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.core.datasets import open_dataset
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.layout import region_folder
from memwal_ops.core.projection import TOMBSTONE, Node, Projection, nodes, plan_projection, renumbered
from memwal_ops.core.writer_release import WrittenBy, read_written_by
from memwal_ops.errors import (
    GenerationCorruptError,
    GenerationMissingError,
    InvalidFormatError,
    ReadOnlyStoreError,
    SchemaProjectionError,
    StorageCredentialsError,
    StorageError,
    StoreUnavailableError,
    TableNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    import lance

    from memwal_ops.core.schema_history import SchemaHistory
    from memwal_ops.core.table import Table
    from memwal_ops.format.region_manifest import FlushedGeneration
    from memwal_ops.storage.locations import Location

ROW_ADDRESS = "_rowaddr"
_MAX_BATCH_ROWS = 8192
# Lance decodes up to 16 batches ahead of whoever reads them.
_BATCHES_IN_BUDGET = 128
_MIN_READ_AHEAD = 8 << 20
_NOT_THE_GENERATIONS_FAULT = (StorageCredentialsError, ReadOnlyStoreError, StoreUnavailableError)


@dataclass(frozen=True, slots=True)
class GenerationRef:
    """A generation as its region manifest lists it (S0-049), without having looked at it.

    ``bytes`` and ``rows`` are the manifest's accounting; None where the writer's release kept none.
    """

    region_id: UUID
    generation: int
    path: str
    rows: int | None
    bytes: int | None

    @property
    def folder(self) -> str:
        """Where it lies, relative to the table's root."""
        return f"{region_folder(self.region_id)}/{self.path}"

    def __str__(self) -> str:
        return f"generation {self.generation} of region {self.region_id} ({self.path})"


def generation_ref(region_id: UUID, flushed: FlushedGeneration) -> GenerationRef:
    """The reference to one entry of a region manifest."""
    return GenerationRef(region_id, flushed.generation, flushed.path, flushed.physical_rows, flushed.accounted_bytes)


@dataclass(frozen=True, slots=True)
class Generation:
    """An opened generation, with the way to the base table's present schema.

    Attributes:
        data_bytes: size of its data files.
        physical_rows: rows in its data files, superseded ones included.
        newest_row_first: whether the lowest row address of a key is its newest write, not the highest.
    """

    ref: GenerationRef
    dataset: lance.LanceDataset
    projection: Projection
    data_bytes: int
    physical_rows: int
    newest_row_first: bool

    def read_keys(self) -> pa.Table:
        """Key columns under the base's names, ``_tombstone`` (bool) and ``_rowaddr`` (uint64), in row order."""
        columns = [*self.projection.keys, *([TOMBSTONE] if self.projection.has_tombstones else [])]
        table = self._read(columns)
        if not self.projection.has_tombstones:
            table = table.append_column(TOMBSTONE, pa.repeat(pa.scalar(value=False), table.num_rows))
        return table.select([*self.projection.keys, TOMBSTONE, ROW_ADDRESS])

    def read_rows(self, *, max_bytes: int) -> Iterator[pa.RecordBatch]:
        """All live rows in row order, as ``projection.source_columns`` of the generation, in batches.

        Args:
            max_bytes: memory budget; batches are cut and read ahead so that about a quarter of it is used,
                by the average size of this generation's rows.
        """
        row_bytes = max(1, self.data_bytes // max(1, self.physical_rows))
        batch_rows = min(_MAX_BATCH_ROWS, max(1, max_bytes // _BATCHES_IN_BUDGET // row_bytes))
        with _as_corrupt(self.ref), lance_errors("read the rows of", self.ref.folder):
            yield from self.dataset.scanner(
                columns=self.projection.source_columns,
                batch_size=batch_rows,
                scan_in_order=True,
                io_buffer_size=max(max_bytes // 8, _MIN_READ_AHEAD),
                blob_handling="all_binary",
            ).to_batches()

    def sealed(self) -> SealedGeneration:
        """What another process needs to open it; counts its rows from metadata alone."""
        with _as_corrupt(self.ref), lance_errors("count the rows of", self.ref.folder):
            live = int(self.dataset.count_rows())
        return SealedGeneration(
            self.ref,
            int(self.dataset.version),
            self.projection,
            self.data_bytes,
            self.physical_rows,
            live,
            self.newest_row_first,
        )

    def _read(self, columns: list[str]) -> pa.Table:
        with _as_corrupt(self.ref), lance_errors("read the keys of", self.ref.folder):
            return self.dataset.scanner(columns=columns, with_row_address=True, scan_in_order=True).to_table()


@dataclass(frozen=True, slots=True)
class SealedGeneration:
    """An opened generation without its handle, so that another process can open the very same one.

    Attributes:
        version: the dataset version that was opened.
        live_rows: rows that no deletion vector hides; what every later reading must give.
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

        Raises:
            GenerationCorruptError: it does not open any more.
            StorageError: the store failed; the generation may be well.
        """
        with _as_corrupt(self.ref), lance_errors("open", self.ref.folder):
            dataset = open_dataset(location, self.ref.folder, version=self.version)
        return Generation(
            self.ref, dataset, self.projection, self.data_bytes, self.physical_rows, self.newest_row_first
        )


def open_generation(table: Table, ref: GenerationRef, history: SchemaHistory) -> Generation:
    """Open a generation and match its columns to the base table's present schema.

    Raises:
        GenerationMissingError: no directory, or an empty one.
        GenerationCorruptError: a directory that does not open.
        SchemaProjectionError: columns that cannot be brought to the base schema.
        StorageError: the store failed; the generation may be well.
    """
    try:
        with lance_errors("open", ref.folder):
            dataset = open_dataset(table.location, ref.folder)
            fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        written = read_written_by(table.store, ref.folder, dataset.version)
    except InvalidFormatError as error:
        raise GenerationCorruptError(f"The manifest of {ref} does not decode: {error}") from error
    except (StorageError, TableNotFoundError) as error:
        if isinstance(error, _NOT_THE_GENERATIONS_FAULT):
            raise
        if next(iter(table.store.list(ref.folder)), None) is None:
            raise GenerationMissingError(f"The directory of {ref} is not there or empty.") from error
        raise GenerationCorruptError(f"{ref} does not open as a Lance table: {error}") from error
    source = nodes(dataset)
    if written.numbers_fields_from_zero:
        source = _with_base_ids(source, written, history)
    projection = plan_projection(
        source, nodes(table.dataset), table.dataset.schema, table.primary_key, history.is_rename
    )
    files = [file for fragment in fragments for file in fragment.files]
    return Generation(
        ref,
        dataset,
        projection,
        data_bytes=sum(file.file_size_bytes or 0 for file in files),
        physical_rows=sum(fragment.physical_rows for fragment in fragments),
        newest_row_first=written.newest_row_first,
    )


def _with_base_ids(source: tuple[Node, ...], written: WrittenBy, history: SchemaHistory) -> tuple[Node, ...]:
    """The fields under the ids that the base table had for them when the generation was flushed."""
    ids = history.base_ids(written.manifest, ignore=TOMBSTONE)
    if ids is None:
        raise SchemaProjectionError(
            f"Lance {written.manifest.writer_version.version} numbered the generation's fields without regard to the "
            "base table's, and no version is left that had these fields when it was flushed.",
            remedy="Bring the base table back to the generation's columns, merge, and change them again.",
        )
    return tuple(node if node.name == TOMBSTONE else renumbered(node, ids) for node in source)


@contextmanager
def _as_corrupt(ref: GenerationRef) -> Iterator[None]:
    """A generation that opened but does not read is damaged, unless the store itself is at fault."""
    try:
        yield
    except StorageError as error:
        if isinstance(error, _NOT_THE_GENERATIONS_FAULT):
            raise
        raise GenerationCorruptError(f"{ref} cannot be read: {error}") from error
