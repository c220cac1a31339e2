"""Evaluate a filter in Lance's SQL on base fragments and on rows in memory, with the same result.

Rows in memory are written to a Lance dataset in memory and filtered by the same scanner as a base fragment, so that
nulls, casts and functions mean the same in the base and in generations.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import lance
import numpy as np
import pyarrow as pa

from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

_ROW = "__memwal_ops_row"
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_FIELDS = re.compile(r"(?<=Valid fields are )[^.]*")
# Lance's own columns have another meaning in a generation, and none in memory.
_SYSTEM = re.compile(r"\b_row(?:id|addr|offset|_last_updated_at_version|_created_at_version)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Condition:
    """A compiled filter; see :func:`condition`.

    Attributes:
        sql: the expression, for a Lance scanner.
        columns: names of the base columns that it reads, in the base's order.
        storage_version: of the base's files; the meaning of a null inside a struct may depend on it.
    """

    sql: str
    columns: tuple[str, ...]
    storage_version: str

    def holds(self, rows: pa.RecordBatch | pa.Table) -> npt.NDArray[np.bool_]:
        """For each row whether the condition is true (null is not); ``rows`` has ``columns`` in the base's types.

        Raises:
            InvalidUsageError: the expression fails on a value.
        """
        matches = np.zeros(rows.num_rows, dtype=np.bool_)
        if rows.num_rows:
            chosen = pa.table({_ROW: np.arange(rows.num_rows)})
            for name in self.columns:
                chosen = chosen.append_column(rows.schema.field(name), _chunked(rows.column(name)))
            matches[_matching_rows(self.sql, chosen, self.storage_version)] = True
        return matches


def condition(text: str, base: lance.LanceDataset) -> Condition:
    """Compile ``text`` for the columns of ``base``.

    Raises:
        InvalidUsageError: it is not a boolean expression over these columns.
    """
    schema: pa.Schema = base.schema
    version = str(base.data_storage_version)
    names = {name.lower() for name in schema.names}
    system = {found.lower() for found in _SYSTEM.findall(_QUOTED.sub("''", text))} - names
    if system:
        raise InvalidUsageError(
            f"The filter {text!r} uses {', '.join(sorted(system))}, which is a property of a row's position.",
            remedy=_REMEDY,
        )
    # In parentheses: Lance's parser ignores text after a complete expression.
    sql = f"({text}\n)"
    _plan(sql, schema, version)
    return Condition(sql, tuple(_columns(sql, schema, version)), version)


def _columns(sql: str, schema: pa.Schema, version: str) -> Sequence[str]:
    """The columns without which it cannot be planned; all of them if that cannot be determined."""
    text = sql.lower()
    likely = [field for field in schema if field.name.lower() in text or "`" in field.name]
    if len({field.name.lower() for field in likely}) == len(likely) and _plans(sql, likely, version):
        return [
            field.name
            for field in likely
            if not _plans(sql, [other for other in likely if other is not field], version)
        ]
    return list(schema.names)


def _plans(sql: str, fields: Sequence[pa.Field], version: str) -> bool:
    try:
        _plan(sql, pa.schema(fields), version)
    except InvalidUsageError:
        return False
    return True


def _plan(sql: str, schema: pa.Schema, version: str) -> None:
    nothing = pa.schema([pa.field(_ROW, pa.int64()), *schema]).empty_table()
    _matching_rows(sql, nothing, version)


def _matching_rows(sql: str, rows: pa.Table, version: str) -> npt.NDArray[np.int64]:
    with failing(sql):
        dataset = lance.write_dataset(rows, "memory://", data_storage_version=cast("Any", version))
        row_numbers: npt.NDArray[np.int64] = (
            dataset.scanner(columns=[_ROW], filter=sql).to_table().column(_ROW).to_numpy()
        )
    return row_numbers


@contextmanager
def failing(sql: str) -> Iterator[None]:
    """Report an error of pylance as an error of the filter.

    Raises:
        InvalidUsageError: what pylance raises inside.
    """
    try:
        with lance_errors("use the filter", sql[1:-2]):
            yield
    except MemwalOpsError as error:
        message = _FIELDS.sub(_of_the_table, str(error)).rstrip(" .")
        raise InvalidUsageError(f"{message}.", remedy=_REMEDY) from error


def _of_the_table(fields: re.Match[str]) -> str:
    """Lance's list of the columns that a filter may use, without our own and those that are refused here."""
    return ", ".join(name for name in fields[0].split(", ") if name != _ROW and not _SYSTEM.fullmatch(name))


def is_failing(error: MemwalOpsError) -> bool:
    """Whether a scan failed because its filter failed on a value."""
    return "Error applying filter expression" in str(error)


def _chunked(column: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])


_REMEDY = (
    "Give an expression over the table's columns in the SQL of Lance's filters, such as "
    '"id > 5 AND txt IS NOT NULL"; names with capitals or spaces go between backticks.'
)
