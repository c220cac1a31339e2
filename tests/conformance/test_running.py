"""Jobs as they run when nothing goes wrong: plans, repeats, two at once, order, and collection after everything."""

from __future__ import annotations

import enum
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import run_job
from memwal_ops.core.maintain import ordered
from memwal_ops.core.registry import job_specs
from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage import probe
from tests.conformance.formats import FormatUnderTest, TableUnderTest, opened
from tests.support.json_types import assert_json
from tests.support.overtaken import Overtaken
from tests.support.run_cli import contents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.core.report import Report


def steps_of(table: Any) -> list[str]:
    """The jobs that maintain runs on a table, in its order."""
    return [spec.name for spec in ordered(spec for spec in table.jobs.values() if spec.in_maintain)]


def run(kind: FormatUnderTest, table: Any, job: str, *, apply: bool = True) -> Report:
    return run_job(table, job, kind.options_of(table, job), apply=apply)


@contextmanager
def busy(kind: FormatUnderTest) -> Iterator[None]:
    """If a format has one writer at a time, a concurrent run may fail as busy."""
    try:
        yield
    except MemwalOpsError as error:
        if not kind.waits or error.reason != "busy":
            raise


def check_report(report: Report) -> None:
    """The keys and kinds that every report has."""
    document = report.to_json()
    assert isinstance(report.decision, str)
    assert document["decision"] == str(report.decision)
    assert report.decision == report.decision.lower()
    assert type(report.exit_code) is int
    assert_json(document)
    assert report.describe().strip()


@pytest.mark.sampled(2)
def test_a_plan_writes_nothing(kind: FormatUnderTest, made: TableUnderTest) -> None:
    before = contents(made.uri)
    for job in steps_of(opened(made)):
        check_report(run(kind, opened(made), job, apply=False))
        assert contents(made.uri) == before, job
    assert (table := opened(made)).format.summarize(table).backlog
    assert contents(made.uri) == before


@pytest.mark.sampled(3)
def test_apply_twice(kind: FormatUnderTest, made: TableUnderTest) -> None:
    for job in steps_of(opened(made)):
        check_report(run(kind, opened(made), job))
        assert made.read() == made.expected(), job
        before, revision = contents(made.uri), opened(made).revision
        again = run(kind, opened(made), job)
        check_report(again)
        assert again.exit_code == 0
        assert opened(made).revision == revision, job
        assert {*contents(made.uri)} == {*before}, job
        assert made.read() == made.expected(), job
    table = opened(made)
    assert made.read_revision(table.revision) == made.expected(), "everything is in the base"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", [1, 2])
def test_overtaken(kind: FormatUnderTest, made: TableUnderTest, at: int) -> None:
    """Another run does all of it right before this one's first, or second, write."""
    for job in steps_of(opened(made)):
        table = opened(made)
        outcomes: list[Report] = []

        def others(job: str = job, outcomes: list[Report] = outcomes) -> None:
            with busy(kind):
                outcomes.append(run(kind, opened(made), job))

        outcomes.append(run(kind, kind.with_store(table, Overtaken(table.store, at, others, writes=True)), job))
        assert {one.exit_code for one in outcomes} == {0}, job
        assert made.read() == made.expected(), job
    assert made.read_revision(opened(made).revision) == made.expected()


@pytest.mark.sampled(3)
def test_two_at_once(kind: FormatUnderTest, made: TableUnderTest) -> None:
    def one(job: str) -> int | str:
        try:
            return run(kind, opened(made), job).exit_code
        except MemwalOpsError as error:
            return error.reason

    for job in steps_of(opened(made)):
        with ThreadPoolExecutor(2) as pool:
            outcomes = {*pool.map(one, [job, job])}
        assert outcomes <= ({0, "busy"} if kind.waits else {0}), job
        assert 0 in outcomes, job
        assert made.read() == made.expected(), job
    assert made.read_revision(opened(made).revision) == made.expected()


@pytest.mark.sampled(3)
def test_maintain_runs_all_in_their_order(kind: FormatUnderTest, made: TableUnderTest) -> None:
    table = opened(made)
    report = run(kind, table, "maintain")
    check_report(report)
    assert report.exit_code == 0
    told = [step["step"] for step in report.to_json()["steps"] if step["decision"] != "not_applicable"]
    assert told == steps_of(table)
    registered = job_specs(kind.name)
    for name in told:
        assert registered[name].after <= registered.keys(), "no step waits for one that there is not"
        assert all(told.index(before) < told.index(name) for before in registered[name].after if before in told)
    assert made.read() == made.expected()


@pytest.mark.sampled(3)
def test_collection_after_everything(kind: FormatUnderTest, made: TableUnderTest) -> None:
    for _ in range(2):
        for job in steps_of(opened(made)):
            if not opened(made).jobs[job].deletes:
                run(kind, opened(made), job)
        made.write()
    run(kind, opened(made), "merge")
    newest = opened(made)
    numbers = [number for number in range(1, newest.revision + 1) if newest.has_revision(number)]
    before = {number: made.read_revision(number) for number in numbers}
    files = contents(made.uri)
    for job in [name for name, spec in newest.jobs.items() if spec.deletes and spec.in_maintain]:
        assert run(kind, opened(made), job).exit_code == 0
    after = opened(made)
    assert files.keys() - contents(made.uri).keys(), "there was something to be collected"
    assert after.revision == newest.revision or kind.trims
    assert made.read() == made.expected()
    for number, rows in before.items():
        if after.has_revision(number):
            assert made.read_revision(number) == rows, number
    made.write()
    run(kind, opened(made), "merge")
    assert made.read() == made.expected() == made.read_revision(opened(made).revision)


def test_decisions_are_of_a_fixed_set(kind: FormatUnderTest, made: TableUnderTest) -> None:
    assert isinstance(run(kind, opened(made), "merge").decision, enum.StrEnum)


@pytest.mark.sampled(3)
def test_what_is_not_merged_is_not_collected(kind: FormatUnderTest, made: TableUnderTest) -> None:
    for _ in range(2):
        for job in [name for name in steps_of(opened(made)) if opened(made).jobs[name].deletes]:
            run(kind, opened(made), job)
            assert made.read() == made.expected(), job
        run(kind, opened(made), "merge")
        made.write()


@pytest.mark.sampled(3)
def test_a_late_merge_takes_nothing_back(kind: FormatUnderTest, made: TableUnderTest) -> None:
    """Right before its first write others write more, merge it, and collect it."""

    def others() -> None:
        with busy(kind):
            made.write()
            for job in ("merge", "gc"):
                run(kind, opened(made), job)

    table = opened(made)
    probe._proven.add(table.store.root)
    run(kind, kind.with_store(table, Overtaken(table.store, 1, others, writes=True)), "merge")
    assert made.read() == made.expected()
