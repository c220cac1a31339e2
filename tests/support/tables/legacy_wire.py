"""A decoder and an encoder of legacy MemWAL details, written from the document and not from our code."""

from __future__ import annotations

import struct
from typing import Any

from tests.support.tables import wire

STATES = ("OPEN", "SEALED", "FLUSHED", "MERGED")


def parts_of(data: bytes) -> list[tuple[int, Any]]:
    """Number and value of each field."""
    return [(one.number, one.value) for one in wire.decode(data)]


def numbers(data: bytes) -> list[int]:
    """An ``EncodedU64Array``."""
    ((kind, message),) = parts_of(data)
    parts = dict(parts_of(message))
    if kind == 3:
        values = parts.get(2, b"")
        return [one for (one,) in struct.iter_unpack("<Q", values)]
    form = {1: "<H", 2: "<I"}[kind]
    return [parts.get(1, 0) + one for (one,) in struct.iter_unpack(form, parts.get(2, b""))]


def segment(data: bytes) -> tuple[str, list[int]]:
    """The encoding of a ``U64Segment``, and its numbers in the order in which they stand."""
    ((kind, message),) = parts_of(data)
    name = {1: "range", 2: "range_with_holes", 3: "range_with_bitmap", 4: "sorted_array", 5: "array"}[kind]
    if kind >= 4:
        return name, numbers(message)
    parts = dict(parts_of(message))
    every = range(parts.get(1, 0), parts.get(2, 0))
    if kind == 2:
        holes = numbers(parts[3])
        return name, [one for one in every if one not in holes]
    if kind == 3:
        bits = parts[3]
        return name, [one for at, one in enumerate(every) if bits[at // 8] & (1 << (at % 8))]
    return name, list(every)


def details(data: bytes) -> list[dict[str, Any]]:
    """Every MemWAL of the details, in their order."""
    assert not data or data[0] == 0x0A
    found = []
    for number, message in parts_of(data):
        assert number == 1
        parts = dict(parts_of(message))
        name = dict(parts_of(parts[1]))
        encoding, entries = segment(parts[4])
        found.append(
            {
                "region": name.get(1, b"").decode(),
                "generation": name.get(2, 0),
                "mem_table_location": parts.get(2, b"").decode(),
                "wal_location": parts.get(3, b"").decode(),
                "encoding": encoding,
                "entries": entries,
                "state": STATES[parts.get(5, 0)],
                "owner_id": parts.get(6, b"").decode(),
                "last_updated_dataset_version": parts.get(7, 0),
            }
        )
    return found


def encoded(mem_wals: list[dict[str, Any]]) -> bytes:
    """The details that list these MemWALs; ``entries`` are encoded already."""
    listed = []
    for one in mem_wals:
        name = wire.encode([(1, one["region"].encode()), (2, one["generation"])])
        listed.append(
            wire.encode(
                [
                    (1, name),
                    (2, one["mem_table_location"].encode()),
                    (3, one["wal_location"].encode()),
                    (4, one["entries"]),
                    (5, STATES.index(one["state"])),
                    (6, one["owner_id"].encode()),
                    (7, one["last_updated_dataset_version"]),
                ]
            )
        )
    return wire.encode([(1, message) for message in listed])
