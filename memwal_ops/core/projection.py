"""Bring a generation's columns to the base table's present schema, by field id.

A generation keeps the field ids of the time it was flushed (landmine 14), so the id says which
base column a value belongs to, whatever either side calls it: an added column is null, a dropped
one is ignored, a renamed one follows. One trap: Lance gives the id of a dropped column to the
next added one where no data file holds it any more. A different name under the same id is
therefore only a rename where the base's own history shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from memwal_ops.errors import SchemaProjectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import lance

    RenameCheck = Callable[[int, str, str], bool | None]

TOMBSTONE = "_tombstone"


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
    """One base field and where a generation has it.

    Attributes:
        target: the base's field.
        source: the generation's field, or None where it has none.
        position: index of ``source`` among the fields of its parent; -1 without a source.
        children: the same for the fields inside; empty where values pass through unchanged.
    """

    target: Node
    source: Node | None
    position: int = -1
    children: tuple[Column, ...] = ()


@dataclass(frozen=True, slots=True)
class Projection:
    """How to turn a generation's batches into base batches.

    Attributes:
        columns: one per base column, in base order.
        keys: names that the key columns have in the generation, in key order.
        has_tombstones: whether the generation carries a ``_tombstone`` column.
    """

    schema: pa.Schema
    columns: tuple[Column, ...]
    keys: tuple[str, ...]
    has_tombstones: bool

    @property
    def source_columns(self) -> list[str]:
        """Names of the top-level columns to read from the generation."""
        return [column.source.name for column in self.columns if column.source is not None]

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of ``source_columns`` as a batch of the base schema; same rows, same order."""
        arrays = [
            pa.nulls(batch.num_rows, column.target.type)
            if column.source is None
            else _project(batch.column(column.source.name), column)
            for column in self.columns
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def nodes(dataset: lance.LanceDataset) -> tuple[Node, ...]:
    """The fields of a dataset as trees."""
    schema = dataset.schema
    return tuple(_node(field, schema.field(field.name())) for field in dataset.lance_schema.fields())


def renumbered(node: Node, ids: Mapping[int, int]) -> Node:
    """The same field and all inside it under other ids."""
    children = tuple(renumbered(child, ids) for child in node.children)
    return replace(node, field_id=ids[node.field_id], children=children)


def plan_projection(
    generation: Sequence[Node],
    base: Sequence[Node],
    base_schema: pa.Schema,
    primary_key: Sequence[str],
    is_rename: RenameCheck,
) -> Projection:
    """Match a generation's fields to the base's.

    Args:
        generation, base: the field trees of both sides.
        base_schema: the Arrow schema that the result has.
        primary_key: names of the key columns in the base.
        is_rename: ``(field_id, name in the generation, name in the base)`` to True for a rename,
            False for an id that was given to another column, None where nobody can tell any more.

    Raises:
        SchemaProjectionError: a changed type, a missing key, a required column without values, or a
            name change that the base's history no longer explains.
    """
    has_tombstones = any(node.name == TOMBSTONE for node in generation)
    # Recognised by name alone: the id of _tombstone is the next free one of its time, which a
    # column added to the base later may own (landmine 14).
    values = [node for node in generation if node.name != TOMBSTONE]
    columns = _match_all(values, base, is_rename)
    by_name = {column.target.name: column for column in columns}
    keys: list[str] = []
    for name in primary_key:
        source = by_name[name].source
        if source is None:
            raise SchemaProjectionError(f"The generation has no values for the key column {name!r}.")
        keys.append(source.name)
    return Projection(base_schema, columns, tuple(keys), has_tombstones)


def _node(field: Any, arrow: pa.Field) -> Node:
    children = field.children()
    arrow_type = arrow.type
    if pa.types.is_struct(arrow_type):
        inner = tuple(_node(child, arrow_type.field(child.name())) for child in children)
    elif children and (pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)):
        inner = (_node(children[0], arrow_type.value_field),)
    else:
        inner = ()
    return Node(field.id(), field.name(), arrow_type, arrow.nullable, inner)


def _match_all(sources: Sequence[Node], targets: Sequence[Node], is_rename: RenameCheck) -> tuple[Column, ...]:
    by_id = {node.field_id: (position, node) for position, node in enumerate(sources)}
    columns = []
    for target in targets:
        position, source = by_id.get(target.field_id, (-1, None))
        if source is not None and not _is_same_field(source, target, is_rename):
            source = None
        if source is None:
            _refuse_changed_type(target, sources)
            if not target.nullable:
                raise SchemaProjectionError(f"The generation has no values for the required column {target.name!r}.")
            columns.append(Column(target, None))
        else:
            columns.append(Column(target, source, position, _inner(source, target, is_rename)))
    return tuple(columns)


def _refuse_changed_type(target: Node, sources: Sequence[Node]) -> None:
    """A change of type gives a column a new id: its old values must not turn into nulls in silence."""
    for source in sources:
        if source.name == target.name and not source.type.equals(target.type):
            raise SchemaProjectionError(
                f"Column {target.name!r} has type {target.type} in the base table and {source.type} in the generation."
            )


def _is_same_field(source: Node, target: Node, is_rename: RenameCheck) -> bool:
    if source.name == target.name:
        return True
    verdict = is_rename(target.field_id, source.name, target.name)
    if verdict is None:
        raise SchemaProjectionError(
            f"Field {target.field_id} was {source.name!r} when the generation was flushed and is {target.name!r} "
            "now; the versions that would tell a rename from a drop and an add are gone.",
            remedy=f"If it was renamed: rename {target.name!r} back to {source.name!r}, merge, and rename it again. If "
            f"{source.name!r} was dropped, or undone by a restore: copy {target.name!r} to a new column, drop it, and "
            "rename the copy, so that its field is another.",
        )
    return verdict


def _inner(source: Node, target: Node, is_rename: RenameCheck) -> tuple[Column, ...]:
    """The match of the fields inside; empty where both sides are the same to the last field."""
    if _is_identical(source, target):
        return ()
    if pa.types.is_struct(source.type) and pa.types.is_struct(target.type):
        return _match_all(source.children, target.children, is_rename)
    if type(source.type) is type(target.type) and source.children and target.children:
        item_source, item_target = source.children[0], target.children[0]
        return (Column(item_target, item_source, 0, _inner(item_source, item_target, is_rename)),)
    if not source.type.equals(target.type):
        raise SchemaProjectionError(
            f"Column {target.name!r} has type {target.type} in the base table and {source.type} in the generation."
        )
    return ()


def _is_identical(source: Node, target: Node) -> bool:
    return (
        source.field_id == target.field_id
        and source.type.equals(target.type)
        and len(source.children) == len(target.children)
        and all(a.name == b.name and _is_identical(a, b) for a, b in zip(source.children, target.children, strict=True))
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
    values = _project(array.values, column.children[0])
    maker = pa.LargeListArray if pa.types.is_large_list(target) else pa.ListArray
    return maker.from_arrays(array.offsets, values, type=target, mask=array.is_null())
