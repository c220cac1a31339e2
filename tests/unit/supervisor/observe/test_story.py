"""What a page says of a table over time, after a click, and at the first look."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from memwal_ops.supervisor.config.model import PricesConfig
from memwal_ops.supervisor.http.access import Viewer
from memwal_ops.supervisor.observe import findings
from memwal_ops.supervisor.observe.spending import Spending
from memwal_ops.supervisor.observe.table_view import achieved_text, asked_view, attributed, runs_chart, writes_chart
from tests.support.fleet import HISTORY, FakeLedger, FakeTables, fleet, job, pages_of, run, status, table

OPERATOR = Viewer("operate", "c", acting=True)


def ago(**span: float) -> str:
    return (datetime.now(UTC) - timedelta(**span)).isoformat()


def ledger_run(**changes: Any) -> dict[str, Any]:
    plan = {"backlog": {"fragments": 1181.0, "versions": 40.0}}
    return {"job": "compact", "outcome": "succeeded", "finished": 50.0, "plan": plan, "achieved": {}, **changes}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"achieved": {"fragments": 1143}}, "fragments 1,181 -> 38"),
        ({"achieved": {"fragments": 1143}, "plan": None}, "1,143 fragments fewer"),
        ({"achieved": {"fragments": -3}, "plan": {}}, "3 fragments more"),
        ({"achieved": {"versions": 12, "bytes_freed": 3 << 20}}, "versions 40 -> 28, freed 3.0 MiB"),
        ({"achieved": {"rows_merged": 5200}}, "5,200 rows merged"),
        ({"achieved": {"recall_before": 0.91, "recall_after": 0.95}}, "recall 0.91 -> 0.95"),
        ({"achieved": {"recall_after": 0.95}}, ""),
        ({"outcome": "died", "achieved": None}, "died"),
        ({"achieved": None}, ""),
    ],
)
def test_a_run_shows_what_it_achieved(changes: dict[str, Any], text: str) -> None:
    assert achieved_text(ledger_run(**changes), "lance") == text


def test_the_lanes_of_runs_and_writes_have_markers() -> None:
    runs = [
        ledger_run(achieved={"fragments": 1143}),
        ledger_run(finished=70.0, outcome="failed"),
        ledger_run(finished=80.0),  # it achieved nothing
        ledger_run(finished=-5.0, achieved={"fragments": 1}),  # before the scale
    ]
    (lane,) = runs_chart(runs, "lance", 0.0, 100.0)
    assert lane["marks"] == [(500.0, "ok"), (700.0, "critical")]
    assert "compact: fragments 1,181 -> 38" in lane["points"]
    assert lane["summary"] == "the last: compact: failed"
    assert runs_chart([], "lance", 0.0, 100.0) == []
    now = datetime.now(UTC).timestamp()
    (writes,) = writes_chart(HISTORY, now - 7200, now)
    assert len(writes["marks"]) == 4 + 2, "those of other programs, and what was flushed"
    assert "8b064fec/8 flushed, 2,600 rows" in writes["points"]
    assert "memwal-ops" not in writes["points"]
    assert writes_chart(None, 0.0, 1.0) == []


PROGRESS = {"activity": "merging", "unit": "rows", "done": 52_000, "total": 140_000, "detail": "", "seconds_left": 24.0}


def test_after_a_click_a_page_shows_who_asked_since_when_and_how_it_goes() -> None:
    asked = {"by": "ann", "since": ago(seconds=16)}
    running = job(state="running", running_seconds=14.0, asked=asked, progress=PROGRESS)
    waiting = job(state="queued", waiting_for="worker", asked=asked)
    of_bytes = {**PROGRESS, "unit": "bytes", "total": None, "seconds_left": None}
    one = table("a", jobs={"merge": running, "compact": waiting, "expire": job(state="running", progress=of_bytes)})
    ended = run(
        job="gc", plan={"asked_by": "bob"}, id=77, decision="nothing_to_delete", figures={}, finished=ago(minutes=1)
    )
    old = run(job="snapshot", plan={"asked_by": "bob"}, finished=ago(hours=3))
    shown = {one["job"]: one for one in asked_view(one, [ended, old, run(plan={"asked_by": "x"}, finished=None)])}
    assert shown.keys() == {"merge", "compact", "gc"}
    assert shown["merge"]["text"] == "running for 14 s, merging 52,000 of 140,000 rows, about 24 s left"
    assert shown["merge"]["share"] == pytest.approx(0.371, abs=0.001)
    assert (shown["compact"]["text"], shown["compact"]["by"]) == ("waits for a worker", "ann")
    assert (shown["gc"]["text"], shown["gc"]["run"], shown["gc"]["busy"]) == ("succeeded: nothing to delete", 77, False)
    page = pages_of(status([one]), runs=lambda **_: [ended]).table("a").body.decode()
    assert re.search(r"<li data-busy><strong>merge</strong>, asked by ann 1\d s ago \(", page)
    assert "merging 50.8 KiB" in page, "bytes are printed as sizes"
    assert '<progress aria-label="progress of merge"' in page
    assert '<a href="/runs/77">succeeded: nothing to delete</a>' in page
    assert page.index("<h2>Asked</h2>") < page.index("<h2>Jobs</h2>") < page.index("<h2>Over time</h2>")
    assert "<h2>Asked</h2>" not in pages_of(status([table("a")])).table("a").body.decode()


def test_a_table_in_order_says_that_there_is_nothing_to_do() -> None:
    page = pages_of(status([table("a", waiting=0)])).table("a").body.decode()
    assert re.search(r"Nothing to do: nothing is wrong, and nothing waits. Next: \w+ in ", page)
    page = pages_of(status([table("a", waiting=2)])).table("a").body.decode()
    assert "Nothing to do: nothing is wrong, and 2 generations wait, within the limits." in page
    for other in (table("a", waiting=140), table("a", paused={"until": None, "reason": "", "by": "ann"})):
        assert "Nothing to do" not in pages_of(status([other])).table("a").body.decode()


def test_a_job_that_waits_for_a_worker_is_not_due_in_an_hour() -> None:
    """It is due now: its timer fires later, and another job's sooner; each page tells for how long it has waited."""
    waiting = job(state="queued", waiting_for="worker", waiting_seconds=300.0, next_due=ago(hours=-23))
    window = job(state="queued", waiting_for="window", next_due=ago(hours=-23))
    starts = job(state="leasing", waiting_seconds=2.0, next_due=ago(hours=-23))
    one = table("a", waiting=0, jobs={"merge": job(), "compact": waiting, "expire": window, "gc": starts})
    pages = pages_of(status([one]))
    page = pages.table("a").body.decode()
    assert "Next: compact has waited 5 min for a worker." in page
    assert "due, has waited 5 min for a worker" in page
    assert re.findall(r'data-l="due">([^<]+)<', page) == [findings.due_text(job()), "now", "now", "about to start"]
    assert "in 23 h" not in page
    assert 'compact <span class="soft">has waited 5 min for a worker</span>' in pages.tables().body.decode()
    assert findings.next_job({"merge": job(), "gc": job(next_due=None)}) == "merge"
    assert findings.next_job({"gc": job(next_due=None)}) is None
    alike = {name: job(next_due=due, waiting_seconds=3.0) for name, due in (("gc", None), ("merge", ago(hours=1)))}
    assert findings.next_job(alike) == "gc", "by a trigger, without a schedule"


