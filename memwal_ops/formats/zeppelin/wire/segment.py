"""Decode and encode objects of a segment. Little-endian.

Centroids, clusters with full-precision rows, attributes. Decoded: the layouts of all releases. Encoded: the oldest
(``[k][dim][f32...]``, ``[n][dim]`` and ``[id length][id][f32...]`` per row), which every reader accepts.

Attribute indexes of a cluster: bitmaps (``ZBMP``) and inverted lists (``ZFTS``), JSON with a header. Positions are rows
of the cluster. A field gets no bitmap if it has more than 10,000 values, or one that cannot be a key: a map, a list in
a list, an integer beyond doubles. A reader then filters by the attributes themselves.

Scalar and product quantization codes are stored in addition to the full-precision rows.
"""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pyroaring import BitMap

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.zeppelin.wire.fragment import Attributes, UnstorableError, compact_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]


_BITMAP, _TEXT = b"ZBMP\x01", b"ZFTS\x01"
_MAX_VALUES = 10_000
_WORD = re.compile(r"\w+")
_MAX_WORD_LENGTH = 40


def bitmap_name(cluster: int) -> str:
    """The name of a cluster's bitmap object."""
    return f"bitmap_{cluster}.bin"


def text_name(cluster: int) -> str:
    """The name of a cluster's inverted-list object."""
    return f"fts_index_{cluster}.bin"


def encode_bitmaps(rows: Sequence[Attributes | None], fields: Iterable[str]) -> bytes:
    """The bitmaps of some fields."""
    built = {field: bitmap for field in sorted(fields) if (bitmap := _bitmap(rows, field)) is not None}
    document = {"vector_count": len(rows), "fields": built}
    return _BITMAP + compact_json(document)


