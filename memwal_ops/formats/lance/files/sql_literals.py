"""Write values as SQL literals, for filters of pylance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterable

_INT64_MIN = -(2**63)
_NARROW = 32
_UNITS = {"s": "Second", "ms": "Millisecond", "us": "Microsecond", "ns": "Nanosecond"}


def has_sql_literals(keys: pa.ChunkedArray) -> bool:
    """Whether every key has an SQL literal."""
    if pa.types.is_integer(keys.type):
        # The smallest int64 has no literal: SQL reads it as minus a number that is too large.
        return not len(keys) or bool(pc.min(keys).as_py() > _INT64_MIN)
    return bool(pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type))


def sql_literal(value: int | str) -> str:
    """A value as an SQL literal."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def is_one_of(column: str, values: Iterable[int | str]) -> str:
    """The SQL condition that a column, whose name has no backtick, has one of these values; of none it is ``false``.

    As SQL and not as an Arrow expression: pylance passes those through Substrait, which rejects a table that has any
    column of an unsupported type (half floats, for example).
    """
    listed = ", ".join(map(sql_literal, values))
    return f"`{column}` IN ({listed})" if listed else "false"


def literal(value: Any, kind: pa.DataType) -> str | None:  # noqa: PLR0911 - one for each kind
    """The literal of a value of ``kind``, compared without rounding and by an index; None: there is none."""
    if pa.types.is_boolean(kind):
        return "true" if value else "false"
    if pa.types.is_integer(kind):
        return str(value) if value > _INT64_MIN else f"cast('{value}' as bigint)"
    if pa.types.is_float16(kind):
        return repr(float(value)) if math.isfinite(value) else None
    if pa.types.is_floating(kind):
        text = str(value) if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")
        return f"cast('{text}' as {'float' if pa.types.is_float32(kind) else 'double'})"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "'" + value.replace("'", "''") + "'"  # type: ignore[no-any-return]  # values are Any
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if pa.types.is_date(kind):
        return f"date '{value}'"
    if pa.types.is_timestamp(kind):
        return f"cast('{value}' as timestamp(9))"
    if pa.types.is_decimal256(kind):
        return f"arrow_cast('{value}', 'Decimal256({kind.precision}, {kind.scale})')"
    if pa.types.is_decimal(kind):
        return f"cast('{value}' as decimal({kind.precision},{kind.scale}))"
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return _counted(value, kind)
    return literal(value, kind.value_type) if pa.types.is_dictionary(kind) else None


def _counted(value: int, kind: pa.DataType) -> str:
    """A time or duration by its number of units: SQL of pylance has no literal for it."""
    name = "Duration" if pa.types.is_duration(kind) else f"Time{kind.bit_width}"
    counted = f"arrow_cast({value}, 'Int{kind.bit_width}')"
    return f"arrow_cast({counted}, '{name}({_UNITS[kind.unit]})')"


def plain(values: pa.ChunkedArray) -> list[Any]:
    """Values as :func:`literal` takes them; timestamps as text, because Python has no nanoseconds."""
    kind = values.type
    if pa.types.is_timestamp(kind):
        return values.cast(pa.timestamp(kind.unit)).cast(pa.string()).to_pylist()  # type: ignore[no-any-return]
    if pa.types.is_time(kind) or pa.types.is_duration(kind):
        return values.cast(pa.int32() if kind.bit_width == _NARROW else pa.int64()).to_pylist()  # type: ignore[no-any-return]
    return values.to_pylist()  # type: ignore[no-any-return]
