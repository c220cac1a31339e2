"""The end of a Lance data file, looked at before pylance reads the file.

Two kinds of damage end the process in pylance, without any error that could be caught. It makes room
for as many columns and buffers as the footer claims, before it looks whether they are there: one wrong
byte asks for 64 GB. And it hands a column's name to Arrow as a C string, which must not have a zero byte.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError
from memwal_ops.format._pb import table_pb2 as pb

# Where column metadata, its offset table and the global buffers' table begin; how many global buffers
# and columns there are; format version; magic.
_FOOTER = struct.Struct("<QQQIIHH4s")
_BUFFER = struct.Struct("<QQ")
_MAGIC = b"LANC"


def check_lance_file(tail: bytes, size: int) -> bool:
    """Refuse a file that pylance must not be given.

    Args:
        tail: its last bytes, or all.
        size: of the whole file.

    Returns:
        Whether that could be told; False: ask again with the whole file.

    Raises:
        InvalidFormatError: no Lance file, or one that claims what cannot be.
    """
    if len(tail) < _FOOTER.size:
        raise InvalidFormatError(f"{len(tail)} bytes are too few for a Lance file.")
    metadata_at, columns_at, buffers_at, buffers, columns, _, _, magic = _FOOTER.unpack(tail[-_FOOTER.size :])
    if magic != _MAGIC:
        raise InvalidFormatError(f"The file ends in {magic!r}, not in {_MAGIC!r}: it is cut short or no Lance file.")
    end = size - _FOOTER.size
    last = max(metadata_at, columns_at + columns * _BUFFER.size, buffers_at + buffers * _BUFFER.size)
    if last > end or not buffers:
        raise InvalidFormatError(f"A Lance file of {size} bytes cannot have {columns} columns and {buffers} buffers.")
    start = size - len(tail)
    if buffers_at < start:
        return False
    schema_at, length = _BUFFER.unpack_from(tail, buffers_at - start)
    if schema_at + length > end:
        raise InvalidFormatError(f"The schema of a Lance file of {size} bytes is said to end at {schema_at + length}.")
    if schema_at < start:
        return False
    _check_schema(tail[schema_at - start : schema_at - start + length])
    return True


def _check_schema(data: bytes) -> None:
    descriptor = pb.FileDescriptor()
    try:
        descriptor.ParseFromString(data)
    except DecodeError as error:
        raise InvalidFormatError(f"The schema of a Lance file is no protobuf message: {error}") from error
    if any("\0" in field.name or "\0" in field.logical_type for field in descriptor.schema.fields):
        raise InvalidFormatError("A column of a Lance file has a zero byte in its name.")
