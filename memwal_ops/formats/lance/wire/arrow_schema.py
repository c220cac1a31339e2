"""Read the metadata of a schema in an Arrow stream, without building the types of its columns.

pyarrow builds them, and a registered extension type (for example pylance's blobs) may refuse the storage type of a
column: then the schema's metadata cannot be read with pyarrow either. Layout: Arrow columnar format,
"Encapsulated message format"; Message.fbs and Schema.fbs.
"""

from __future__ import annotations

import struct

from memwal_ops.errors import InvalidFormatError

_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_U16 = struct.Struct("<H")
_MARK = b"\xff\xff\xff\xff"
_SCHEMA = 1
# Numbers of the fields in their flatbuffers tables.
_MESSAGE_HEADER_TYPE, _MESSAGE_HEADER, _SCHEMA_METADATA, _PAIR_KEY, _PAIR_VALUE = 1, 2, 2, 0, 1


def schema_end(head: bytes) -> int:
    """Number of bytes from the stream's start to the end of its schema.

    Raises ``InvalidFormatError``: ``head`` is not the start of an Arrow stream.
    """
    at = _I32.size if head.startswith(_MARK) else 0  # streams before Arrow 0.15 have no mark
    size = _I32.unpack_from(head, at)[0] if len(head) >= at + _I32.size else 0
    if size <= 0:
        raise InvalidFormatError(f"An Arrow stream does not begin with {head[:8]!r}.")
    return at + _I32.size + int(size)


def schema_metadata(head: bytes, key: bytes) -> bytes | None:
    """One entry of the schema's own metadata, if there is one; ``head`` goes to :func:`schema_end` at least.

    Raises ``InvalidFormatError``: it is not a schema, or is truncated.
    """
    end = schema_end(head)
    if len(head) < end:
        raise InvalidFormatError(f"The schema of an Arrow stream has {end} bytes, of which only {len(head)} exist.")
    start = 2 * _I32.size if head.startswith(_MARK) else _I32.size
    try:
        return _Flatbuffer(head[start:end]).metadata(key)
    except (struct.error, IndexError) as error:
        raise InvalidFormatError(f"The schema of an Arrow stream is truncated or damaged: {error}") from error


class _Flatbuffer:
    """A minimal flatbuffers reader: tables, vectors of tables, byte strings."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def metadata(self, key: bytes) -> bytes | None:
        message = self._follow(0)
        kind = self._field(message, _MESSAGE_HEADER_TYPE)
        header = self._field(message, _MESSAGE_HEADER)
        if kind is None or header is None or self._data[kind] != _SCHEMA:
            raise InvalidFormatError("The first message of an Arrow stream is not a schema.")
        pairs = self._field(self._follow(header), _SCHEMA_METADATA)
        if pairs is None:
            return None
        vector = self._follow(pairs)
        for place in range(self._number(_U32, vector)):
            pair = self._follow(vector + _U32.size * (place + 1))
            if self._is(self._field(pair, _PAIR_KEY), key):
                value = self._field(pair, _PAIR_VALUE)
                return b"" if value is None else self._string(self._follow(value))
        return None

    def _number(self, kind: struct.Struct, at: int) -> int:
        if at < 0:  # Python would index from the end
            raise IndexError(f"offset {at}")
        return int(kind.unpack_from(self._data, at)[0])

    def _follow(self, at: int) -> int:
        return at + self._number(_U32, at)

    def _field(self, table: int, number: int) -> int | None:
        """The position of a table's field; None if the table does not have it."""
        layout = table - self._number(_I32, table)
        entry = _U16.size * (number + 2)
        if entry >= self._number(_U16, layout):
            return None
        offset = self._number(_U16, layout + entry)
        return table + offset if offset else None

    def _string(self, at: int) -> bytes:
        size = self._number(_U32, at)
        start = at + _U32.size
        if start + size > len(self._data):
            raise IndexError(f"{size} bytes from {start} on")
        return self._data[start : start + size]

    def _is(self, field: int | None, wanted: bytes) -> bool:
        if field is None:
            return False
        at = self._follow(field)
        # The size is compared first: a damaged vector may refer to one large string a million times.
        return self._number(_U32, at) == len(wanted) and self._string(at) == wanted
