"""Check the footer of a Lance data file before pylance reads the file.

Two kinds of damage abort the process inside pylance, without an error that could be caught. It allocates
memory for as many columns and buffers as the footer claims before it checks that they exist: one wrong
byte allocates 64 GB. And it passes a column's name to Arrow as a C string, which must not contain a zero byte.
"""

from __future__ import annotations

import struct

from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.wire._pb import table_pb2 as pb

# Positions of the column metadata, of its offset table and of the table of global buffers; number of global
# buffers; number of columns; format version; magic.
_FOOTER = struct.Struct("<QQQIIHH4s")
# Of the first format: position of the metadata, format version, magic.
_FIRST_FOOTER = struct.Struct("<QHH4s")
_FOOTER_SINCE = (0, 3)
_BUFFER = struct.Struct("<QQ")
_MAGIC = b"LANC"


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
    """Refuse a file on which pylance would abort the process.

    Args:
        tail: its last bytes, or all.
        size: of the whole file.

    Returns:
        The file's schema; None if that starts before ``tail``: call again with the whole file.

    Raises:
        InvalidFormatError: it is not a Lance file, or its footer has impossible values.
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
