"""The pages of the service: what is on them, and where it comes from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from memwal_ops.supervisor.state.samples import Samples
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import Stage, vars_of
from tests.support.fleet import FakeHistory, fleet, pages_of, run, status, table


def names_in_order(page: str) -> list[str]:
    return re.findall(r'<h2><a href="/tables/[^"]*">([^<]*)</a>', page)


def test_the_worst_tables_come_first_with_what_to_type() -> None:
    page = pages_of(status(fleet(20))).fleet().decode()
    assert sorted(names_in_order(page)[:3]) == ["clicks", "payments", "sessions"]
    assert len(names_in_order(page)) == 20
    assert "3 critical</span>, " in page
    assert "17 ok" in page
    assert "is blocked at generation 7: generation_missing" in page
    assert "<pre>memwal-ops inspect s3://lake/payments.lance</pre>" in page
    assert "It is behind: 140 generations wait, the oldest for 93 min." in page
    assert "<pre>memwal-ops history --config /etc/memwal-ops/config.yaml --table clicks --job merge</pre>" in page
    assert "gc failed 4 times in a row, last with storage_credentials" in page
    assert "Give the role s3:DeleteObject on the prefix." in page
    assert 'href="/runbooks/errors/21-storage_credentials.md"' in page
    assert "Lease of merge: ops@vm-2 pid 71, until " in page


def test_every_runbook_link_leads_to_a_page() -> None:
    pages = pages_of(status(fleet(20), config={"file": "x", "loaded": "2026-01-01T00:00:00+00:00", "error": "bad"}))
    links = set(re.findall(r'href="(/runbooks/[^"]*)"', pages.fleet().decode()))
    assert len(links) >= 4
    for link in links:
        found = pages.page_at(link)
        assert found is not None
        assert found.kind.startswith("text/plain")
        assert found.body.startswith(b"# ")


@pytest.mark.parametrize(
    "path", ["/runbooks/../errors.py", "/runbooks/../version.py", "/runbooks/x.md", "/runbooks//a.md", "/runbooks/",
             "/runbooks/errors", "/tables/none", "/tables/none/backlog.svg", "/tables/", "/other"],
)  # fmt: skip
def test_other_paths_have_no_page(path: str) -> None:
    assert pages_of(status(fleet(20))).page_at(path) is None


def test_a_table_has_its_jobs_runs_and_blocked_parts() -> None:
    page = (pages_of(status(fleet(20))).table("payments") or b"").decode()
    assert "region_id: 8b064fec-aec3-4903-a579-f8c5e0d0373c; generation: 7" in page
    assert "<td>merge</td><td>idle</td>" in page
    assert page.count("<td>when: generations &gt;= 8</td>") == 6
    assert "rows merged 5,200; bytes merged 9.0 MiB" in page
    assert "<td>40, 41</td>" in page
    assert "data:image/svg+xml;base64," in page


def test_a_table_has_its_history() -> None:
    page = (pages_of(status(fleet(20))).table("payments") or b"").decode()
    assert "<td>memwal-ops merge</td><td>update</td>" in page
    assert "<td>8b064fec/8</td><td>waiting</td>" in page
    assert '<meter value="5" max="7"></meter> 5 of 7' in page
    assert "version 41, the newest" in page
    assert "rows merged by version" in page
    unknown = (pages_of(status(fleet(20)), history=lambda _: None).table("payments") or b"").decode()
    assert "Not read yet" in unknown


def test_the_last_gc_tells_what_holds_storage() -> None:
    held = {"kind": "wal_entry", "path": "p", "objects": 1, "bytes": 1024, "because": "not merged"}
    collected = [run(job="gc", report={"held": [held, held], "delete": [{**held, "kind": "orphan"}], "unknown": 3})]
    page = (pages_of(status(fleet(20)), runs=lambda **_: collected).table("payments") or b"").decode()
    row = '<td>wal entry</td><td class="number">2</td><td class="number">2.0 KiB</td><td>not merged</td>'
    assert row in page
    assert "<td>nothing (memwal-ops gc --apply deletes it)</td>" in page


def test_viewing_a_page_has_the_history_read_at_most_once_a_minute(stage: Stage) -> None:
    def polls() -> list[bool]:
        return [request.history for _, request in stage.pools.given if isinstance(request, PollRequest)]

    stage.see("a", generations=3)
    stage.scheduler.read_history("a")
    stage.turn()
    worker, request = stage.pools.given[-1]
    stage.scheduler.on_message(worker, vars_of(Result(request.id, "succeeded", report={"revisions": []})))
    stage.turn()
    assert stage.scheduler.tables["a"].history == {"revisions": []}
    stage.scheduler.read_history("a")
    stage.turn(59)
    assert polls() == [False, True]
    stage.see("a", generations=3)
    assert stage.scheduler.tables["a"].history == {"revisions": []}  # a poll without one keeps it
    stage.scheduler.read_history("a")
    stage.scheduler.read_history("none")
    stage.turn(2)
    stage.scheduler.read_history("a")
    stage.turn()
    assert polls() == [False, True, False, True]


def test_names_are_quoted_in_addresses() -> None:
    odd = "a/b c?d#e%2F"
    pages = pages_of(status([table(odd)]))
    (link,) = re.findall(r'<h2><a href="([^"]*)"', pages.fleet().decode())
    (chart,) = re.findall(r'<img src="([^"?]*)', pages.fleet().decode())
    assert (pages.page_at(link) or pytest.fail(link)).body.count(b"a/b c?d#e%2F") >= 1
    assert (pages.page_at(chart) or pytest.fail(chart)).kind == "image/svg+xml"


def test_a_page_reads_the_run_history_only_after_another_run() -> None:
    history, document = FakeHistory(), status(fleet(200))
    pages = pages_of(document, history)
    first = pages.fleet()
    asked = history.asked
    assert asked < 10  # of the tables in trouble only
    assert pages.fleet()[:4000].partition(b"since")[0] == first[:4000].partition(b"since")[0]
    assert history.asked == asked
    document["tables"][7]["jobs"]["gc"]["last_finished"] = "2026-11-22T00:00:00+00:00"
    pages.fleet()
    assert asked < history.asked <= asked + 2


def test_a_chart_is_drawn_once_for_each_poll() -> None:
    pages = pages_of(status([table("a")]))
    first = pages.page_at("/tables/a/backlog.svg")
    again = pages.page_at("/tables/a/backlog.svg")
    assert first is not None
    assert again is not None
    assert first.body is again.body


def test_no_table_is_a_finding() -> None:
    page = pages_of(status([])).fleet().decode()
    assert "no pattern matches any" in page


def test_samples_are_bounded_and_recent() -> None:
    samples = Samples()
    for second in range(0, 3 * 86_400, 60):
        samples.add(1e9 + second, second % 7)
    kept = samples.all()
    times = [when for when, _ in kept]
    assert len(kept) <= 120
    assert times == sorted(times)
    assert times[-1] - times[0] <= 86_400
    assert times[-1] - times[-30] == 29 * 60
    samples.add(times[10], 5.0)  # the clock was set back
    assert [when for when, _ in samples.all()] == times[:11]
    assert samples.all()[-1] == (times[10], 5.0)


def test_polls_take_samples(stage: Stage) -> None:
    stage.see("a", generations=3)
    stage.turn(60)
    stage.see("a", generations=5)
    assert [amount for _, amount in stage.scheduler.tables["a"].samples.all()] == [3.0, 5.0]


def test_how_indexes_answer_and_recall_over_time() -> None:
    """The last answers of each, the curve of vector indexes, and what to do about a bad one before all else."""

    def entry(index: str, recall: float | None, *findings: str) -> dict[str, Any]:
        return {
            "index": index, "type": "IVF_PQ" if recall else "BTree", "queries": 62, "wrong": 3 if findings else 0,
            "recall": recall, "recall_low": recall, "recall_high": recall, "segments": 2, "skipped": None,
            "findings": [{"check": one, "evidence": "3 rows <gone>.", "remedy": "Build it anew."} for one in findings],
        }  # fmt: skip

    asked = [entry("by_n", None, "index_misses_rows"), entry("by_v", 0.91)]
    stamp = {"asked_at": "2026-11-25T10:00:00+00:00", "asked_version": 41}
    one = table("vectors", answers=[{**of, **stamp} for of in asked])
    runs = [
        run(job="verify", finished=f"2026-11-{day}T10:00:00+00:00", report={"seed": 1, "answers": asked})
        for day in (25, 24, 23)
    ]
    page = (pages_of(status([one]), runs=lambda **_: runs).table("vectors") or b"").decode()
    assert page.count("<h2>Answers of indexes</h2>") == 1
    assert '<td>by_n</td><td>BTree</td><td class="number">62</td><td class="number">3</td>' in page
    assert "0.910 (0.910 to 0.910)" in page
    assert "recall of vector indexes over time" in page
    assert "answers badly" in page
    first = page.index('<strong class="critical">critical</strong>')
    assert "The index by_n (BTree) answers wrongly" in page[first : first + 200]
    assert "3 rows &lt;gone&gt;." in page
    assert 'href="/runbooks/wrong-answers.md"' in page
    assert "recall of vector indexes" not in (pages_of(status([one])).table("vectors") or b"").decode()
    fine = (pages_of(status([table("vectors")])).table("vectors") or b"").decode()
    assert "Answers of indexes" not in fine
