"""Bloom filter and key tuples of a generation: the bytes that pylance itself writes, and known answers."""

from __future__ import annotations

import os
import random
from datetime import date
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.regions.key_files import GenerationKeys, read_bloom_filter
from memwal_ops.formats.lance.wire.bloom_filter import (
    BloomFilter,
    is_encodable,
    is_hashed_alike,
    key_hashes,
    key_tuples,
)
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from tests.support.tables.schemas import PRIMARY_KEY

REGION = "5e0c1b0a-6a52-4b6e-9d3e-0f7d3a1b2c4d"
SECOND = {**PRIMARY_KEY, b"lance-schema:unenforced-primary-key:position": b"2"}
FIRST = {**PRIMARY_KEY, b"lance-schema:unenforced-primary-key:position": b"1"}


def sip13(data: bytes) -> int:
    """SipHash-1-3 with a zero key, word for word from its paper."""
    mask = 2**64 - 1
    v = [0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573]

    def turned(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (64 - bits))) & mask

    def compress() -> None:
        v[0] = (v[0] + v[1]) & mask
        v[2] = (v[2] + v[3]) & mask
        v[1] = turned(v[1], 13) ^ v[0]
        v[3] = turned(v[3], 16) ^ v[2]
        v[0] = turned(v[0], 32)
        v[2] = (v[2] + v[1]) & mask
        v[0] = (v[0] + v[3]) & mask
        v[1] = turned(v[1], 17) ^ v[2]
        v[3] = turned(v[3], 21) ^ v[0]
        v[2] = turned(v[2], 32)

    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, whole, 8)]
    for word in [*words, int.from_bytes(data[whole:], "little") | (len(data) & 255) << 56]:
        v[3] ^= word
        compress()
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(3):
        compress()
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def flushed(folder: Path, columns: dict[str, pa.Array]) -> Path:
    """A generation of pylance's own writer with these key columns."""
    marks = [PRIMARY_KEY] if len(columns) == 1 else [FIRST, SECOND]
    fields = [
        pa.field(name, column.type, nullable=False, metadata=mark)
        for (name, column), mark in zip(columns.items(), marks, strict=True)
    ]
    rows = pa.table([*columns.values()], schema=pa.schema(fields)).append_column(
        "v", pa.array(range(len(next(iter(columns.values())))))
    )
    made = lance.write_dataset(rows, str(folder / "t.lance"))
    made.initialize_mem_wal(unsharded=True)
    with made.mem_wal_writer(REGION) as writer:
        writer.put(rows)
    (found,) = (folder / "t.lance" / "_mem_wal" / REGION).glob("*_gen_1")
    return found


@pytest.mark.parametrize("offset", [0, 3])
def test_the_hash_of_messages_of_any_length(offset: int) -> None:
    rng = random.Random(5)
    texts = ["", "a", "é" * 30, "x" * 300, *("q" * rng.randrange(40) for _ in range(50))]
    found = key_hashes([pa.array(["skipped"] * offset + texts).slice(offset)])
    assert [int(one) for one in found] == [sip13(b"\0" + text.encode() + b"\xff") for text in texts]
    keys = [pa.array([1, -2], pa.int16()), pa.array([b"", os.urandom(3)]), pa.array([True, False])]
    expected = [
        sip13(b"\0\1\0" + b"\0" + bytes(8) + b"\0\1"),
        sip13(b"\0\xfe\xff" + b"\0\3" + bytes(7) + keys[1][1].as_py() + b"\0\0"),
    ]
    assert [int(one) for one in key_hashes(keys)] == expected
    assert len(key_hashes([pa.array([], pa.int64())])) == 0


@pytest.mark.req("S0-136", "S0-140")
@pytest.mark.parametrize(
    "columns",
    [
        {"a": pa.array([5, -7, 2**62])},
        {"a": pa.array([5, -7, 2**30], pa.int32())},
        {"a": pa.array(["", "text", "\0longer than eight bytes"])},
        {"a": pa.array([b"", b"\0\0", b"bytes"])},
        {"a": pa.array([5, -7, 5]), "b": pa.array(["x", "\0", "xy"])},
        {"a": pa.array([b"x", b"", b"\0"]), "b": pa.array([1, -2, 3], pa.int32())},
    ],
    ids=["int64", "int32", "text", "bytes", "two", "two of bytes"],
)
def test_the_files_of_a_generation_are_those_of_pylance(tmp_path: Path, columns: dict[str, pa.Array]) -> None:
    theirs = flushed(tmp_path, columns)
    rows = pa.table(columns)
    ours = GenerationKeys.of([rows], [*columns]).files("2.0")
    assert ours["bloom_filter.bin"] == (theirs / "bloom_filter.bin").read_bytes()
    for name in ("_pk_index/page_data.lance", "_pk_index/page_lookup.lance"):
        mine = tmp_path / Path(name).name
        mine.write_bytes(ours[name])
        read, expected = (LanceFileReader(str(path)) for path in (mine, theirs / name))
        assert read.read_all().to_table().equals(expected.read_all().to_table())
        assert read.metadata().schema == expected.metadata().schema
        assert read.metadata().schema.metadata == expected.metadata().schema.metadata


