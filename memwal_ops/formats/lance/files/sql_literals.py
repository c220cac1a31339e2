"""Write values as SQL literals, for filters of pylance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Iterable

_INT64_MIN = -(2**63)


def has_sql_literals(keys: pa.ChunkedArray) -> bool:
    """Whether every key has an SQL literal."""
    if pa.types.is_integer(keys.type):
        # The smallest int64 has no literal: SQL reads it as minus a number that is too large.
        return bool(pc.min(keys).as_py() > _INT64_MIN)
    return bool(pa.types.is_string(keys.type) or pa.types.is_large_string(keys.type))


def sql_literal(value: int | str) -> str:
    """A value as an SQL literal."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def is_one_of(column: str, values: Iterable[int | str]) -> str:
    """The SQL condition that a column, whose name has no backtick, has one of these values.

    As SQL and not as an Arrow expression: pylance passes those through Substrait, which rejects a table that has any
    column of an unsupported type (half floats, for example).
    """
    return f"`{column}` IN ({', '.join(map(sql_literal, values))})"
