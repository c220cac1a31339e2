"""Derive the possible values of single columns from a filter in SQL, for the pruning of regions (S0-200).

Only expressions with a certain meaning are used: comparisons of a column with literals, ``IN`` and ``BETWEEN``, joined
by ``AND`` and ``OR``. All others restrict nothing, so that no region is pruned because of them. Each of these
conditions is false or NULL for a NULL, so that a row that meets it has a value in the column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import sqlglot
from sqlglot import exp, tokens
from sqlglot.dialects import Dialect

if TYPE_CHECKING:
    from collections.abc import Mapping

_MAX_VALUES = 1000
# Quotes, escapes and comments that SQL dialects read in different ways.
_AMBIGUOUS = ('"', "\\", "--", "/*", "#", "$", "{", ";")
_COMPARISONS: dict[type[exp.Binary], str] = {exp.EQ: "=", exp.GT: ">", exp.GTE: ">", exp.LT: "<", exp.LTE: "<"}
_SWAPPED = {"=": "=", ">": "<", "<": ">"}
_COARSE_UNITS = frozenset({"s", "ms", "us"})


class _Lance(Dialect):  # type: ignore[misc]  # sqlglot's own metaclass, which types as Any
    """The part of Lance's SQL that is parsed here."""

    class Tokenizer(tokens.Tokenizer):
        """Names are in backticks, strings in single quotes."""

        IDENTIFIERS = ["`"]  # noqa: RUF012 - as sqlglot declares it
        QUOTES = ["'"]  # noqa: RUF012 - as sqlglot declares it


@dataclass(frozen=True, slots=True)
class Domain:
    """The possible values of a column, in rows that a filter lets through.

    Attributes:
        values: all possible values; None: not known.
        low, high: inclusive bounds; None: not known. Unused if ``values`` are known.
    """

    values: frozenset[Any] | None = None
    low: Any = None
    high: Any = None

    def __and__(self, other: Domain) -> Domain:
        """The values that are in both."""
        if self.values is None and other.values is None:
            lows = [one.low for one in (self, other) if one.low is not None]
            highs = [one.high for one in (self, other) if one.high is not None]
            return Domain(None, max(lows, default=None), min(highs, default=None))
        known, also = (self, other) if self.values is not None else (other, self)
        return Domain(frozenset(one for one in known.values or () if also.has(one)))

    def __or__(self, other: Domain) -> Domain:
        """A domain with all values of either; it may have more."""
        if self.values is not None and other.values is not None:
            return Domain(self.values | other.values)
        pairs = [(one.low, one.high) if one.values is None else _ends(one.values) for one in (self, other)]
        empty = [one.values is not None and not one.values for one in (self, other)]
        if any(empty):
            return other if empty[0] else self
        (low, high), (also_low, also_high) = pairs
        return Domain(
            None,
            None if low is None or also_low is None else min(low, also_low),
            None if high is None or also_high is None else max(high, also_high),
        )

    def has(self, value: Any) -> bool:
        """Whether the column may have this value."""
        if self.values is not None:
            return value in self.values
        return not ((self.low is not None and value < self.low) or (self.high is not None and value > self.high))

    def enumerated(self) -> frozenset[Any] | None:
        """All values, also of a short range of whole numbers; None: too many, or not known."""
        if self.values is not None:
            return self.values
        if type(self.low) is int and type(self.high) is int and self.high - self.low < _MAX_VALUES:
            return frozenset(range(self.low, self.high + 1))
        return None


def _ends(values: frozenset[Any]) -> tuple[Any, Any]:
    return min(values, default=None), max(values, default=None)


