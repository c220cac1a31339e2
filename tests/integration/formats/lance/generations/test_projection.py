"""A generation's batches in the base's schema, after fields inside were renamed, dropped, added, added again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.errors import SchemaProjectionError
from memwal_ops.formats.lance.files.blobs import written_schema
from memwal_ops.formats.lance.generations.projection import nodes, plan_projection
from memwal_ops.formats.lance.jobs import merge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from memwal_ops.formats.lance.engines.merge.collapse import MergeEngine

KEY = pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"})
REGION = "00000000-0000-4000-8000-000000000001"
P = pa.struct([("a", pa.int32()), ("b", pa.string())])


def p(number: int) -> dict[str, Any]:
    return {"a": number, "b": f"b{number}"}


# The type, its values, the path of `b` inside; every kind of nothing among them.
KINDS: dict[str, tuple[pa.DataType, list[Any], str]] = {
    "struct": (P, [p(0), None, {"a": None, "b": None}, p(3), p(4)], "x.b"),
    "list": (pa.list_(P), [[p(0)], None, [], [None, p(3)], [p(4), p(5)]], "x.item.b"),
    "large list": (pa.large_list(P), [[], [p(1)], None, [p(3), p(4), p(5)], [None]], "x.item.b"),
    "list in a struct": (
        pa.struct([("n", pa.int8()), ("l", pa.list_(P))]),
        [{"l": [p(0)], "n": 1}, {"l": None, "n": 2}, None, {"l": [], "n": 3}, {"l": [p(4), None], "n": None}],
        "x.l.item.b",
    ),
    "list in a list": (
        pa.list_(pa.list_(P)),
        [[[p(0)], None, []], None, [], [[p(3), p(4)]], [[None]]],
        "x.item.item.b",
    ),
    "map": (
        pa.map_(pa.string(), P),
        [[("k", p(0))], None, [], [("l", None), ("m", p(3))], [("k", p(4))]],
        "x.entries.value.b",
    ),
}


def changed(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The value with each struct that has a ``b`` changed."""
    if isinstance(value, dict):
        value = {name: changed(one, change) for name, one in value.items()}
        return change(value) if "b" in value else value
    if isinstance(value, (list, tuple)):
        return type(value)(changed(one, change) for one in value)
    return value


def renamed(one: dict[str, Any]) -> dict[str, Any]:
    return {"a": one["a"], "renamed": one["b"]}


def emptied(one: dict[str, Any]) -> dict[str, Any]:
    return {"a": one["a"], "b": None}


def table_of(kind: pa.DataType, values: list[Any]) -> pa.Table:
    schema = pa.schema([KEY, pa.field("x", kind)])
    return pa.table({"id": pa.array(range(len(values)), pa.int64()), "x": pa.array(values, kind)}, schema=schema)


@pytest.mark.parametrize("name", KINDS)
def test_slices_keep_their_values_and_their_nulls(tmp_path: Path, name: str) -> None:
    kind, values, path = KINDS[name]
    rows = table_of(kind, values * 3)
    generation = lance.write_dataset(rows, str(tmp_path / "g.lance"), data_storage_version="2.2")
    lance.write_dataset(rows, str(tmp_path / "b.lance"), data_storage_version="2.2")
    lance.dataset(tmp_path / "b.lance").alter_columns({"path": path, "name": "renamed"})
    base = lance.dataset(tmp_path / "b.lance")
    plan = plan_projection(nodes(generation), nodes(base), written_schema(base.schema), ["id"], lambda *_: True)
    (batch,) = rows.combine_chunks().to_batches()
    expected = [changed(value, renamed) for value in values * 3]
    for start in range(len(expected)):
        for length in (1, 2, len(expected) - start):
            got = plan.apply(batch.slice(start, length))
            got.validate(full=True)
            assert got.column("x").to_pylist() == expected[start : start + length], (start, length)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", KINDS)
def test_merged_after_a_field_inside_was_renamed(tmp_path: Path, name: str, engine: MergeEngine | None) -> None:
    kind, values, path = KINDS[name]
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(table_of(kind, values[:1]), uri, data_storage_version="2.2").initialize_mem_wal()
    with lance.dataset(uri).mem_wal_writer(REGION) as writer:
        writer.put(table_of(kind, values))
    lance.dataset(uri).alter_columns({"path": path, "name": "renamed"})
    assert merge.apply(open_table(uri), merge.MergeOptions(), engine=engine).decision == "merged"
    found = {row["id"]: row["x"] for row in lance.dataset(uri).to_table().to_pylist()}
    assert found == {number: changed(value, renamed) for number, value in enumerate(values)}


def test_values_of_another_type_are_not_turned_into_nulls(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(table_of(pa.int32(), [1, 2]), uri).initialize_mem_wal()
    with lance.dataset(uri).mem_wal_writer(REGION) as writer:
        writer.put(table_of(pa.int32(), [3, 4]))
    lance.dataset(uri).drop_columns(["x"])
    lance.dataset(uri).add_columns(pa.field("x", pa.string()))
    (fault,) = merge.apply(open_table(uri), merge.MergeOptions()).blocked
    assert "'x' has type string in the base table and int32 in the generation" in str(fault.error)


@pytest.mark.parametrize("missing", ["x", "id"])
def test_a_column_that_needs_values_and_has_none(tmp_path: Path, missing: str) -> None:
    x = pa.field("x", pa.int64(), nullable=False)
    schemas = pa.schema([KEY, x]), pa.schema([KEY if missing == "x" else x])
    base, generation = (
        lance.write_dataset(schema.empty_table(), str(tmp_path / f"{place}.lance"))
        for place, schema in enumerate(schemas)
    )
    is_same = {0: missing == "x"}
    with pytest.raises(SchemaProjectionError, match=f"no values for the required column '{missing}'"):
        plan_projection(
            nodes(generation), nodes(base), base.schema, ["id"], lambda field_id, _: is_same.get(field_id, True)
        )


@pytest.mark.parametrize("name", ["struct", "list", "large list", "list in a struct"])  # pylance adds to no others
def test_merged_after_a_field_inside_was_dropped_and_added_again(tmp_path: Path, name: str) -> None:
    """Without a data file that has the column, the field that is added gets the id of the one that was dropped."""
    kind, values, path = KINDS[name]
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(table_of(pa.int8(), [1]).drop_columns(["x"]), uri, data_storage_version="2.2")
    lance.dataset(uri).add_columns(pa.field("x", kind))
    lance.dataset(uri).initialize_mem_wal()
    with lance.dataset(uri).mem_wal_writer(REGION) as writer:
        writer.put(table_of(kind, values))
    before = str(lance.dataset(uri).lance_schema)
    lance.dataset(uri).drop_columns([path])
    lance.dataset(uri).add_columns(pa.schema([pa.field("x", only_b(kind))]))
    assert str(lance.dataset(uri).lance_schema) == before, "the premise: the id is used again"
    assert merge.apply(open_table(uri), merge.MergeOptions()).decision == "merged"
    found = {row["id"]: row["x"] for row in lance.dataset(uri).to_table().to_pylist()}
    assert found == {number: changed(value, emptied) for number, value in enumerate(values)}


def only_b(kind: pa.DataType) -> pa.DataType:
    """The type with nothing but the way to ``b``."""
    if kind == P:
        return pa.struct([("b", pa.string())])
    if pa.types.is_struct(kind):
        return pa.struct([kind.field("l").with_type(only_b(kind.field("l").type))])
    return (pa.large_list if pa.types.is_large_list(kind) else pa.list_)(only_b(kind.value_type))
