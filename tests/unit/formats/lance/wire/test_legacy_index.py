"""Legacy MemWAL details and U64Segments against an independent decoder, and what is refused."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from memwal_ops.errors import InvalidFormatError, InvalidUsageError, TableCorruptError
from memwal_ops.formats.lance.wire.legacy_index import (
    EMPTY,
    MemWal,
    MemWalId,
    State,
    decode_mem_wals,
    decode_segment,
    encode_mem_wals,
    encode_segment,
)
from tests.support.tables import legacy_wire, wire

U64 = 2**64 - 1


def u16(base: int, offsets: list[int]) -> bytes:
    return wire.encode([(1, wire.encode([(1, base), (2, struct.pack(f"<{len(offsets)}H", *offsets))]))])


def u32(base: int, offsets: list[int]) -> bytes:
    return wire.encode([(2, wire.encode([(1, base), (2, struct.pack(f"<{len(offsets)}I", *offsets))]))])


def u64(values: list[int]) -> bytes:
    return wire.encode([(3, wire.encode([(2, struct.pack(f"<{len(values)}Q", *values))]))])


def bounds(start: int, end: int, *more: tuple[int, bytes]) -> bytes:
    return wire.encode([(1, start), (2, end), *more])


SEGMENTS = {
    "empty": (b"\x0a\x00", "range", []),
    "range": (wire.encode([(1, bounds(0, 5))]), "range", [0, 1, 2, 3, 4]),
    "holes16": (wire.encode([(2, bounds(2, 9, (3, u16(3, [0, 2, 3]))))]), "range_with_holes", [2, 4, 7, 8]),
    "holes64": (wire.encode([(2, bounds(0, 4, (3, u64([1]))))]), "range_with_holes", [0, 2, 3]),
    "bitmap": (wire.encode([(3, bounds(10, 20, (3, b"\x05\x02")))]), "range_with_bitmap", [10, 12, 19]),
    "sorted32": (wire.encode([(4, u32(7, [0, 1, 70_000]))]), "sorted_array", [7, 8, 70_007]),
    "array": (wire.encode([(5, u64([9, 2, U64]))]), "array", [9, 2, U64]),
}


@pytest.mark.req("S1-013")
@pytest.mark.parametrize("name", SEGMENTS)
def test_all_five_encodings(name: str) -> None:
    data, encoding, numbers = SEGMENTS[name]
    assert legacy_wire.segment(data) == (encoding, numbers)
    found = decode_segment(data)
    assert found.encoding == encoding
    assert list(found) == sorted(numbers)
    assert found.count == len(numbers)
    assert found.highest == (max(numbers) if numbers else None)
    assert legacy_wire.segment(encode_segment(found)) == (encoding, numbers)
    assert decode_segment(encode_segment(found)) == found


REFUSED = {
    "no bytes": (b"", "none of the five"),
    "not a protobuf message": (b"\x0a\xff", "no protobuf"),
    "backwards": (wire.encode([(1, bounds(5, 2))]), "begins at 5"),
    "hole outside": (wire.encode([(2, bounds(0, 3, (3, u64([3]))))]), "holes"),
    "holes unsorted": (wire.encode([(2, bounds(0, 9, (3, u64([4, 3]))))]), "holes"),
    "no holes": (wire.encode([(2, bounds(0, 9))]), "without an encoding"),
    "short bitmap": (wire.encode([(3, bounds(0, 9, (3, b"\x01")))]), "bitmap has 1 bytes"),
    "long range, no bitmap": (wire.encode([(3, bounds(0, 1 << 60))]), "bitmap has 0 bytes"),
    "unsorted": (wire.encode([(4, u64([2, 1]))]), "not sorted"),
    "twice": (wire.encode([(5, u64([2, 1, 2]))]), "twice"),
    "odd bytes": (wire.encode([(5, wire.encode([(3, wire.encode([(2, b"123")]))]))]), "8-byte numbers has 3 bytes"),
    "overflow": (wire.encode([(5, u16(U64, [1]))]), "above 64 bits"),
}


@pytest.mark.req("S1-013")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_segment(name: str) -> None:
    data, message = REFUSED[name]
    with pytest.raises(InvalidFormatError, match=message):
        decode_segment(data)


def test_a_range_of_any_length_takes_no_memory() -> None:
    found = decode_segment(wire.encode([(1, bounds(0, 1 << 62))]))
    assert (found.count, found.highest) == (1 << 62, (1 << 62) - 1)
    assert found.text() == f"0 to {(1 << 62) - 1:,}"


@pytest.mark.req("S1-014", "S1-015", "S1-016")
def test_entries_begin_at_0_and_gaps_become_holes() -> None:
    entries = EMPTY
    for number in (0, 1, 4, 5, 9):
        entries = entries.with_new_high(number)
    assert legacy_wire.segment(encode_segment(entries)) == ("range_with_holes", [0, 1, 4, 5, 9])
    assert entries.holes == ((2, 3), (6, 8))
    assert entries.text() == "0 to 9, without 2 to 3 and 6 to 8"
    assert 4 in entries
    assert 3 not in entries
    for number in (9, 3, -1, U64):
        with pytest.raises(InvalidUsageError, match="not above the last one"):
            entries.with_new_high(number)


@pytest.mark.parametrize("name", SEGMENTS)
def test_every_encoding_takes_a_new_high(name: str) -> None:
    _, encoding, numbers = SEGMENTS[name]
    before = decode_segment(SEGMENTS[name][0])
    if before.highest == U64:
        return
    high = 3 if before.highest is None else before.highest + 3
    kept, found = legacy_wire.segment(encode_segment(before.with_new_high(high)))
    assert found == [*numbers, high]
    assert kept == ("range_with_holes" if name == "range" else encoding)


def mem_wal(random_: random.Random, region: str, generation: int) -> dict[str, object]:
    return {
        "region": region,
        "generation": generation,
        "mem_table_location": f"memory://{region}/{generation}",
        "wal_location": f"wal/{region}/{generation}",
        "entries": random_.choice([*SEGMENTS.values()])[0],
        "state": random_.choice(legacy_wire.STATES),
        "owner_id": random_.choice(["", "a", "wörker"]),
        "last_updated_dataset_version": random_.choice([0, 1, U64]),
    }


@pytest.mark.req("S1-006", "S1-007", "S1-010", "S1-011", "S1-012", "S1-017", "S1-018", "S1-019", "S1-020", "S1-022",
                 "S1-024")  # fmt: skip
@pytest.mark.parametrize("seed", range(50))
def test_details_against_the_independent_decoder(seed: int) -> None:
    random_ = random.Random(seed)
    ids = {(random_.choice("abé"), random_.randrange(4)) for _ in range(random_.randrange(6))}
    data = legacy_wire.encoded([mem_wal(random_, *one) for one in sorted(ids)])
    ours = decode_mem_wals(data)
    theirs = legacy_wire.details(data)
    assert [
        {
            "region": one.id.region,
            "generation": one.id.generation,
            "mem_table_location": one.mem_table_location,
            "wal_location": one.wal_location,
            "encoding": one.wal_entries.encoding,
            "entries": sorted(one.wal_entries),
            "state": one.state.name,
            "owner_id": one.owner_id,
            "last_updated_dataset_version": one.last_updated_dataset_version,
        }
        for one in ours
    ] == [{**one, "entries": sorted(one["entries"])} for one in theirs]
    assert legacy_wire.details(encode_mem_wals(ours)) == theirs
    changed = [replace(one, state=State.MERGED) for one in ours]
    assert legacy_wire.details(encode_mem_wals(changed)) == [{**one, "state": "MERGED"} for one in theirs]


def test_fields_that_are_not_known_survive() -> None:
    message = wire.encode([(1, wire.encode([(1, b"r")])), (4, b"\x0a\x00"), (99, b"later")])
    (one,) = decode_mem_wals(wire.encode([(1, message)]))
    ((_, again),) = legacy_wire.parts_of(encode_mem_wals([replace(one, owner_id="b")]))
    assert dict(legacy_wire.parts_of(again))[99] == b"later"


NAMED = wire.encode([(1, b"r"), (2, 1)])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\xff", "not a protobuf message"),
        (wire.encode([(1, wire.encode([(4, b"\x0a\x00")]))]), "without an id"),
        (wire.encode([(1, wire.encode([(1, NAMED), (4, b"\x0a\x00"), (5, 4)]))]), "generation 1 of region 'r'.*4"),
        (wire.encode([(1, wire.encode([(1, NAMED)]))]), "none of the five"),
        (wire.encode([(1, wire.encode([(1, NAMED), (4, b"\x0a\x00")]))] * 2), "twice"),
    ],
)
def test_details_that_cannot_be_read(data: bytes, message: str) -> None:
    with pytest.raises(TableCorruptError, match=message):
        decode_mem_wals(data)


def test_no_mem_wal_is_no_bytes() -> None:
    assert encode_mem_wals([]) == b""
    assert decode_mem_wals(b"") == ()
    assert decode_segment(encode_segment(EMPTY)) == EMPTY
    assert MemWal(MemWalId("r", 0), "", "").wal_entries == EMPTY
