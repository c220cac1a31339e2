"""Read the codebook of a vector index (IVF centroids and quantizer) from its files.

All layers of the LSM tree must share it, or distances from one layer cannot be compared with those from another
(S0-110, S0-112). ``optimize_indices`` with its defaults does change it: where segments are merged it splits large
partitions and joins small ones.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from memwal_ops.errors import MemwalOpsError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.indexes.base_indexes import CREATE_AGAIN, index_folder, open_index_file
from memwal_ops.formats.lance.wire._pb import vector_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from lance.file import LanceFileReader
    from numpy.typing import NDArray

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.locations import Location

MODEL_FILES = _INDEX_FILE, _STORAGE_FILE = "index.idx", "auxiliary.idx"
# Positions of buffers in the file, which are not part of their content.
_POSITIONS = ("codebook_position", "rotate_mat_position")
# How codes are stored, which does not change them. Where pylance merges segments, it packs those of IVF_RQ, and
# transposes those of IVF_PQ that it built with a codebook.
_LAYOUT = ("packed", "transposed")
# Parameters of quantizers that are in a VectorModel, or follow from it.
_SUPPORTED_PARAMETERS = frozenset(
    {"dim", "codebook_position", "nbits", "num_sub_vectors", "dimension", "codebook_tensor", "transposed"}
)
# Parameters of the graph of HNSW, as the file and pylance's call name them.
_GRAPH = ("m", "ef_construction", "max_level")
_BY_HAND = (
    "Bring this index up to date manually; or merge everything, then create it again with a release that memwal-ops "
    "supports."
)
# numpy types by Lance's number of the tensor type.
_TENSOR_TYPES = {1: "<f2", 2: "<f4", 3: "<f8"}


@dataclass(frozen=True, slots=True)
class CodebookParameters:
    """The parameters that determine the partition and the code of a vector.

    Two are equal if vectors get the same partitions and codes from both; sizes are not compared.

    ``kind``: index type and distance, from the file. ``partitions``: number of IVF partitions. ``centroids``: digest of
    the centroids. ``quantizer``: the quantizer's parameters and the digests of its tables. ``sizes``: rows per
    partition in this segment.
    """

    kind: str
    partitions: int
    centroids: str
    quantizer: str
    sizes: tuple[int, ...] = field(compare=False)

    @property
    def is_dot_product(self) -> bool:
        """Whether codes of a product quantizer are compared by dot products."""
        described = json.loads(self.kind)
        return str(described.get("type", "")).endswith("PQ") and described.get("distance_type") == "dot"


def read_codebook(table: Table, entry: table_pb2.IndexMetadata) -> CodebookParameters:
    """The codebook of one index segment, published or not; a few small reads at the ends of two files.

    Raises ``UnsupportedFeatureError``: files of releases before Lance's v3 vector index, or files that this release
    cannot compare.
    """
    return codebook_at(table.location, index_folder(table, entry), entry.name)


def codebook_at(location: Location, folder: str, name: str) -> CodebookParameters:
    """Read the codebook of the segment in ``folder``, a URI; ``name`` is that of the index, for error messages."""
    with _decoding(f"The codebook of index {name} cannot be read from {folder}", _BY_HAND):
        index = open_index_file(location, f"{folder}/{_INDEX_FILE}")
        storage = open_index_file(location, f"{folder}/{_STORAGE_FILE}")
        described = json.loads(_text(index, "lance:index"))
        model = _ivf(index)
        parameters = _quantizer(storage)
        sizes = tuple(_ivf(storage).lengths)
        centroids = model.centroids_tensor.SerializeToString(deterministic=True)
        quantizer = {key: _rounded(value) for key, value in parameters.items() if key not in _POSITIONS + _LAYOUT}
        for position in _POSITIONS:
            if parameters.get(position) is not None:
                quantizer[position] = _digest(bytes(storage.read_global_buffer(parameters[position])))
    trained = _digest(centroids + bytes(str(list(model.centroids)), "ascii"))
    documents = [json.dumps(document, sort_keys=True) for document in (described, quantizer)]
    return CodebookParameters(documents[0], len(sizes), trained, documents[1], sizes)


@dataclass(frozen=True, slots=True)
class VectorModel:
    """The trained parameters of a vector index. From them pylance builds another one with the same.

    Attributes:
        centroids: of the partitions, one row each.
        codebook: of the product quantizer: sub-vectors x codes x dimensions of a sub-vector; None without one.
    """

    centroids: NDArray[np.floating[Any]]
    codebook: NDArray[np.floating[Any]] | None


def read_model(location: Location, folder: str, name: str) -> VectorModel:
    """The model of an index segment; arguments as :func:`codebook_at`.

    Raises:
        UnsupportedFeatureError: its quantizer has parameters that pylance does not accept, or its files cannot be read.
    """
    with _decoding(f"The model of index {name} cannot be read from {folder}"):
        index = open_index_file(location, f"{folder}/{_INDEX_FILE}")
        storage = open_index_file(location, f"{folder}/{_STORAGE_FILE}")
        parameters = _quantizer(storage)
        if not parameters.keys() <= _SUPPORTED_PARAMETERS:
            raise UnsupportedFeatureError(
                f"Index {name} has a quantizer ({json.loads(_text(index, 'lance:index'))['type']}) that pylance trains "
                "anew for each index: it accepts no existing one, so the distances of the two could not be compared.",
                remedy="Use an IVF_FLAT, IVF_PQ, IVF_HNSW_FLAT or IVF_HNSW_PQ index; or leave this one out of the "
                "maintained indexes.",
            )
        centroids = _tensor(_ivf(index).centroids_tensor)
        codebook = None
        if parameters.get("codebook_position") is not None:
            stored = vector_pb2.Tensor.FromString(bytes(storage.read_global_buffer(parameters["codebook_position"])))
            parts = parameters["num_sub_vectors"]
            codebook = _tensor(stored).reshape(parts, -1, parameters["dimension"] // parts)
    return VectorModel(centroids, codebook)


def rotated_model(location: Location, folder: str, name: str) -> dict[str, Any] | None:
    """Centroids and rotation of an IVF_RQ segment, as arguments of pylance; others as of :func:`codebook_at`.

    None: the rotation is a matrix, which pylance does not take as an argument.
    """
    with _decoding(f"The model of index {name} cannot be read from {folder}"):
        parameters = _quantizer(open_index_file(location, f"{folder}/{_STORAGE_FILE}"))
        if parameters["rotation_type"] != "fast":
            return None
        centroids = _tensor(_ivf(open_index_file(location, f"{folder}/{_INDEX_FILE}")).centroids_tensor)
    return {"ivf_centroids": centroids, "rabitq_model": json.dumps(parameters | {"packed": False})}


@dataclass(frozen=True, slots=True)
class ScalarBounds:
    """The range of scalar quantization. Components outside are not told apart; with cosine, those of unit vectors."""

    low: float
    high: float
    metric: str


def scalar_bounds(location: Location, folder: str, name: str) -> ScalarBounds:
    """The bounds of an IVF_SQ or IVF_HNSW_SQ segment; arguments as :func:`codebook_at`.

    Raises: as :func:`read_codebook`.
    """
    with _decoding(f"The bounds of index {name} cannot be read from {folder}"):
        bounds = _quantizer(open_index_file(location, f"{folder}/{_STORAGE_FILE}"))["bounds"]
        described = json.loads(_text(open_index_file(location, f"{folder}/{_INDEX_FILE}"), "lance:index"))
        return ScalarBounds(float(bounds["start"]), float(bounds["end"]), str(described["distance_type"]))


def vector_parameters(location: Location, folder: str, name: str) -> dict[str, Any]:
    """The parameters of a vector index by which pylance builds another one; arguments as :func:`codebook_at`.

    Those of the quantizer by its type; bounds, rotations and codebooks are trained, and left out.

    Raises: as :func:`read_codebook`.
    """
    with _decoding(f"How index {name} was built cannot be read from {folder}", CREATE_AGAIN):
        index = open_index_file(location, f"{folder}/{_INDEX_FILE}")
        storage = open_index_file(location, f"{folder}/{_STORAGE_FILE}")
        described = json.loads(_text(index, "lance:index"))
        kind = str(described["type"])
        arguments = {"metric": described["distance_type"], "num_partitions": len(_ivf(storage).lengths)}
        stored = _quantizer(storage)
        if kind.endswith("PQ"):
            arguments |= {"num_sub_vectors": stored["num_sub_vectors"], "num_bits": stored["nbits"]}
        elif kind.endswith("RQ"):
            arguments["num_bits"] = stored["num_bits"]
        if "HNSW" in kind:
            graphs = [json.loads(text) for text in json.loads(_text(index, "lance:hnsw")) if text]
            parameters = graphs[0]["params"] if graphs else {}
            arguments |= {key: parameters[key] for key in _GRAPH if key in parameters}
    return arguments


def partitions_of(location: Location, folders: Iterable[str]) -> int | None:
    """The number of partitions, by any file of these segments that can be read; None: there is none."""
    for folder, file in product(folders, MODEL_FILES):
        with suppress(MemwalOpsError, KeyError, IndexError, TypeError, ValueError, DecodeError, OSError):
            with lance_errors("read index", folder):
                model = _ivf(open_index_file(location, f"{folder}/{file}"))
            if partitions := len(model.lengths) or (model.centroids_tensor.shape or [0])[0]:
                return int(partitions)
    return None


def _tensor(stored: vector_pb2.Tensor) -> NDArray[np.floating[Any]]:
    if stored.data_type not in _TENSOR_TYPES:
        raise ValueError(
            f"its centroids are no floats (type {stored.data_type} of Lance): pylance trains an index with no others."
        )
    return np.frombuffer(stored.data, _TENSOR_TYPES[stored.data_type]).reshape([*stored.shape])


@contextmanager
def _decoding(failed: str, remedy: str | None = None) -> Iterator[None]:
    """Turn what an unknown file makes fail into an error with this message; errors of the store stay.

    Raises ``UnsupportedFeatureError``: the file is not as this release knows it.
    """
    try:
        yield
    except StorageError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, DecodeError, OSError) as error:
        raise UnsupportedFeatureError(f"{failed}: {error}", remedy=remedy) from error


def _quantizer(storage: LanceFileReader) -> dict[str, Any]:
    parameters: dict[str, Any] = json.loads(json.loads(_text(storage, "storage_metadata"))[0])
    return parameters


def _text(reader: LanceFileReader, key: str) -> str:
    return str(reader.metadata().schema.metadata[key.encode()].decode())


def _ivf(reader: LanceFileReader) -> vector_pb2.Ivf:
    return vector_pb2.Ivf.FromString(bytes(reader.read_global_buffer(int(_text(reader, "lance:ivf")))))


def _rounded(value: object) -> object:
    """Round floats: their last digits change each time that Lance reads and writes an SQ bound."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    return f"{value:.9g}" if isinstance(value, float) else value


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
