"""The details of the MemWAL index of Lance 0.31 to 1.x: a list of MemWALs, each with a state and an owner (S1-006).

Current releases use the same type URL for other details, and give field 1 another meaning; the first byte differs.

The WAL entries of a MemWAL are a set of numbers, which Lance stores in five encodings of its ``U64Segment``. A range of
2^60 numbers is encoded in a few bytes, so a set is kept as its bounds and gaps, never as all its numbers.
"""

from __future__ import annotations

import enum
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from google.protobuf.message import DecodeError

from memwal_ops.errors import InvalidFormatError, InvalidUsageError, TableCorruptError
from memwal_ops.formats.lance.wire._pb import memwal_pb2 as pb
from memwal_ops.formats.lance.wire.names import U64_MAX

_TYPECODES = {"u16_array": "H", "u32_array": "I", "u64_array": "Q"}


@dataclass(frozen=True, slots=True)
class U64Segment:
    """A set of unsigned 64-bit numbers.

    Attributes:
        encoding: range, range_with_holes, range_with_bitmap, sorted_array or array.
        spans: the numbers as ascending spans ``(first, last)``, both inclusive, with a gap between any two.
        order: of an array: its numbers in their stored order; else empty.
    """

    encoding: str
    spans: tuple[tuple[int, int], ...]
    order: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return sum(last - first + 1 for first, last in self.spans)

    @property
    def highest(self) -> int | None:
        """The highest number; None of an empty set."""
        return self.spans[-1][1] if self.spans else None

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """The numbers that are missing between the lowest and the highest, as spans (S1-016)."""
        return tuple((before[1] + 1, after[0] - 1) for before, after in pairwise(self.spans))

    def __contains__(self, number: int) -> bool:
        return any(first <= number <= last for first, last in self.spans)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.spans:
            yield from range(first, last + 1)

    def with_new_high(self, number: int) -> U64Segment:
        """The set with a number above all others; a gap before it becomes a hole, as in Lance.

        Raises ``InvalidUsageError``: it is not above all others, or no unsigned 64-bit number.
        """
        if not (-1 if self.highest is None else self.highest) < number < U64_MAX:
            raise InvalidUsageError(f"WAL entry {number} is not above the last one, {self.highest}.")
        spans = _joined([*self.spans, (number, number)])
        encoding = "range_with_holes" if self.encoding == "range" and len(spans) > 1 else self.encoding
        return U64Segment(encoding, spans, (*self.order, number) if self.order else ())

    def text(self) -> str:
        """``0 to 9, without 4 and 6 to 7``; ``none``."""
        if not self.spans:
            return "none"
        without = " and ".join(_span_text(*hole) for hole in self.holes)
        return _span_text(self.spans[0][0], self.spans[-1][1]) + (f", without {without}" if without else "")


EMPTY = U64Segment("range", ())


def decode_segment(data: bytes) -> U64Segment:
    """Decode a segment.

    Raises ``InvalidFormatError``: no protobuf, no encoding (as of no bytes at all: the empty set is ``0a 00``), bounds
    the wrong way round, holes or values out of order or out of bounds, a bitmap of another length.
    """
    message = pb.U64Segment()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidFormatError(f"The segment is no protobuf message: {error}") from error
    encoding = message.WhichOneof("segment")
    if encoding is None:
        raise InvalidFormatError("The segment has none of the five encodings.")
    if encoding in {"sorted_array", "array"}:
        return _of_array(encoding, _numbers(getattr(message, encoding)))
    bounds = getattr(message, encoding)
    if bounds.start > bounds.end:
        raise InvalidFormatError(f"The segment's range begins at {bounds.start} and ends before {bounds.end}.")
    if encoding == "range":
        gaps: Sequence[int] = ()
    elif encoding == "range_with_holes":
        gaps = _numbers(bounds.holes)
        if any(a >= b for a, b in pairwise(gaps)) or (gaps and not bounds.start <= gaps[0] <= gaps[-1] < bounds.end):
            raise InvalidFormatError("The segment's holes are not ascending numbers of its range.")
    else:
        gaps = _bitmap_gaps(bounds)
    return U64Segment(encoding, _between(bounds.start, bounds.end, gaps))


