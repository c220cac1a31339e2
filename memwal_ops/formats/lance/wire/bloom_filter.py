"""The primary key bloom filter of a generation, ``bloom_filter.bin`` (S0-136, S0-140), as Lance writes and reads it.

The specification names the file only. Lance stores a split-block bloom filter of Parquet's form without a
header: blocks of eight 32-bit words, least significant byte first. The hash is
SipHash-1-3 with a zero key. Its input has for each key column a byte 0 (not NULL) and the value: integers as stored;
strings, then a byte 255; binary after its length as a uint64.

pylance's writer hashes the values of other types than :data:`_HASHED` as if they were empty, and its filters miss all
their keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidFormatError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray


_BINARY = pa.large_binary()
_SIGN = np.uint64(1 << 63)


def is_encodable(kind: pa.DataType) -> bool:
    """Whether values of a type can be encoded in such a tuple."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_date(kind)
        or types.is_boolean(kind)
        or _is_text(kind)
        or types.is_fixed_size_binary(kind)
    )


def key_tuples(columns: Sequence[pa.Array]) -> pa.Array:
    """One binary value for each row of columns of types that :func:`is_encodable`, without NULL values.

    Of each column a byte 1 (not NULL; 0 means NULL), and the value: whole numbers as eight bytes, most significant
    first, with the sign bit turned where they have a sign; a boolean as one byte; text and bytes with each byte 0
    followed by 255, and two bytes 0 behind them.
    """
    parts = [part for column in columns for part in _key_parts(column)]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", _BINARY)).cast(pa.binary())


def _key_parts(column: pa.Array) -> list[pa.Array]:
    kind = column.type
    tag = pa.repeat(pa.scalar(b"\1", _BINARY), len(column))
    if pa.types.is_boolean(kind):
        return [tag, _bytes(column.cast(pa.uint8()).to_numpy())]
    if pa.types.is_integer(kind) or pa.types.is_date(kind):
        if pa.types.is_unsigned_integer(kind):
            return [tag, _bytes(column.cast(pa.uint64()).to_numpy().byteswap())]
        whole = column.cast(pa.int32() if kind == pa.date32() else pa.int64()).cast(pa.int64()).to_numpy()
        return [tag, _bytes((whole.view(np.uint64) ^ _SIGN).byteswap())]
    escaped = pc.replace_substring(column.cast(_BINARY), b"\0", b"\0\xff")
    return [tag, escaped, pa.repeat(pa.scalar(b"\0\0", _BINARY), len(column))]


def _bytes(values: np.ndarray[tuple[int, ...], np.dtype[np.unsignedinteger]]) -> pa.Array:
    width = pa.binary(values.dtype.itemsize)
    return pa.Array.from_buffers(width, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))]).cast(_BINARY)


