"""The pages of the service: what is on them, and where it comes from."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from memwal_ops.cli.check import table_faults
from memwal_ops.cli.status import _head, describe
from memwal_ops.core.figures import backlog_of
from memwal_ops.errors import StoreUnavailableError
from memwal_ops.pages.charts import value_ticks
from memwal_ops.pages.rendering import amount_text
from memwal_ops.supervisor.config.model import PricesConfig
from memwal_ops.supervisor.http.access import Viewer
from memwal_ops.supervisor.observe.findings import CRITICAL, OK, level_of_finding, service_findings
from memwal_ops.supervisor.observe.metrics import Metrics
from memwal_ops.supervisor.observe.spending import Spending
from memwal_ops.supervisor.observe.table_view import charts_of
from memwal_ops.supervisor.scheduling.discovery import Fault
from memwal_ops.supervisor.state.samples import budget_sample
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import Stage, vars_of
from tests.support.fleet import JOBS, FakeHistory, FakeLedger, FakeTables, fleet, job, pages_of, run, status, table


class NoLedger(FakeLedger):
    def ledger(self, since: datetime, table: str | None = None) -> list[dict[str, Any]]:
        return []


NOTHING = {
    "service_error": None, "history_error": None, "tables": [], "findings": [],
    "summary": {
        "tables": 0, "ok": 0, "warning": 0, "critical": 0, "oldest_table": None, "unreadable": 0, "generations": 0,
        "rows": 0, "not_read": 0,
    },
}  # fmt: skip


def names_in_order(page: str) -> list[str]:
    return re.findall(r'<th scope="row" role="rowheader"><a href="/tables/[^"]*">([^<]*)</a>', page)


def test_the_worst_tables_come_first_with_what_is_wrong() -> None:
    page = pages_of(status(fleet(20))).tables().body.decode()
    assert sorted(names_in_order(page)[:3]) == ["clicks", "payments", "sessions"]
    assert len(names_in_order(page)) == 20
    assert "3 critical</span>" in page
    assert "17 ok</span>" in page
    assert "is blocked at generation 7: generation_missing" in page
    assert "gc failed 4 times in a row, last with storage_credentials" in page


def member(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "holder": f"ops@{name}", "version": "0", "started": "2026-01-01T00:00:00+00:00", "living": True,
        "tables": 7, "known_tables": 20, "same_tables": True, "same_budget": True,
        "seconds_since_heartbeat": 3.2, **changes,
    }  # fmt: skip


def test_the_members_of_a_fleet_and_what_is_wrong_with_them() -> None:
    members = [member("a"), member("b", living=False), member("c", same_tables=False), member("d", tables=None)]
    members[2]["same_budget"] = False
    members[3]["refused_use"] = "cpu of 1e+09, where the wall clock allows 1e+08 at most"
    shown = {"uri": "s3://b/ops/", "name": "a", "state": "unreachable", "error": "Refused.", "members": members}
    page = pages_of(status(fleet(20), fleet=shown)).tables().body.decode()
    assert "This service is the member a of the fleet at s3://b/ops/" in page
    assert page.count('data-l="last heartbeat" class="number">3 s ago') == 4
    assert "cannot be used; this member keeps its 7 tables. Refused." in page
    assert "The member b ended without leaving" in page
    assert "The configuration of the member c names other tables" in page
    assert "The member c has another budget than this one" in page
    assert "What the member d says that it used is left out of the budget: cpu of 1e+09, where the wall" in page
    assert page.count("is left out of the budget") == 1
    assert "The member a " not in page
    assert 'href="/runbooks/split-membership.md"' in page
    text = describe({**NOTHING, "service": status([], fleet=shown)["service"]}, in_full=False)
    assert re.search(r"^a \(this one\) +unreachable +7 of 20 +3 s ago +ops@a$", text, re.MULTILINE), text
    assert re.search(r"^b +dead ", text, re.MULTILINE)


def test_a_store_that_is_away_asks_for_no_command() -> None:
    """The service tries again by itself; its pages said "run the command again"."""
    away = Fault("s3://dead/*", "Cannot list it.", 24, StoreUnavailableError.remedy)
    (listed,) = service_findings(None, [away], "")
    assert listed["do"] == "Wait for the store to recover: what failed is tried again, without a command."


def test_whether_events_come_and_what_is_wrong_with_them() -> None:
    good = {
        "queue": "https://sqs/1/q", "state": "listening", "error": None, "last_message": None, "lag_seconds": 0.0,
        "last_event": "2026-11-21T12:00:00.000+00:00", "tables": 7, "missed": [], "unreadable": 0,
        "unreadable_error": None,
    }  # fmt: skip
    said = "Events announce the commits of 7"
    page = pages_of(status(fleet(20), events=good)).tables().body.decode()
    assert f"{said} tables; the last one came at 2026-11-21 12:00:00 UTC." in page
    assert "no-events.md" not in page
    document = {**NOTHING, "service": status([], events=good)["service"]}
    assert f"{said} of 0 tables; the last one came at" in " ".join(describe(document, in_full=False).split())
    for change, says in (
        ({"state": "unreachable", "error": "Refused."}, "all tables are polled as without it. Refused."),
        ({"missed": ["a", "b", "c", "d", "e"]}, "No event announced a commit to a, b, c and 2 more; polls found it."),
        ({"unreadable": 3, "unreadable_error": "no JSON"}, "has messages that are not S3&#39;s (3): no JSON."),
        ({"lag_seconds": 720.0}, "Events are 12 min old when they are received."),
    ):
        page = pages_of(status(fleet(20), events={**good, **change})).tables().body.decode()
        assert says in page, says
        assert 'href="/runbooks/no-events.md"' in page
        assert (said in page) == ("error" not in change)


def test_what_is_paused_is_in_the_head_of_the_status() -> None:
    """Nothing is due there, so that nothing else of the status shows it."""
    end, reason = "2026-11-29T10:30:06+00:00", "a move"
    pause = {"until": end, "reason": reason, "by": "anna", "since": end}
    orders = table("orders", jobs={"merge": job(paused={**pause, "until": None, "reason": ""})}, paused=pause)
    document = {**NOTHING, "service": {**status([])["service"], "paused": pause}, "tables": [orders]}
    document |= {"discovery_faults": [], "history_error": None}
    shown = " ".join(_head(document).split())
    assert "Paused: all tables, by anna, until 2026-11-29 10:30 UTC: a move." in shown
    assert "Paused: orders, by anna, until 2026-11-29 10:30 UTC: a move." in shown
    assert "Paused: orders merge, by anna, until it is resumed." in shown
    assert "Paused" not in _head({**NOTHING, **document, "service": status([])["service"], "tables": []})


def test_the_budget_and_its_chart() -> None:
    amounts = {"used": {"cpu": 50.0}, "in_flight": {"cpu": 0.0}}
    budget = {
        "per_seconds": 86400.0, "currency": "USD", "shadow": False, "limits": {"cpu": 100.0}, **amounts, "own": amounts,
        "members": 1, "members_unread": 0, "used_up": None, "frees": None,
    }  # fmt: skip
    pages = pages_of(status(fleet(20), budget=budget))
    now = time.time()
    pages._samples = lambda name, _: [] if name else [(int(now) - 600 * at, {"cpu": 0.5 / at}) for at in (300, 2, 1)]  # type: ignore[method-assign,misc]  # of the test
    page = pages.tables().body.decode()
    assert "Used of the budget per 1d: 50 s of 100 s of processor." in page
    assert "longer" not in page
    spent = {"used": {"cpu": 335.0}, "used_up": "cpu", "frees": "2026-11-28T13:14:49+00:00"}
    over = pages_of(status(fleet(20), budget={**budget, **spent})).tables().body.decode()
    assert "5 min of 100 s of processor. One run may use more than a limit if nothing was used before it" in over
    assert "What is due would pass a limit (cpu): it waits until 2026-11-28 13:14:49 UTC." in over
    assert 'aria-label="budget used over time: now cpu 50%"' in page
    assert budget_sample(budget, 119.0) == [("", 60, {"cpu": 0.5})]  # type: ignore[arg-type]  # it is one
    assert budget_sample(None, 1.0) == []
    assert "budget used" not in pages_of(status(fleet(20))).tables().body.decode()


def test_a_table_says_what_to_type() -> None:
    pages = pages_of(status(fleet(20)))
    assert "<pre>memwal-ops inspect s3://lake/payments.lance</pre>" in pages.table("payments").body.decode()
    clicks = pages.table("clicks").body.decode()
    assert "It is behind: 140 generations wait, the oldest for 93 min." in clicks
    assert "<pre>memwal-ops history --config /etc/memwal-ops/config.yaml --table clicks --job merge</pre>" in clicks
    sessions = pages.table("sessions").body.decode()
    assert "Give the role s3:DeleteObject on the prefix." in sessions
    assert 'href="/runbooks/errors/21-storage_credentials.md"' in sessions
    assert "ops@vm-2 pid 71, until " in pages.table("orders-009").body.decode()


def test_every_runbook_link_leads_to_a_page() -> None:
    pages = pages_of(status(fleet(20), config={"file": "x", "loaded": "2026-01-01T00:00:00+00:00", "error": "bad"}))
    shown = [pages.tables(), *(pages.table(name) for name in ("payments", "clicks", "sessions"))]
    links = {link for page in shown for link in re.findall(r'href="(/runbooks/[^"]*)"', page.body.decode())}
    assert len(links) >= 5
    seen: set[str] = set()
    while links - seen:
        link = (links - seen).pop()
        seen.add(link)
        found = pages.page_at(link.partition("#")[0])
        assert found is not None
        assert (found.kind, found.status) == ("text/html; charset=utf-8", 200), link
        # Links of a page are absolute, so that they lead to the same place from /runbooks/ and from a page.
        hrefs = re.findall(r'href="([^"]*)"', found.body.decode())
        assert all(href.startswith(("/", "#", "https://", "data:")) for href in hrefs), link
        links |= {href for href in hrefs if href.startswith("/runbooks/")}
        anchor = link.partition("#")[2]
        assert not anchor or f'id="{anchor}"' in found.body.decode(), link
    assert len(seen) > 80  # all pages of the runbooks, by links


@pytest.mark.parametrize("path", ["/tables/", "/other", "/assets/../console.js", "/assets/style.css", "/run"])
def test_other_paths_have_no_page(path: str) -> None:
    assert pages_of(status(fleet(20))).page_at(path) is None


@pytest.mark.parametrize(
    "path",
    ["/tables/none", "/tables/none/backlog.svg", "/tables/%3Cb%3E", "/runs/100", "/runs/x", "/runs/", "/runs/-1",
     "/runs/99999999999999999999", "/runs/٣", "/runbooks/../errors.py", "/runbooks/../version.py", "/runbooks/x.md",
     "/runbooks//a.md", "/runbooks/errors", "/runbooks/<b>.md"],
)  # fmt: skip
def test_what_does_not_exist_is_a_page_that_says_so(path: str) -> None:
    page = pages_of(status(fleet(20))).page_at(path)
    assert page is not None
    assert (page.status, page.kind) == (404, "text/html; charset=utf-8")
    assert b"There is no " in page.body
    assert b"<b>" not in page.body


def test_a_table_has_its_jobs_and_runs_and_no_finding_twice() -> None:
    page = pages_of(status(fleet(20))).table("payments").body.decode()
    assert page.count("8b064fec-aec3-4903-a579-f8c5e0d0373c") == 1
    assert 'rowheader">merge</th><td role="cell" data-l="state">idle</td>' in page
    assert page.count('<td role="cell" data-l="why">when: generations &gt;= 8</td>') == 6
    assert "rows merged 5,200; bytes merged 9.0 MiB" in page
    assert '<td role="cell" data-l="versions">40, 41</td>' in page
    assert '<a href="/runs/1">' in page
    assert page.count('<svg class="plot"') > 8
    assert "<dd>2,600,000</dd>" in page


def test_jobs_that_do_not_apply_are_not_listed() -> None:
    jobs = {**table("a")["jobs"], "merge": job(applies=False, next_due=None)}
    pages = pages_of(status([table("a", jobs=jobs)]), spending=Spending(NoLedger(), PricesConfig))
    page = pages.table("a").body.decode()
    assert 'rowheader">merge<' not in page
    assert 'rowheader">gc<' in page
    assert "Not for this table: merge." in page
    operator = Viewer("operate", "c", acting=True)
    assert b"/jobs/merge/run" not in pages.table("a", "", operator).body


def test_one_missing_table_is_one_finding() -> None:
    missing = "No table found at s3://lake/gone.lance: the prefix is empty."
    error = {"reason": "table_not_found", "message": missing, "remedy": "Check the URI."}
    failing = {name: job(consecutive_failures=3, last_outcome="failed") for name in JOBS}
    gone = table("gone", look_error=missing, jobs=failing, waiting=0)
    runs = [run(table="gone", outcome="failed", exit_code=4, error=error)]
    page = pages_of(status([gone]), runs=lambda **_: runs).table("gone").body.decode()
    (only,) = re.findall(r'<li class="is-critical">(.*?)</li>', page, re.DOTALL)
    assert "table_not_found. No table found at s3://lake/gone.lance: the prefix is empty." in only
    assert "merge, catchup, compact, snapshot, expire and gc fail for this reason." in only
    assert "Check the URI." in only
    assert '<li class="is-warning">' not in page


def test_jobs_that_fail_for_one_reason_are_one_finding() -> None:
    error = {"reason": "storage_credentials", "message": "AccessDenied.", "remedy": "Give the role more."}
    failing = {name: job(consecutive_failures=3 if name == "gc" else 1, last_outcome="failed") for name in JOBS}
    runs = [run(outcome="failed", exit_code=21, error=error)]
    page = pages_of(status([table("a", jobs=failing)]), runs=lambda **_: runs).table("a").body.decode()
    (only,) = re.findall(r'<li class="is-critical">(.*?)</li>', page, re.DOTALL)
    assert "merge, catchup, compact, snapshot, expire and gc failed" in only
    late = {name: job(last_success=None, seconds_since_success=3e4) for name in JOBS}
    page = pages_of(status([table("a", jobs=late)])).table("a").body.decode()
    (only,) = re.findall(r'<li class="is-critical">(.*?)</li>', page, re.DOTALL)
    assert "have not succeeded for a long time" in only


def test_only_who_may_operate_gets_buttons() -> None:
    jobs = {
        **table("a")["jobs"], "compact": job(state="running", running_seconds=4.0),
        "gc": job(consecutive_failures=2, last_outcome="failed", backoff_seconds=40.0),
    }  # fmt: skip
    pages = pages_of(status([table("a b", jobs=jobs, waiting=140)]), runs=lambda **_: [])
    for viewer in (Viewer(), Viewer(acting=True), Viewer("view", "c", acting=True), Viewer("operate", None, True)):
        page = pages.table("a b", "", viewer).body.decode()
        assert "/api/v1/" not in page
        assert "memwal-ops service run" in page
        assert ("Sign in" in page) == (viewer.acting and viewer.role is None)
    page = pages.page_at("/tables/a%20b", "range=7d", Viewer("operate", 'c"1', acting=True))
    assert page is not None
    text = page.body.decode()
    forms = dict(re.findall(r'<form method="post" action="([^"]*)">(.*?)</form>', text, re.DOTALL))
    base = "/api/v1/tables/a%20b"
    assert {f"{base}/jobs/compact/cancel", f"{base}/jobs/gc/retry", f"{base}/jobs/merge/run"} <= forms.keys()
    assert f"{base}/pause" in forms
    assert "/sign-out" in forms
    for action, form in forms.items():
        assert 'name="csrf" value="c&#34;1"' in form
        assert action == "/sign-out" or 'name="next" value="/tables/a%20b?range=7d"' in form
    # The remedy of a finding, where a run is one, is its button.
    behind = re.search(r'<li class="is-critical"><p>.{0,80}It is behind.*?</li>', text, re.DOTALL)
    assert behind
    assert "Run merge now" in behind[0]
    paused = {"until": "2026-12-01T00:00:00+00:00", "reason": "<b>load", "by": "ann"}
    stopped = pages_of(status([table("a", paused=paused)]))
    text = stopped.table("a", "", Viewer("operate", "c", acting=True)).body.decode()
    assert "/api/v1/tables/a/resume" in text
    assert "until 2026-12-01 00:00:00 UTC by ann: &lt;b&gt;load" in text


def test_a_run_has_a_page() -> None:
    error = {"reason": "storage_credentials", "message": "AccessDenied.", "remedy": "Give the role more."}
    plan = {"apply": True, "options": {"max_deletes": 10, "older_than": "30d"}, "backlog": {"generations": 9}}
    one = run(
        job="gc", error=error, exit_code=21, outcome="failed", plan=plan, figures={"conflicts": 2}, log=["a", "<b>"]
    )
    page = pages_of(status([]), run=lambda _: one).run("7").body.decode()
    assert "memwal-ops gc s3://lake/payments.lance --max-deletes 10 --older-than 30d --apply</pre>" in page
    assert 'href="/runbooks/errors/21-storage_credentials.md"' in page
    assert "<dt>commit conflicts</dt><dd>2</dd>" in page
    assert "<dt>generations</dt><dd>9</dd>" in page
    assert "rewrite" in page
    assert "46.7 %" in page
    assert "a\n&lt;b&gt;</pre>" in page
    assert "&#34;decision&#34;: &#34;merged&#34;" in page
    running = run(outcome="running", finished=None, seconds=None, phases=None, figures=None, report=None, plan={})
    assert "not yet" in pages_of(status([]), run=lambda _: running | {"decision": None}).run("7").body.decode()


def test_a_table_has_its_history() -> None:
    page = pages_of(status(fleet(20))).table("payments").body.decode()
    assert 'data-l="by">memwal-ops merge</td><td role="cell" data-l="operation">update</td>' in page
    assert 'rowheader">8b064fec/8</th><td role="cell" data-l="state">waiting</td>' in page
    assert '<meter aria-label="coverage of id_idx" value="5" max="7"></meter> 5 of 7' in page
    assert "version 41, the newest" in page
    assert page.count('class="story"') == 1, "all of it is on one axis"
    unknown = pages_of(status(fleet(20)), history=lambda _: None).table("payments").body.decode()
    assert "<p data-busy>It is being read" in unknown


def test_the_last_gc_tells_what_holds_storage() -> None:
    held = {"kind": "wal_entry", "path": "p", "objects": 1, "bytes": 1024, "because": "not merged"}
    collected = [run(job="gc", report={"held": [held, held], "delete": [{**held, "kind": "orphan"}], "unknown": 3})]
    document = status(fleet(20))
    tables = FakeTables(document, {"payments": {"bytes": 5 << 20, "by": "2126-12-01T10:00:00+00:00"}})
    page = pages_of(document, runs=lambda **_: collected, tables=tables).table("payments").body.decode()
    assert 'rowheader">wal entry</th><td role="cell" data-l="objects" class="number">2</td>' in page
    assert 'class="number">2.0 KiB</td><td role="cell" class="wide">not merged</td>' in page
    assert "nothing (memwal-ops gc --apply deletes it)" in page
    assert "5.0 MiB are kept only by the age of versions" in page
    assert "2126-12-01 10:00:00 UTC" in page


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
    (link,) = re.findall(r'rowheader"><a href="([^"]*)"', pages.tables().body.decode())
    assert (pages.page_at(link) or pytest.fail(link)).body.count(b"a/b c?d#e%2F") >= 1


def test_a_page_reads_the_run_history_only_after_another_run() -> None:
    history, document = FakeHistory(), status(fleet(200))
    pages = pages_of(document, history)
    pages.tables()
    asked = history.asked
    assert asked < 10  # of the tables in trouble only
    pages.tables()
    assert history.asked == asked
    document["tables"][7]["jobs"]["gc"]["last_finished"] = "2026-11-22T00:00:00+00:00"
    pages.overview.refresh()
    assert asked < history.asked <= asked + 2


def test_a_request_makes_only_the_rows_that_it_shows() -> None:
    document = status(fleet(2000))
    tables = FakeTables(document)
    pages = pages_of(document, tables=tables)
    pages.tables()
    asked = tables.asked
    pages.tables("q=orders-1234")
    assert tables.asked == asked + 1
    document["tables"][40]["jobs"]["gc"] = job(state="running")
    pages.overview.refresh()
    assert tables.asked == asked + 2
    assert "1 running" in pages.tables().body.decode()


def test_a_table_that_was_not_read_is_not_ok() -> None:
    unread = table("new", state="not_read", looked_at=None, seconds_since_look=None, version=None, backlog={})
    document = status([table("a", waiting=0), unread])
    page = pages_of(document).tables().body.decode()
    assert "1 ok" in page
    assert "1 not read yet" in page
    assert "Not read yet: 1 of 2. These sums are of the 1 table that was read." in page
    assert "It has not been read yet: nothing is known of it." in page
    assert names_in_order(page) == ["new", "a"]
    assert names_in_order(pages_of(document).tables("state=not_read").body.decode()) == ["new"]
    nothing = pages_of(status([unread])).tables().body.decode()
    assert "Nothing is known of their sizes yet." in nothing
    assert "0 B" not in nothing


def test_no_table_is_a_finding() -> None:
    page = pages_of(status([])).tables().body.decode()
    assert "no pattern matches any" in page
    page = pages_of(status([], discovery_pending=["s3://away/*.lance"])).tables().body.decode()
    assert "no pattern matches any" not in page
    assert "Not listed yet: s3://away/*.lance" in page


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
    times = [(datetime.now(UTC) - timedelta(days=days)).isoformat() for days in (1, 2, 3)]
    runs = [run(job="verify", finished=when, report={"seed": 1, "answers": asked}) for when in times]
    pages = pages_of(status([one]), runs=lambda **_: runs)
    page = pages.table("vectors", "range=7d").body.decode()
    assert page.count("<h2>Answers of indexes</h2>") == 1
    row = re.search(r'rowheader">by_n</th>.*?</tr>', page)
    assert row
    assert re.findall(r">([^<]+)</", row[0])[:4] == ["by_n", "BTree", "62", "3"]
    assert '<td role="cell" data-l="recall" class="number p3">0.91</td>' in pages.tables().body.decode()
    assert "0.910 (0.910 to 0.910)" in page
    assert "recall of vector indexes over time" in page
    assert "answers badly" in page
    first = page.index('<li class="is-critical">')
    assert "The index by_n (BTree) answers wrongly" in page[first : first + 200]
    assert "3 rows &lt;gone&gt;." in page
    assert 'href="/runbooks/wrong-answers.md"' in page
    assert "recall of vector indexes over time: now 0.91" in page
    assert "recall of vector indexes" not in pages.table("vectors", "range=1h").body.decode()
    assert "recall of vector indexes" not in pages_of(status([one])).table("vectors").body.decode()
    fine = pages_of(status([table("vectors")])).table("vectors").body.decode()
    assert "Answers of indexes" not in fine


def test_what_the_runs_of_a_table_cost() -> None:
    page = pages_of(status(fleet(20))).table("payments", "range=7d").body.decode()
    (section,) = re.findall(r"<h2>Cost of the last 7 days</h2>.*?</section>", page, re.DOTALL)
    # 336 runs of half an hour each, of which some may have ended just before the week.
    assert re.search(r"<dt>runs</dt><dd>33[456]</dd>", section)
    assert re.search(r"<dt>cost</dt><dd>\$0\.3\d</dd>", section)
    assert re.findall(r'rowheader">(\w+)</th>', section) == ["merge", "compact"]
    assert "cost per 6 hours over time: $0.3" in page
    assert (
        "cost per 5 minutes over time: $0.00" in pages_of(status(fleet(20))).table("payments", "range=1h").body.decode()
    )
    nothing = Spending(NoLedger(), PricesConfig)
    page = pages_of(status(fleet(20)), spending=nothing).table("payments").body.decode()
    assert "Cost of" not in page
    assert "cost in" not in page


def test_the_list_has_the_cost_of_the_week_where_it_is_known() -> None:
    document = status(fleet(20))
    page = pages_of(document, tables=FakeTables(document, costs={"clicks": 1.25, "payments": 0.5})).tables()
    assert "<dt>cost of the last 7 days</dt><dd>$1.75</dd>" in page.body.decode()
    assert page.body.count(b'data-l="7-day cost" class="number">$') == 2
    assert b"7-day" not in pages_of(document).tables().body


def test_a_figure_that_does_not_change_is_a_flat_line_to_now() -> None:
    samples = [(-7200, {"table_rows": 5.0}), (600, {"table_rows": 5.0})]
    document = table("a", backlog={"table_rows": 5.0, "fragments": 3.0})
    flat, parts = charts_of(samples, 0.0, 3600.0, backlog_of(document))
    assert (flat["title"], flat["summary"]) == ("rows", "now 5")
    assert json.loads(flat["points"]) == [[0, "5"], [600, "5"], [3600, "5"]]
    assert re.fullmatch(r"M0\.0 (\S+)H166\.7V\1H1000\.0V\1H1000", flat["line"])
    assert parts["summary"] == "now 3", "it was read, and not recorded yet"
    page = pages_of(status([document])).table("a", "range=90d").body.decode()
    assert "Nothing was recorded" not in page
    assert page.index("<h2>Jobs</h2>") < page.index("<h2>Over time</h2>")


@pytest.mark.parametrize("unit", ["count", "bytes", "seconds"])
@pytest.mark.parametrize("most", [0.0, 1.0, 2.0, 3.0, 7.0, 41.0, 999.0, 1024.0, 5e6, 7e11, 86_400.0])
def test_ticks_are_distinct(unit: Any, most: float) -> None:
    ticks = value_ticks([0.0, most], unit)
    texts = [amount_text(tick, unit) for tick in ticks]
    assert len({*texts}) == len(texts) >= 2, texts
    assert ticks[0] == 0
    assert ticks[-1] >= most


@pytest.mark.parametrize("error", [None, "It did not respond."])
def test_check_pages_and_metrics_agree_on_a_table_that_cannot_be_read(error: str | None) -> None:
    """One was a warning in ``check``, and critical elsewhere."""
    one = table(
        "a",
        waiting=0,
        look_error=error,
        state="read" if error is None else "unreadable",
        jobs={},
        expect_writes_seconds=None,
    )
    document = status([one])
    worst = max((level for level, _ in table_faults(one)), default=OK)
    assert worst == (OK if error is None else CRITICAL)
    assert max((level_of_finding(found) for found in pages_of(document).findings(one)), default=OK) == worst
    assert (
        f"memwal_ops_tables_unreadable {float(error is not None)}"
        in b"".join(Metrics(lambda: document).expose()).decode()
    )  # type: ignore[arg-type, return-value]  # of the support


def test_a_blocked_part_says_its_remedy_once_and_for_this_table() -> None:
    remedy = "Restore the directory; without one, memwal-ops repair URI writes it again."
    block = {"region_id": "r", "generation": 1, "reason": "generation_corrupt", "detail": f"It is cut. {remedy}"}
    runs = [run(outcome="partial", exit_code=10, report={"blocked": [{**block, "remedy": remedy}]})]
    page = pages_of(status([table("a", blocked=1)]), runs=lambda **_: runs).table("a").body.decode()
    assert page.count("Restore the directory; without one,") == 1
    assert "memwal-ops repair s3://lake/a.lance writes it again." in page
