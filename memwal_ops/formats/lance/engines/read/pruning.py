"""Determine which regions may have rows that meet a filter, or have looked-up keys (S0-200, S0-204).

A region is pruned only if it is certain to have none. Its rows have the values of its spec's fields, which are computed
from key columns. So if no key with these values can meet the filter, the region has no such row, and no newer version
of a base row that meets it. Timeline with a field of another column: key 7 is in the base with a day of 2025, and in
the region of 2026 with a day of 2026; a scan for 2025 that pruned that region would return the row of the base, which
was replaced.

Of a filter in SQL, only expressions with a certain meaning are used: comparisons of a column with literals, ``IN`` and
``BETWEEN``, joined by ``AND`` and ``OR``. All others restrict nothing. Each of these conditions is false or NULL for a
NULL, so that a row that meets it has a value in the column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from memwal_ops.errors import MemwalOpsError, import_extra
from memwal_ops.formats.lance.regions.specs import RegionField, RegionSpec, by_region, region_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.generations.region_identity import RegionValues
    from memwal_ops.formats.lance.table import Table

_MAX_COMBINED = 1000
_MONOTONE = frozenset({"identity", "truncate", "year"})
_MAX_VALUES = 1000
# Quotes, escapes and comments that SQL dialects read in different ways.
_AMBIGUOUS = ('"', "\\", "--", "/*", "#", "$", "{", ";")
_COMPARISONS = {"eq": "=", "gt": ">", "gte": ">", "lt": "<", "lte": "<"}
_SWAPPED = {"=": "=", ">": "<", "<": ">"}
_COARSE_UNITS = frozenset({"s", "ms", "us"})


class Wanted(Protocol):
    """The rows that a read needs."""

    def may_be_in(self, values: RegionValues) -> bool:
        """Whether a region of these values may have such rows."""


class WantedRows:
    """The rows that meet a filter."""

    def __init__(self, table: Table, condition: str) -> None:
        """Parse a filter in SQL over the columns of a version."""
        schema = table.schema
        self._key = {*table.primary_key}
        self._kinds = {name: schema.field(name).type for name in table.primary_key}
        by_column = domains(condition, schema)
        self._domains = {name: by_column[name] for name in self._key & by_column.keys()}
        self._possible: dict[tuple[int | None, str], frozenset[Any] | None] = {}

    def may_be_in(self, values: RegionValues) -> bool:
        """Whether a region of these values may have such rows."""
        return not any(
            self._excluded(values.spec, field, value)
            for field, value in zip(values.spec.fields, values.values, strict=True)
            if self._key.issuperset(field.sources)
        )

    def _excluded(self, spec: RegionSpec, one: RegionField, value: Any) -> bool:
        """Whether no row that meets the filter has this value of a field."""
        place = (spec.spec_id, one.field_id)
        if place not in self._possible:
            self._possible[place] = self._values(one)
        possible = self._possible[place]
        if possible is not None:
            return value not in possible
        if len(one.sources) != 1 or value is None:
            return False
        domain = self._domains.get(str(one.sources[0]), Domain())
        if not _is_monotone(one, domain):
            return False
        low, high = (None if end is None else self._of(one, [(end,)]) for end in (domain.low, domain.high))
        return any(value < least for least in low or ()) or any(value > most for most in high or ())

    def _values(self, one: RegionField) -> frozenset[Any] | None:
        """The field's values of all rows that meet the filter; None: not known, or too many."""
        known = [self._domains.get(str(name), Domain()).enumerated() for name in one.sources]
        sets = [values for values in known if values is not None]
        if len(sets) < len(known) or prod(map(len, sets)) > _MAX_COMBINED:
            return None
        return self._of(one, [*product(*sets)])

    def _of(self, one: RegionField, rows: list[tuple[Any, ...]]) -> frozenset[Any] | None:
        """The field's values of such rows; None if they cannot be computed."""
        try:
            columns = {
                str(name): pa.array([row[at] for row in rows], self._kinds[str(name)])
                for at, name in enumerate(one.sources)
            }
            return frozenset(value for (value,), _ in by_region(region_values(RegionSpec((one,)), pa.table(columns))))
        except (MemwalOpsError, pa.ArrowException, OverflowError, TypeError, ValueError):
            return None


