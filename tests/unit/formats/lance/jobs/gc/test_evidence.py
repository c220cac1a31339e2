"""The gates of a generation, and what is read again before each batch of deletions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from memwal_ops.core.candidates import Gate
from memwal_ops.errors import TableReplacedError
from memwal_ops.formats.lance.jobs.gc import evidence as module
from memwal_ops.formats.lance.jobs.gc.evidence import CurrentEvidence, GcEvidence, read_evidence
from memwal_ops.formats.lance.options import RetentionOptions

REGION, OTHER = UUID(int=1), UUID(int=2)
NOW = datetime(2026, 11, 21, tzinfo=UTC)


class Retained:
    """A retention that needs what the test says, and notes when it is refreshed."""

    def __init__(self, needed: str | None = None) -> None:
        self.needed = needed
        self.points_into_mem_wal = False
        self.asked: list[Any] = []
        self.newest = 5

    def needs(self, region_id: UUID, generation: int) -> str | None:
        self.asked.append((region_id, generation))
        return self.needed

    def refresh(self, table: Any, now: datetime) -> None:
        self.asked.append((table, now))
        self.newest = table.newest().version


def table(version: int = 5, newest: Any = None, **merged: int) -> Any:
    index = SimpleNamespace(merged_generations={REGION: merged.get("merged", 3)})
    made = SimpleNamespace(version=version, index=index, store=f"store of {version}")
    made.newest = lambda: newest or made
    return made


def evidence(needed: str | None = None, covered: Any = None, **options: Any) -> GcEvidence:
    retention: Any = Retained(needed)
    return GcEvidence(options.pop("table", table()), retention, covered or {}, NOW, RetentionOptions())


MERGED = Gate(met=True, text="merged: the base table has generations up to 3")
NO_INDEX = Gate(met=True, text="there is no index to catch up")
NOT_NEEDED = Gate(met=True, text="merged in every version, tag, branch and hold that may be opened")


@pytest.mark.req("S0-184", "S0-188", "S0-189")
def test_a_generation_that_is_not_merged_is_held() -> None:
    one = evidence()
    assert one.generation_gates(REGION, 4) == (
        Gate(met=False, text="not merged yet: the base table has generations up to 3"),
    )
    assert one.generation_gates(OTHER, 1) == (
        Gate(met=False, text="not merged yet: the base table has generations up to 0"),
    )
    assert one.generation_gates(REGION, 3) == (MERGED, NO_INDEX, NOT_NEEDED)
    assert one.retention.asked == [(REGION, 3)]  # type: ignore[attr-defined]


@pytest.mark.req("S0-188")
def test_every_index_must_cover_a_generation() -> None:
    one = evidence(covered={"b": {REGION: 2, OTHER: 9}, "a": {REGION: 3}, "c": {OTHER: 9}})
    assert one.generation_gates(REGION, 3) == (
        MERGED,
        Gate(met=False, text="index b covers generations only up to 2 (memwal-ops catchup)"),
        Gate(met=False, text="index c covers generations only up to 0 (memwal-ops catchup)"),
        NOT_NEEDED,
    )
    one = evidence(covered={"b": {REGION: 2}, "a": {REGION: 3}})
    assert one.generation_gates(REGION, 2)[1] == Gate(met=True, text="covered by index a, b")


@pytest.mark.req("S0-189")
@pytest.mark.parametrize(("needed", "advice"), [("version 2", " (memwal-ops expire)"), ("branch side (version 2)", "")])
def test_a_generation_that_a_version_needs_is_held(needed: str, advice: str) -> None:
    text = f"needed by {needed}: not merged there, or its search indexes lack it{advice}"
    assert evidence(needed).generation_gates(REGION, 1) == (MERGED, NO_INDEX, Gate(met=False, text=text))


def test_ages_are_those_at_the_beginning_of_the_run() -> None:
    gate = evidence().age_gate("written", NOW - timedelta(hours=2), timedelta(hours=3))
    assert gate == Gate(met=False, text="written, 2 h ago; kept for 3 h")
    assert evidence().age_gate("written", NOW - timedelta(hours=2), timedelta(hours=2)).met


@pytest.mark.parametrize("version", [4, 6])
def test_read_again(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coverage of indexes is that of the table's version, which is opened before the versions are listed."""
    monkeypatch.setattr(module, "covered_generations", lambda one: f"covered of {one.version}")
    newest = table(version)
    before = evidence(table=table(5, newest), covered="read before")
    again = before.reread()
    assert again.table is newest
    assert again.covered == f"covered of {version}"
    assert again.retention is before.retention
    assert again.retention.asked == [(before.table, NOW), (newest, NOW)]  # type: ignore[attr-defined]
    assert (again.now, again.options) == (NOW, before.options)


def test_a_table_of_which_no_newer_version_is_listed_is_not_opened_again() -> None:
    before = evidence(table=table(5), covered="read before")
    assert before.reread() is before
    assert before.retention.asked == [(before.table, NOW)]  # type: ignore[attr-defined]


def test_the_first_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "covered_generations", lambda one: f"covered of {one.version}")
    monkeypatch.setattr(module, "LiveVersions", Retained)
    one, options = table(), RetentionOptions()
    read = read_evidence(one, options, NOW)
    assert (read.table, read.covered, read.now) == (one, "covered of 5", NOW)
    assert read.options is options
    assert read.retention.asked == [(one, NOW)]  # type: ignore[attr-defined]


class Held:
    """An anchor that notes the store with which it is checked."""

    def __init__(self, log: list[str], *, replaced: bool = False) -> None:
        self.log, self.replaced = log, replaced

    def check(self, store: str) -> None:
        self.log.append(f"checked in {store}")
        if self.replaced:
            raise TableReplacedError("another table")


def current(monkeypatch: pytest.MonkeyPatch, newest: int, log: list[str], *, replaced: bool = False) -> CurrentEvidence:
    def anchor(one: Any) -> str:
        log.append(f"anchor of {one.version}")
        return f"anchor of {one.version}"

    monkeypatch.setattr(module, "covered_generations", lambda _: {})
    monkeypatch.setattr(module, "table_anchor", anchor)
    monkeypatch.setattr(module, "require_complete", lambda *_: None)  # of real tables: test_newest_incomplete.py
    anchors: Any = (Held(log), Held(log, replaced=replaced))
    return CurrentEvidence(evidence(table=table(5, table(newest))), anchors)


def test_a_newer_version_gets_an_anchor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old anchor is checked after the new one was read: so both are of one table."""
    log: list[str] = []
    one = current(monkeypatch, 6, log)
    one.renew()
    assert log == ["anchor of 6", "checked in store of 5", "checked in store of 5"]
    assert (one.evidence.table.version, one.anchors) == (6, ("anchor of 6",))


def test_the_same_version_keeps_its_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    one = current(monkeypatch, 5, log)
    before, anchors = one.evidence, one.anchors
    one.renew()
    assert log == []
    assert one.anchors is anchors
    assert one.evidence is before


def test_another_table_is_not_taken_for_a_newer_version(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    one = current(monkeypatch, 6, log, replaced=True)
    before, anchors = one.evidence, one.anchors
    with pytest.raises(TableReplacedError, match="another table"):
        one.renew()
    assert (one.evidence, one.anchors) == (before, anchors)
    with pytest.raises(TableReplacedError, match="another table"):
        one.check()
