"""Read the base table's indexes, and the fragments that their segments cover.

The coverage of an index is read only from its bitmaps: ``index_catchup`` is not reliable, as the two specifications
disagree about an index that is absent from it, and pylance does not update it when an update moves rows out of an
index.

The manifest has the fragments that a segment covers; only its files show which rows are in it. Read are only the row
ids or row addresses, 8 bytes each, of a bitmap index its maps.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
from google.protobuf import empty_pb2
from google.protobuf.unknown_fields import UnknownFieldSet
from lance.file import LanceFileReader

from memwal_ops import errors
from memwal_ops.formats.lance.files.datasets import ROW_ID, lance_errors, lance_options
from memwal_ops.formats.lance.files.named_files import absolute_base
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.locations import Location


_SCALAR = frozenset({"BTree", "Bitmap", "LabelList", "Inverted", "NGram", "ZoneMap", "BloomFilter"})
# Field numbers of VectorIndexDetails (protos/index.proto of Lance).
_HNSW = 3
_COMPRESSIONS = {4: "PQ", 5: "SQ", 6: "RQ", 8: "FLAT"}


@dataclass(frozen=True, slots=True)
class BaseIndex:
    """One index of a table version; names and types as pylance shows them.

    ``name``: its name. ``type``: for example ``BTree``, ``Inverted``, ``IVF_PQ``. ``segments``: its entries, the oldest
    first. ``covered``: ids of all fragments that its segments cover, including those that no longer exist.
    """

    name: str
    type: str
    segments: tuple[table_pb2.IndexMetadata, ...]
    covered: frozenset[int]

    @property
    def is_vector(self) -> bool:
        """Whether it has a codebook; indexes of older releases are recognized only by their type."""
        urls = {entry.index_details.type_url for entry in self.segments}
        return self.type.startswith("IVF_") or any(url.endswith("VectorIndexDetails") for url in urls)

    @property
    def segment_ids(self) -> frozenset[UUID]:
        """Ids of the segments."""
        return frozenset(UUID(bytes=entry.uuid.uuid) for entry in self.segments)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How far an index is behind a version. ``uncovered``: ids of fragments; ``uncovered_rows``: live rows in them."""

    fragments: int
    uncovered: frozenset[int]
    uncovered_rows: int

    @property
    def complete(self) -> bool:
        """Whether every fragment is covered."""
        return not self.uncovered


def base_indexes(table: Table) -> Mapping[str, BaseIndex]:
    """The table's indexes by name, in order of name; Lance's system indexes are left out.

    Raises ``TableCorruptError``: a fragment bitmap does not decode.
    """
    entries = version_manifest.by_name(table.manifest)
    if not entries:
        return {}
    types = {name: _type_of(same[0].index_details) for name, same in entries.items()}
    if None in types.values():
        with lance_errors("read the indexes of", table.location.uri):
            types = {index.name: index.index_type for index in table.handle.get().describe_indices()}
    return {
        name: BaseIndex(name, types.get(name) or "unknown", tuple(entries[name]), covered_by(entries[name]))
        for name in sorted(entries)
    }


def _type_of(details: Any) -> str | None:
    """The type of an index as its details show it; None for those that pylance derives from the index's files."""
    kind = details.type_url.rpartition(".")[2].removesuffix("IndexDetails")
    if kind != "Vector":
        return kind if kind in _SCALAR else None
    present = {field.field_number for field in UnknownFieldSet(empty_pb2.Empty.FromString(details.value))}  # type: ignore[attr-defined]  # iterable, missing in the stub
    compressed = [name for number, name in _COMPRESSIONS.items() if number in present]
    return f"IVF_{'HNSW_' if _HNSW in present else ''}{compressed[0]}" if len(compressed) == 1 else None


def covered_by(entries: Iterable[table_pb2.IndexMetadata]) -> frozenset[int]:
    """Ids of the fragments that any of the entries covers."""
    try:
        return frozenset[int]().union(
            *(version_manifest.decode_fragment_bitmap(entry.fragment_bitmap) for entry in entries)
        )
    except errors.InvalidFormatError as error:
        raise errors.TableCorruptError(str(error)) from error


def is_of_key(table: Table, index: BaseIndex) -> bool:
    """Whether it is the B-tree of the primary key."""
    ids = {field.name: field.id for field in table.manifest.manifest.fields if field.parent_id < 0}
    keys = [ids[name] for name in table.primary_key]
    return index.type.lower() == "btree" and all([*segment.fields] == keys for segment in index.segments)


def is_nested(index: BaseIndex, version: version_manifest.VersionManifest) -> bool:
    """Whether a field of an index is in a struct."""
    outer = {field.id: field.parent_id for field in version.manifest.fields}
    return any(outer.get(field, -1) >= 0 for entry in index.segments for field in entry.fields)


def coverage(covered: frozenset[int], version: version_manifest.VersionManifest) -> Coverage:
    """Compare the fragments that an index covers with the fragments of a version."""
    missing = [fragment for fragment in version.manifest.fragments if fragment.id not in covered]
    return Coverage(
        len(version.manifest.fragments),
        frozenset(fragment.id for fragment in missing),
        sum(fragment.physical_rows - fragment.deletion_file.num_deleted_rows for fragment in missing),
    )