def encode_segment(segment: U64Segment) -> bytes:
    """The bytes of a segment, in its own encoding; holes and values are stored as 64-bit numbers, as Lance does."""
    message = pb.U64Segment()
    if segment.encoding in {"sorted_array", "array"}:
        target = getattr(message, segment.encoding)
        target.u64_array.values = _little(array("Q", segment.order or segment)).tobytes()
        return message.SerializeToString(deterministic=True)
    bounds = getattr(message, segment.encoding)
    bounds.SetInParent()
    if segment.spans:
        bounds.start, bounds.end = segment.spans[0][0], segment.spans[-1][1] + 1
    if segment.encoding == "range_with_holes":
        holes = array("Q", (number for first, last in segment.holes for number in range(first, last + 1)))
        bounds.holes.u64_array.values = _little(holes).tobytes()
    elif segment.encoding == "range_with_bitmap":
        bits = bytearray((bounds.end - bounds.start + 7) // 8)
        for number in segment:
            at = number - bounds.start
            bits[at // 8] |= 1 << at % 8
        bounds.bitmap = bytes(bits)
    return message.SerializeToString(deterministic=True)


def _of_array(encoding: str, numbers: Sequence[int]) -> U64Segment:
    ascending = sorted(numbers)
    if any(a == b for a, b in pairwise(ascending)):
        raise InvalidFormatError("The segment's array has a number twice.")
    if encoding == "sorted_array" and ascending != list(numbers):
        raise InvalidFormatError("The segment's sorted array is not sorted.")
    return U64Segment(encoding, _joined([(number, number) for number in ascending]), tuple(numbers))


def _bitmap_gaps(bounds: pb.U64Segment.RangeWithBitmap) -> list[int]:
    """The numbers of a bitmap that are not set. A comment in Lance's protobuf has the highest bit first; its code not.

    The code is what wrote the bytes: the lowest bit of a byte is the first number.
    """
    length = bounds.end - bounds.start
    if len(bounds.bitmap) != (length + 7) // 8:
        raise InvalidFormatError(f"The segment's bitmap has {len(bounds.bitmap)} bytes for {length} numbers.")
    return [bounds.start + at for at in range(length) if not bounds.bitmap[at // 8] >> at % 8 & 1]


def _numbers(encoded: pb.EncodedU64Array) -> Sequence[int]:
    kind = encoded.WhichOneof("array")
    if kind is None:
        raise InvalidFormatError("The segment has an array without an encoding.")
    stored = getattr(encoded, kind)
    data = stored.values if kind == "u64_array" else stored.offsets
    numbers = array(_TYPECODES[kind])
    if len(data) % numbers.itemsize:
        raise InvalidFormatError(f"The segment's array of {numbers.itemsize}-byte numbers has {len(data)} bytes.")
    numbers.frombytes(data)
    base = 0 if kind == "u64_array" else stored.base
    decoded = [base + number for number in _little(numbers)]
    if decoded and max(decoded) > U64_MAX:
        raise InvalidFormatError("The segment's array has numbers above 64 bits.")
    return decoded


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _between(start: int, end: int, gaps: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The spans from ``start`` to before ``end`` without ``gaps``, which ascend."""
    spans = []
    for gap in (*gaps, end):
        if start < gap:
            spans.append((start, gap - 1))
        start = gap + 1
    return tuple(spans)


def _joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and joined[-1][1] + 1 == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)


def _span_text(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


class State(enum.IntEnum):
    """The life of a MemWAL, in its order (S1-017 to S1-020)."""

    OPEN = 0
    SEALED = 1
    FLUSHED = 2
    MERGED = 3


@dataclass(frozen=True, slots=True, order=True)
class MemWalId:
    """A MemWAL: a generation of a region; both are unique together (S1-007). Generations begin at 0."""

    region: str
    generation: int

    def __str__(self) -> str:
        return f"generation {self.generation} of region {self.region!r}"


@dataclass(frozen=True, slots=True)
class MemWal:
    """One MemWAL (S1-010 to S1-024).

    Attributes:
        mem_table_location: where its rows are for readers, likely ``memory://...``.
        wal_location: the root of its log; never changes.
        wal_entries: the ids of its log's entries, from 0 on; others at the root are not part of it.
        owner_id: who may change it.
        last_updated_dataset_version: the table version that changed it last.
        source: the message that it was decoded from, with fields that this release does not define.
    """

    id: MemWalId
    mem_table_location: str
    wal_location: str
    wal_entries: U64Segment = EMPTY
    state: State = State.OPEN
    owner_id: str = ""
    last_updated_dataset_version: int = 0
    source: bytes = field(default=b"", repr=False, compare=False)


def decode_mem_wals(details: bytes) -> tuple[MemWal, ...]:
    """Decode legacy details, in their stored order.

    Raises ``TableCorruptError``: no protobuf, a MemWAL without an id or with a duplicate one, an unknown state, entries
    that do not decode.
    """
    message = pb.LegacyMemWalIndexDetails()
    try:
        message.ParseFromString(details)
    except (DecodeError, UnicodeDecodeError) as error:
        raise TableCorruptError(
            f"The details of the legacy MemWAL index are not a protobuf message: {error}"
        ) from error
    mem_wals = tuple(map(decode_mem_wal, message.mem_wal_list))
    ids = [mem_wal.id for mem_wal in mem_wals]
    if len({*ids}) < len(ids):
        twice = next(mem_wal_id for mem_wal_id in ids if ids.count(mem_wal_id) > 1)
        raise TableCorruptError(f"The legacy MemWAL index lists {twice} twice.")
    return mem_wals


def decode_mem_wal(message: pb.LegacyMemWal) -> MemWal:
    """Decode one MemWAL. Raises as :func:`decode_mem_wals`."""
    if not message.HasField("id"):
        raise TableCorruptError("The legacy MemWAL index lists a MemWAL without an id.")
    mem_wal_id = MemWalId(message.id.region, message.id.generation)
    try:
        state = State(message.state)
        entries = decode_segment(message.wal_entries)
    except (ValueError, InvalidFormatError) as error:
        raise TableCorruptError(f"The legacy MemWAL index cannot be read at {mem_wal_id}: {error}") from error
    return MemWal(
        mem_wal_id,
        message.mem_table_location,
        message.wal_location,
        entries,
        state,
        message.owner_id,
        message.last_updated_dataset_version,
        message.SerializeToString(deterministic=True),
    )


def encode_mem_wals(mem_wals: Iterable[MemWal]) -> bytes:
    """The details that list these MemWALs; empty for none, which every release reads as an empty MemWAL index."""
    return pb.LegacyMemWalIndexDetails(mem_wal_list=map(encode_mem_wal, mem_wals)).SerializeToString(deterministic=True)


def encode_mem_wal(mem_wal: MemWal) -> pb.LegacyMemWal:
    """The message of one MemWAL; entries that did not change keep the bytes of their encoding."""
    message = pb.LegacyMemWal()
    message.ParseFromString(mem_wal.source)
    message.id.region, message.id.generation = mem_wal.id.region, mem_wal.id.generation
    message.mem_table_location, message.wal_location = mem_wal.mem_table_location, mem_wal.wal_location
    if not message.wal_entries or decode_segment(message.wal_entries) != mem_wal.wal_entries:
        message.wal_entries = encode_segment(mem_wal.wal_entries)
    message.state = mem_wal.state.value  # type: ignore[assignment]  # the stub wants its own enum; the wire has a number
    message.owner_id = mem_wal.owner_id
    message.last_updated_dataset_version = mem_wal.last_updated_dataset_version
    return message
