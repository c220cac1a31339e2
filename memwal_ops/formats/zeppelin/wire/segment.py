"""Decode and encode objects of a segment: centroids, clusters with full-precision rows, attributes. Little-endian.

Decoded: the layouts of all releases. Encoded: the oldest (``[k][dim][f32...]``, ``[n][dim]`` and
``[id length][id][f32...]`` per row), which every reader accepts.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.zeppelin.wire.fragment import UnstorableError
from memwal_ops.formats.zeppelin.wire.json_text import compact_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from memwal_ops.formats.zeppelin.wire.fragment import Attributes

    Matrix = NDArray[np.float32]

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

    Raises:
        InvalidFormatError: truncated or foreign bytes, a value that is not finite.
    """
    begins = len(_CENTROIDS_2) if data[:4] == _CENTROIDS_2 else 0
    count, width = _header(data, begins)
    end = begins + 8 + 4 * count * width
    if len(data) < end or (not begins and len(data) > end):
        raise InvalidFormatError(f"{count} centroids of {width} dimensions do not fit into {len(data)} bytes.")
    found = np.frombuffer(data, "<f4", count * width, begins + 8).reshape(count, width)
    if not np.isfinite(found).all():
        raise InvalidFormatError("A centroid has a value that is not a finite number.")
    return found.astype(np.float32)


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

    Raises:
        InvalidFormatError: truncated or foreign bytes.
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
    """Ids and full-precision vectors of one cluster of a grouped object.

    Args:
        data: the object.
        cluster: its number in the segment.
        described: the object's entry in the manifest.

    Raises:
        InvalidFormatError: truncated or foreign bytes; it does not contain the cluster.
    """
    kind, (entries,) = data[:4], struct.unpack_from("<I", _whole(data, 0, 8), 4)
    if kind == _GROUP_5:
        layout = next((one for one in map(_layout, described["row_layouts"]) if one[0] == cluster), None)
        if layout is None:
            raise InvalidFormatError(f"The manifest has no row layout of cluster {cluster}.")
        return _decode_rows(data, layout)
    if kind not in {_GROUP_1, _GROUP_4}:
        raise InvalidFormatError(f"It begins with {kind!r}, which is not a known version of grouped clusters.")
    form = "<IQQ" if kind == _GROUP_1 else "<IQQQQ"
    size = struct.calcsize(form)
    for number in range(entries):
        found = struct.unpack(form, _whole(data, 8 + number * size, size))
        if found[0] == cluster:
            return decode_cluster(_whole(data, *found[-2:]))
    raise InvalidFormatError(f"It does not contain cluster {cluster}.")


def encode_attributes(rows: Sequence[Attributes | None]) -> bytes:
    """The attributes of a cluster, in the order of its rows."""
    return compact_json([row or None for row in rows])


def decode_attributes(data: bytes, count: int) -> list[Attributes | None]:
    """The attributes of a cluster with ``count`` rows.

    Raises:
        InvalidFormatError: it is not a JSON list of that many maps or nulls.
    """
    try:
        found = json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidFormatError(f"It is not JSON: {error}.") from error
    except (ValueError, RecursionError) as error:
        raise UnstorableError(f"It has attributes that cannot be read: {error}.") from error
    if not isinstance(found, list) or len(found) != count:
        raise InvalidFormatError(f"It is not a list of the attributes of {count} rows.")
    if not all(one is None or isinstance(one, dict) for one in found):
        raise InvalidFormatError("Attributes are neither a map nor null.")
    return found


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


def _layout(found: Any) -> Sequence[int]:
    """A row layout: a list in MessagePack, a map in JSON; the same order of fields."""
    values = [*found.values()] if isinstance(found, dict) else [*found]
    if len(values) != 8 or not all(type(one) is int and one >= 0 for one in values):  # noqa: PLR2004 - as many
        raise InvalidFormatError(f"{found!r:.80} is not a row layout.")
    return values


def _header(data: bytes, at: int) -> tuple[int, int]:
    count, width = struct.unpack("<II", _whole(data, at, 8))
    if width > MAX_DIMENSIONS or (count and not width):
        raise InvalidFormatError(f"It begins with {data[:8]!r}, which is not a known layout.")
    return count, width


def _whole(data: bytes, begins: int, length: int) -> bytes:
    found = data[begins : begins + length]
    if len(found) != length:
        raise InvalidFormatError(f"It is truncated: {length} bytes from {begins} on are missing.")
    return found


def _id(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidFormatError(f"An id is not UTF-8: {data[:40]!r}.") from error