# In pylance's error.
_FIRST_FORMAT = "read v1 metadata"
CREATE_AGAIN = (
    "Create it again yourself: dataset.drop_index(NAME), then dataset.create_index(..., name=NAME). With replace=True, "
    "pylance may keep a part of the old one, and nobody could read the index. Where there is a log, create one under "
    "another name instead: then memwal-ops catchup URI --migrate-codebook OLD NEW."
)


def index_folder(table: Table, entry: table_pb2.IndexMetadata) -> str:
    """The URI of the files of an index segment."""
    name = f"{INDICES_FOLDER}/{UUID(bytes=entry.uuid.uuid)}"
    if not entry.HasField("base_id"):
        return f"{table.location.folder}/{name}"
    for base in table.manifest.manifest.base_paths:
        if base.id == entry.base_id:
            folder = absolute_base(table.location.folder, base.path.rstrip("/"))
            return f"{folder}/{name if base.is_dataset_root else name.rsplit('/', 1)[-1]}"
    raise errors.UnsupportedFeatureError(
        f"Index {entry.name} is in base {entry.base_id}, which the table does not define."
    )


def open_index_file(location: Location, path: str, columns: list[str] | None = None) -> LanceFileReader:
    """Open a file of an index of the table at a location.

    ``path``: its URI. ``columns``: those that are read; None: all.
    Raises ``UnsupportedFeatureError``: it is of Lance's first format, which pylance reads in queries alone;
    ``StorageError``: it cannot be read.
    """
    try:
        with lance_errors("read index", path):
            return LanceFileReader(path, storage_options=lance_options(location), columns=columns)
    except errors.StorageError as error:
        if _FIRST_FORMAT not in str(error):
            raise
        raise errors.UnsupportedFeatureError(
            f"{path} is of Lance's first format, as releases up to 0.20 wrote indexes.", remedy=CREATE_AGAIN
        ) from error


LISTED = frozenset({"BTree", "Inverted"})
MAPPED = frozenset({"Bitmap"})
_IDS = {"BTree": ("page_data.lance", "ids")}
_MAP_FILE = "bitmap_page_lookup.lance"


def row_ids_in(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> Iterator[NDArray[np.uint64]]:
    """The row ids in the files of a segment, in parts; of an index that has addresses instead, these.

    Raises ``StorageError``: a file cannot be read.
    """
    folder = index_folder(table, entry)
    if index.is_vector:
        names, column = ["auxiliary.idx"], ROW_ID
    elif index.type == "Inverted":
        names, column = [f"part_{partition}_docs.lance" for partition in _partitions(table, folder, index)], ROW_ID
    else:
        name, column = _IDS[index.type]
        names = [name]
    for name in names:
        path = f"{folder}/{name}"
        try:
            reader = open_index_file(table.location, path, [column])
        except errors.ObjectNotFoundError:
            if index.is_vector:  # raises if it is of the first format, which has no other file
                open_index_file(table.location, f"{folder}/index.idx")
            raise
        with lance_errors("read index", path):
            for batch in reader.read_all(batch_size=65536).to_batches():
                yield batch.column(column).to_numpy()


def fragments_held(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> frozenset[int]:
    """The fragments of which the files of a segment have rows, whatever it claims; of an index of row addresses.

    Raises ``TableCorruptError``: a map cannot be decoded; ``UnsupportedFeatureError``: the files are of an older
    layout; ``StorageError``: a file cannot be read.
    """
    if index.type in MAPPED:
        return _fragments_of_maps(table, index, entry)
    held = (np.unique(version_manifest.fragments_of(ids)).tolist() for ids in row_ids_in(table, index, entry))
    return frozenset[int]().union(*held)


def _partitions(table: Table, folder: str, index: BaseIndex) -> list[int]:
    described: dict[bytes, bytes] = {}
    try:
        described = open_index_file(table.location, f"{folder}/metadata.lance").metadata().schema.metadata or {}
    except errors.ObjectNotFoundError:  # releases up to 0.20 have only this one; it may be gone, too
        open_index_file(table.location, f"{folder}/invert.lance")
    if b"partitions" not in described:
        raise errors.UnsupportedFeatureError(f"The files of index {index.name} do not list its partitions.")
    partitions: list[int] = json.loads(described[b"partitions"])
    return partitions


def _fragments_of_maps(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> frozenset[int]:
    """The fragments in the row address maps of a bitmap index: of each map a number, then fragment, size and bytes."""
    path = f"{index_folder(table, entry)}/{_MAP_FILE}"
    reader = open_index_file(table.location, path, ["bitmaps"])
    fragments: set[int] = set()
    with lance_errors("read index", path):
        for batch in reader.read_all(batch_size=1024).to_batches():
            for value in batch.column("bitmaps").to_pylist():
                try:
                    [count] = struct.unpack_from("<I", value)
                    at = 4
                    for _ in range(count):
                        fragment, size = struct.unpack_from("<II", value, at)
                        fragments.add(fragment)
                        at += 8 + size
                except struct.error as error:
                    raise errors.TableCorruptError(
                        f"A map of index {index.name} in {path} cannot be decoded."
                    ) from error
    return frozenset(fragments)
