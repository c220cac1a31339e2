"""Filters: what they match, and that an invalid one is refused before any row is read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.zeppelin.reader import compile_filter

ROWS: dict[str, dict[str, Any] | None] = {
    "a": {"price": 3, "op": "x", "tags": ["p", "q"]},
    "b": {"price": "3", "name": "O'Neil"},
    "c": {"price": None},
    "d": None,
    "e": {"price": True, "tags": []},
}
MATCHES: list[tuple[dict[str, Any] | None, str]] = [
    (None, "abcde"),
    ({}, "abcde"),
    ({"price": 3}, "a"),
    ({"price": None}, "c"),
    ({"op": "eq", "field": "op", "value": "x"}, "a"),
    ({"op": "eq", "field": "price", "value": True}, "e"),
    ({"op": "not_eq", "field": "price", "value": 3}, "bcde"),
    ({"op": "in", "field": "price", "values": [3, "3"]}, "ab"),
    ({"op": "in", "field": "price", "values": []}, ""),
    ({"op": "not_in", "field": "price", "values": [3, "3"]}, "cde"),
    ({"op": "contains", "field": "tags", "value": "p"}, "a"),
    ({"op": "range", "field": "price", "gt": 2, "lte": 3.0}, "a"),
    ({"op": "range", "field": "price", "lt": 10**400}, "a"),
    ({"op": "and", "filters": [{"price": 3}, {"tags": "q"}]}, "a"),
    ({"op": "or", "filters": [{"price": 3}, {"name": "O'Neil"}]}, "ab"),
    ({"op": "not", "filter": {"price": 3}}, "bcde"),
]
REFUSED: list[Any] = [
    [], "price", 3, {"op": "nope"}, {"op": ["eq"]}, {"op": "eq", "field": "price"}, {"op": "eq", "value": 3},
    {"op": "eq", "field": ["price"], "value": 3}, {"op": "eq", "field": "price", "value": [3]}, {"tags": ["p", "q"]},
    {"op": "eq", "field": "price", "value": 3, "more": 1}, {"op": "in", "field": "price", "values": "abc"},
    {"op": "in", "field": "price", "values": [[3]]}, {"op": "not_in", "field": "price", "values": []},
    {"op": "range", "field": "price"}, {"op": "range", "field": "price", "gte": "3"},
    {"op": "range", "field": "price", "gte": [1]}, {"op": "range", "field": "price", "gte": True},
    {"op": "range", "field": "price", "gte": float("nan")}, {"op": "range", "field": "price", "gt": 2, "foo": 1},
    {"op": "range", "gt": 2}, {"op": "and", "filters": []}, {"op": "and", "filters": {"price": 3}},
    {"op": "or", "filters": [3]}, {"op": "not", "filter": {}}, {"op": "not"},
    json.loads('{"op":"not","filter":' * 900 + "3" + "}" * 900),
]  # fmt: skip


@pytest.mark.parametrize(("wanted", "names"), MATCHES)
def test_matches(wanted: dict[str, Any] | None, names: str) -> None:
    passes = compile_filter(wanted)
    assert "".join(name for name, row in ROWS.items() if passes(row)) == names


@pytest.mark.parametrize("wanted", REFUSED, ids=lambda wanted: str(wanted)[:60])
def test_refused(wanted: Any) -> None:
    with pytest.raises(InvalidUsageError, match="filter is invalid"):
        compile_filter(wanted)
