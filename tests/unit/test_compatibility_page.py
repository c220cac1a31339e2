"""The tables of docs/compatibility.md are those that ``make client-matrix`` writes."""

from __future__ import annotations

import re

import pytest

from tests.campaigns.clients.environments import RELEASES
from tests.campaigns.clients.page import END, GROUPS, PAGE, START, columns_of, group_of, replaced, tables

RESULTS = {
    "pylance 7.0.0": {
        "kinds": ["plain", "btree", "stable-zonemap", "mem-wal-stable"],
        "refused": [],
        "own": {"stable-zonemap": ["find", "optimize"]},
    },
    "lancedb 0.40.0": {"kinds": ["plain"], "refused": ["plain"], "own": {}},
}


def test_tables_of_a_run() -> None:
    lines = replaced(f"{START}{END}", RESULTS).removesuffix(f"\n{END}").splitlines()[1:]
    assert lines[0] == "| kinds of tables | pylance 7.0.0 | lancedb 0.40.0 |"
    assert "| scalar and text indexes, stable row ids | 0, own 1 | - |" in lines
    assert "| MemWAL, stable row ids | 1 | - |" in lines
    assert "| plain, other options | 1 | 0, refused 1 |" in lines
    assert lines[-2:] == ["| plain |  | lancedb 0.40.0 |", "| stable-zonemap | pylance 7.0.0 (find, optimize) |  |"]


def test_kinds_with_the_same_row_share_it() -> None:
    results = {"pylance 7.0.0": {"kinds": ["a", "b"], "refused": ["b", "a"], "own": {"b": ["find"], "a": ["find"]}}}
    page = replaced(f"{START}{END}", results)
    assert "| a, b | pylance 7.0.0 (find) | pylance 7.0.0 |" in page
    (column,) = columns_of(page.partition(START)[2].partition(END)[0]).values()
    assert (column.own, column.refused) == ({"a": "find", "b": "find"}, ["a", "b"])


def test_the_rest_of_the_page_stays() -> None:
    page = replaced(f"before\n{START}\nold\n{END}\nafter\n", RESULTS)
    assert page.startswith(f"before\n{START}\n| kinds of tables |")
    assert page.endswith(f"\n{END}\nafter\n")
    assert replaced(page, {}) == page


def test_a_run_of_one_release_keeps_the_columns_of_others() -> None:
    page = replaced(f"{START}{END}", RESULTS)
    again = replaced(page, {"lancedb 0.40.0": {"kinds": ["plain"], "refused": [], "own": {"plain": ["find"]}}})
    old, new = (columns_of(one.partition(START)[2].partition(END)[0]) for one in (page, again))
    assert new["pylance 7.0.0"] == old["pylance 7.0.0"]
    assert new["lancedb 0.40.0"].own == {"plain": "find"}
    assert "| plain | lancedb 0.40.0 (find) |  |" in again


def test_each_release_has_a_column() -> None:
    old = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert [*columns_of(old)] == [*RELEASES]
    assert tables(columns_of(old)) == old.strip()


def test_the_page_has_the_tables_of_a_run() -> None:
    text = PAGE.read_text()
    assert (text.count(START), text.count(END)) == (1, 1)
    shown = text.partition(START)[2].partition(END)[0].strip().splitlines()
    header, *rows = shown[: shown.index("")]
    names = [cell.strip() for cell in header.strip("|").split("|")][1:]
    assert names == [one for one in RELEASES if one in names]
    assert len(names) > 1
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]] == [name for name, _ in GROUPS]
    cells = [cell.strip() for row in rows[1:] for cell in row.strip("|").split("|")[1:]]
    assert [cell for cell in cells if not re.fullmatch(r"-|\d+(, own \d+)?(, refused \d+)?", cell)] == []


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("stable-ivf_rq", "vector indexes, stable row ids"),
        ("mem-wal-stable-buckets", "MemWAL, stable row ids"),
        ("compact-to-2.2", "storage versions"),
        ("tags", "plain, other options"),
    ],
)
def test_each_kind_is_in_one_row(kind: str, group: str) -> None:
    assert group_of(kind) == group
