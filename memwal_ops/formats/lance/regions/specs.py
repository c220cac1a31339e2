"""Region specs: compute the region that a row belongs to (S0-081 to S0-085).

A spec computes one value per field for each row; rows with equal values belong to one region. The source columns must
be key columns. Timeline otherwise: a spec is ``year(day)``, and ``day`` is no key column; key 7 is put with a day of
2025 into region A, then with one of 2026 into region B; B is merged, then A: the older row is in the base table
(S0-009).

A field may be an expression: DataFusion SQL over ``col0``, ``col1``, ... with six rules (S0-086 to S0-092), which are
checked twice where possible: by the functions that the expression calls, and by its results for samples. A violation
that is not detected would route two rows of one key to two regions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.errors import InvalidUsageError, TableCorruptError, UnsupportedFeatureError
from memwal_ops.formats.lance.regions.transforms import TRANSFORMS, check_transform, transformed, transforms_text
from memwal_ops.formats.lance.wire._pb import memwal_pb2
from memwal_ops.formats.lance.wire.region_manifest import NAN, field_type, python_value, type_name

_FUNCTION_CALL = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\(")
# DataFusion declares it deterministic, but its result changes when DataFusion is updated.
_OF_RELEASE = frozenset({"version"})
_UNSIGNED = (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
_INTEGERS = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), *_UNSIGNED)
_FLOATS = (pa.float32(), pa.float64())
_NUMBERS = (0, 1, 2, 5, 7, 12, 100, 127, -1, -7, -128, 1000, -32768, 2**31 - 1, -(2**31), 2**40, 2**53)
_REMOVAL = "column-removal resistant"
_PROMOTION = "type-promotion resistant"
_TEXTS = ("", "a", "iceberg", "Zürich", "日本語", "x" * 40, "1", "2026-01-31")


def evaluated(expression: str, columns: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    """The region values that an expression gives for source columns, in the type of its field.

    Raises ``InvalidUsageError``: it fails, or gives a value that is not of that type; ``UnsupportedFeatureError``:
    DataFusion is not installed.
    """
    try:
        values = _run(expression, columns)
    except UnsupportedFeatureError:
        raise
    except Exception as error:
        raise InvalidUsageError(f"The region expression {expression!r} fails: {_message(error)}.") from error
    if len(values) != len(columns[0]):
        raise InvalidUsageError(
            f"The region expression {expression!r} gives {len(values)} values for {len(columns[0])} rows."
        )
    return _as_type(expression, values, kind)


def check_expression(expression: str, sources: Sequence[pa.DataType], kind: pa.DataType) -> None:
    """Refuse an expression over columns of these types that breaks one of the six rules.

    Raises ``InvalidUsageError``, which names the rule; ``UnsupportedFeatureError``: DataFusion is not installed.
    """
    if not sources:
        raise InvalidUsageError(f"The region expression {expression!r} has no source column.")
    _check_calls(expression, sources)
    samples = [_samples(source) for source in sources]
    rows = max(map(len, samples))
    # The samples of several columns are shifted against each other, to combine different values.
    columns = [
        pa.concat_arrays([sample] * (rows // len(sample) + 2))[at : at + rows] for at, sample in enumerate(samples)
    ]
    whole = evaluated(expression, columns, kind)
    if not whole.equals(evaluated(expression, columns, kind)):
        raise _broken(expression, "deterministic", "the same rows give other values the second time")
    alone = [evaluated(expression, [column[at : at + 1] for column in columns], kind) for at in range(rows)]
    if not whole.equals(pa.concat_arrays(alone)):
        raise _broken(expression, "stateless", "the value of a row depends on other rows")
    _check_promotion(expression, columns, kind, whole)
    for at in range(len(columns)):
        nothing = [pa.nulls(rows, values.type) if other == at else values for other, values in enumerate(columns)]
        removed = [pa.nulls(rows) if other == at else values for other, values in enumerate(columns)]
        try:
            expected = evaluated(expression, nothing, kind)
        except InvalidUsageError as error:
            raise _broken(expression, "NULL-safe", f"where col{at} is NULL, {error}") from error
        try:
            values = evaluated(expression, removed, kind)
        except InvalidUsageError as error:
            raise _broken(expression, _REMOVAL, f"without col{at} {error}") from error
        if not values.equals(expected):
            raise _broken(expression, _REMOVAL, f"without col{at} it gives other values than where that is NULL")


def _check_calls(expression: str, sources: Sequence[pa.DataType]) -> None:
    try:
        parsed = _frame([pa.nulls(1, kind) for kind in sources]).parse_sql_expr(expression)
    except UnsupportedFeatureError:
        raise
    except Exception as error:
        raise InvalidUsageError(f"The region expression {expression!r} is invalid: {_message(error)}.") from error
    called = set(_FUNCTION_CALL.findall(parsed.canonical_name()))
    unsteady = sorted(called & (_unsteady() | _OF_RELEASE))
    if unsteady:
        raise _broken(expression, "deterministic and stateless", f"it calls {', '.join(unsteady)}")


def _check_promotion(expression: str, columns: Sequence[pa.Array], kind: pa.DataType, whole: pa.Array) -> None:
    for at, column in enumerate(columns):
        for other in _equivalent(column.type):
            rows = pc.indices_nonzero(_that_fit(column, other))
            some = [column.take(rows) for column in columns]
            some[at] = some[at].cast(other)
            try:
                values = evaluated(expression, some, kind)
            except InvalidUsageError as error:
                # A narrower type may be too small for the result; columns are never changed to narrower types.
                if other.bit_width < column.type.bit_width:
                    continue
                raise _broken(expression, _PROMOTION, f"where col{at} is {other}, {error}") from error
            if not values.equals(whole.take(rows)):
                raise _broken(expression, _PROMOTION, f"where col{at} is {other}, it gives other values")


def _equivalent(kind: pa.DataType) -> list[pa.DataType]:
    """Types to which a numeric type may be changed. uint64 and signed types have no common wider type."""
    if kind in _FLOATS:
        return [other for other in _FLOATS if other != kind]
    if kind in _UNSIGNED:
        return [other for other in _UNSIGNED if other != kind]
    return [other for other in _INTEGERS if other not in {kind, pa.uint64()}] if kind in _INTEGERS else []


def _that_fit(column: pa.Array, kind: pa.DataType) -> pa.Array:
    def fits(value: Any) -> bool:
        if value is None:
            return True
        try:
            return bool(pa.scalar(value, kind).as_py() == value)
        except (pa.ArrowInvalid, OverflowError):
            return False

    return pa.array([fits(value) for value in column.to_pylist()])


def _samples(kind: pa.DataType) -> pa.Array:
    wanted: list[Any]
    if pa.types.is_integer(kind):
        wanted = [number for number in _NUMBERS if _that_fit(pa.array([number], pa.int64()), kind)[0].as_py()]
    elif pa.types.is_floating(kind):
        wanted = [0.0, 1.0, -1.0, 0.5, -2.25, 1024.0, 65504.0]
    elif pa.types.is_boolean(kind):
        wanted = [True, False]
    elif pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        days = pa.array([0, 1, 20_000, -1, -20_000, 11_016], pa.int32()).cast(pa.date32())
        return pa.concat_arrays([days.cast(kind), pa.nulls(1, kind)])
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        wanted = [*_TEXTS]
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        wanted = [text.encode() for text in _TEXTS]
    else:
        raise InvalidUsageError(f"A region expression cannot have a column of the type {kind}.")
    return pa.array([*wanted, None], kind)


def _as_type(expression: str, found: pa.Array, kind: pa.DataType) -> pa.Array:
    if found.null_count == len(found):
        return pa.nulls(len(found), kind)
    if found.type != kind and _family(found.type) != _family(kind):
        raise _broken(expression, "consistent with its result type", f"it gives {found.type}, not {kind}")
    try:
        return found.cast(kind)
    except pa.ArrowInvalid as error:
        raise _broken(
            expression, "consistent with its result type", f"a value is not of type {kind}: {error}"
        ) from error


def _family(kind: pa.DataType) -> str:
    types = pa.types
    families: dict[str, Callable[[pa.DataType], bool]] = {
        "number": lambda kind: types.is_integer(kind) or types.is_decimal(kind),
        "float": types.is_floating,
        "date": types.is_date,
        "moment": types.is_timestamp,
        "text": lambda kind: types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind),
        "bytes": lambda kind: types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind),
    }
    return next((name for name, belongs in families.items() if belongs(kind)), str(kind))


def _run(expression: str, columns: Sequence[pa.Array]) -> pa.Array:
    frame = _frame(columns)
    return frame.select(frame.parse_sql_expr(expression)).to_arrow_table().column(0).combine_chunks()


def _frame(columns: Sequence[pa.Array]) -> Any:
    """The columns as ``col0``, ``col1``, ..., in a session of their own with one thread, which keeps their order."""
    names = [f"col{at}" for at in range(len(columns))]
    return _session().from_arrow(pa.table(dict(zip(names, columns, strict=True))))


def _session(**settings: str) -> Any:
    try:
        from datafusion import SessionConfig, SessionContext  # noqa: PLC0415 - heavy, and an extra
    except ImportError as error:
        raise UnsupportedFeatureError(
            "Rows of this table are routed to regions by an expression, which needs DataFusion: it is not installed.",
            remedy="Install it: pip install 'memwal-ops[expressions]'.",
        ) from error
    return SessionContext(SessionConfig({"datafusion.execution.target_partitions": "1", **settings}))


@cache
def _unsteady() -> frozenset[str]:
    """Names of the functions that DataFusion does not declare deterministic."""
    session = _session(**{"datafusion.catalog.information_schema": "true"})
    routines = session.sql("SELECT routine_name FROM information_schema.routines WHERE NOT is_deterministic")
    return frozenset(routines.to_arrow_table().column(0).to_pylist())


def _broken(expression: str, rule: str, detail: str) -> InvalidUsageError:
    return InvalidUsageError(f"The region expression {expression!r} is not {rule}: {detail}.")


def _message(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")


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
        """Parse a field as written on the command line; raises ``InvalidUsageError``.

        ``bucket(id, 16)``, ``truncate(name, 3)``, ``multi_bucket(a, b, 16)`` or ``year(day)``, optionally preceded by
        ``NAME=`` (default: columns and transform, joined by ``_``); or a JSON object with the attributes.
        """
        if text.lstrip().startswith("{"):
            return cls._of_json(text)
        match = _CALL.fullmatch(text.strip())
        if match is None or match["transform"] not in TRANSFORMS:
            raise InvalidUsageError(
                f"{text!r:.200} is not a region field.",
                remedy=f"Write TRANSFORM(COLUMN, ...), for example bucket(id, 16). {transforms_text()}",
            )
        arguments = [argument.strip() for argument in match["arguments"].split(",")]
        transform, parameters = match["transform"], {}
        if transform in _NUMBERED:
            parameters = {_NUMBERED[transform]: arguments.pop()}
        named = match["name"] or "_".join([*arguments, transform])
        return cls(named, tuple(arguments), transform, parameters=parameters)

    @classmethod
    def _of_json(cls, text: str) -> RegionField:
        try:
            document = json.loads(text)
            if not document.keys() <= _KEYS:
                raise ValueError(f"unknown: {', '.join(sorted(document.keys() - _KEYS))}")
            parameters = {str(key): str(value) for key, value in document.pop("parameters", {}).items()}
            made = cls(**{**document, "sources": tuple(document["sources"])}, parameters=parameters)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidUsageError(f"{text!r:.200} is not a region field: {error}.") from error
        return made


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """The rule that assigns the rows of a table to regions, by at least one field.

    ``spec_id``: from 1, never reused (S0-082); None: the next free id.
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

    ``specs``: the new specs; one without an id gets the lowest id above all used ones. ``ids``: field ids of the
    table's columns by name. ``key``: names of the key columns. ``earlier``: specs of the index; a field of one name
    must have the same type in all specs. ``used``: ids that must not be reused (S0-082).
    Raises ``InvalidUsageError``: an id is duplicate, used or out of range, two fields have one name, a source is not a
    key column, or a transform or an expression is invalid; ``UnsupportedFeatureError``: a spec has an expression, and
    DataFusion is not installed.
    """
    given = [spec.spec_id for spec in specs if spec.spec_id is not None]
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
    types = {spec_field.field_id: spec_field.result_type for spec in earlier for spec_field in spec.fields}
    encoded = []
    for spec in specs:
        made = memwal_pb2.RegionSpec(spec_id=next(free) if spec.spec_id is None else spec.spec_id)
        if not spec.fields:
            raise InvalidUsageError(f"The region spec {made.spec_id} has no fields.")
        if len({spec_field.field_id for spec_field in spec.fields}) < len(spec.fields):
            raise InvalidUsageError(f"The region spec {made.spec_id} has two fields of one name.")
        for spec_field in spec.fields:
            kind = _checked(spec_field, schema, key)
            if types.setdefault(spec_field.field_id, kind) != kind:
                raise InvalidUsageError(
                    f"The region field {spec_field.field_id} has the type {kind} in one spec and another type in "
                    "another spec."
                )
            stored = made.fields.add(
                field_id=spec_field.field_id,
                source_ids=[ids[name] for name in spec_field.sources if name],
                result_type=kind,
            )
            if spec_field.transform is not None:
                stored.transform = spec_field.transform
            if spec_field.expression is not None:
                stored.expression = spec_field.expression
            stored.parameters.update(spec_field.parameters)
        encoded.append(made)
    return encoded


def decode_spec(stored: memwal_pb2.RegionSpec, names: Mapping[int, str]) -> RegionSpec:
    """Decode a stored spec; ``names``: of the columns by field id, at the version for which rows are written.

    Raises ``TableCorruptError``: the spec has no id or no fields, or a field has no name, or not exactly one of
    transform and expression.
    """
    if not stored.spec_id or not stored.fields:
        raise TableCorruptError(f"The table's region spec {stored.spec_id} has no id, or no fields.")
    fields = []
    for stored_field in stored.fields:
        transform = stored_field.transform if stored_field.HasField("transform") else None
        expression = stored_field.expression if stored_field.HasField("expression") else None
        if not stored_field.field_id or (transform is None) == (expression is None):
            raise TableCorruptError(
                f"A field of the region spec {stored.spec_id} has no name, or not one of transform and expression."
            )
        sources = tuple(names.get(number) for number in stored_field.source_ids)
        kind, parameters = stored_field.result_type, dict(stored_field.parameters)
        fields.append(RegionField(stored_field.field_id, sources, transform, expression, kind, parameters))
    return RegionSpec(tuple(fields), stored.spec_id)


def region_values(spec: RegionSpec, rows: pa.Table) -> pa.Table:
    """Compute the region values of each row: one column per field of the spec, with the field's type.

    Raises ``InvalidUsageError``: an expression fails, or a value does not fit its type.
    """
    columns = {}
    for spec_field in spec.fields:
        sources = [
            pa.nulls(rows.num_rows) if name is None or name not in rows.column_names else _plain(rows.column(name))
            for name in spec_field.sources
        ]
        columns[spec_field.field_id] = _value(spec_field, sources)
    return pa.table(columns)


def by_region(values: pa.Table) -> list[tuple[tuple[Any, ...], pa.Array]]:
    """Group rows by :func:`region_values`: for each region its values, and its rows' indices, ascending."""
    if not values.num_rows:
        return []
    codes = pa.array(np.zeros(values.num_rows, np.int64))
    for column in values.columns:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        wide = codes.to_numpy() * len(encoded.dictionary) + encoded.indices.to_numpy(zero_copy_only=False)
        codes = pa.array(wide).dictionary_encode().indices.cast(pa.int64())
    plain = codes.to_numpy()
    # NumPy's stable sort of 16-bit integers is a radix sort, ten times as fast.
    plain = plain.astype(np.uint16) if plain.max() <= np.iinfo(np.uint16).max else plain
    order = np.argsort(plain, kind="stable")
    starts = np.flatnonzero(np.diff(plain[order].astype(np.int64), prepend=-1))
    parts = np.split(order, starts[1:])
    return [(tuple(python_value(column[int(part[0])]) for column in values.columns), pa.array(part)) for part in parts]


def _checked(one: RegionField, schema: pa.Schema, key: Sequence[str]) -> str:
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
    try:
        value = transformed(one.transform or "", one.parameters, sources).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidUsageError(
            f"The region field {one.field_id} has a value that is not a valid {kind}: {error}."
        ) from error
    if pa.types.is_floating(kind):
        # -0.0 equals 0.0, and NaN has many bit patterns: each is one region value.
        zero, no_number = (value.type.to_pandas_dtype()(number) for number in (0, NAN))
        plain = pc.fill_null(value, zero).to_numpy() + zero
        plain = np.where(np.isnan(plain), no_number, plain)
        return pa.array(plain, kind, mask=pc.is_null(value).to_numpy(False))  # noqa: FBT003
    return value


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """One array without dictionary encoding or time zone: an instant is the same in every zone."""
    return column.combine_chunks().cast(_plain_type(column.type))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
