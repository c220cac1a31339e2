"""Compactions with a budget, and repeated ones: what they rewrite, what they say, and that they come to an end."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.figures import poll_table
from tests.support.counting_store import CountingStore

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1 << 10


def append(uri: str, kib: int, first: int = 0) -> None:
    """A fragment of about that size, of rows of 1 KiB that no encoding makes smaller."""
    made = random.Random(kib + first)
    rows = [made.randbytes(KIB) for _ in range(kib)]
    lance.write_dataset(pa.table({"id": range(first, first + kib), "data": rows}), uri, mode="append")


def compacted(uri: str, **options: Any) -> dict[str, Any]:
    return run_job(uri, "compact", options).to_json()


def figures(uri: str, **options: Any) -> dict[str, float]:
    table = open_table(uri)
    found, faults = poll_table(table, [table.jobs["compact"]], {"compact": options})
    assert faults == []
    return dict(found)


def test_a_run_rewrites_no_more_than_its_budget(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    for _ in range(16):
        append(uri, 100)
    budget, debts = 500 * KIB, [figures(uri)["debt"]]
    dry = run_job(uri, "compact", {"max_bytes": budget}, apply=False).to_json()
    assert 0 < dry["bytes_written"] <= budget < dry["debt"] == debts[0]
    assert dry["why"] == "The run would use its --max-bytes; the next run would continue."
    assert run_job(uri, "compact", {"max_bytes": 1 << 30}, apply=False).why is None
    whys = set()
    while (report := compacted(uri, max_bytes=budget))["decision"] == "compacted":
        assert report["debt"] == figures(uri)["debt"]
        whys.add(why := report["why"] or "")
        if report["bytes_read"] > budget:
            assert "Nothing that is due fits --max-bytes (500.0 KiB): the smallest group of fragments" in why
            assert (report["fragments_added"], report["bytes_read"] < 4 * budget) == (1, True)
        assert ("The run has used its --max-bytes; the next run continues." in why) == (report["debt"] > 0)
        debts.append(report["debt"])
        assert len(debts) < 16
    assert len(debts) > 2
    assert debts[-1] == report["debt"] == 0
    assert len(whys) > 1


def test_a_fragment_that_is_larger_than_the_budget_is_rewritten_alone_and_last(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    append(uri, 900)
    for number in range(4):
        append(uri, 100, 1000 + number)
    lance.dataset(uri).delete("id < 450")
    budget = 600 * KIB
    first = compacted(uri, max_bytes=budget)
    assert (first["fragments_removed"], first["fragments_added"]) == (3, 1), (
        "of the group, as many as half of the budget holds"
    )
    assert first["bytes_read"] <= budget
    assert first["debt"] > 0
    dry = run_job(uri, "compact", {"max_bytes": budget}, apply=False)
    assert "is rewritten alone" in " ".join(dry.describe().split())
    second = compacted(uri, max_bytes=budget)
    assert (second["fragments_removed"], second["debt"]) == (1, 0)
    assert second["bytes_read"] > budget
    assert "is rewritten alone" in second["why"]
    assert compacted(uri, max_bytes=budget)["decision"] == "unchanged"


def test_a_fragment_with_few_deleted_rows_is_joined_with_a_much_smaller_one(tmp_path: Path) -> None:
    """pylance takes a fragment for small by all of its rows, and the policy by those that are left."""
    uri = str(tmp_path / "t.lance")
    append(uri, 40)
    lance.dataset(uri).delete("id < 2")
    append(uri, 1, 40)
    ran = compacted(uri)
    assert (ran["decision"], ran["fragments_after"], ran["rows_rewritten"], ran["debt"]) == ("compacted", 1, 39, 0)


@pytest.mark.parametrize("seed", range(4))
def test_a_second_run_directly_after_one_finds_nothing(tmp_path: Path, seed: int) -> None:
    """Though pylance puts what the first one wrote behind all others, where it has other neighbors."""
    uri, made, first = str(tmp_path / "t.lance"), random.Random(seed), 0
    for _ in range(14):
        append(uri, kib := made.choice([1, 40, 70, 70, 150, 600]), first)
        first += kib
    nth = [7, 19][seed % 2]  # more and less than what is rewritten for that
    lance.dataset(uri).delete(f"id % {nth} = 0 and id < {first // 2}")
    dry = run_job(uri, "compact", apply=False).to_json()
    ran = compacted(uri)
    assert (ran["decision"], ran["debt"]) == ("compacted", 0)
    assert (ran["fragments_removed"], ran["fragments_after"]) == (dry["fragments_removed"], dry["fragments_after"])
    again = compacted(uri)
    assert (again["decision"], again["debt"], again["version"]) == ("unchanged", 0, ran["version"])
    assert lance.dataset(uri).count_rows() == first - len(range(0, first // 2, nth))


def test_the_polled_debt_follows_the_options_of_the_runs(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    for number in range(3):
        append(uri, 100, number)
    none = figures(uri)
    assert (none["due_fragments"], none["urgent_fragments"], none["debt"]) == (0, 0, 0)
    all_of_it = figures(uri, tier_factor=1)
    assert (all_of_it["due_fragments"], all_of_it["urgent_fragments"], all_of_it["debt_rows"]) == (3, 3, 300)
    assert all_of_it["debt"] == all_of_it["debt_read"] > 300 * KIB


def test_a_table_to_which_nothing_is_due_is_not_written_to(tmp_path: Path) -> None:
    uri = str(tmp_path / "t.lance")
    for number in range(2):
        append(uri, 100, number)
    table: Any = open_table(uri)
    store = CountingStore(table.store)
    report = run_job(replace(table, store=store), "compact")
    assert report.decision == "unchanged"
    assert not {"put", "put_if_absent", "compare_and_swap", "delete_many"} & store.calls.keys()
    append(uri, 400)
    table = open_table(uri)
    store = CountingStore(table.store)
    assert run_job(replace(table, store=store), "compact", tier_factor=1).decision == "compacted"
    assert store.calls["put_if_absent"], "it probes the store first"