def decode_bitmaps(data: bytes) -> dict[str, dict[str, BitMap]]:
    """Per field the rows of its values. Raises ``InvalidFormatError``."""
    document = _document(data, _BITMAP)
    try:
        return {
            field: {value: BitMap.deserialize(bytes(rows)) for value, rows in entry["values"].items()}
            for field, entry in document["fields"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidFormatError(f"Its bitmaps cannot be read: {error!r:.120}.") from error


def value_key(value: Any) -> str:
    """The key of a value in a bitmap index: values of different types have different keys."""
    if isinstance(value, bool):
        return f"b:{str(value).lower()}"
    if isinstance(value, int):
        return f"i:{value}"
    if isinstance(value, float):
        return f"f:{_bits(value)}"
    return f"s:{value}"


def encode_text_index(rows: Sequence[Attributes | None], fields: Iterable[str]) -> bytes:
    """The inverted lists of some fields."""
    built = {field: inverted for field in sorted(fields) if (inverted := _inverted(rows, field)) is not None}
    document = {"vector_count": len(rows), "fields": built}
    return _TEXT + compact_json(document)


def decode_text_index(data: bytes) -> Mapping[str, Any]:
    """Per field ``avg_doc_length``, ``doc_count`` and ``postings``. Raises ``InvalidFormatError``."""
    fields = _document(data, _TEXT).get("fields")
    if not isinstance(fields, dict):
        raise InvalidFormatError("It has no fields.")
    return fields


def words(text: object) -> list[str]:
    """The words of a text: lower-case runs of letters and digits. No stemming and no stop words.

    The wiki document does not define them; merge refuses native namespaces with full text.
    """
    terms = _WORD.findall(text.lower()) if isinstance(text, str) else ()
    return [word for word in terms if len(word) <= _MAX_WORD_LENGTH]


def _bitmap(rows: Sequence[Attributes | None], field: str) -> dict[str, Any] | None:
    present, values, numbers, is_list = BitMap(), defaultdict[str, BitMap](BitMap), set[float](), False
    for position, row in enumerate(rows):
        value = (row or {}).get(field)
        if value is None:
            continue
        present.add(position)
        is_list = is_list or isinstance(value, list)
        for item in value if isinstance(value, list) else (value,):
            if not isinstance(item, str | int | float):
                return None
            values[value_key(item)].add(position)
            if isinstance(item, int | float) and not isinstance(item, bool):
                try:
                    numbers.add(float(item))
                except OverflowError:
                    return None
    if len(values) > _MAX_VALUES:
        return None
    return {
        "present": [*present.serialize()],
        "values": {key: [*values[key].serialize()] for key in sorted(values)},
        "sorted_numeric_keys": [_bits(number) for number in sorted(numbers)],
        "is_list": is_list,
    }


def _inverted(rows: Sequence[Attributes | None], field: str) -> dict[str, Any] | None:
    postings = defaultdict[str, list[dict[str, int]]](list)
    texts = [words((row or {}).get(field)) for row in rows]
    for position, terms in enumerate(texts):
        for word, count in Counter(terms).items():
            postings[word].append({"position": position, "tf": count})
    lengths = [len(terms) for terms in texts if terms]
    if not lengths:
        return None

    return {
        "avg_doc_length": sum(lengths) / len(lengths),
        "doc_count": len(lengths),
        "postings": {word: {"df": len(postings[word]), "entries": postings[word]} for word in sorted(postings)},
    }


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def _document(data: bytes, magic: bytes) -> dict[str, Any]:
    if not data.startswith(magic):
        raise InvalidFormatError(f"It begins with {data[:5]!r}, and not with {magic!r}.")
    try:
        document = json.loads(data[len(magic) :])
    except (ValueError, RecursionError) as error:
        raise InvalidFormatError(f"It is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise InvalidFormatError("It is not a JSON object.")
    return document


CALIBRATION = "sq_calibration.bin"
CODEBOOK = "pq_codebook.bin"
CODES = 256


@dataclass(frozen=True, eq=False)
class ScalarQuantizer:
    """One byte for each dimension: the range from ``least`` to ``most`` in 255 steps, rounded down as Zeppelin does."""

    least: Matrix
    most: Matrix

    def artifact(self) -> tuple[str, bytes]:
        """Name and bytes of the segment's quantizer object."""
        pairs = np.stack([self.least, self.most], axis=1).astype("<f4")
        return CALIBRATION, struct.pack("<I", len(pairs)) + pairs.tobytes()

    def cluster_name(self, number: int) -> str:
        """The name of a cluster's codes."""
        return f"sq_cluster_{number}.bin"

    def cluster(self, number: int, ids: Sequence[str], vectors: Matrix) -> tuple[str, bytes]:
        """Name and bytes of a cluster's codes."""
        span = self.most - self.least
        flat = span < np.finfo(np.float32).eps
        scale = np.where(flat, 0, 255 / np.where(flat, 1, span)).astype(np.float32)
        codes = np.clip((vectors - self.least) * scale, 0, 255).astype(np.uint8)
        return self.cluster_name(number), _coded(ids, codes, vectors.shape[1])


@dataclass(frozen=True, eq=False)
class ProductQuantizer:
    """One byte for each of ``len(codebook)`` parts of a vector; ``codebook`` has shape (parts, 256, part width)."""

    codebook: Matrix

    def artifact(self) -> tuple[str, bytes]:
        """Name and bytes of the segment's quantizer object."""
        return CODEBOOK, struct.pack("<III", *self.codebook.shape) + self.codebook.astype("<f4").tobytes()

    def cluster_name(self, number: int) -> str:
        """The name of a cluster's codes."""
        return f"pq_cluster_{number}.bin"

    def cluster(self, number: int, ids: Sequence[str], vectors: Matrix) -> tuple[str, bytes]:
        """Name and bytes of a cluster's codes."""
        parts, _, width = self.codebook.shape
        codes = np.empty((len(vectors), parts), dtype=np.uint8)
        for part, book in enumerate(self.codebook):
            slices = vectors[:, part * width : (part + 1) * width]
            distances = (book**2).sum(axis=1) - 2 * (slices @ book.T)
            codes[:, part] = distances.argmin(axis=1)
        return self.cluster_name(number), _coded(ids, codes, parts)


Quantizer = ScalarQuantizer | ProductQuantizer


def _coded(ids: Sequence[str], codes: NDArray[np.uint8], width: int) -> bytes:
    parts = [struct.pack("<II", len(ids), width)]
    for name, code in zip(ids, codes, strict=True):
        encoded = name.encode()
        parts += [struct.pack("<I", len(encoded)), encoded, code.tobytes()]
    return b"".join(parts)


CENTROIDS = "centroids.bin"
_CENTROIDS_2 = b"ZCT2"
_SECTIONS = (b"ZCL2", b"ZCL3")
_GROUP_1, _GROUP_4, _GROUP_5 = b"ZBP1", b"ZBP\x04", b"ZBP\x05"
MAX_DIMENSIONS = 1 << 16


def cluster_name(cluster: int) -> str:
    """The name of the object with a cluster's rows."""
    return f"cluster_{cluster}.bin"


def attributes_name(cluster: int) -> str:
    """The name of the object with a cluster's attributes."""
    return f"attrs_{cluster}.bin"


def encode_centroids(centroids: Matrix) -> bytes:
    """``centroids.bin`` of shape (clusters, dimensions)."""
    return struct.pack("<II", *centroids.shape) + centroids.astype("<f4").tobytes()


def decode_centroids(data: bytes) -> Matrix:
    """Centroids, shape (clusters, dimensions).

    Raises ``InvalidFormatError``: truncated or foreign bytes, a value that is not finite.
    """
    begins = len(_CENTROIDS_2) if data[:4] == _CENTROIDS_2 else 0
    count, width = _header(data, begins)
    end = begins + 8 + 4 * count * width
    if len(data) < end or (not begins and len(data) > end):
        raise InvalidFormatError(f"{count} centroids of {width} dimensions do not fit into {len(data)} bytes.")
    centroids = np.frombuffer(data, "<f4", count * width, begins + 8).reshape(count, width)
    if not np.isfinite(centroids).all():
        raise InvalidFormatError("A centroid has a value that is not a finite number.")
    return centroids.astype(np.float32)


def encode_cluster(ids: Sequence[str], vectors: Matrix, dimensions: int) -> bytes:
    """The rows of a cluster."""
    packed = np.ascontiguousarray(vectors, "<f4").reshape(-1).view(np.uint8).data
    stride = 4 * dimensions
    parts: list[bytes | memoryview] = [struct.pack("<II", len(ids), dimensions)]
    for row, name in enumerate(ids):
        encoded = name.encode()
        parts += [struct.pack("<I", len(encoded)), encoded, packed[row * stride : (row + 1) * stride]]
    return b"".join(parts)


def decode_cluster(data: bytes) -> tuple[list[str], Matrix]:
    """Ids and full-precision vectors of a cluster object, of any layout except the grouped ones.

    Raises ``InvalidFormatError``: truncated or foreign bytes.
    """
    if data[:4] in _SECTIONS:
        begins, length = struct.unpack_from("<QQ", _whole(data, 0, 36), 20)
        data = _whole(data, begins, length)
    if data[:4] in _SECTIONS:
        raise InvalidFormatError("A section with rows contains another one.")
    if data[:3] == _GROUP_1[:3]:
        raise InvalidFormatError("It contains a group of clusters, which the manifest does not record.")
    count, width = _header(data, 0)
    stride, at = 4 * width, 8
    if count * (stride + 4) > len(data) - at:
        raise InvalidFormatError(f"{count} rows of {width} dimensions do not fit into {len(data)} bytes.")
    ids, rows = [], []
    view = memoryview(data)
    for _ in range(count):
        (length,) = struct.unpack_from("<I", _whole(data, at, 4))
        ids.append(_id(_whole(data, at + 4, length)))
        at += 4 + length
        rows.append(view[at : at + stride])
        at += stride
    if at != len(data):
        raise InvalidFormatError(f"It has {len(data)} bytes, and its rows end at {at}.")
    return ids, np.frombuffer(bytearray().join(rows), "<f4").reshape(count, width).astype(np.float32, copy=False)


def decode_grouped(data: bytes, cluster: int, described: Mapping[str, Any]) -> tuple[list[str], Matrix]:
    """Ids and full-precision vectors of one cluster of a grouped object, which its manifest entry describes.

    Raises ``InvalidFormatError``: truncated or foreign bytes; it does not contain the cluster.
    """
    kind, (entries,) = data[:4], struct.unpack_from("<I", _whole(data, 0, 8), 4)
    if kind == _GROUP_5:
        layout = next((layout for layout in map(_layout, described["row_layouts"]) if layout[0] == cluster), None)
        if layout is None:
            raise InvalidFormatError(f"The manifest has no row layout of cluster {cluster}.")
        return _decode_rows(data, layout)
    if kind not in {_GROUP_1, _GROUP_4}:
        raise InvalidFormatError(f"It begins with {kind!r}, which is not a known version of grouped clusters.")
    form = "<IQQ" if kind == _GROUP_1 else "<IQQQQ"
    size = struct.calcsize(form)
    for number in range(entries):
        values = struct.unpack(form, _whole(data, 8 + number * size, size))
        if values[0] == cluster:
            return decode_cluster(_whole(data, *values[-2:]))
    raise InvalidFormatError(f"It does not contain cluster {cluster}.")


def encode_attributes(rows: Sequence[Attributes | None]) -> bytes:
    """The attributes of a cluster, in the order of its rows."""
    return compact_json([row or None for row in rows])


def decode_attributes(data: bytes, count: int) -> list[Attributes | None]:
    """The attributes of a cluster with ``count`` rows.

    Raises ``InvalidFormatError``: it is not a JSON list of that many maps or nulls.
    """
    try:
        rows = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidFormatError(f"It is not JSON: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise UnstorableError(f"It has attributes that cannot be read: {error}.") from error
    if not isinstance(rows, list) or len(rows) != count:
        raise InvalidFormatError(f"It is not a list of the attributes of {count} rows.")
    if not all(part is None or isinstance(part, dict) for part in rows):
        raise InvalidFormatError("Attributes are neither a map nor null.")
    return rows


def _decode_rows(data: bytes, layout: Sequence[int]) -> tuple[list[str], Matrix]:
    _, count, _, _, ids_at, ids_length, vectors_at, vectors_length = layout
    block = _whole(data, ids_at, ids_length)
    (rows_of_ids,) = struct.unpack_from("<I", _whole(block, 0, 4))
    if rows_of_ids != count or not count or vectors_length % (4 * count):
        raise InvalidFormatError(f"It has ids of {rows_of_ids} rows, and a layout of {count}.")
    ids, at = [], 4
    for _ in range(count):
        (length,) = struct.unpack_from("<I", _whole(block, at, 4))
        ids.append(_id(_whole(block, at + 4, length)))
        at += 4 + length
    vectors = np.frombuffer(_whole(data, vectors_at, vectors_length), "<f4").reshape(count, -1)
    return ids, vectors.astype(np.float32)


def _layout(entry: Any) -> Sequence[int]:
    """A row layout: a list in MessagePack, a map in JSON; the same order of fields."""
    values = [*entry.values()] if isinstance(entry, dict) else [*entry]
    if len(values) != 8 or not all(type(value) is int and value >= 0 for value in values):  # noqa: PLR2004 - as many
        raise InvalidFormatError(f"{entry!r:.80} is not a row layout.")
    return values


def _header(data: bytes, at: int) -> tuple[int, int]:
    count, width = struct.unpack("<II", _whole(data, at, 8))
    if width > MAX_DIMENSIONS or (count and not width):
        raise InvalidFormatError(f"It begins with {data[:8]!r}, which is not a known layout.")
    return count, width


def _whole(data: bytes, begins: int, length: int) -> bytes:
    part = data[begins : begins + length]
    if len(part) != length:
        raise InvalidFormatError(f"It is truncated: {length} bytes from {begins} on are missing.")
    return part


def _id(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidFormatError(f"An id is not UTF-8: {data[:40]!r}.") from error
