"""How a generation's fields are matched to the base's, and how its rows look then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from memwal_ops.formats.lance.generations.projection import (
    Node,
    Projection,
    SchemaProjectionError,
    conformed,
    plan_projection,
    renumbered,
)

INT, TEXT = pa.int64(), pa.string()


def node(field_id: int, name: str, kind: pa.DataType = INT, *children: Node, nullable: bool = True) -> Node:
    return Node(field_id, name, kind, nullable, children)


def struct(field_id: int, name: str, *children: Node, nullable: bool = True) -> Node:
    kind = pa.struct([pa.field(one.name, one.type, one.nullable) for one in children])
    return node(field_id, name, kind, *children, nullable=nullable)


def mapped(field_id: int, name: str, key: Node, item: Node) -> Node:
    return node(
        field_id, name, pa.map_(key.type, item.type), struct(field_id + 50, "entries", key, item, nullable=False)
    )


def listed(field_id: int, name: str, item: Node, *, large: bool = False) -> Node:
    field = pa.field(item.name, item.type, item.nullable)
    return node(field_id, name, pa.large_list(field) if large else pa.list_(field), item)


ID = node(1, "id", nullable=False)


def planned(
    generation: list[Node], base: list[Node], told: Mapping[int, bool | None] | None = None, key: str = "id"
) -> Projection:
    """``told`` has the fields of which the history does not show that they are the same."""
    schema = pa.schema([pa.field(one.name, one.type, one.nullable) for one in base])
    return plan_projection(generation, base, schema, [key], lambda field_id, _: (told or {}).get(field_id, True))


def applied(projection: Projection, **columns: pa.Array) -> dict[str, list[Any]]:
    batch = projection.apply(pa.RecordBatch.from_pydict(columns))
    assert batch.schema == projection.schema
    batch.validate(full=True)
    return batch.to_pydict()  # type: ignore[no-any-return]


def test_columns_are_matched_by_id() -> None:
    """``_tombstone`` by its name alone: its id may be that of a column that was added later."""
    generation = [node(3, "b"), node(1, "key", nullable=False), node(4, "_tombstone", pa.bool_()), node(9, "dropped")]
    base = [ID, node(3, "renamed"), node(4, "added", TEXT)]
    found = planned(generation, base)
    assert (found.keys, found.has_tombstones, found.source_columns) == (("key",), True, ["key", "b"])
    assert [column.position for column in found.columns] == [1, 0, -1]
    rows = applied(found, key=pa.array([1, 2]), b=pa.array([3, None]))
    assert rows == {"id": [1, 2], "renamed": [3, None], "added": [None, None]}
    assert not planned([ID], [ID]).has_tombstones


def test_the_history_is_asked_for_each_field_once() -> None:
    asked: list[tuple[int, bool]] = []

    def is_same(field_id: int, renamed: bool) -> bool:
        asked.append((field_id, renamed))
        return True

    plan_projection([ID, node(2, "a")], [ID, node(2, "b"), node(3, "c")], pa.schema([]), ["id"], is_same)
    assert asked == [(1, False), (2, True)]


def test_an_id_that_was_used_again_is_another_column() -> None:
    found = planned([ID, node(2, "a")], [ID, node(2, "a")], {2: False})
    assert found.source_columns == ["id"]
    assert applied(found, id=pa.array([1])) == {"id": [1], "a": [None]}


@pytest.mark.parametrize(
    ("generation", "base", "told", "key", "text"),
    [
        ([node(2, "a")], [ID], {}, "id", "no values for the required column 'id'"),
        ([ID], [ID], {1: False}, "id", "no values for the required column 'id'"),
        ([ID], [ID, node(2, "a", nullable=False)], {}, "id", "no values for the required column 'a'"),
        ([ID], [ID, node(2, "a")], {}, "a", "no values for the key column 'a'"),
        ([ID, node(2, "a")], [ID, node(3, "a", TEXT)], {}, "id", "'a' has type string in the base table and int64 in"),
        ([ID, node(2, "a")], [ID, node(2, "a", TEXT)], {}, "id", "'a' has type string in the base table and int64 in"),
        ([ID, node(2, "a")], [ID, node(2, "b")], {2: None}, "id", "Field 2 was 'a' when .* and is 'b' now"),
        ([ID, node(2, "a")], [ID, node(2, "a")], {2: None}, "id", "Cannot match the columns 'a' with"),
        ([ID, node(2, "a")], [ID, node(2, "a")], {1: None, 2: None}, "id", "Cannot match the columns 'a'"),
        ([ID], [ID], {1: None}, "id", "Cannot match the columns 'id' with"),
    ],
)
def test_what_cannot_be_matched_is_refused(
    generation: list[Node], base: list[Node], told: Mapping[int, bool | None], key: str, text: str
) -> None:
    with pytest.raises(SchemaProjectionError, match=text):
        planned(generation, base, told, key)


def test_a_required_column_was_there_when_the_table_was_made() -> None:
    """Only a nullable one can be added to a table that has rows."""
    base = [ID, node(2, "a", nullable=False), node(3, "b")]
    assert planned(base, base, {1: None, 2: None}).source_columns == ["id", "a", "b"]


def test_another_column_of_the_old_type_is_no_obstacle() -> None:
    generation = [ID, node(2, "a"), node(3, "other", TEXT)]
    assert planned(generation, [ID, node(2, "a"), node(4, "new", TEXT)]).source_columns == ["id", "a"]
    assert applied(planned([ID, node(2, "a")], [ID, node(5, "a")]), id=pa.array([1])) == {"id": [1], "a": [None]}
    assert planned([ID, node(2, "a", TEXT)], [ID, node(2, "a")], {2: False}).source_columns == ["id"]


INNER = struct(2, "s", node(3, "x"), node(4, "y", TEXT))
VALUES = [{"x": 1, "y": "a"}, None, {"x": None, "y": "b"}]


def inside(kind: str, inner: Node) -> Node:
    """A column that has the struct inside."""
    match kind:
        case "struct":
            return inner
        case "list":
            return listed(7, "s", inner)
        case "large list":
            return listed(7, "s", inner, large=True)
        case "map":
            return mapped(7, "s", node(8, "key", TEXT, nullable=False), inner)
        case _:
            return struct(7, "s", node(9, "other"), listed(10, "deep", inner))


def values(kind: str, rows: list[Any]) -> list[Any]:
    """Three structs as the values of such a column: nulls and empty ones among them."""
    match kind:
        case "struct":
            return rows
        case "list" | "large list":
            return [rows[:2], None, [], rows[2:]]
        case "map":
            return [[("a", rows[0]), ("b", rows[1])], None, [], [("c", rows[2])]]
        case _:
            return [{"other": 5, "deep": rows[:1]}, None, {"other": None, "deep": None}, {"other": 6, "deep": rows[1:]}]


KINDS = ["struct", "list", "large list", "map", "deep"]


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("target", "told", "expected"),
    [
        (INNER, {}, VALUES),
        (
            struct(2, "s", node(4, "y", TEXT), node(3, "x")),
            {},
            [one and {"y": one["y"], "x": one["x"]} for one in VALUES],
        ),
        (
            struct(2, "s", node(3, "renamed"), node(5, "new", TEXT)),
            {},
            [one and {"renamed": one["x"], "new": None} for one in VALUES],
        ),
        (INNER, {4: False}, [one and {"x": one["x"], "y": None} for one in VALUES]),
    ],
)
def test_fields_inside(kind: str, sliced: bool, target: Node, told: dict[int, bool], expected: list[Any]) -> None:
    """Reordered, renamed, added, and dropped and added again."""
    source, wanted = inside(kind, INNER), inside(kind, target)
    found = planned([ID, source], [ID, wanted], told)
    given = pa.array(values(kind, VALUES), source.type)
    if sliced:
        given = pa.concat_arrays([given, given])[len(given) :]
    rows = applied(found, id=pa.array(range(len(given))), s=given)
    assert rows["s"] == values(kind, expected)
    assert (found.columns[1].children == ()) is (target is INNER and not told)


@pytest.mark.parametrize("kind", KINDS)
def test_a_type_that_changed_inside_is_refused(kind: str) -> None:
    for target in (
        struct(2, "s", node(3, "x", TEXT), node(4, "y", TEXT)),
        struct(2, "s", node(3, "x"), node(6, "y")),
    ):
        with pytest.raises(SchemaProjectionError, match="has type"):
            planned([ID, inside(kind, INNER)], [ID, inside(kind, target)])


def test_a_list_is_not_a_large_list() -> None:
    with pytest.raises(SchemaProjectionError, match="'s' has type large_list"):
        planned([ID, inside("list", INNER)], [ID, inside("large list", INNER)])


def test_ids_can_be_exchanged() -> None:
    ids = {2: 20, 3: 30, 4: 40}
    assert renumbered(INNER, ids) == struct(20, "s", node(30, "x"), node(40, "y", TEXT))


def test_rows_take_the_types_of_a_schema() -> None:
    rows = pa.RecordBatch.from_pydict({"a": pa.array([1, 2], pa.int32()), "b": ["x", "y"]})
    schema = pa.schema([pa.field("a", INT, nullable=False), pa.field("b", pa.large_string())])
    assert conformed(rows, schema).to_pydict() == {"a": [1, 2], "b": ["x", "y"]}
    assert conformed(rows, schema).schema == schema


@pytest.mark.parametrize(
    ("kind", "values", "path"),
    [
        (INT, [1, None], "c"),
        (pa.struct([pa.field("x", INT, nullable=False)]), [{"x": 1}, {"x": None}], "c.x"),
        (pa.list_(pa.field("item", INT, nullable=False)), [[1], [None]], "c.item"),
        (pa.map_(INT, pa.field("value", INT, nullable=False)), [[(1, 2)], [(3, None)]], "c.value"),
    ],
)
def test_a_required_field_without_a_value_is_refused(kind: pa.DataType, values: list[Any], path: str) -> None:
    field = pa.field("c", kind, nullable=path != "c")
    rows = pa.RecordBatch.from_arrays([pa.array(values, kind)], schema=pa.schema([field]))
    with pytest.raises(SchemaProjectionError, match=f"'{path}' is NULL"):
        conformed(rows, pa.schema([field]))
