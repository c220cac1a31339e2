"""Determine which regions may have rows that meet a filter, or have looked-up keys (S0-200, S0-204).

A region is pruned only if it is certain to have none. Its rows have the values of its spec's fields, which are computed
from key columns. So if no key with these values can meet the filter, the region has no such row, and no newer version
of a base row that meets it.
Timeline with a field of another column: key 7 is in the base with a day of 2025, and in the region of 2026 with a day
of 2026; a scan for 2025 that pruned that region would return the row of the base, which was replaced.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.engines.read.predicates import Domain, domains
from memwal_ops.formats.lance.regions.specs import RegionSpec, by_region, region_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import date

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.generations.region_values import RegionValues
    from memwal_ops.formats.lance.regions.specs import RegionField
    from memwal_ops.formats.lance.table import Table

_MAX_COMBINED = 1000
_MONOTONE = frozenset({"identity", "truncate", "year"})


class Wanted(Protocol):
    """The rows that a read needs."""

    def may_be_in(self, values: RegionValues) -> bool:
        """Whether a region of these values may have such rows."""


class WantedRows:
    """The rows that meet a filter."""

    def __init__(self, table: Table, condition: str) -> None:
        """Parse a filter in SQL over the columns of a version."""
        schema = table.dataset.schema
        self._key = {*table.primary_key}
        self._kinds = {name: schema.field(name).type for name in table.primary_key}
        found = domains(condition, schema)
        self._domains = {name: found[name] for name in self._key & found.keys()}
        self._possible: dict[tuple[int | None, str], frozenset[Any] | None] = {}

    def may_be_in(self, values: RegionValues) -> bool:
        """Whether a region of these values may have such rows."""
        return not any(
            self._excluded(values.spec, one, value)
            for one, value in zip(values.spec.fields, values.values, strict=True)
            if self._key.issuperset(one.sources)
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
        """Keep the keys, in the columns and types of the table's key."""
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
        found = np.zeros(self._keys.num_rows, bool)
        if values.values in rows:
            found[rows[values.values].to_numpy()] = True
        return found

    def _rows_of(self, values: RegionValues) -> Mapping[tuple[Any, ...], pa.Array] | None:
        """Per region values of a spec the positions of the keys; None if they cannot be computed."""
        spec = values.spec
        if spec.spec_id not in self._rows:
            self._rows[spec.spec_id] = self._routed(spec)
        return self._rows[spec.spec_id]

    def _routed(self, spec: RegionSpec) -> Mapping[tuple[Any, ...], pa.Array] | None:
        if not {name for one in spec.fields for name in one.sources} <= {*self._table.primary_key}:
            return None
        try:
            return dict(by_region(region_values(spec, self._keys)))
        except MemwalOpsError:  # for example an expression, where DataFusion is not installed
            return None
