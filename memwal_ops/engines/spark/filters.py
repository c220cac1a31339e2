"""Spark's filters as Lance's SQL, where both are sure to decide alike.

What is left out here costs time and no row: Spark checks all filters again. What is put in wrongly
would lose rows, so only comparisons of signed integers, strings and booleans with a constant go in
(floats do not: Spark takes NaN for the largest number, Lance for none).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPERATORS = {
    "EqualTo": "=",
    "GreaterThan": ">",
    "GreaterThanOrEqual": ">=",
    "LessThan": "<",
    "LessThanOrEqual": "<=",
}
_INT64_MIN = -(2**63)
_MOST_VALUES = 1000


def sql_filter(filters: Sequence[Any], schema: pa.Schema) -> str | None:
    """The conjunction of those of Spark's ``filters`` that Lance can take; None where it can take none."""
    texts = [text for one in filters if (text := _sql(one, schema)) is not None]
    return " AND ".join(texts) or None


def _sql(one: Any, schema: pa.Schema) -> str | None:
    kind = type(one).__name__
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    if len(attribute) != 1 or attribute[0] not in schema.names or "`" in attribute[0]:
        return None
    name = f"`{attribute[0]}`"
    if kind in {"IsNull", "IsNotNull"}:
        return f"{name} IS {'NOT ' if kind == 'IsNotNull' else ''}NULL"
    values = one.value if kind == "In" else [getattr(one, "value", None)]
    literals = [_literal(value, schema.field(attribute[0]).type) for value in values]
    if not 0 < len(literals) <= _MOST_VALUES or None in literals:
        return None
    if kind == "In":
        return f"{name} IN ({', '.join(map(str, literals))})"
    return f"{name} {_OPERATORS[kind]} {literals[0]}" if kind in _OPERATORS else None


def _literal(value: Any, kind: pa.DataType) -> str | None:
    if isinstance(value, bool):
        return str(value).lower() if pa.types.is_boolean(kind) else None
    if isinstance(value, int):
        return str(value) if pa.types.is_signed_integer(kind) and value > _INT64_MIN else None
    if isinstance(value, str) and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return "'" + value.replace("'", "''") + "'"
    return None