def test_columns_of_jobs_without_a_value_are_not_shown() -> None:
    page = pages_of(status([table("a")])).table("a").body.decode()
    assert ">lease</th>" not in page
    assert ">failures</th>" not in page
    failing = pages_of(status(fleet(20))).table("sessions").body.decode()
    assert ">failures</th>" in failing


def test_runs_of_jobs_that_do_not_apply_contradict_nothing() -> None:
    jobs = {
        **table("a")["jobs"],
        "merge": job(applies=False, next_due=None),
        "snapshot": job(applies=False, next_due=None),
    }
    ran = [run(job="merge", decision="not_applicable"), run(job="snapshot"), run(job="gc")]
    page = pages_of(status([table("a", jobs=jobs)]), runs=lambda **_: ran).table("a").body.decode()
    assert "Not for this table: merge, snapshot. Runs of snapshot below are of a time when it applied." in page
    assert 'data-l="job">merge<' not in page
    assert 'data-l="job">snapshot<' in page


class Week(FakeLedger):
    def used_by(self, after: int, running: Any, limit: int) -> list[Any]:
        ended = datetime.now(UTC).timestamp() - 60
        used = {"store": "local", "requests": {"get": 9, "put": 1, "list": 0, "delete": 0}, "cpu_seconds": 2.0}
        achieved = {"rows_merged": 5200, "bytes_freed": 1 << 20, "fragments": 1143}
        one = {"id": 1, "table": "a", "started": ended - 1, "finished": ended, "outcome": "succeeded"}
        failed = {**one, "id": 2, "outcome": "failed", "used": None, "achieved": None}
        return [{**one, "used": used, "achieved": achieved}, failed][min(after, 2) :]