def _is_monotone(one: RegionField, domain: Domain) -> bool:
    """Whether the field's values rise with its source in the domain."""
    if one.transform in _MONOTONE:
        return True
    if domain.low is None or domain.high is None:
        return False
    low, high = domain.low, domain.high
    if one.transform == "month":
        return bool(low.year == high.year)
    if one.transform == "day":
        return (low.year, low.month) == (high.year, high.month)
    return one.transform == "hour" and _day(low) == _day(high)


def _day(moment: date) -> tuple[int, int, int]:
    return moment.year, moment.month, moment.day


class WantedKeys:
    """The rows with given keys."""

    def __init__(self, table: Table, keys: pa.Table) -> None:
        self._table, self._keys = table, keys
        self._rows: dict[int | None, Mapping[tuple[Any, ...], pa.Array] | None] = {}

    def may_be_in(self, values: RegionValues) -> bool:
        """Whether a region of these values may have one of the keys."""
        rows = self._rows_of(values)
        return rows is None or values.values in rows

    def among(self, values: RegionValues | None) -> NDArray[np.bool_]:
        """Per key whether a region of these values may have it; without values: all of them."""
        rows = None if values is None else self._rows_of(values)
        if rows is None or values is None:
            return np.ones(self._keys.num_rows, bool)
        mask = np.zeros(self._keys.num_rows, bool)
        if values.values in rows:
            mask[rows[values.values].to_numpy()] = True
        return mask

    def _rows_of(self, values: RegionValues) -> Mapping[tuple[Any, ...], pa.Array] | None:
        """Per region values of a spec the positions of the keys; None if they cannot be computed."""
        spec = values.spec
        if spec.spec_id not in self._rows:
            self._rows[spec.spec_id] = self._routed(spec)
        return self._rows[spec.spec_id]

    def _routed(self, spec: RegionSpec) -> Mapping[tuple[Any, ...], pa.Array] | None:
        if not {name for field in spec.fields for name in field.sources} <= {*self._table.primary_key}:
            return None
        try:
            return dict(by_region(region_values(spec, self._keys)))
        except MemwalOpsError:  # for example an expression, where DataFusion is not installed
            return None


