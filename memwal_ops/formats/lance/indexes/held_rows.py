"""Read from the files of an index which rows they hold.

The manifest has the fragments that a segment covers; only its files show which rows are in it. Read are only the
row ids or row addresses, 8 bytes each, of a bitmap index its maps.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.errors import ObjectNotFoundError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.datasets import ROW_ID
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.indexes.segment_files import index_folder, open_index_file
from memwal_ops.formats.lance.wire.version_manifest import fragments_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

LISTED = frozenset({"BTree", "Inverted"})
MAPPED = frozenset({"Bitmap"})
_IDS = {"BTree": ("page_data.lance", "ids")}
_MAP_FILE = "bitmap_page_lookup.lance"


def row_ids_in(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> Iterator[NDArray[np.uint64]]:
    """The row ids in the files of a segment, in parts; of an index that has addresses instead, these.

    Raises:
        StorageError: a file cannot be read.
    """
    folder = index_folder(table, entry)
    if index.is_vector:
        names, column = ["auxiliary.idx"], ROW_ID
    elif index.type == "Inverted":
        names, column = [f"part_{one}_docs.lance" for one in _partitions(table, folder, index)], ROW_ID
    else:
        name, column = _IDS[index.type]
        names = [name]
    for name in names:
        path = f"{folder}/{name}"
        try:
            reader = open_index_file(table.location, path, [column])
        except ObjectNotFoundError:
            if index.is_vector:  # raises if it is of the first format, which has no other file
                open_index_file(table.location, f"{folder}/index.idx")
            raise
        with lance_errors("read index", path):
            for batch in reader.read_all(batch_size=65536).to_batches():
                yield batch.column(column).to_numpy()


def fragments_held(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> frozenset[int]:
    """The fragments of which the files of a segment have rows, whatever it claims; of an index of row addresses.

    Raises:
        TableCorruptError: a map cannot be decoded.
        UnsupportedFeatureError: the files are of an older layout.
        StorageError: a file cannot be read.
    """
    if index.type in MAPPED:
        return _fragments_of_maps(table, index, entry)
    found = (np.unique(fragments_of(ids)).tolist() for ids in row_ids_in(table, index, entry))
    return frozenset[int]().union(*found)


def _partitions(table: Table, folder: str, index: BaseIndex) -> list[int]:
    """The partitions of a segment of a text index."""
    described: dict[bytes, bytes] = {}
    try:
        described = open_index_file(table.location, f"{folder}/metadata.lance").metadata().schema.metadata or {}
    except ObjectNotFoundError:  # releases up to 0.20 have only this one; it may be gone, too
        open_index_file(table.location, f"{folder}/invert.lance")
    if b"partitions" not in described:
        raise UnsupportedFeatureError(f"The files of index {index.name} do not list its partitions.")
    partitions: list[int] = json.loads(described[b"partitions"])
    return partitions


def _fragments_of_maps(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> frozenset[int]:
    """The fragments in the row address maps of a bitmap index: of each map a number, then fragment, size and bytes."""
    path = f"{index_folder(table, entry)}/{_MAP_FILE}"
    reader = open_index_file(table.location, path, ["bitmaps"])
    found: set[int] = set()
    with lance_errors("read index", path):
        for batch in reader.read_all(batch_size=1024).to_batches():
            for value in batch.column("bitmaps").to_pylist():
                try:
                    [count] = struct.unpack_from("<I", value)
                    at = 4
                    for _ in range(count):
                        fragment, size = struct.unpack_from("<II", value, at)
                        found.add(fragment)
                        at += 8 + size
                except struct.error as error:
                    raise TableCorruptError(f"A map of index {index.name} in {path} cannot be decoded.") from error
    return frozenset(found)