def test_the_first_page_answers_three_questions() -> None:
    spending = Spending(Week(), PricesConfig)
    spending.read()
    page = pages_of(status(fleet(20)), spending=spending).tables().body.decode()
    wrong, behind, week = (page.index(question) for question in ("What is wrong?", "What is behind?", "this week cost"))
    assert wrong < behind < week < page.index("<caption")
    assert '<span class="critical">3 critical</span>' in page[wrong:behind]
    assert '<a href="/tables/sessions">sessions</a>: gc failed 4 times in a row' in page[wrong:behind]
    assert '<a href="/tables/clicks">clicks</a>: 140 generations wait, the oldest for 93 min' in page[behind:week]
    assert '2 runs, <span class="warning">1 failed</span>' in page[week:]
    assert "10 requests, 2 s of processor, 0 B written; nothing at the configured prices" in page[week:]
    assert "Saved: 5,200 rows merged, 1,143 fragments fewer, 1.0 MiB freed" in page[week:]
    assert "$0.00" not in page
    calm = pages_of(status([table("a", waiting=0)])).tables().body.decode()
    assert "Nothing to do: nothing is wrong." in calm
    assert "Nothing waits to be merged." in calm
    assert "Not known yet." in calm, "the history was not read"
    never = Spending(FakeLedger(), PricesConfig)
    never.read()
    assert (
        "No run ended in the 7 days before the history was read, 0 s ago."
        in pages_of(status(fleet(20)), spending=never).tables().body.decode()
    )
    unread = table("new", state="not_read", looked_at=None, seconds_since_look=None, version=None, backlog={})
    partly = pages_of(status([table("a", waiting=0), unread])).tables().body.decode()
    assert "Nothing to do" not in partly
    assert "1 of 2 tables were not read yet." in partly
    assert "What is wrong?" not in pages_of(status([unread])).tables().body.decode()


def test_columns_without_a_value_are_not_shown() -> None:
    document = status([table("a", waiting=0), table("b", waiting=0)])
    shown = pages_of(document, tables=FakeTables(document, costs={"a": 0.0, "b": 0.0})).tables().body.decode()
    names = re.findall(r'role="columnheader"[^>]*><a href="[^"]*"[^>]*>([^<]*)</a>', shown)
    assert names == ["State", "Table", "Rows", "Size", "Fragments", "Indexed", "Last job", "Next job"]
    document = status([table("a", waiting=0), table("b", waiting=3)])
    later = {"a": {"bytes": 5, "by": "2126-12-01T00:00:00+00:00"}}
    shown = pages_of(document, tables=FakeTables(document, later, {"a": 0.5})).tables().body.decode()
    names = re.findall(r'role="columnheader"[^>]*><a href="[^"]*"[^>]*>([^<]*)</a>', shown)
    assert {"Held", "Free on", "Waiting", "Oldest", "7-day cost"} <= {*names}


def test_a_plan_is_shown_before_a_run() -> None:
    pages = pages_of(status([table("a")]))
    done = {"table": "a", "job": "expire", "report": {"decision": "dry_run", "n": "<b>"}, "text": "3 versions <go>."}
    page = pages.acted(done, "/tables/a", OPERATOR)
    assert page is not None
    text = page.body.decode()
    assert "<h1>Plan of expire on a</h1>" in text
    assert "Nothing was changed." in text
    assert "3 versions &lt;go&gt;." in text
    assert 'action="/api/v1/tables/a/jobs/expire/run"' in text
    hold = {"table": "a", "hold": {"id": 3, "version": 41, "until": "2126-12-01T00:00:00+00:00", "released": False}}
    page = pages.acted(hold, "/tables/a", OPERATOR)
    assert page is not None
    assert "Version 41 is kept until <strong>2126-12-01 00:00:00 UTC" in page.body.decode()
    assert 'action="/api/v1/tables/a/holds/3/release"' in page.body.decode()
    page = pages.acted({"done": {"a": {}}, "refused": {"b<": "There is no table."}}, "/", OPERATOR)
    assert page is not None
    assert "Done on 1 of 2 tables." in page.body.decode()
    assert pages.acted({"done": {"a": {}}, "refused": {}}, "/", OPERATOR) is None
    assert pages.acted({"table": "a", "job": "gc", "state": "queued"}, "/", OPERATOR) is None


class Free(FakeLedger):
    """Runs of a local store, the first of them ten minutes ago."""

    def ledger(self, since: datetime, table: str | None = None) -> list[dict[str, Any]]:
        now = datetime.now(UTC).timestamp()
        used = {"store": "local", "requests": {"get": 9}, "bytes_read": 1, "bytes_written": 1, "cpu_seconds": 1.0}
        one = {"table": table, "job": "gc", "outcome": "failed", "plan": {}, "used": used, "achieved": None}
        return [{**one, "started": now - ago, "finished": now - ago} for ago in (10.0, 900.0)]


def test_a_first_day_is_no_vertical_bar_and_what_has_no_price_costs_nothing() -> None:
    pages = pages_of(status([table("a")]), spending=Spending(Free(), PricesConfig), samples=lambda *_: [])
    page = pages.table("a").body.decode()
    (span,) = re.findall(r'data-span="\[([\d.]+), ([\d.]+)\]"', page.partition("<h2>History")[0])
    assert 890 < float(span[1]) - float(span[0]) < 960
    assert "$0.00" not in page
    assert "2 runs" in page
    assert "Nothing of it has a price in the configuration" in page


