"""Check data files and deletion files before pylance reads them.

Some damage aborts the process inside pylance, without an error that could be caught. Of a data file it allocates memory
for as many columns and buffers as the footer claims before it checks that they exist: one wrong byte allocates 64 GB.
It passes a column's name to Arrow as a C string, which must not contain a zero byte. Of a deletion file in Arrow's
format it allocates what the footer claims that the one record batch has.

Other damage hides other rows than were deleted, without any error.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Positions of the column metadata, of its offset table and of the table of global buffers; number of global
# buffers; number of columns; format version; magic.
_FOOTER = struct.Struct("<QQQIIHH4s")
# Of the first format: position of the metadata, format version, magic.
_FIRST_FOOTER = struct.Struct("<QHH4s")
_FOOTER_SINCE = (0, 3)
_BUFFER = struct.Struct("<QQ")
_MAGIC = b"LANC"

_ARROW_START, _ARROW_END = b"ARROW1\0\0", b"ARROW1"
# The last bytes of an Arrow file: the length of its footer, and the magic.
_ARROW_TAIL = struct.Struct("<i6s")
# Where a record batch is: its position, the length of its metadata, and that of its body.
_BLOCK = struct.Struct("<qi4xq")
_MESSAGE = struct.Struct("<Ii")
_CONTINUED = 0xFFFF_FFFF
# Numbers of fields in Arrow's File.fbs and Message.fbs: of the footer, a message, a record batch, its compression.
_DICTIONARIES, _RECORD_BATCHES = 2, 3
_HEADER, _BODY_LENGTH = 2, 3
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3
_CODEC = 0
_CODECS = ("lz4", "zstd")
# Of a buffer: position and length; of a compressed one, the length without compression.
_PAIR, _SIZE, _NOT_COMPRESSED, _PADDING = struct.Struct("<qq"), struct.Struct("<q"), -1, 64
_DELETED_ROWS = pa.schema([pa.field("row_id", pa.uint32(), nullable=False)])
# A roaring bitmap, https://github.com/RoaringBitmap/RoaringFormatSpec: the first bytes without and with runs, the
# fewest containers for which positions are stored with runs, the most values of an array, the bytes of a bitset.
_NO_RUNS, _RUNS = 12346, 12347
_POSITIONS_FROM, _ARRAY, _BITSET = 4, 4096, 8192
_CONTAINERS = 1 << 16


def is_cut_short(data: bytes) -> bool:
    """Whether a whole file lacks the end of a Lance file: its writer was stopped, or its end was lost."""
    return len(data) < _FOOTER.size or not data.endswith(_MAGIC)


def is_first_format(tail: bytes, size: int) -> bool:
    """Whether a file that ends so is of Lance's first format: index files of releases up to 0.20 are.

    The position must be in the file: of a later format, the number of columns would be its upper half.
    """
    if len(tail) < _FIRST_FOOTER.size:
        return False
    position, major, minor, magic = _FIRST_FOOTER.unpack(tail[-_FIRST_FOOTER.size :])
    return magic == _MAGIC and (major, minor) < _FOOTER_SINCE and position < size


def check_lance_file(tail: bytes, size: int) -> pb.FileSchema | None:
    """Refuse a file on which pylance would abort the process, by its last bytes (``tail``), or all.

    Returns the file's schema; None if that starts before ``tail``: call again with the whole file.

    Raises ``InvalidFormatError``: it is not a Lance file, or its footer has impossible values.
    """
    if len(tail) < _FOOTER.size:
        raise InvalidFormatError(f"{len(tail)} bytes are too few for a Lance file.")
    metadata_at, columns_at, buffers_at, buffers, columns, _, _, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
    if magic != _MAGIC:
        raise InvalidFormatError(f"The file ends in {magic!r}, not in {_MAGIC!r}: it is truncated or not a Lance file.")
    end = size - _FOOTER.size
    last = max(metadata_at, columns_at + columns * _BUFFER.size, buffers_at + buffers * _BUFFER.size)
    if last > end or not buffers:
        raise InvalidFormatError(f"A Lance file of {size} bytes cannot have {columns} columns and {buffers} buffers.")
    start = size - len(tail)
    if buffers_at < start:
        return None
    schema_at, length = _BUFFER.unpack_from(tail, buffers_at - start)
    if schema_at + length > end:
        raise InvalidFormatError(f"The schema of a Lance file of {size} bytes ends at {schema_at + length}.")
    if schema_at < start:
        return None
    return _checked_schema(tail[schema_at - start : schema_at - start + length])


def _checked_schema(data: bytes) -> pb.FileSchema:
    descriptor = pb.FileDescriptor()
    try:
        descriptor.ParseFromString(data)
    except DecodeError as error:
        raise InvalidFormatError(f"The schema of a Lance file is not a protobuf message: {error}") from error
    if any("\0" in field.name or "\0" in field.logical_type for field in descriptor.schema.fields):
        raise InvalidFormatError("A column of a Lance file has a zero byte in its name.")
    return descriptor.schema


def check_deletion_file(data: bytes, *, bitmap: bool, deleted: int, rows: int) -> None:
    """Refuse a deletion file that is damaged, or does not fit its fragment.

    Args:
        data: the whole file.
        bitmap: whether it is a roaring bitmap; else an Arrow file, whose offsets have no order.
        deleted: how many rows are deleted by the manifest; 0: old releases did not record it.
        rows: of the fragment, deleted ones included; 0: not recorded.

    Raises ``InvalidFormatError``: its structure is damaged, or it has not so many different offsets below ``rows``.
    """
    try:
        count, last = _checked_bitmap(data) if bitmap else _checked_arrow(data)
    except (struct.error, ValueError, LookupError, MemoryError, OSError, pa.ArrowException) as error:
        raise InvalidFormatError("it is cut short, or its structure is damaged") from error
    if deleted and count != deleted:
        raise InvalidFormatError(f"it deletes {count:,} rows, and {deleted:,} by the manifest")
    if rows and last >= rows:
        raise InvalidFormatError(f"it deletes row {last:,} of a fragment of {rows:,} rows")


def _checked_arrow(data: bytes) -> tuple[int, int]:
    """Number of rows, and the highest offset. Lance writes one record batch of one column, compressed or not."""
    length, magic = _ARROW_TAIL.unpack(data[-_ARROW_TAIL.size :])
    end = len(data) - _ARROW_TAIL.size - length
    if not data.startswith(_ARROW_START) or magic != _ARROW_END or not 0 < length <= end:
        raise InvalidFormatError("it does not begin and end as an Arrow file")
    footer = _Flatbuffer(data[end : end + length])
    block = footer.vector(_RECORD_BATCHES, _BLOCK.size)
    if len(block) != _BLOCK.size or footer.vector(_DICTIONARIES, _BLOCK.size):
        raise InvalidFormatError("it does not have one record batch")
    at, metadata, body = _BLOCK.unpack(block)
    if min(at, metadata, body) < 0 or at + metadata + body > end:
        raise InvalidFormatError("its record batch ends behind the file")
    file = pa.ipc.open_file(data)
    if file.schema != _DELETED_ROWS:
        raise InvalidFormatError("it has other columns than one of offsets")
    continued, size = _MESSAGE.unpack_from(data, at)
    if (continued, size) != (_CONTINUED, metadata - _MESSAGE.size):
        raise InvalidFormatError("the lengths of its record batch contradict each other")
    message = _Flatbuffer(data[at + _MESSAGE.size : at + metadata])
    if message.number(_BODY_LENGTH, "<q") != body:
        raise InvalidFormatError("the lengths of its record batch contradict each other")
    offsets = _offsets(message.table(_HEADER), data[at + metadata : at + metadata + body])
    file.get_batch(0).validate(full=True)
    different = np.unique(offsets)
    if len(different) != len(offsets):
        raise InvalidFormatError("an offset is in it twice")
    return len(different), int(different[-1]) if len(different) else -1


def _offsets(batch: _Flatbuffer, body: bytes) -> NDArray[np.uint32]:
    """The values of a record batch. Every length is checked before anything is allocated by it."""
    rows = batch.number(_LENGTH, "<q")
    validity, values = _PAIR.iter_unpack(batch.vector(_BUFFERS, _PAIR.size))
    if batch.vector(_NODES, _PAIR.size) != _PAIR.pack(rows, 0):
        raise InvalidFormatError("it has other rows than its record batch, or NULL among them")
    compression = batch.table(_COMPRESSION) if batch.has(_COMPRESSION) else None
    decoded = b""
    for (start, length), expected in ((validity, (rows + 7) // 8), (values, 4 * rows)):
        if min(start, length) < 0 or start + length > len(body):
            raise InvalidFormatError("a buffer ends behind its record batch")
        decoded = body[start : start + length]
        if compression is None or not decoded:
            continue
        (size,), decoded = _SIZE.unpack_from(decoded), decoded[_SIZE.size :]
        if size != _NOT_COMPRESSED and not expected <= size <= expected + _PADDING:
            raise InvalidFormatError(f"a buffer of {rows:,} rows claims {size:,} bytes")
        if size != _NOT_COMPRESSED:
            decoded = pa.decompress(decoded, size, _CODECS[compression.number(_CODEC, "<b")], asbytes=True)
        if len(decoded) < expected:
            raise InvalidFormatError(f"a buffer of {rows:,} rows has {len(decoded):,} bytes")
    return np.frombuffer(decoded, "<u4", rows)


class _Flatbuffer:
    """A table of a flatbuffer, by default at the position of its root."""

    def __init__(self, data: bytes, at: int | None = None) -> None:
        self._data = data
        self._at = struct.unpack_from("<I", data)[0] if at is None else at

    def has(self, number: int) -> bool:
        return self._field(number) != self._at

    def number(self, number: int, kind: str) -> int:
        """A number; 0 if the table does not have the field."""
        return int(struct.unpack_from(kind, self._data, self._field(number))[0]) if self.has(number) else 0

    def table(self, number: int) -> _Flatbuffer:
        return _Flatbuffer(self._data, self._referred(number))

    def vector(self, number: int, width: int) -> bytes:
        """The elements of a vector, each of so many bytes; none if the table does not have the field."""
        if not self.has(number):
            return b""
        at = self._referred(number)
        (length,) = struct.unpack_from("<I", self._data, at)
        content = self._data[at + 4 : at + 4 + length * width]
        if len(content) != length * width:
            raise InvalidFormatError("a list is longer than the file")
        return content

    def _referred(self, number: int) -> int:
        at = self._field(number)
        return at + int(struct.unpack_from("<I", self._data, at)[0])

    def _field(self, number: int) -> int:
        """The position of a field; that of the table if it does not have the field."""
        fields = self._at - int(struct.unpack_from("<i", self._data, self._at)[0])
        if 4 + 2 * number >= struct.unpack_from("<H", self._data, fields)[0]:
            return self._at
        return self._at + int(struct.unpack_from("<H", self._data, fields + 4 + 2 * number)[0])


def _checked_bitmap(data: bytes) -> tuple[int, int]:
    """Number of rows, and the highest offset. Every container is checked: pylance and CRoaring believe some of it."""
    (cookie,) = struct.unpack_from("<I", data)
    if cookie == _NO_RUNS:
        (containers,), at, is_run = struct.unpack_from("<I", data, 4), 8, None
    elif cookie & 0xFFFF == _RUNS:
        containers, at = (cookie >> 16) + 1, 4 + ((cookie >> 16) + 8) // 8
        is_run = np.unpackbits(np.frombuffer(data, np.uint8, at - 4, 4), bitorder="little")
    else:
        raise InvalidFormatError("it does not begin as a roaring bitmap")
    if containers > _CONTAINERS:
        raise InvalidFormatError(f"it claims {containers:,} containers")
    keys, sizes = np.frombuffer(data, "<u2", 2 * containers, at).astype(np.int64).reshape(-1, 2).T
    at += 4 * containers
    positions = None
    if is_run is None or containers >= _POSITIONS_FROM:
        positions = np.frombuffer(data, "<u4", containers, at)
        at += 4 * containers
    last, right = -1, bool((np.diff(keys) > 0).all())
    for number, size in enumerate((sizes + 1).tolist()):
        right = right and (positions is None or positions[number] == at)
        if is_run is not None and is_run[number]:
            (runs,) = struct.unpack_from("<H", data, at)
            starts, lengths = np.frombuffer(data, "<u2", 2 * runs, at + 2).astype(np.int64).reshape(-1, 2).T
            ends = starts + lengths
            right = right and bool(runs and (starts[1:] > ends[:-1]).all() and (lengths + 1).sum() == size)
            at, last = at + 2 + 4 * runs, int(ends[-1]) if runs else -1
        elif size <= _ARRAY:
            offsets = np.frombuffer(data, "<u2", size, at)
            right = right and bool((offsets[1:] > offsets[:-1]).all())
            at, last = at + 2 * size, int(offsets[-1])
        else:
            bits = np.unpackbits(np.frombuffer(data, np.uint8, _BITSET, at), bitorder="little")
            (present,) = np.nonzero(bits)
            right = right and len(present) == size
            at, last = at + _BITSET, int(present[-1]) if len(present) else -1
        right = right and 0 <= last < _CONTAINERS
    if not right or at != len(data):
        raise InvalidFormatError("its containers contradict its header")
    return int((sizes + 1).sum()), (int(keys[-1]) << 16) + last if containers else -1
