"""A scheduled run of a table to which nothing was written since one that found nothing to do is skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from memwal_ops.formats.lance.specs import CATCHUP, COMPACT, MERGE
from tests.unit.supervisor.scheduling.test_idle_polls import MINUTES, POLL, TEXT, Polled


class Scheduled(Polled):
    """An idle table with a merge that is due every 10 minutes, whose first run found nothing to do."""

    def __init__(self, folder: Path, text: str = TEXT) -> None:
        super().__init__(folder, text)
        self.fingerprint = "a b"
        self.run(4 * POLL)
        self.merge()

    def merge(self, **details: object) -> None:
        self.stage.due("a")
        self.stage.turn()
        self.stage.answer("a", **{"decision": "nothing_to_merge", **details})  # type: ignore[arg-type]
        self.run(4 * POLL)

    def due(self) -> list[tuple[str, str]]:
        """What runs after the next schedule."""
        self.run(10 * MINUTES)
        self.stage.scheduler.on_schedule("a", "merge")
        self.stage.turn()
        self.run(POLL)
        return self.stage.in_flight

    @property
    def skipped(self) -> float:
        return self.stage.metrics.skipped.value("a", "merge", "unchanged")


def test_it_is_skipped_for_as_long_as_nothing_is_written(tmp_path: Path) -> None:
    table = Scheduled(tmp_path)
    for times in range(1, 13):
        assert table.due() == []
        assert table.skipped == times
        last = table.stage.job("a")
        assert last["last_success"] >= last["last_started"] > "2026-11-21T12:09"
    assert len(table.stage.outcomes(job="merge")) == 1
    assert table.due() == []
    table.fingerprint = "a c"
    assert table.due() == [("a", "merge")]
    assert table.skipped == 13


def test_a_job_that_only_reads_looks_again_after_six(tmp_path: Path) -> None:
    """A file may be lost without a write."""
    table = Scheduled(tmp_path)
    entry = table.stage.scheduler.tables["a"].entries["merge"]
    entry.settings = replace(entry.settings, job=replace(entry.settings.job, reads_only=True))
    table.merge()
    for _ in range(6):
        assert table.due() == []
    assert table.due() == [("a", "merge")]
    table.stage.answer("a", decision="nothing_to_merge")
    table.run(4 * POLL)
    assert table.due() == []


@pytest.mark.parametrize("what", ["published", "failed", "partial", "written_before", "written_during"])
def test_after_another_end_it_runs(tmp_path: Path, what: str) -> None:
    table = Scheduled(tmp_path)
    if what == "written_before":
        table.fingerprint = "a c"  # the run saw it, the poll before the run did not
        table.merge()
    elif what == "written_during":
        table.stage.due("a")
        table.stage.turn()
        table.fingerprint = "a c"
        table.stage.answer("a", decision="nothing_to_merge")
        table.run(4 * POLL)
    else:
        outcome = "succeeded" if what == "published" else what
        table.merge(outcome=outcome, versions=(4,) if what == "published" else ())
    assert ("a", "merge") in table.due() or table.stage.outcomes(job="merge")[-1] == "running"
    assert table.skipped == 0


@pytest.mark.parametrize("what", ["options", "heartbeat", "failing", "blocked", "no_fingerprint"])
def test_where_it_is_not_sure_it_runs(tmp_path: Path, what: str) -> None:
    text = TEXT
    if what == "heartbeat":
        text = TEXT.replace("schedule: 10d", "schedule: 10d, heartbeat_url: 'http://127.0.0.1:1/x'")
    table = Scheduled(tmp_path, text)
    state = table.stage.scheduler.tables["a"]
    entry = state.entries["merge"]
    if what == "options":
        entry.settings = replace(entry.settings, options={"max_bytes": 1})
    elif what == "failing":
        table.fails = True
    elif what == "blocked":
        state.blocked = 1.0
    elif what == "no_fingerprint":
        table.fingerprint = None
    assert table.due() == [("a", "merge")]
    assert table.skipped == 0


def test_a_poll_that_began_before_does_not_decide(tmp_path: Path) -> None:
    """It may have looked before a write that was there when the job became due."""
    table = Scheduled(tmp_path)
    table.run(10 * MINUTES)
    table.stage.scheduler.poll("a")
    table.stage.turn()
    table.stage.turn(1.0)
    table.stage.scheduler.on_schedule("a", "merge")
    assert table.stage.scheduler.tables["a"].scheduled
    table.run(0.001)
    assert table.skipped == 0, "the poll under way was answered, and the next one has begun"
    table.run(POLL)
    assert table.skipped == 1


def test_a_job_that_waits_for_rest_is_not_skipped() -> None:
    """A table at rest is due though nothing was written: by its figures, which are read again each hour."""
    resting = [spec for spec in (CATCHUP, COMPACT, MERGE) if hasattr(spec.options(), "rest_after")]
    assert resting == [CATCHUP, COMPACT]
    assert not any(spec.skip_if_unchanged for spec in resting)
