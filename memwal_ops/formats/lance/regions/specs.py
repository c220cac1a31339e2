"""Region specs: compute the region that a row belongs to (S0-081 to S0-085).

A spec computes one value per field for each row; rows with equal values belong to one region. The source columns must
be key columns. Timeline otherwise: a spec is ``year(day)``, and ``day`` is no key
column; key 7 is put with a day of 2025 into region A, then with one of 2026 into region B; B is merged, then A:
the older row is in the base table (S0-009).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError, TableCorruptError
from memwal_ops.formats.lance.regions.expressions import check_expression, evaluated
from memwal_ops.formats.lance.regions.transforms import TRANSFORMS, check_transform, transformed, transforms_text
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.region_fields import NAN, canonical, field_type, type_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

MANUAL = 0
"""The spec id of manual regions (S0-084)."""
_LARGEST_ID = 2**32 - 1
_CALL = re.compile(r"(?:(?P<name>\w+)\s*=\s*)?(?P<transform>\w+)\((?P<arguments>[^()]*)\)", re.ASCII)
_NUMBERED = {"bucket": "num_buckets", "multi_bucket": "num_buckets", "truncate": "width"}
_KEYS = frozenset({"field_id", "sources", "transform", "expression", "result_type", "parameters"})


@dataclass(frozen=True, slots=True)
class RegionField:
    """A region field: computes one of the values that identify a row's region (S0-085).

    Attributes:
        field_id: name of the field. Fields of one name have one type in all specs of a table.
        sources: names of the source columns; None stands for a dropped column, which is read as NULL (S0-090).
        transform: a well-known transform: identity, year, month, day, hour, bucket, multi_bucket or truncate; or
        expression: DataFusion SQL over ``col0``, ``col1``, ..., the sources in order.
        result_type: Arrow's name of the value's type, for example ``int32`` or ``utf8``; a transform implies its own.
        parameters: ``num_buckets`` for bucket and multi_bucket, ``width`` for truncate.
    """

    field_id: str
    sources: tuple[str | None, ...]
    transform: str | None = None
    expression: str | None = None
    result_type: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> RegionField:
        """Parse a field as written on the command line.

        ``bucket(id, 16)``, ``truncate(name, 3)``, ``multi_bucket(a, b, 16)`` or ``year(day)``, optionally preceded by
        ``NAME=`` (default: columns and transform, joined by ``_``); or a JSON object with the attributes.

        Raises:
            InvalidUsageError: the text is neither.
        """
        if text.lstrip().startswith("{"):
            return cls._of_json(text)
        found = _CALL.fullmatch(text.strip())
        if found is None or found["transform"] not in TRANSFORMS:
            raise InvalidUsageError(
                f"{text!r:.200} is not a region field.",
                remedy=f"Write TRANSFORM(COLUMN, ...), for example bucket(id, 16). {transforms_text()}",
            )
        arguments = [one.strip() for one in found["arguments"].split(",")]
        transform, parameters = found["transform"], {}
        if transform in _NUMBERED:
            parameters = {_NUMBERED[transform]: arguments.pop()}
        named = found["name"] or "_".join([*arguments, transform])
        return cls(named, tuple(arguments), transform, parameters=parameters)

    @classmethod
    def _of_json(cls, text: str) -> RegionField:
        try:
            found = json.loads(text)
            if not found.keys() <= _KEYS:
                raise ValueError(f"unknown: {', '.join(sorted(found.keys() - _KEYS))}")
            parameters = {str(key): str(value) for key, value in found.pop("parameters", {}).items()}
            made = cls(**{**found, "sources": tuple(found["sources"])}, parameters=parameters)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidUsageError(f"{text!r:.200} is not a region field: {error}.") from error
        return made


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """The rule that assigns the rows of a table to regions.

    Attributes:
        fields: at least one field.
        spec_id: id from 1, never reused (S0-082); None: the next free id.
    """

    fields: tuple[RegionField, ...]
    spec_id: int | None = None


def encode_specs(
    specs: Sequence[RegionSpec],
    schema: pa.Schema,
    ids: Mapping[str, int],
    key: Sequence[str],
    *,
    earlier: Sequence[RegionSpec] = (),
    used: AbstractSet[int] = frozenset(),
) -> list[memwal_pb2.RegionSpec]:
    """Check new specs and encode them as the MemWAL index stores them (S0-074).

    Args:
        specs: the new specs; one without an id gets the lowest id above all used ones.
        ids: field ids of the table's columns by name.
        key: names of the key columns.
        earlier: specs of the index; a field of one name must have the same type in all specs.
        used: ids that must not be reused (S0-082).

    Raises:
        InvalidUsageError: an id is duplicate, used or out of range, two fields have one name, a source is not a key
            column, or a transform or an expression is invalid.
        UnsupportedFeatureError: a spec has an expression, and DataFusion is not installed.
    """
    given = [one.spec_id for one in specs if one.spec_id is not None]
    for number in given:
        if not 0 < number <= _LARGEST_ID or given.count(number) > 1:
            raise InvalidUsageError(
                f"{number} cannot be the id of {'two region specs' if given.count(number) > 1 else 'a region spec'}.",
                remedy="Ids are integers from 1; 0 is the id of manual regions.",
            )
        if number in used:
            raise InvalidUsageError(
                f"The id {number} belongs to an earlier region spec: its regions would be mistaken for the new one's.",
                remedy="Omit the id: the next free one is used.",
            )
    free = (number for number in count(max(used, default=0) + 1) if number not in given)
    types = {one.field_id: one.result_type for spec in earlier for one in spec.fields}
    encoded = []
    for spec in specs:
        made = memwal_pb2.RegionSpec(spec_id=next(free) if spec.spec_id is None else spec.spec_id)
        if not spec.fields:
            raise InvalidUsageError(f"The region spec {made.spec_id} has no fields.")
        if len({one.field_id for one in spec.fields}) < len(spec.fields):
            raise InvalidUsageError(f"The region spec {made.spec_id} has two fields of one name.")
        for one in spec.fields:
            kind = _checked(one, schema, key)
            if types.setdefault(one.field_id, kind) != kind:
                raise InvalidUsageError(
                    f"The region field {one.field_id} has the type {kind} in one spec and another type in another spec."
                )
            stored = made.fields.add(
                field_id=one.field_id, source_ids=[ids[name] for name in one.sources if name], result_type=kind
            )
            if one.transform is not None:
                stored.transform = one.transform
            if one.expression is not None:
                stored.expression = one.expression
            stored.parameters.update(one.parameters)
        encoded.append(made)
    return encoded


def decode_spec(stored: memwal_pb2.RegionSpec, names: Mapping[int, str]) -> RegionSpec:
    """Decode a stored spec.

    Args:
        names: names of the table's columns by field id, at the version for which rows are written.

    Raises:
        TableCorruptError: the spec has no id or no fields, or a field has no name, or not exactly one of transform
            and expression.
    """
    if not stored.spec_id or not stored.fields:
        raise TableCorruptError(f"The table's region spec {stored.spec_id} has no id, or no fields.")
    fields = []
    for one in stored.fields:
        transform = one.transform if one.HasField("transform") else None
        expression = one.expression if one.HasField("expression") else None
        if not one.field_id or (transform is None) == (expression is None):
            raise TableCorruptError(
                f"A field of the region spec {stored.spec_id} has no name, or not one of transform and expression."
            )
        sources = tuple(names.get(number) for number in one.source_ids)
        fields.append(RegionField(one.field_id, sources, transform, expression, one.result_type, dict(one.parameters)))
    return RegionSpec(tuple(fields), stored.spec_id)


def region_values(spec: RegionSpec, rows: pa.Table) -> pa.Table:
    """Compute the region values of each row: one column per field of the spec, with the field's type.

    Args:
        rows: rows with the source columns; other columns are ignored.

    Raises:
        InvalidUsageError: an expression fails, or a value does not fit its type.
    """
    columns = {}
    for one in spec.fields:
        sources = [
            pa.nulls(rows.num_rows) if name is None or name not in rows.column_names else _plain(rows.column(name))
            for name in one.sources
        ]
        columns[one.field_id] = _value(one, sources)
    return pa.table(columns)


def by_region(values: pa.Table) -> list[tuple[tuple[Any, ...], pa.Array]]:
    """Group rows by region: for each region its values, and the indices of its rows in ascending order.

    Args:
        values: result of :func:`region_values`.
    """
    if not values.num_rows:
        return []
    codes = pa.array(np.zeros(values.num_rows, np.int64))
    for column in values.columns:
        found = column.combine_chunks().dictionary_encode(null_encoding="encode")
        wide = codes.to_numpy() * len(found.dictionary) + found.indices.to_numpy(zero_copy_only=False)
        codes = pa.array(wide).dictionary_encode().indices.cast(pa.int64())
    plain = codes.to_numpy()
    # NumPy's stable sort of 16-bit integers is a radix sort, ten times as fast.
    plain = plain.astype(np.uint16) if plain.max() <= np.iinfo(np.uint16).max else plain
    order = np.argsort(plain, kind="stable")
    starts = np.flatnonzero(np.diff(plain[order].astype(np.int64), prepend=-1))
    parts = np.split(order, starts[1:])
    return [
        (tuple(canonical(column[int(part[0])].as_py()) for column in values.columns), pa.array(part)) for part in parts
    ]


def _checked(one: RegionField, schema: pa.Schema, key: Sequence[str]) -> str:
    """Check a field, and return the name of its type."""
    if not one.field_id:
        raise InvalidUsageError("A region field has no name.")
    if (one.transform is None) == (one.expression is None):
        raise InvalidUsageError(f"The region field {one.field_id} needs either a transform or an expression.")
    strange = [str(name) for name in one.sources if name not in key]
    if strange or len(set(one.sources)) < len(one.sources):
        raise InvalidUsageError(
            f"The region field {one.field_id} cannot use {', '.join(strange) or 'a column twice'}: rows of "
            "one key would be written to two regions, and the older row could be merged last.",
            remedy=f"Use the table's key columns: {', '.join(key)}.",
        )
    kinds = [_plain_type(schema.field(name).type) for name in one.sources]
    if one.transform is not None:
        kind = check_transform(one.transform, one.parameters, kinds)
    else:
        kind = field_type(one.result_type)
        if type_name(kind) is None or (pa.types.is_binary(kind) and one.result_type != "binary"):
            raise InvalidUsageError(f"The region field {one.field_id} has the unknown result type {one.result_type!r}.")
        if one.parameters:
            raise InvalidUsageError(f"The region field {one.field_id} has parameters, but an expression takes none.")
        check_expression(one.expression or "", kinds, kind)
    named = type_name(kind)
    if named is None:
        raise InvalidUsageError(f"The region field {one.field_id} cannot have the type {kind}.")
    if one.result_type and field_type(one.result_type) != kind:
        raise InvalidUsageError(f"The region field {one.field_id} has the type {kind}, not {one.result_type}.")
    return named


def _value(one: RegionField, sources: list[pa.Array]) -> pa.Array:
    kind = field_type(one.result_type)
    if one.expression is not None:
        return evaluated(one.expression, sources, kind)
    check_transform(one.transform or "", one.parameters, [column.type for column in sources])
    found = transformed(one.transform or "", one.parameters, sources)
    try:
        found = found.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidUsageError(
            f"The region field {one.field_id} has a value that is not a valid {kind}: {error}."
        ) from error
    if pa.types.is_floating(kind):
        # -0.0 equals 0.0, and NaN has many bit patterns: each is one region value.
        zero, no_number = (found.type.to_pandas_dtype()(one) for one in (0, NAN))
        plain = pc.fill_null(found, zero).to_numpy() + zero
        plain = np.where(np.isnan(plain), no_number, plain)
        return pa.array(plain, kind, mask=pc.is_null(found).to_numpy(False))  # noqa: FBT003
    return found


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """One array without dictionary encoding or time zone: an instant is the same in every zone."""
    return column.combine_chunks().cast(_plain_type(column.type))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