def _is_text(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


BLOCK = 32
_WORDS, _BITS = 8, 32
_WORD = 8
_MAX_BYTES = 128 << 20
# As in Lance: a false positive for about 1 in 1,754 absent keys.
_FALSE_POSITIVES = 0.00057
_FEWEST_KEYS = 8192
# Rows per batch: the working set fits a processor's cache.
_CHUNK = 1 << 14
_HASHED = frozenset({pa.int32(), pa.int64(), pa.string(), pa.binary()})
_NOTHING = pa.scalar(b"", pa.large_binary())
_SALT = np.array(
    [0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31], np.uint32
)
_STATE = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


class BloomFilter:
    """Whether a key was certainly never added, or may have been."""

    def __init__(self, blocks: NDArray[np.uint32]) -> None:
        """Use these blocks of eight words each, which are changed in place."""
        self._blocks = blocks

    @classmethod
    def for_keys(cls, keys: int) -> BloomFilter:
        """An empty filter for that many keys."""
        bits = -8 * max(keys, _FEWEST_KEYS) / math.log(1 - _FALSE_POSITIVES ** (1 / 8))
        size = min(max(int(bits) // 8, BLOCK), _MAX_BYTES)
        return cls(np.zeros(((1 << (size - 1).bit_length()) // BLOCK, 8), np.uint32))

    @classmethod
    def decode(cls, data: bytes) -> BloomFilter:
        """Decode a stored filter.

        Raises:
            InvalidFormatError: it does not consist of blocks.
        """
        if not data or len(data) % BLOCK:
            raise InvalidFormatError(f"A bloom filter cannot have {len(data)} bytes.")
        return cls(np.frombuffer(data, "<u4").reshape(-1, 8).astype(np.uint32))

    @property
    def nbytes(self) -> int:
        """The size in memory, which is that of the stored form."""
        return self._blocks.nbytes

    def encode(self) -> bytes:
        """The stored form."""
        return self._blocks.astype("<u4").tobytes()

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Add keys, given by their columns, in the order of the table's key."""
        at, numbers = self._places(key_hashes(columns))
        if len(at) < len(self._blocks):
            for word in range(_WORDS):
                np.bitwise_or.at(self._blocks[:, word], at, np.uint32(1) << numbers[:, word])
            return
        # Bit by bit, which is faster for many keys.
        bits = np.zeros((*self._blocks.shape, _BITS), bool)
        for word in range(_WORDS):
            bits[:, word][at, numbers[:, word]] = True
        self._blocks |= np.packbits(bits, axis=-1, bitorder="little").view("<u4").reshape(self._blocks.shape)

    def may_have(self, columns: Sequence[pa.Array]) -> NDArray[np.bool_]:
        """Per key whether it may have been added."""
        at, numbers = self._places(key_hashes(columns))
        set_bits = (self._blocks[at] >> numbers) & np.uint32(1)
        present: NDArray[np.bool_] = np.logical_and.reduce(set_bits, axis=1)
        return present

    def _places(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        high, low = hashes >> np.uint64(32), (hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        at = (high * np.uint64(len(self._blocks))) >> np.uint64(32)
        return at, (low[:, None] * _SALT) >> np.uint32(27)


def is_hashed_alike(kinds: Iterable[pa.DataType]) -> bool:
    """Whether every writer hashes keys of these types in the same way, so that a stored filter may be used."""
    return _HASHED.issuperset(kinds)


def key_hashes(columns: Sequence[pa.Array]) -> NDArray[np.uint64]:
    """The hash of each key, without NULL values."""
    hashes = _of_words(columns[0]) if len(columns) == 1 else None
    if hashes is not None:
        return hashes
    parts = [part for column in columns for part in _parts(column)]
    messages = parts[0] if len(parts) == 1 else pc.binary_join_element_wise(*parts, _NOTHING)
    hashes = np.empty(len(messages), np.uint64)
    for start in range(0, len(messages), _CHUNK):
        hashes[start : start + _CHUNK] = _siphash(messages.slice(start, _CHUNK))
    return hashes


def _of_words(column: pa.Array) -> NDArray[np.uint64] | None:
    """The hashes of a column of values of up to eight bytes, without conversion to bytes; None: another type."""
    kind = column.type
    width = kind.bit_width // 8 if pa.types.is_primitive(kind) and not pa.types.is_boolean(kind) else 0
    if not width:
        return None
    start, size = column.offset * width, len(column) * width
    buffer = column.buffers()[1]
    values = np.frombuffer(buffer.slice(start, size) if size else b"", f"<u{width}").astype(np.uint64)
    hashes = np.empty(len(values), np.uint64)
    for first in range(0, len(values), _CHUNK):
        part = values[first : first + _CHUNK]
        state = [np.full(len(part), word, np.uint64) for word in _STATE]
        length = np.uint64((width + 1) << 56)
        if width < _WORD:
            _mix(state, (part << np.uint64(8)) | length)
        else:
            _mix(state, part << np.uint64(8))
            _mix(state, (part >> np.uint64(56)) | length)
        hashes[first : first + _CHUNK] = _finished(state)
    return hashes


def _parts(column: pa.Array) -> list[pa.Array]:
    kind, length = column.type, len(column)
    if pa.types.is_dictionary(kind):
        return _parts(column.cast(kind.value_type))
    zero = pa.repeat(pa.scalar(b"\0", pa.large_binary()), length)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return [zero, column.cast(pa.large_binary()), pa.repeat(pa.scalar(b"\xff", pa.large_binary()), length)]
    if pa.types.is_boolean(kind):
        return _parts(column.cast(pa.uint8()))
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
        return [zero, _fixed(column, kind.bit_width // 8)]
    plain = column.cast(pa.large_binary())
    return [zero, _fixed(pc.binary_length(plain).cast(pa.uint64()), 8), plain]


def _fixed(column: pa.Array, width: int) -> pa.Array:
    values = column.buffers()[1]
    start, size = column.offset * width, len(column) * width
    binary = pa.Array.from_buffers(pa.binary(width), len(column), [None, values.slice(start, size)])
    return binary.cast(pa.large_binary())


def _siphash(messages: pa.Array) -> NDArray[np.uint64]:
    _, offsets, data = messages.buffers()
    ends = np.frombuffer(offsets, np.int64)[messages.offset : messages.offset + len(messages) + 1]
    first = int(ends[0])
    raw = np.frombuffer(data, np.uint8)[first : int(ends[-1])] if data is not None else np.empty(0, np.uint8)
    padded = np.concatenate([raw, np.zeros(8, np.uint8)])
    starts, lengths = ends[:-1] - first, np.diff(ends)
    state = [np.full(len(starts), word, np.uint64) for word in _STATE]
    for word in range(int(lengths.max(initial=0)) // 8 + 1):
        left = lengths - 8 * word
        taken = np.flatnonzero(left >= 0)
        places = np.minimum(starts[taken] + 8 * word, len(raw))
        block = padded[places[:, None] + np.arange(8)].view("<u8").ravel().astype(np.uint64)
        short = left[taken] < _WORD  # the last word: what is left, and the length
        bits = np.where(short, left[taken] * 8, 0).astype(np.uint64)
        tail = (block & ((np.uint64(1) << bits) - np.uint64(1))) | (lengths[taken].astype(np.uint64) << np.uint64(56))
        block = np.where(short, tail, block)
        if len(taken) == len(starts):
            _mix(state, block)
        else:
            some = [word[taken] for word in state]
            _mix(some, block)
            for values, changed in zip(state, some, strict=True):
                values[taken] = changed
    return _finished(state)


def _finished(state: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    state[2] ^= np.uint64(0xFF)
    for _ in range(3):
        _round(state)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _mix(state: list[NDArray[np.uint64]], block: NDArray[np.uint64]) -> None:
    state[3] ^= block
    _round(state)
    state[0] ^= block


def _round(state: list[NDArray[np.uint64]]) -> None:
    v0, v1, v2, v3 = state
    v0 += v1
    v1[:] = _turned(v1, 13) ^ v0
    v0[:] = _turned(v0, 32)
    v2 += v3
    v3[:] = _turned(v3, 16) ^ v2
    v0 += v3
    v3[:] = _turned(v3, 21) ^ v0
    v2 += v1
    v1[:] = _turned(v1, 17) ^ v2
    v2[:] = _turned(v2, 32)


def _turned(words: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    return (words << np.uint64(bits)) | (words >> np.uint64(64 - bits))