@pytest.mark.parametrize(
    "kind",
    [getattr(pa, sign + "int" + bits)() for sign in ("", "u") for bits in ("8", "16", "32", "64")]
    + [pa.string(), pa.binary(), pa.large_string(), pa.large_binary(), pa.bool_()],
    ids=str,
)
def test_a_filter_is_used_only_where_pylance_hashes_alike(tmp_path: Path, kind: pa.DataType) -> None:
    """The contract: pylance's filter has the key, or is not read; a wrong one hides newer rows from a look-up."""
    binary = kind in {pa.binary(), pa.large_binary()}
    keys = pa.array([b"1", b"0"], kind) if binary else pa.array([1, 0]).cast(kind)
    for columns in ({"a": keys}, {"a": pa.array([1, 2]), "b": keys}):
        theirs = flushed(tmp_path / str(len(columns)), columns)
        there = BloomFilter.decode((theirs / "bloom_filter.bin").read_bytes()).may_have([*columns.values()])
        alike = is_hashed_alike(column.type for column in columns.values())
        assert there.all() if alike else not there.any()
        found = read_bloom_filter(
            open_store(resolve(theirs.parent)), theirs.name, [one.type for one in columns.values()]
        )
        assert (found is not None) == alike
        rows = pa.table(columns)
        assert ("bloom_filter.bin" in GenerationKeys.of([rows], [*columns]).files("2.0")) == alike


@pytest.mark.req("S0-136")
def test_a_filter_misses_no_key_and_few_others() -> None:
    there, others = pa.array(np.arange(100_000)), pa.array(np.arange(100_000, 200_000))
    made = BloomFilter.for_keys(100_000)
    made.add([there])
    read = BloomFilter.decode(made.encode())
    assert read.may_have([there]).all()
    assert read.may_have([others]).mean() < 0.003
    assert not BloomFilter.for_keys(0).may_have([there]).any()
    for wrong in (b"", b"x" * 31):
        with pytest.raises(InvalidFormatError):
            BloomFilter.decode(wrong)


def values(kind: pa.DataType, rng: random.Random) -> list[Any]:
    if pa.types.is_boolean(kind):
        return [False, True]
    if pa.types.is_date(kind):
        return [date(1960, 1, 1), date(1970, 1, 1), date(2024, 2, 29)]
    if pa.types.is_integer(kind):
        low = 0 if pa.types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1))
        return [low, 0, 1, 2 ** (kind.bit_width - 1) - 1]
    raw = [b"", b"\0", b"\0\0", b"\0\xff", b"a", b"ab", bytes([rng.randrange(128)])]
    return [one.decode("latin-1") if pa.types.is_string(kind) else one for one in raw]


@pytest.mark.parametrize(
    "kind",
    [pa.int8(), pa.int64(), pa.uint8(), pa.uint64(), pa.date32(), pa.date64(), pa.bool_(), pa.string(), pa.binary()],
    ids=str,
)
def test_tuples_have_the_order_of_their_values(kind: pa.DataType) -> None:
    rng = random.Random(3)
    pairs = [(one, number) for one in values(kind, rng) for number in (-1, 0, 1)]
    rng.shuffle(pairs)
    found = key_tuples([pa.array([one for one, _ in pairs], kind), pa.array([number for _, number in pairs])])
    by_tuple = [pair for _, pair in sorted(zip(found.to_pylist(), pairs, strict=True), key=lambda one: one[0])]
    assert by_tuple == sorted(pairs)
    assert len({*found.to_pylist()}) == len({*pairs})
    assert is_encodable(kind)


def test_keys_that_have_no_index() -> None:
    """Two columns, one of which has no place in a tuple, and no hash that pylance has as well."""
    assert not is_encodable(pa.float64())
    rows = pa.table({"a": [1.5, 2.5], "b": [1, 2]})
    assert not GenerationKeys.of([rows], ["a", "b"]).files("2.0")


@pytest.mark.req("S0-192")
def test_which_rows_are_superseded() -> None:
    fragments = [pa.table({"a": part, "b": ["x"] * len(part)}) for part in ([1, 2, 1], [2], [3, 3, 1])]
    assert [[*one] for one in GenerationKeys.of(fragments, ["a", "b"]).superseded()] == [[0, 1, 2], [], [0]]
    assert [[*one] for one in GenerationKeys.of(fragments[:1], ["b"]).superseded()] == [[0, 1]]