@cache
def _lance() -> tuple[Any, Any]:
    """The package ``sqlglot``, and its dialect with the part of Lance's SQL that is parsed here.

    Raises ``ExtraMissingError``: it is not installed.
    """
    sqlglot = import_extra("sqlglot", "reader", "Reads with a filter")

    class Lance(sqlglot.Dialect):  # type: ignore[misc,name-defined]  # the package is an extra
        """Names are in backticks, strings in single quotes."""

        class Tokenizer(sqlglot.tokens.Tokenizer):  # type: ignore[misc,name-defined]  # the package is an extra
            IDENTIFIERS = ["`"]  # noqa: RUF012 - as sqlglot declares it
            QUOTES = ["'"]  # noqa: RUF012 - as sqlglot declares it

    return sqlglot, Lance


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
            lows = [side.low for side in (self, other) if side.low is not None]
            highs = [side.high for side in (self, other) if side.high is not None]
            return Domain(None, max(lows, default=None), min(highs, default=None))
        known, also = (self, other) if self.values is not None else (other, self)
        return Domain(frozenset(value for value in known.values or () if also.has(value)))

    def __or__(self, other: Domain) -> Domain:
        """A domain with all values of either; it may have more."""
        if self.values is not None and other.values is not None:
            return Domain(self.values | other.values)
        pairs = [(side.low, side.high) if side.values is None else _ends(side.values) for side in (self, other)]
        empty = [side.values is not None and not side.values for side in (self, other)]
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
        if isinstance(value, np.datetime64):
            return True  # a time that Python does not have: NumPy's units overflow where they are compared
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

    ``condition``: SQL, as for Lance. ``schema``: of the table; only columns of integers, strings, dates and timestamps
    without a time zone are used.
    Raises ``ExtraMissingError``: the parser is not installed.
    """
    sqlglot, dialect = _lance()
    if any(mark in condition for mark in _AMBIGUOUS):
        return {}
    # Names that differ only in their case are ignored: which one is meant depends on Lance.
    folded = [name.casefold() for name in schema.names]
    kinds = {name: schema.field(name).type for name in schema.names if folded.count(name.casefold()) == 1}
    try:
        return _domains(sqlglot.parse_one(condition, dialect=dialect), kinds)
    except (sqlglot.errors.SqlglotError, RecursionError):
        return {}


def _domains(node: Any, kinds: Mapping[str, pa.DataType]) -> dict[str, Domain]:
    if node.key == "paren":
        return _domains(node.this, kinds)
    if node.key in {"and", "or"}:
        left, right = _domains(node.left, kinds), _domains(node.right, kinds)
        both = left.keys() & right.keys()
        if node.key == "or":
            return {name: left[name] | right[name] for name in both}
        return {**left, **right, **{name: left[name] & right[name] for name in both}}
    if node.key in {"between", "in"}:
        return _listed(node, kinds)
    if node.key not in _COMPARISONS:
        return {}
    sign = _COMPARISONS[node.key]
    return _compared(node.left, sign, node.right, kinds) or _compared(node.right, _SWAPPED[sign], node.left, kinds)


def _listed(node: Any, kinds: Mapping[str, pa.DataType]) -> dict[str, Domain]:
    if node.key == "between":
        ends = [_compared(node.this, sign, node.args[end], kinds) for sign, end in ((">", "low"), ("<", "high"))]
        if node.args.get("symmetric") or not all(ends):
            return {}
        (name,) = ends[0]
        return {name: ends[0][name] & ends[1][name]}
    plain = {name for name, value in node.args.items() if value} == {"this", "expressions"}
    listed = [_compared(node.this, "=", value, kinds) for value in node.expressions] if plain else []
    if not listed or not all(listed) or len(listed) > _MAX_VALUES:
        return {}
    (name,) = listed[0]
    return {name: Domain(frozenset[Any]().union(*(domain[name].values or () for domain in listed)))}


def _compared(column: Any, sign: str, value: Any, kinds: Mapping[str, pa.DataType]) -> dict[str, Domain]:
    """The domain from a comparison; bounds are inclusive, so a strict comparison includes one value too many."""
    if column.key != "column" or column.table or column.name not in kinds:
        return {}
    literal = _literal(value, kinds[column.name])
    if literal is None:
        return {}
    domain = {"=": Domain(frozenset({literal})), ">": Domain(low=literal), "<": Domain(high=literal)}[sign]
    return {column.name: domain}


def _literal(node: Any, kind: pa.DataType) -> Any:
    """The value of a literal in the column's type; None if that is not certain."""
    if pa.types.is_integer(kind):
        return _number(node)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return node.this if node.key == "literal" and node.is_string else None
    named = {"DATE"}
    if pa.types.is_timestamp(kind) and kind.tz is None and kind.unit in _COARSE_UNITS:
        named, kind = {*named, "TIMESTAMP"}, pa.timestamp("us")
    elif not pa.types.is_date(kind):
        return None
    if not (node.key in {"cast", "trycast"} and node.this.key == "literal" and node.this.is_string):
        return None
    try:
        return pa.scalar(node.this.this).cast(kind).as_py() if node.args["to"].this.value in named else None
    except (pa.ArrowException, ValueError, OverflowError):
        return None


def _number(node: Any) -> int | None:
    if node.key == "neg":
        number = _number(node.this)
        return None if number is None else -number
    if node.key != "literal" or node.is_string:
        return None
    # int() also accepts 1_000, and digits of other scripts.
    return int(node.this) if node.this.isascii() and node.this.isdecimal() else None
