"""Evaluate filters over attributes: attribute equality, or the operations of Zeppelin's queries."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.zeppelin.wire.fragment import Attributes

_BOUNDS = {"gte": operator.ge, "lte": operator.le, "gt": operator.gt, "lt": operator.lt}
_MEMBERS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("eq", "not_eq", "contains"), frozenset({"op", "field", "value"})),
    **dict.fromkeys(("in", "not_in"), frozenset({"op", "field", "values"})),
    **dict.fromkeys(("and", "or"), frozenset({"op", "filters"})),
    "not": frozenset({"op", "filter"}),
    "range": frozenset({"op", "field", *_BOUNDS}),
}


def compile_filter(wanted: Mapping[str, Any] | None) -> Callable[[Attributes | None], bool]:
    """Compile a filter to a predicate on a row's attributes, which raises nothing; without members, every row passes.

    Raises:
        InvalidUsageError: an invalid filter.
    """
    if wanted is None or wanted == {}:
        return lambda _: True
    try:
        test = _compile(wanted)
    except RecursionError:
        raise _invalid("it", "is nested too deeply") from None
    return lambda row: test(row or {})


def _compile(wanted: Any) -> Callable[[Attributes], bool]:
    if not isinstance(wanted, Mapping) or not wanted:
        raise _invalid(wanted, "is not an object with members")
    if "op" not in wanted:
        tests = [_of(name, _equals(value)) for name, value in wanted.items()]
        return lambda row: all(test(row) for test in tests)
    kind = wanted["op"]
    members = _MEMBERS.get(kind) if isinstance(kind, str) else None
    if members is None:
        raise _invalid(kind, f"is no operation; these are: {', '.join(_MEMBERS)}")
    if kind != "range" and (missing := members - wanted.keys()):
        raise _invalid(wanted, f"lacks {min(missing)!r}")
    if unknown := wanted.keys() - members:
        raise _invalid(wanted, f"has the member {min(unknown, key=str)!r}, which {kind} does not know")
    if kind in {"and", "or"}:
        parts = [_compile(part) for part in _list_of(wanted["filters"], kind)]
        joined = all if kind == "and" else any
        return lambda row: joined(part(row) for part in parts)
    if kind == "not":
        inner = _compile(wanted["filter"])
        return lambda row: not inner(row)
    field, test = wanted.get("field"), _test(kind, wanted)
    if not isinstance(field, str):
        raise _invalid(field, "is not the name of an attribute")
    if kind in {"not_eq", "not_in"}:
        return lambda row: not _of(field, test)(row)
    return _of(field, test)


def _test(kind: str, wanted: Mapping[str, Any]) -> Callable[[Any], bool]:
    if kind in {"in", "not_in"}:
        tests = [_equals(value) for value in _list_of(wanted["values"], kind)]
        return lambda value: any(test(value) for test in tests)
    if kind == "range":
        bounds = [(compare, wanted[name]) for name, compare in _BOUNDS.items() if wanted.get(name) is not None]
        if not bounds or not all(_is_number(bound) and abs(bound) < math.inf for _, bound in bounds):
            raise _invalid(wanted, f"needs numbers as bounds: {', '.join(_BOUNDS)}")
        return lambda value: _is_number(value) and all(compare(value, bound) for compare, bound in bounds)
    return _equals(wanted["value"])


def _list_of(values: Any, kind: str) -> list[Any]:
    # Of no members, "and" and "not_in" would match every row: erase would delete all of them.
    if not isinstance(values, list | tuple) or not (values or kind in {"in", "or"}):
        raise _invalid(values, "is not a list with members")
    return [*values]


def _of(name: str, test: Callable[[Any], bool]) -> Callable[[Attributes], bool]:
    def passes(row: Attributes) -> bool:
        value = row.get(name)
        return name in row and any(map(test, value if isinstance(value, list) else [value]))

    return passes


def _equals(wanted: Any) -> Callable[[Any], bool]:
    """Equality of values of one type; a boolean is not a number."""
    if wanted is not None and not isinstance(wanted, str | int | float):
        raise _invalid(wanted, "is not a string, a number, a boolean or null, as a value must be")
    return lambda value: isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _invalid(part: Any, why: str) -> InvalidUsageError:
    return InvalidUsageError(
        f"The filter is invalid: {part!r:.200} {why}.",
        remedy='Give for example {"color": "red"} or {"op": "range", "field": "price", "gte": 3}.',
    )
