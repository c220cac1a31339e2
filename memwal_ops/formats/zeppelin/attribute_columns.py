"""Choose columns for the attributes of a namespace, and convert rows to them.

An attribute has no type: its values may differ in type from row to row. Integers and floats together become float64 if
no integer loses digits; other mixtures become JSON text, and the report names them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.zeppelin.segments import Rows

ID, VECTOR = "id", "vector"
ATTRIBUTE = "memwal_ops.attribute"
_JSON = "memwal_ops.json"
_EXACT = 2**53
_INT64 = range(-(2**63), 2**63)
_TYPES: Mapping[frozenset[str], pa.DataType] = {
    frozenset({"bool"}): pa.bool_(),
    frozenset({"int"}): pa.int64(),
    frozenset({"int", "long"}): pa.int64(),
    frozenset({"long"}): pa.int64(),
    frozenset({"float"}): pa.float64(),
    frozenset({"int", "float"}): pa.float64(),
    frozenset({"str"}): pa.string(),
}


def kind_of(value: object) -> str:
    """``bool``, ``int``, ``long`` (no float64 has its digits), ``huge`` (no int64), ``float``, ``str`` or ``list``."""
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    if value not in _INT64:
        return "huge"
    return "int" if abs(value) <= _EXACT else "long"


@dataclass(frozen=True)
class Kinds:
    """The kinds of values of each attribute: of the values themselves, and of the elements of its lists."""

    values: Mapping[str, set[str]]
    elements: Mapping[str, set[str]]

    @classmethod
    def empty(cls) -> Kinds:
        """The kinds of no rows."""
        return cls(defaultdict(set), defaultdict(set))

    def add(self, rows: Rows) -> None:
        """Add the attributes of some rows."""
        for attributes in rows.attributes:
            for name, value in (attributes or {}).items():
                if value is None:
                    continue  # as an attribute that the row lacks
                self.values[name].add(kind_of(value))
                if isinstance(value, list):
                    self.elements[name].update(kind_of(one) for one in value if one is not None)

    def to_json(self) -> dict[str, dict[str, list[str]]]:
        """The kinds as lists."""
        return {
            what: {name: sorted(kinds) for name, kinds in found.items()}
            for what, found in (("values", self.values), ("elements", self.elements))
        }

    def add_json(self, document: Mapping[str, Mapping[str, list[str]]]) -> None:
        """Add the kinds from a result of :meth:`to_json`."""
        for what, found in (("values", self.values), ("elements", self.elements)):
            for name, kinds in document[what].items():
                found[name].update(kinds)

    def type_of(self, name: str) -> pa.DataType | None:
        """The type that holds every value; None: only JSON text does."""
        kinds = frozenset(self.values[name])
        if kinds != {"list"}:
            return _TYPES.get(kinds)
        elements = frozenset(self.elements[name])
        inner = pa.string() if not elements else _TYPES.get(elements)
        return None if inner is None else pa.list_(inner)


@dataclass(frozen=True)
class Columns:
    """The columns of a migrated namespace: ``id``, ``vector``, and one for each attribute.

    Attributes:
        schema: of the table; an attribute's field names its attribute in its metadata.
    """

    schema: pa.Schema

    @classmethod
    def of(cls, kinds: Kinds, dimensions: int) -> Columns:
        """Columns for these attributes, by name."""
        fields = [pa.field(ID, pa.string(), nullable=False), pa.field(VECTOR, pa.list_(pa.float32(), dimensions))]
        return cls(pa.schema(fields)).with_added(kinds)

    def with_added(self, kinds: Kinds) -> Columns:
        """The same columns, and new ones for attributes that have none.

        Raises:
            InvalidUsageError: an attribute has values that its column cannot store.
        """
        by_attribute = self.by_attribute
        fields = [*self.schema]
        for name in sorted(kinds.values):
            if name not in by_attribute:
                fields.append(_field(name, kinds.type_of(name), {one.name for one in fields}))
            elif not _fits(by_attribute[name], kinds, name):
                raise InvalidUsageError(
                    f"The attribute {name!r} has new values that its column {by_attribute[name].name} of type "
                    f"{by_attribute[name].type} cannot store.",
                    remedy="Migrate to a new target: its column types are chosen from all values.",
                )
        return Columns(pa.schema(fields))

    @property
    def by_attribute(self) -> dict[str, pa.Field]:
        """The field of each attribute."""
        return {
            one.metadata[ATTRIBUTE.encode()].decode(): one
            for one in self.schema
            if one.metadata and ATTRIBUTE.encode() in one.metadata
        }

    def convert(self, rows: Rows) -> pa.RecordBatch:
        """Rows as a batch; an attribute that a row lacks is null."""
        arrays: dict[str, pa.Array] = {
            ID: pa.array(rows.ids, pa.string()),
            VECTOR: pa.FixedSizeListArray.from_arrays(
                pa.array(np.ascontiguousarray(rows.vectors, np.float32).ravel()), self.dimensions
            ),
        }
        for name, field in self.by_attribute.items():
            values = [None if one is None else one.get(name) for one in rows.attributes]
            if is_json(field):
                texts = (None if one is None else json.dumps(one, ensure_ascii=False) for one in values)
                arrays[field.name] = pa.array(texts, pa.string())
            else:
                arrays[field.name] = pa.array(values, field.type)
        return pa.record_batch([arrays[one.name] for one in self.schema], schema=self.schema)

    @property
    def dimensions(self) -> int:
        """Dimensions of the vectors."""
        return int(self.schema.field(VECTOR).type.list_size)


def is_json(field: pa.Field) -> bool:
    """Whether a column has each value as JSON text."""
    metadata: Mapping[bytes, bytes] = field.metadata or {}
    return _JSON.encode() in metadata


def _field(attribute: str, found: pa.DataType | None, taken: set[str]) -> pa.Field:
    # Lance interprets a dot as the path into a struct.
    wanted = attribute.replace(".", "_") or "attribute"
    folded = {one.casefold() for one in taken}
    name, number = wanted, 1
    while name.casefold() in folded:
        name, number = f"{wanted}_{number}", number + 1
    metadata = {ATTRIBUTE: attribute} | ({_JSON: "true"} if found is None else {})
    return pa.field(name, pa.string() if found is None else found, metadata=metadata)


def _fits(field: pa.Field, kinds: Kinds, name: str) -> bool:
    """Whether a column can store these values without loss."""
    if is_json(field):
        return True
    found = kinds.type_of(name)
    if pa.types.is_list(field.type):
        if kinds.values[name] != {"list"}:
            return False
        whole = field.type == pa.list_(pa.float64()) and kinds.elements[name] <= {"int", "float"}
        return whole or not kinds.elements[name] or (found is not None and found.equals(field.type))
    whole = field.type == pa.float64() and kinds.values[name] <= {"int", "float"}
    return whole or (found is not None and bool(found.equals(field.type)))
