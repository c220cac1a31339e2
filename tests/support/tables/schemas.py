"""Schemas and rows of the test tables: every key type and column shape that a merge must carry.

A key is made from a whole number, one to one, so that workloads can speak of key 17 whatever its type.
"""

from __future__ import annotations

import datetime
import decimal
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pyarrow as pa

KeyKind = Literal[
    "int64", "int32", "string", "large_string", "binary",
    "timestamp", "date", "decimal", "fixed_binary", "composite",
]  # fmt: skip
Columns = Literal["plain", "vector", "nested", "wide"]

#: Key types that pylance's MemWAL writer takes. It refuses timestamp, date, decimal, fixed_binary (and
#: floats) at initialize_mem_wal: "unsupported type ... for hashing"; the region layout has no such limit.
WRITER_KEYS: tuple[KeyKind, ...] = ("int64", "int32", "string", "large_string", "binary", "composite")
ALL_KEYS: tuple[KeyKind, ...] = (*WRITER_KEYS, "timestamp", "date", "decimal", "fixed_binary")
ALL_COLUMNS: tuple[Columns, ...] = ("plain", "vector", "nested", "wide")

PRIMARY_KEY = {"lance-schema:unenforced-primary-key": "true"}
TOMBSTONE = "_tombstone"
VECTOR_SIZE = 8

_EPOCH = datetime.datetime(2020, 1, 1)
_KEYS: dict[str, tuple[pa.DataType, Callable[[int], Any]]] = {
    "int64": (pa.int64(), lambda n: n - 3 if n % 2 else 2**40 + n),
    "int32": (pa.int32(), lambda n: n - 3),
    "string": (pa.string(), lambda n: "" if n == 0 else f"key-{n}-ü"),
    "large_string": (pa.large_string(), lambda n: f"key {n} " + "x" * (n % 40)),
    "binary": (pa.binary(), lambda n: n.to_bytes(4, "little") + b"\x00" * (n % 3)),
    "timestamp": (pa.timestamp("us"), lambda n: _EPOCH + datetime.timedelta(microseconds=7 * n)),
    "date": (pa.date32(), lambda n: _EPOCH.date() + datetime.timedelta(days=n)),
    "decimal": (pa.decimal128(18, 3), lambda n: decimal.Decimal(n - 5) / 8),
    "fixed_binary": (pa.binary(16), lambda n: n.to_bytes(16, "big")),
}
_COLUMNS: dict[str, list[pa.Field]] = {
    "plain": [pa.field("val", pa.float32()), pa.field("txt", pa.string())],
    "vector": [pa.field("vec", pa.list_(pa.float32(), VECTOR_SIZE)), pa.field("txt", pa.string())],
    "nested": [
        pa.field("s", pa.struct([pa.field("x", pa.int32()), pa.field("y", pa.list_(pa.string()))])),
        pa.field("l", pa.list_(pa.struct([pa.field("p", pa.int64()), pa.field("q", pa.large_string())]))),
    ],
    "wide": [
        pa.field("f64", pa.float64()),
        pa.field("flag", pa.bool_()),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("amount", pa.decimal128(20, 4)),
        pa.field("blob", pa.large_binary()),
        pa.field("tag", pa.binary(4)),
        *(pa.field(f"c{i}", pa.int32()) for i in range(24)),
    ],
}


def key_columns(key: KeyKind) -> list[str]:
    """Names of the primary key columns, in their order."""
    return ["tenant", "id"] if key == "composite" else ["id"]


def table_schema(key: KeyKind, columns: Columns) -> pa.Schema:
    """Key columns first, marked as the unenforced primary key, then the payload (all nullable)."""
    types = {"tenant": pa.string(), "id": pa.int64()} if key == "composite" else {"id": _KEYS[key][0]}
    keys = [pa.field(name, kind, nullable=False, metadata=PRIMARY_KEY) for name, kind in types.items()]
    return pa.schema([*keys, *_COLUMNS[columns]])


def key_of(key: KeyKind, n: int) -> tuple[Any, ...]:
    """The key tuple of a whole number >= 0; one to one."""
    if key == "composite":
        return (f"tenant {n % 3}", n // 3)
    return (_KEYS[key][1](n),)


def _value(field: pa.Field, rng: random.Random, stamp: int) -> Any:
    if rng.random() < 0.08:
        return None
    kind = field.type
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_integer(kind):
        return stamp + rng.randrange(1000)
    if pa.types.is_floating(kind):
        return rng.randrange(1 << 16) / 16
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return f"{stamp}/{rng.randrange(10_000)}" + "é" * rng.randrange(4)
    if pa.types.is_fixed_size_binary(kind):
        return rng.randbytes(kind.byte_width)
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind):
        return rng.randbytes(rng.randrange(12))
    if pa.types.is_date(kind):
        return _EPOCH.date() + datetime.timedelta(days=rng.randrange(4000))
    if pa.types.is_timestamp(kind):
        return (_EPOCH + datetime.timedelta(microseconds=rng.randrange(1 << 40))).replace(tzinfo=datetime.UTC)
    if pa.types.is_decimal(kind):
        return decimal.Decimal(rng.randrange(10_000_000)) / 10_000
    if pa.types.is_struct(kind):
        return {child.name: _value(child, rng, stamp) for child in kind}
    size = kind.list_size if pa.types.is_fixed_size_list(kind) else rng.randrange(4)
    child = kind.value_field
    if pa.types.is_fixed_size_list(kind):  # a vector has no null inside
        return [rng.randrange(1 << 16) / 16 for _ in range(size)]
    return [_value(child, rng, stamp) for _ in range(size)]


def key_table(schema: pa.Schema, key: KeyKind, numbers: Sequence[int]) -> pa.Table:
    """Key columns only, in the given order."""
    names = key_columns(key)
    values = [key_of(key, n) for n in numbers]
    fields = [schema.field(name) for name in names]
    columns = [pa.array([v[i] for v in values], field.type) for i, field in enumerate(fields)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def row_table(schema: pa.Schema, key: KeyKind, numbers: Sequence[int], rng: random.Random, stamp: int) -> pa.Table:
    """One row for each number, with random payload; `stamp` tells writes of one key apart."""
    keys = key_table(schema, key, numbers)
    columns = []
    for field in schema:
        if field.name in keys.schema.names:
            columns.append(keys[field.name])
        else:
            columns.append(pa.array([_value(field, rng, stamp) for _ in numbers], field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def primary_key(schema: pa.Schema) -> list[str]:
    """Names of the fields that carry the primary key mark."""
    mark = b"lance-schema:unenforced-primary-key"
    return [f.name for f in schema if (f.metadata or {}).get(mark) == b"true"]
