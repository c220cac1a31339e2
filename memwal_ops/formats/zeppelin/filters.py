"""Evaluate filters over attributes: attribute equality, or the operations of Zeppelin's queries."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.formats.zeppelin.wire.fragment import Attributes

_BOUNDS = {"gte": operator.ge, "lte": operator.le, "gt": operator.gt, "lt": operator.lt}


def compile_filter(found: Mapping[str, Any] | None) -> Callable[[Attributes | None], bool]:
    """Compile a filter to a predicate on a row's attributes.

    Raises:
        InvalidUsageError: an invalid filter.
    """
    if not found:
        return lambda _: True
    try:
        test = _compile(found)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidUsageError(
            f"The filter {found!r:.200} is invalid: {error!r}.",
            remedy='Give for example {"color": "red"} or {"op": "range", "field": "price", "gte": 3}.',
        ) from error
    return lambda row: test(row or {})


def _compile(found: Mapping[str, Any]) -> Callable[[Attributes], bool]:
    if "op" not in found:
        tests = [_one(name, _equals(wanted)) for name, wanted in found.items()]
        return lambda row: all(test(row) for test in tests)
    kind = found["op"]
    if kind in {"and", "or"}:
        parts = [_compile(one) for one in found["filters"]]
        joined = all if kind == "and" else any
        return lambda row: joined(part(row) for part in parts)
    if kind == "not":
        inner = _compile(found["filter"])
        return lambda row: not inner(row)
    test = _test(kind, found)
    if kind in {"not_eq", "not_in"}:
        return lambda row: not _one(found["field"], test)(row)
    return _one(found["field"], test)


def _test(kind: str, found: Mapping[str, Any]) -> Callable[[Any], bool]:
    if kind in {"eq", "not_eq", "contains"}:
        return _equals(found["value"])
    if kind in {"in", "not_in"}:
        several = [*found["values"]]
        return lambda value: any(_equal(value, one) for one in several)
    if kind == "range":
        bounds = [(compare, found[name]) for name, compare in _BOUNDS.items() if found.get(name) is not None]
        return lambda value: _is_number(value) and all(compare(value, bound) for compare, bound in bounds)
    raise KeyError(kind)


def _one(name: str, test: Callable[[Any], bool]) -> Callable[[Attributes], bool]:
    def of(row: Attributes) -> bool:
        value = row.get(name)
        values = value if isinstance(value, list) else [value]
        return name in row and any(test(one) for one in values)

    return of


def _equals(wanted: Any) -> Callable[[Any], bool]:
    return lambda value: _equal(value, wanted)


def _equal(value: Any, wanted: Any) -> bool:
    """Equality of values of one type; a boolean is not a number."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
