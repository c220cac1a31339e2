"""The codebook of a vector index: IVF centroids and quantizer, as its files have them.

All layers of the LSM tree must share it, or distances from one layer cannot be compared with those
from another (S0-110, S0-112). ``optimize_indices`` with its defaults does change it: where segments
are merged it splits large partitions and joins small ones (landmine 22).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

from google.protobuf.message import DecodeError
from lance.file import LanceFileReader

from memwal_ops.core.datasets import lance_options
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.snapshots import INDICES_FOLDER
from memwal_ops.errors import StorageError, UnsupportedFeatureError
from memwal_ops.format._pb import vector_pb2

if TYPE_CHECKING:
    from memwal_ops.core.table import Table
    from memwal_ops.format._pb import table_pb2

_INDEX_FILE, _STORAGE_FILE = "index.idx", "auxiliary.idx"
# Where in the file a buffer stands; it says nothing of what is in the buffer.
_POSITIONS = ("codebook_position", "rotate_mat_position")


@dataclass(frozen=True, slots=True)
class Codebook:
    """What decides which partition a vector falls into and which code it gets.

    Two are equal if vectors get the same partitions and codes from both; sizes do not matter.

    Attributes:
        kind: index type and distance, as the file says.
        partitions: number of IVF partitions.
        centroids: digest of the centroids.
        quantizer: the quantizer's parameters and the digests of its tables.
        sizes: rows per partition in this segment.
    """

    kind: str
    partitions: int
    centroids: str
    quantizer: str
    sizes: tuple[int, ...] = field(compare=False)


def read_codebook(table: Table, entry: table_pb2.IndexMetadata) -> Codebook:
    """The codebook of one index segment, published or not; a few small reads at the ends of two files.

    Raises:
        UnsupportedFeatureError: files as releases wrote them before Lance's v3 vector index, or files
            that this release cannot compare.
        StorageError: the store failed.
    """
    folder = _folder(table, entry)
    try:
        index = _open(table, f"{folder}/{_INDEX_FILE}")
        storage = _open(table, f"{folder}/{_STORAGE_FILE}")
        described = json.loads(_text(index, "lance:index"))
        model = _ivf(index)
        parameters = json.loads(json.loads(_text(storage, "storage_metadata"))[0])
        sizes = tuple(_ivf(storage).lengths)
        centroids = model.centroids_tensor.SerializeToString(deterministic=True)
        quantizer = {name: _rounded(value) for name, value in parameters.items() if name not in _POSITIONS}
        for name in _POSITIONS:
            if parameters.get(name) is not None:
                quantizer[name] = _digest(bytes(storage.read_global_buffer(parameters[name])))
    except StorageError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, DecodeError, OSError) as error:
        raise UnsupportedFeatureError(
            f"The codebook of index {entry.name} cannot be read from {folder}: {error}",
            remedy="Bring this index up to date by hand, or create it again with a release that memwal-ops supports.",
        ) from error
    return Codebook(
        json.dumps(described, sort_keys=True),
        len(sizes),
        _digest(centroids + bytes(str(list(model.centroids)), "ascii")),
        json.dumps(quantizer, sort_keys=True),
        sizes,
    )


def _folder(table: Table, entry: table_pb2.IndexMetadata) -> str:
    name = f"{INDICES_FOLDER}/{UUID(bytes=entry.uuid.uuid)}"
    if not entry.HasField("base_id"):
        return f"{table.location.uri}/{name}"
    for base in table.manifest.manifest.base_paths:
        if base.id == entry.base_id:
            return f"{base.path.rstrip('/')}/{name if base.is_dataset_root else name.rsplit('/', 1)[-1]}"
    raise UnsupportedFeatureError(f"Index {entry.name} stands in base {entry.base_id}, which the table does not name.")


def _open(table: Table, path: str) -> LanceFileReader:
    with lance_errors("read the codebook of", path):
        return LanceFileReader(path, storage_options=lance_options(table.location))


def _text(reader: LanceFileReader, key: str) -> str:
    return str(reader.metadata().schema.metadata[key.encode()].decode())


def _ivf(reader: LanceFileReader) -> vector_pb2.Ivf:
    return vector_pb2.Ivf.FromString(bytes(reader.read_global_buffer(int(_text(reader, "lance:ivf")))))


def _rounded(value: object) -> object:
    """Without the last digits, which change each time that Lance writes down an SQ bound it has read."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return f"{value:.9g}" if isinstance(value, float) else value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
