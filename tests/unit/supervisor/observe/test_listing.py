"""Search, filter, sort, group and page tables, by query strings that anybody may write."""

from __future__ import annotations

import random
import re
import threading

import pytest

from memwal_ops.supervisor.observe.overview import (
    GROUPS,
    PAGE_ROWS,
    SORTS,
    FleetQuery,
    Overview,
    group_names,
    groups_of,
    page_of,
    totals,
)
from tests.support.fleet import FakeTables, fleet, pages_of, status, table
from tests.support.waiting import PATIENCE


def overview(count: int = 250) -> Overview:
    tables = fleet(count)
    for at, one in enumerate(tables):
        one["labels"] = [{"team": "search"}, {"team": "search2", "tier": "<gold>"}, {}][at % 3]
        one["uri"] = f"s3://lake/db{at % 3}/{one['name']}.lance"
        one["backlog"] |= {"table_rows": float(at * 7919 % 1000), "table_bytes": float(at)}
    later = {"payments": {"bytes": 7, "by": "2126-01-02T00:00:00+00:00"}}
    document = status([*tables, table("idx", format="lm_diskann", uri="/data/idx", backlog={"delta_blocks": 2.0})])
    return pages_of(document, tables=FakeTables(document, later)).overview


@pytest.mark.parametrize("sort", [*SORTS])
@pytest.mark.parametrize("order", ["up", "down"])
def test_every_column_sorts_with_the_unknown_last(sort: str, order: str) -> None:
    query, rows = FleetQuery.read(f"sort={sort}&order={order}"), overview().rows()
    pages = [page_of(rows, FleetQuery.read(f"sort={sort}&order={order}&page={page}"))[0] for page in (1, 2, 3)]
    assert [len(page) for page in pages] == [PAGE_ROWS, PAGE_ROWS, 51]
    shown = [row for page in pages for row in page]
    assert {row.name for row in shown} == {row.name for row in rows}
    values = [SORTS[sort](row) for row in shown]
    known = [value for value in values if value is not None]
    assert values[: len(known)] == sorted(known, reverse=order == "down")
    assert FleetQuery.read(query.link(page=3).partition("?")[2]) == FleetQuery.read(f"sort={sort}&order={order}&page=3")


def test_filters_and_totals() -> None:
    rows = overview().rows()
    assert [row.name for row in rows if FleetQuery.read("state=critical").matches(row)] == [
        "payments",
        "clicks",
        "sessions",
    ]
    assert [row.name for row in rows if FleetQuery.read("q=BLOCKED+generation_missing").matches(row)] == ["payments"]
    assert [row.name for row in rows if FleetQuery.read("format=lm_diskann").matches(row)] == ["idx"]
    assert sum(FleetQuery.read("q=team%3Dsearch2").matches(row) for row in rows) == 83
    assert sum(FleetQuery.read("in=s3%3A%2F%2Flake%2Fdb1").matches(row) for row in rows) == 83
    sums = totals(rows)
    assert (sums.tables, sums.critical, sums.warning, sums.ok) == (251, 3, 0, 248)
    assert (sums.held, sums.free, sums.free_table) == (7, "2126-01-02T00:00:00+00:00", "payments")
    assert sums.bytes == sum(range(250)) - 3 - 5 - 7 + 3 + 5 + 7


@pytest.mark.parametrize("group", [*GROUPS, "label:team", "label:tier"])
def test_groups_lead_to_their_tables(group: str) -> None:
    rows, query = overview().rows(), FleetQuery.read(f"group={group}")
    groups = groups_of(rows, query)
    assert len(groups) > 1
    assert sum(sums.tables for _, _, sums in groups) == len(rows)
    assert group in group_names(rows)
    for _, link, sums in groups:
        inner = FleetQuery.read(link.partition("?")[2])
        assert not inner.group
        assert sum(inner.matches(row) for row in rows) == sums.tables


@pytest.mark.parametrize("seed", range(3))
def test_any_query_string_shows_tables(seed: int) -> None:
    rows = overview(20).rows()
    rng = random.Random(seed)
    keys = ["q", "state", "format", "group", "in", "sort", "order", "page", "x", "%00", ""]
    values = ["", "name", "critical", "-1", "0", "99999999999999999999", "²", "%ff", "a%20b", "[", "down", "database"]
    for _ in range(300):
        text = "&".join(f"{rng.choice(keys)}={rng.choice(values)}" for _ in range(rng.randrange(6)))
        query = FleetQuery.read(text)
        shown, pages = page_of([row for row in rows if query.matches(row)], query)
        assert len(shown) <= PAGE_ROWS
        assert pages >= 1
        assert re.fullmatch(r"/(\?[!-~]*)?", query.link())
    assert FleetQuery.read("&".join(f"a{at}=1" for at in range(40))).page == 1
    assert FleetQuery.read("q=" + "a" * 100_000).q == ""


def test_nothing_is_read_once_it_is_closed() -> None:
    """Its thread read the history when that was closed, and reported it as a fault."""
    shown = overview(20)
    shown.start()
    shown.close(PATIENCE)
    assert not any(thread.name == "overview" for thread in threading.enumerate())