def domains(condition: str, schema: pa.Schema) -> Mapping[str, Domain]:
    """Per column the values that it may have in rows that meet the filter; a column that is absent may have any.

    Args:
        condition: SQL, as for Lance.
        schema: of the table; only columns of integers, strings, dates and timestamps without a time zone are used.
    """
    if any(mark in condition for mark in _AMBIGUOUS):
        return {}
    # Names that differ only in their case are ignored: which one is meant depends on Lance.
    folded = [name.casefold() for name in schema.names]
    kinds = {name: schema.field(name).type for name in schema.names if folded.count(name.casefold()) == 1}
    try:
        return _domains(sqlglot.parse_one(condition, dialect=_Lance), kinds)
    except (sqlglot.errors.SqlglotError, RecursionError):
        return {}


def _domains(node: exp.Expr, kinds: Mapping[str, pa.DataType]) -> dict[str, Domain]:
    if isinstance(node, exp.Paren):
        return _domains(node.this, kinds)
    if isinstance(node, exp.And | exp.Or):
        left, right = _domains(node.left, kinds), _domains(node.right, kinds)
        both = left.keys() & right.keys()
        if isinstance(node, exp.Or):
            return {name: left[name] | right[name] for name in both}
        return {**left, **right, **{name: left[name] & right[name] for name in both}}
    if isinstance(node, exp.Between | exp.In):
        return _listed(node, kinds)
    if not isinstance(node, exp.Binary) or type(node) not in _COMPARISONS:
        return {}
    sign = _COMPARISONS[type(node)]
    return _compared(node.left, sign, node.right, kinds) or _compared(node.right, _SWAPPED[sign], node.left, kinds)


def _listed(node: exp.Between | exp.In, kinds: Mapping[str, pa.DataType]) -> dict[str, Domain]:
    """The domain from a ``BETWEEN`` or ``IN``."""
    if isinstance(node, exp.Between):
        ends = [_compared(node.this, sign, node.args[end], kinds) for sign, end in ((">", "low"), ("<", "high"))]
        if node.args.get("symmetric") or not all(ends):
            return {}
        (name,) = ends[0]
        return {name: ends[0][name] & ends[1][name]}
    plain = {name for name, value in node.args.items() if value} == {"this", "expressions"}
    found = [_compared(node.this, "=", one, kinds) for one in node.expressions] if plain else []
    if not found or not all(found) or len(found) > _MAX_VALUES:
        return {}
    (name,) = found[0]
    return {name: Domain(frozenset[Any]().union(*(one[name].values or () for one in found)))}


def _compared(column: exp.Expr, sign: str, value: exp.Expr, kinds: Mapping[str, pa.DataType]) -> dict[str, Domain]:
    """The domain from a comparison; bounds are inclusive, so a strict comparison includes one value too many."""
    if not isinstance(column, exp.Column) or column.table or column.name not in kinds:
        return {}
    found = _literal(value, kinds[column.name])
    if found is None:
        return {}
    one = {"=": Domain(frozenset({found})), ">": Domain(low=found), "<": Domain(high=found)}[sign]
    return {column.name: one}


def _literal(node: exp.Expr, kind: pa.DataType) -> Any:
    """The value of a literal in the column's type; None if that is not certain."""
    if pa.types.is_integer(kind):
        return _number(node)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return node.this if isinstance(node, exp.Literal) and node.is_string else None
    named = {exp.DataType.Type.DATE}
    if pa.types.is_timestamp(kind) and kind.tz is None and kind.unit in _COARSE_UNITS:
        named, kind = {*named, exp.DataType.Type.TIMESTAMP}, pa.timestamp("us")
    elif not pa.types.is_date(kind):
        return None
    if not (isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal) and node.this.is_string):
        return None
    try:
        return pa.scalar(node.this.this).cast(kind).as_py() if node.to.this in named else None
    except (pa.ArrowException, ValueError, OverflowError):
        return None


def _number(node: exp.Expr) -> int | None:
    if isinstance(node, exp.Neg):
        found = _number(node.this)
        return None if found is None else -found
    if not isinstance(node, exp.Literal) or node.is_string:
        return None
    # int() also accepts 1_000, and digits of other scripts.
    return int(node.this) if node.this.isascii() and node.this.isdecimal() else None