def test_what_is_blocked_is_behind_however_little_waits() -> None:
    one = table("payments", waiting=9, blocked=1)
    document = status([one, table("a", waiting=9)])
    page = pages_of(document).tables().body.decode()
    behind = page[page.index("What is behind?") : page.index("this week cost")]
    assert (
        '<a href="/tables/payments">payments</a>: 9 generations wait, the oldest for 6 min; a part is blocked' in behind
    )
    assert "Nothing" not in behind
    assert "/tables/a" not in behind, "it is within the limits, and is processed"
    empty = table("p", waiting=0, blocked=1)
    empty["backlog"]["oldest_age"] = 4000.0
    nothing = pages_of(status([empty])).tables().body.decode()
    assert '<a href="/tables/p">p</a>: a part is blocked</li>' in nothing, "and not that 0 of something wait"
    document["tables"][0] = table("b", state="unreadable", backlog={}, look_error="It is cut.", looked_at=None)
    page = pages_of(document).tables().body.decode()
    assert "Nothing of what was read." in page, "what waits in the other one is not known"


def test_versions_that_our_runs_published_are_not_those_of_other_writers() -> None:
    ours = attributed(HISTORY, [run(job="compact", versions=[38]), run(versions=None)])
    assert ours is not None
    by = {one["revision"]: one["by"] for one in ours["revisions"]}
    assert (by[41], by[38], by[37]) == ("lance 14.0.2", "memwal-ops compact", "memwal-ops merge")
    now = datetime.now(UTC).timestamp()
    (writes,) = writes_chart(ours, now - 7200, now)
    assert "version 38" not in writes["points"]
    assert attributed(None, []) is None
    page = pages_of(status([table("a")]), runs=lambda **_: [run(job="compact", versions=[38])]).table("a").body.decode()
    assert 'data-l="by">memwal-ops compact</td>' in page


def test_a_run_that_left_a_part_undone_has_a_marker() -> None:
    (lane,) = runs_chart([ledger_run(job="catchup", outcome="partial")], "lance", 0.0, 100.0)
    assert lane["marks"] == [(500.0, "warning")]
    assert "catchup: left a part undone" in lane["points"]


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"state": "unreadable", "look_error": "It is cut."}, "<p>It is not known: the table cannot be read.</p>"),
        ({"format": "lm_diskann"}, "<p>Tables of this format report none.</p>"),
        ({}, "<p data-busy>It is being read, and shown here then.</p>"),
    ],
)
def test_a_page_knows_why_it_shows_no_history(changes: dict[str, Any], note: str) -> None:
    page = pages_of(status([table("a", **changes)]), history=lambda _: None).table("a").body.decode()
    assert note in page


def test_one_version_is_not_the_last_1_versions() -> None:
    one = {**HISTORY, "revisions": HISTORY["revisions"][:1]}
    page = pages_of(status([table("a")]), history=lambda _: one).table("a").body.decode()
    assert "Its only version, and what made it" in page
    assert "The last 12 versions" in pages_of(status([table("a")])).table("a").body.decode()


def test_sums_of_groups_that_no_table_has_are_not_shown() -> None:
    page = pages_of(status([table("a", waiting=0)])).tables("group=database").body.decode()
    for column in ("critical", "warning", "held", "waiting"):
        assert f">{column}</th>" not in page
    assert ">critical</th>" in pages_of(status(fleet(20))).tables("group=database").body.decode()


def test_phases_are_shares_of_the_whole_run() -> None:
    page = pages_of(status([]), run=lambda _: run(seconds=2.0, phases={"open": 0.5})).run("7").body.decode()
    assert "25 %" in page
    assert "commit conflicts" not in page, "it recorded none"


@pytest.mark.parametrize(
    ("verify", "known"),
    [
        (None, False),
        ({"last_success": None, "last_outcome": "failed"}, False),
        ({"last_success": None, "last_outcome": "partial"}, True),
        ({}, True),
        ({"answers_only": True}, False),
    ],
)
def test_nothing_wrong_is_not_said_of_files_that_none_has_read(verify: dict[str, Any] | None, known: bool) -> None:
    jobs = table("a")["jobs"] | ({} if verify is None else {"verify": job(**verify)})
    pages = pages_of(
        status([table("a", waiting=0, jobs=jobs), table("b", waiting=0, state="not_read", looked_at=None)])
    )
    assert ("No verify has read its files yet." in pages.table("a").body.decode()) != known
    assert ("No verify has read the files of 1 of the 1 table yet." in pages.tables().body.decode()) != known
