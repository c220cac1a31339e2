"""Project a generation's columns onto the base table's current schema, by field id.

A generation keeps the field ids that the base had when it was flushed. So the id, and not the name,
determines the base column of a value: an added column is NULL, a dropped one is ignored, a renamed one is matched.
One trap: Lance reuses the id of a dropped column for the next added one if no data file has it any more, even if both
have the same name. Whether both are the same column is determined from the base table's history
(:mod:`memwal_ops.formats.lance.retention.schema_history`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from lance.schema import LanceSchema

from memwal_ops.errors import SchemaProjectionError
from memwal_ops.formats.lance.files.blobs import bytes_type, written_schema

if TYPE_CHECKING:
    import lance


SameField = Callable[[int, bool], bool | None]
Matches = Callable[["Node", "Node"], bool]
TOMBSTONE = "_tombstone"
_Rows = TypeVar("_Rows", pa.Table, pa.RecordBatch)
_DECIDE = (
    "memwal-ops adopt URI --same-columns lists the generations that wait for a decision, and what it asserts; with "
    "--apply it records that the columns are the same ones, and merge continues. "
)


class UndecidedColumnsError(SchemaProjectionError):
    """Columns cannot be matched any more. An operator can decide whether they are those of a generation.

    ``columns``: their names in the base, with the generation's if that is another one.
    """

    def __init__(self, message: str, columns: tuple[str, ...] = (), remedy: str = "") -> None:
        super().__init__(message, remedy=f"{_DECIDE}{remedy}")
        self.columns = columns


@dataclass(frozen=True, slots=True)
class Node:
    """One field: its Lance id, name, Arrow type, nullability and children in order."""

    field_id: int
    name: str
    type: pa.DataType
    nullable: bool
    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """One base field (``target``) and its source in a generation, if any, at ``position`` among its siblings.

    ``children``: the same for the nested fields; empty if values pass through unchanged.
    """

    target: Node
    source: Node | None
    position: int = -1
    children: tuple[Column, ...] = ()


@dataclass(frozen=True, slots=True)
class Projection:
    """The mapping from a generation's batches to batches of the base schema, by columns in base order.

    ``keys``: names of the key columns in the generation, in key order. ``has_tombstones``: it has a ``_tombstone``
    column.
    """

    schema: pa.Schema
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    has_tombstones: bool

    @property
    def source_columns(self) -> list[str]:
        """Names of the top-level columns to read from the generation."""
        return [column.source.name for column in self.columns if column.source is not None]

    @property
    def is_plain(self) -> bool:
        """Whether all base columns are in the generation with the same names and types: a filter is valid for both."""
        return all(
            column.source is not None
            and column.source.name == column.target.name
            and not column.children
            and column.source.type.equals(column.target.type)
            for column in self.columns
        )

    def select(self, names: Sequence[str]) -> Projection:
        """The same projection for some of the base's columns, in this order."""
        by_name = {column.target.name: column for column in self.columns}
        schema = pa.schema([self.schema.field(name) for name in names])
        return replace(self, schema=schema, columns=tuple(by_name[name] for name in names))

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of ``source_columns`` in the base schema. Raises ``SchemaProjectionError``: required, and NULL."""
        arrays = [
            pa.nulls(batch.num_rows, column.target.type)
            if column.source is None
            else _project(batch.column(column.source.name), column)
            for column in self.columns
        ]
        for array, field in zip(arrays, self.schema, strict=True):
            _refuse_null(array, field)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def with_blobs_as_bytes(self) -> Projection:
        """The same projection for batches whose blobs are plain bytes instead of the type that a writer needs."""
        schema = pa.schema([field.with_type(bytes_type(field.type)) for field in self.schema])
        return replace(self, schema=schema, columns=tuple(map(_with_bytes, self.columns)))


def conformed(rows: _Rows, schema: pa.Schema) -> _Rows:
    """The rows in a schema with the same columns. Raises ``SchemaProjectionError``: NULL in a required column.

    Arrow's own cast refuses a struct that is NULL and has required fields, which is no fault.
    """
    columns = [
        column if column.type.equals(field.type) else column.cast(field.type)
        for column, field in zip(rows.columns, schema, strict=True)
    ]
    for column, field in zip(columns, schema, strict=True):
        _refuse_null(column, field)
    return type(rows).from_arrays(columns, schema=schema)


def null_in_required(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> str | None:
    """The path of a required field that is NULL in a row in which all that contains it is not; None: there is none."""
    if not field.nullable and column.null_count:
        return str(field.name)
    kind = field.type
    if not _has_required(kind):
        return None
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for part, inner in _parts(pa.concat_arrays([chunk.drop_null()]), kind):
            if (path := null_in_required(part, inner)) is not None:
                return f"{field.name}.{path}"
    return None


def required_columns(schema: pa.Schema) -> list[str]:
    """The columns that are, or have inside, a field that may not be NULL."""
    return [field.name for field in schema if not field.nullable or _has_required(field.type)]


def _has_required(kind: pa.DataType) -> bool:
    return any(not inner.nullable or _has_required(inner.type) for inner in _fields_inside(kind))


def _fields_inside(kind: pa.DataType) -> list[pa.Field]:
    if pa.types.is_struct(kind):
        return [kind.field(at) for at in range(kind.num_fields)]
    if pa.types.is_map(kind):
        return [kind.item_field]
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return [kind.value_field] if lists else []


def _parts(array: pa.Array, kind: pa.DataType) -> list[tuple[pa.Array, pa.Field]]:
    if pa.types.is_struct(kind):
        values = array.flatten()
    else:
        values = [array.items if pa.types.is_map(kind) else array.flatten()]
    return [*zip(values, _fields_inside(kind), strict=True)]


def _refuse_null(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> None:
    if (path := null_in_required(column, field)) is not None:
        raise _without_values(path, f"The required column {path!r} is NULL in some rows.")


def _without_values(path: str, message: str) -> SchemaProjectionError:
    return SchemaProjectionError(
        message,
        remedy=f'Run lance.dataset(URI).alter_columns({{"path": "{path}", "nullable": True}}), and this again: it is '
        "then NULL in these rows. Open new writers, and give the rows a value as you like.",
    )


def nodes(dataset: lance.LanceDataset) -> tuple[Node, ...]:
    """The fields of a dataset as trees."""
    schema = written_schema(dataset.schema)
    return tuple(_node(field, schema.field(field.name())) for field in dataset.lance_schema.fields())


def nodes_of(schema: pa.Schema, ids: Sequence[int]) -> tuple[Node, ...]:
    """The fields of rows as trees, with these ids, each before those inside it.

    Raises ``SchemaProjectionError``: another number of ids than of fields.
    """
    fields = LanceSchema.from_pyarrow(schema).fields()
    if sum(map(_size, fields)) != len(ids):
        raise SchemaProjectionError(f"There are {len(ids)} field ids for the columns {', '.join(schema.names)}.")
    numbered = dict(enumerate(ids))
    return tuple(renumbered(_node(field, schema.field(field.name())), numbered) for field in fields)


def _size(field: Any) -> int:
    return 1 + sum(map(_size, field.children()))


def renumbered(node: Node, ids: Mapping[int, int]) -> Node:
    """The field and all nested ones with other ids."""
    children = tuple(renumbered(child, ids) for child in node.children)
    return replace(node, field_id=ids[node.field_id], children=children)


def plan_projection(
    generation: Sequence[Node],
    base: Sequence[Node],
    base_schema: pa.Schema,
    primary_key: Sequence[str],
    is_same: SameField,
) -> Projection:
    """Match a generation's fields to the base's, whose Arrow schema is ``base_schema``.

    ``is_same``: ``(field_id, whether the names differ)`` to True for the same field, False for an id that was reused
    for another one, None if that cannot be determined any more.

    Raises ``SchemaProjectionError``: a changed type, a missing key, a required column without values, or a field of
    which the base's history no longer shows whether it was dropped.
    """
    has_tombstones = any(node.name == TOMBSTONE for node in generation)
    # Recognized by name alone: the id of _tombstone is the next free one at the flush, which a
    # column added to the base later may have.
    values = [node for node in generation if node.name != TOMBSTONE]
    undecided: list[Node] = []
    verdicts: list[bool | None] = []

    def matches(source: Node, target: Node) -> bool:
        verdicts.append(is_same(target.field_id, source.name != target.name))
        return _matches(source, target, verdicts[-1], undecided)

    columns = _match_all(values, base, matches)
    if undecided:
        raise _undecided(undecided)
    if verdicts and all(verdict is None for verdict in verdicts):
        # Timeline of the loss: the table is removed and created again, its first versions expire, and the old regions
        # are copied back. No column was ever dropped, so a required one would be matched with the old table's.
        raise _undecided(base)
    by_name = {column.target.name: column for column in columns}
    keys: list[str] = []
    for name in primary_key:
        source = by_name[name].source
        if source is None:
            raise SchemaProjectionError(f"The generation has no values for the key column {name!r}.")
        keys.append(source.name)
    return Projection(base_schema, columns, tuple(keys), has_tombstones)


def _with_bytes(column: Column) -> Column:
    target = replace(column.target, type=bytes_type(column.target.type))
    return replace(column, target=target, children=tuple(map(_with_bytes, column.children)))


def _node(field: Any, arrow: pa.Field) -> Node:
    children = field.children()
    arrow_type = arrow.type
    if pa.types.is_struct(arrow_type):
        inner = tuple(_node(child, arrow_type.field(child.name())) for child in children)
    elif children and pa.types.is_map(arrow_type):
        inner = (_node(children[0], pa.field("entries", _entries(arrow_type), nullable=False)),)
    elif children and (pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)):
        inner = (_node(children[0], arrow_type.value_field),)
    else:
        inner = ()
    return Node(field.id(), field.name(), arrow_type, arrow.nullable, inner)


def _entries(kind: pa.MapType) -> pa.StructType:
    return pa.struct([kind.key_field, kind.item_field])


def _match_all(
    sources: Sequence[Node], targets: Sequence[Node], matches: Matches, within: str = ""
) -> tuple[Column, ...]:
    by_id = {node.field_id: (position, node) for position, node in enumerate(sources)}
    columns = []
    for target in targets:
        position, source = by_id.get(target.field_id, (-1, None))
        if source is not None and not matches(source, target):
            source = None
        if source is None:
            # A column whose type was changed has a new id: its old values would silently become NULL.
            for other in sources:
                same_name = other.field_id != target.field_id and other.name == target.name
                if same_name and not other.type.equals(target.type):
                    raise _other_type(other, target)
            if not target.nullable:
                path = f"{within}{target.name}"
                raise _without_values(path, f"The generation has no values for the required column {path!r}.")
            columns.append(Column(target, None))
        else:
            columns.append(Column(target, source, position, _inner(source, target, matches, within)))
    return tuple(columns)


def _other_type(source: Node, target: Node) -> SchemaProjectionError:
    return SchemaProjectionError(
        f"Column {target.name!r} has type {target.type} in the base table and {source.type} in the generation."
    )


def _matches(source: Node, target: Node, verdict: bool | None, undecided: list[Node]) -> bool:  # noqa: FBT001 - a result
    """Whether two fields with the same id are the same field; undecided ones are added to ``undecided``."""
    if verdict is not None:
        return verdict
    if source.name != target.name:
        raise UndecidedColumnsError(
            f"Field {target.field_id} was {source.name!r} when the generation was flushed and is {target.name!r} "
            "now; the versions that would distinguish a rename from a drop and an add are gone.",
            (f"{source.name!r} is {target.name!r}",),
            f"Do that if it was renamed. If {source.name!r} was dropped, or removed by a restore: copy {target.name!r} "
            "to a new column, drop it, and rename the copy, so that it has another field id.",
        )
    if target.nullable:  # only a nullable column can be added to a table that has rows
        undecided.append(target)
    return True


def _undecided(fields: Sequence[Node]) -> UndecidedColumnsError:
    names = tuple(dict.fromkeys(repr(field.name) for field in fields))
    return UndecidedColumnsError(
        f"Cannot match the columns {', '.join(names)} with those that the generation was flushed with: the versions "
        "that would show whether they were dropped and added again, or the table created again, have expired, or the "
        "clocks of writer and store contradict each other.",
        names,
        "A restore of an older version drops and adds no column: then there is nothing else to do. Only a column that "
        "was itself dropped and added again since the flush gets another field id before that, so that the "
        "generation's values are ignored: copy it to a new column, drop it, and rename the copy.",
    )


def _inner(source: Node, target: Node, matches: Matches, within: str) -> tuple[Column, ...]:
    """The match of the nested fields; empty if both sides are identical in all of them."""
    if _is_identical(source, target) and _unchanged_inside(source, target, matches):
        return ()
    within = f"{within}{target.name}."
    if pa.types.is_struct(source.type) and pa.types.is_struct(target.type):
        return _match_all(source.children, target.children, matches, within)
    if type(source.type) is type(target.type) and source.children and target.children:
        item_source, item_target = source.children[0], target.children[0]
        return (Column(item_target, item_source, 0, _inner(item_source, item_target, matches, within)),)
    if not source.type.equals(target.type):
        raise _other_type(source, target)
    return ()


def _unchanged_inside(source: Node, target: Node, matches: Matches) -> bool:
    return all(
        matches(inner, other) and _unchanged_inside(inner, other, matches)
        for inner, other in zip(source.children, target.children, strict=True)
    )


def _is_identical(source: Node, target: Node) -> bool:
    """Whether both have the same ids and the same types, including the names of nested fields."""
    return (
        source.field_id == target.field_id
        and source.type.equals(target.type)
        and len(source.children) == len(target.children)
        and all(_is_identical(a, b) for a, b in zip(source.children, target.children, strict=True))
    )


def _project(array: pa.Array, column: Column) -> pa.Array:
    if not column.children:
        return array
    target = column.target.type
    if pa.types.is_struct(target):
        parts = [
            pa.nulls(len(array), child.target.type)
            if child.source is None
            else _project(array.field(child.position), child)
            for child in column.children
        ]
        fields = [target.field(index) for index in range(target.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=array.is_null())
    if array.offset:
        array = pa.concat_arrays([array, array.slice(0, 0)])
    mask = array.is_null()
    (inner,) = column.children
    if pa.types.is_map(target):
        fields = list(_entries(array.type))
        entries = _project(pa.StructArray.from_arrays([array.keys, array.items], fields=fields), inner)
        return pa.MapArray.from_arrays(array.offsets, entries.field(0), entries.field(1), type=target, mask=mask)
    values = _project(array.values, inner)
    maker = pa.LargeListArray if pa.types.is_large_list(target) else pa.ListArray
    return maker.from_arrays(array.offsets, values, type=target, mask=mask)
