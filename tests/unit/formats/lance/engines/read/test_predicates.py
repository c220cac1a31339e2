"""What a filter demands of a column; what is not understood demands nothing."""

from __future__ import annotations

import sys
from datetime import date, datetime
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from memwal_ops.errors import ExtraMissingError
from memwal_ops.formats.lance.engines.read import pruning
from memwal_ops.formats.lance.engines.read.pruning import Domain, domains

SCHEMA = pa.schema([
    ("id", pa.int64()), ("other", pa.int32()), ("name", pa.string()), ("day", pa.date32()), ("at", pa.timestamp("us")),
    ("utc", pa.timestamp("us", "UTC")), ("twice", pa.int64()), ("Twice", pa.int64()),
])  # fmt: skip
JUST = {5: Domain(frozenset({5})), 4: Domain(frozenset({4}))}


@pytest.mark.req("S0-200")
@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("id = 5", JUST[5]),
        ("5 = id", JUST[5]),
        ("(`id` = 5)", JUST[5]),
        ("id = -3", Domain(frozenset({-3}))),
        ("id IN (4, 5, -1)", Domain(frozenset({4, 5, -1}))),
        ("id > 2 AND id <= 9", Domain(low=2, high=9)),
        ("2 < id AND 9 >= id", Domain(low=2, high=9)),
        ("id BETWEEN 2 AND 9 AND name LIKE 'a%'", Domain(low=2, high=9)),
        ("id = 5 OR id = 4", Domain(frozenset({4, 5}))),
        ("id = 5 OR id > 9", Domain(low=5)),
        ("id = 5 AND id > 9 OR id = 4", JUST[4]),
        ("id = 5 AND id = 4", Domain(frozenset())),
        ("id = 4 AND random() < 0.5", JUST[4]),
        ("NOT (id = 5) AND id = 4", JUST[4]),
    ],
)
def test_what_is_understood(condition: str, expected: Domain) -> None:
    assert domains(condition, SCHEMA) == {"id": expected}


@pytest.mark.parametrize(
    ("condition", "name", "expected"),
    [
        ("name = 'it''s'", "name", Domain(frozenset({"it's"}))),
        ("name >= 'b'", "name", Domain(low="b")),
        ("day = date '2026-01-31'", "day", Domain(frozenset({date(2026, 1, 31)}))),
        ("day < date '2026-01-31'", "day", Domain(high=date(2026, 1, 31))),
        ("at > timestamp '2026-01-31 12:00:00'", "at", Domain(low=datetime(2026, 1, 31, 12))),
        ("at = date '2026-01-31'", "at", Domain(frozenset({datetime(2026, 1, 31)}))),
    ],
)
def test_other_types(condition: str, name: str, expected: Domain) -> None:
    assert domains(condition, SCHEMA) == {name: expected}


@pytest.mark.parametrize(
    "condition",
    [
        "id != 5",
        "NOT id = 5",
        "id NOT IN (5)",
        "id IN (5, NULL)",
        "id IN (5, other)",
        "id IN ()",
        "id = NULL",
        "id IS NULL",
        "id = 5 OR true",
        "id = 5 OR other = 4",
        "id = 5 IS TRUE",
        "id = 5 = true",
        "id NOT BETWEEN 1 AND 2",
        "id = 5 % 3",
        "id & 5 = 5",
        "id = 1e3",
        "id = 0x10",
        "id = 1_0",
        "id = '5'",
        "id = CAST('5' AS INT)",
        "abs(id) = 5",
        "t.id = 5",
        "id = 5.0",
        "CASE WHEN id = 5 THEN true END",
        'name = "it"',
        "name = 'a\\' OR id = 5 --'",
        "id = 5 AND (",
        "id = 5; DROP",
        "id = 5 -- x",
        "id = 5 /* x */",
        "day = '2026-02-03'",
        "day = date '2026-02-30'",
        "day = timestamp '2026-01-01'",
        "utc = timestamp '2026-01-01'",
        "twice = 5",
        "Twice = 5",
        "gone = 5",
        "name > 5",
        "id = name",
        "name = 'a' || 'b'",
        "",
    ],
)
def test_what_is_not_understood_demands_nothing(condition: str) -> None:
    assert domains(condition, SCHEMA) == {}


def _conditions() -> st.SearchStrategy[str]:
    number = st.integers(-3, 6)
    simple = st.one_of(
        st.builds(
            "{} {} {}".format, st.sampled_from(["a", "b"]), st.sampled_from(["=", "<", "<=", ">", ">=", "!="]), number
        ),
        st.builds("{1} {2} {0}".format, st.sampled_from(["a", "b"]), number, st.sampled_from(["=", "<", ">="])),
        st.builds(
            "{} IN ({})".format,
            st.sampled_from(["a", "b"]),
            st.lists(number, min_size=1, max_size=3).map(lambda x: ", ".join(map(str, x))),
        ),
        st.builds(
            "{} {}BETWEEN {} AND {}".format, st.sampled_from(["a", "b"]), st.sampled_from(["", "NOT "]), number, number
        ),
        st.sampled_from(["a IS NULL", "b IS NOT NULL", "a + b = 3", "true"]),
    )
    return st.recursive(
        simple,
        lambda inner: st.one_of(
            st.builds("{} AND {}".format, inner, inner),
            st.builds("{} OR {}".format, inner, inner),
            st.builds("({})".format, inner),
            st.builds("NOT ({})".format, inner),
        ),
        max_leaves=6,
    )


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    values = [None, *range(-4, 8)]
    rows = [{"a": a, "b": b} for a in values for b in values]
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    return lance.write_dataset(pa.Table.from_pylist(rows, schema), str(tmp_path_factory.mktemp("grid") / "t"))


@pytest.mark.req("S0-200")
@settings(max_examples=150, deadline=None)
@given(condition=_conditions())
def test_no_row_that_lance_lets_through_is_outside(grid: lance.LanceDataset, condition: str) -> None:
    found = domains(condition, grid.schema)
    rows: list[dict[str, Any]] = grid.to_table(filter=condition).to_pylist()
    for row in rows:
        for name, domain in found.items():
            assert row[name] is not None and domain.has(row[name])


def test_without_the_parser_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    pruning._lance.cache_clear()
    with pytest.raises(ExtraMissingError) as refused:
        domains("id = 1", SCHEMA)
    assert "memwal-ops[reader]" in refused.value.remedy
