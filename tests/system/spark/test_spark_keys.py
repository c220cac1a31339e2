"""How keys cross Spark: equal codes exactly where the keys are equal, and integers and strings come back."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from memwal_ops.formats.lance.engines.merge.locate import key_code
from memwal_ops.formats.lance.engines.spark.engine import to_bytes
from memwal_ops.formats.lance.engines.spark.tasks import pack, positions, tombstones

KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int8": (pa.int8(), st.integers(-128, 127)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint32": (pa.uint32(), st.integers(0, 2**32 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "bool": (pa.bool_(), st.booleans()),
    "date": (pa.date32(), st.dates()),
    "timestamp": (pa.timestamp("us"), st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2200, 1, 1))),
    "decimal": (pa.decimal128(20, 3), st.decimals(-(10**12), 10**12, places=3)),
    "string": (pa.string(), st.text(max_size=4)),
    "large string": (pa.large_string(), st.text("ab\0", max_size=4)),
    "binary": (pa.binary(), st.binary(max_size=4)),
    "fixed binary": (pa.binary(3), st.binary(min_size=3, max_size=3)),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", ""])),
}


def codes(rows: list[tuple[Any, ...]], kinds: list[pa.DataType], *, nullable: bool) -> list[Any]:
    fields = [pa.field(f"k{at}", kind, nullable=nullable) for at, kind in enumerate(kinds)]
    schema = pa.schema(fields)
    columns = [pa.array([row[at] for row in rows], kind) for at, kind in enumerate(kinds)]
    encoded = key_code(schema, schema.names).encode(pa.Table.from_arrays(columns, schema=schema))
    assert encoded.null_count == 0
    found: list[Any] = encoded.to_pylist()
    return found


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("nullable", [False, True])
@settings(deadline=None)
@given(data=st.data())
def test_codes_of_one_column_are_equal_where_keys_are(name: str, nullable: bool, data: st.DataObject) -> None:
    kind, values = KINDS[name]
    keys = data.draw(st.lists(st.one_of(st.none(), values) if nullable else values, min_size=1, max_size=12))
    found = codes([(key,) for key in keys], [kind], nullable=nullable)
    assert [[a == b for b in found] for a in found] == [[a == b for b in keys] for a in keys]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.text("a\0\x01", max_size=3), st.integers(0, 2), st.one_of(st.none(), st.binary(max_size=2))),
        min_size=1,
        max_size=20,
    )
)
def test_codes_of_several_columns_are_equal_where_keys_are(keys: list[tuple[Any, ...]]) -> None:
    found = codes(keys, [pa.string(), pa.uint64(), pa.large_binary()], nullable=True)
    assert [[a == b for b in found] for a in found] == [[a == b for b in keys] for a in keys]


@pytest.mark.parametrize("name", ["int8", "int64", "uint32", "uint64", "string", "large string"])
@settings(deadline=None)
@given(data=st.data())
def test_keys_that_the_index_is_asked_for_come_back(name: str, data: st.DataObject) -> None:
    kind, values = KINDS[name]
    keys = data.draw(st.lists(values, min_size=1, max_size=12))
    schema = pa.schema([pa.field("k", kind, nullable=False)])
    code = key_code(schema, ["k"])
    encoded = code.encode(pa.table({"k": keys}, schema=schema))
    assert code.decode(encoded, kind).to_pylist() == keys


def test_keys_that_are_broadcast_take_their_size_once() -> None:
    """Those that a grouping found are slices of one buffer, which would be pickled for each of them."""
    rows = 200_000
    table = pa.table({"id": pa.array(np.arange(rows))})
    keys = table.group_by("id", use_threads=False).aggregate([("id", "max")]).select(["id"])
    assert keys.column("id").num_chunks > 1, "the premise"
    content = to_bytes(keys)
    assert len(content) < 9 * rows
    assert pa.ipc.open_stream(content).read_all().equals(keys)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(0, 2**22 - 2), st.booleans())
def test_locators_grow_with_age_and_tell_the_row(deleted: list[bool], ordinal: int, newest_first: bool) -> None:
    flags = np.array(deleted)
    locators = pack(ordinal, flags, newest_row_first=newest_first)
    older = locators[::-1] if newest_first else locators
    assert (np.diff(older) > 0).all()
    assert (locators >> 41 == ordinal).all()
    assert positions(locators, len(flags), newest_row_first=newest_first).tolist() == list(range(len(flags)))
    assert tombstones(locators).tolist() == deleted
    assert int(locators.max()) < int(pack(ordinal + 1, flags, newest_row_first=False).min())
