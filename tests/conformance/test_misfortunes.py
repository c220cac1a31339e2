"""Killed at its durable steps, robbed of its lease, lied to by the store: nothing is lost, and the next run ends it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.core.anchors import LeaseGuard
from memwal_ops.core.context import RunContext
from memwal_ops.errors import ConditionalWriteUnsupportedError, LeaseLostError, MemwalOpsError, StoreUnavailableError
from memwal_ops.storage import probe
from memwal_ops.storage.api import DeleteReport
from memwal_ops.storage.wrapper import StoreWrapper
from tests.conformance.formats import FORMATS, FormatUnderTest, Snapshot, TableUnderTest, opened
from tests.conformance.test_running import run, steps_of
from tests.support.calm import calm
from tests.support.dying_store import DyingStore, Killed
from tests.support.run_cli import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.conformance.formats import Rows


def retained(made: TableUnderTest) -> dict[int, Rows]:
    """What every revision holds that can be read."""
    table = opened(made)
    return {one: made.read_revision(one) for one in range(1, table.revision + 1) if table.has_revision(one)}


def test_the_age_of_what_waits_does_not_fall_when_it_is_lost(made: TableUnderTest) -> None:
    """That is when an alert on it must fire. What was written since is younger."""
    hour_ago = time.time() - 3600
    for path in Path(made.uri).rglob("*"):
        os.utime(path, (hour_ago, hour_ago))
    before = _age(made)
    made.remove_entry()
    assert _age(made) >= before
    with suppress(MemwalOpsError):
        made.write()
    assert _age(made) >= before


def _age(made: TableUnderTest) -> float:
    table = opened(made)
    for spec in table.jobs.values():
        for name, metric in spec.backlog_metrics.items():
            if metric.role == "age":
                return float(spec.job.backlog(table)[name])
    pytest.skip("no job of the format has an age")


# A thread that renews a lease dies with its process.
@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:(?s).*Killed:pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_its_steps_and_run_again(kind: FormatUnderTest, made: TableUnderTest, after: bool) -> None:
    """Before, or after, each call. The run that follows ends it, and leaves nothing to do."""
    killed_and_run_again(kind, made, after=after)


@pytest.mark.long
@pytest.mark.parametrize("kind", [one for one in FORMATS if one.name == "lm_diskann"], ids=["lm-diskann"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_each_step_and_run_again(kind: FormatUnderTest, made: TableUnderTest, after: bool) -> None:
    """As above at all of them, where no campaign does."""
    killed_and_run_again(replace(kind, most_steps=None), made, after=after)


def killed_and_run_again(kind: FormatUnderTest, made: TableUnderTest, *, after: bool) -> None:
    with calm():
        for job in steps_of(opened(made)):
            start = Snapshot.of(made)
            table = opened(made)
            probe._proven.clear()
            counting = DyingStore(table.store, 1 << 30, after=False)
            run(kind, kind.with_store(table, counting), job)
            calls = len(counting.calls)
            assert calls, job
            for at in kind.steps(calls):
                start.restore()
                probe._proven.clear()
                table, before = opened(made), retained(made)
                with pytest.raises(Killed):
                    run(kind, kind.with_store(table, DyingStore(table.store, at, after=after)), job)
                where = f"{job}, call {at} of {calls}, {'after' if after else 'before'}"
                assert made.read() == made.expected(), where
                assert opened(made).revision >= max(before), where
                assert retained(made).items() >= {
                    one: rows for one, rows in before.items() if opened(made).has_revision(one)
                }.items(), where  # fmt: skip
                assert run(kind, opened(made), job).exit_code == 0, where
                revision = opened(made).revision
                assert run(kind, opened(made), job).exit_code == 0, where
                assert opened(made).revision == revision, where
                assert made.read() == made.expected(), where
            start.forget()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("allowed", [0, 1, 2, 4])
def test_a_lost_lease(kind: FormatUnderTest, made: TableUnderTest, allowed: int) -> None:
    """From then on nothing becomes visible, and nothing goes but what the run registered as its own."""
    lost = 0
    for job in steps_of(opened(made)):
        probe._proven.add(opened(made).store.root)
        stood: dict[str, Any] = {}
        asked = iter(range(allowed))

        def check(stood: dict[str, Any] = stood, asked: Iterator[int] = asked) -> None:
            if next(asked, None) is None:
                stood.update(files=contents(made.uri), revision=opened(made).revision, rows=retained(made))
                raise LeaseLostError("held by another")

        guard = LeaseGuard(check)
        table = opened(made).with_guard(guard)
        assert table.newest().revision == table.revision
        try:
            table.jobs[job].job.apply(table, kind.options_of(table, job), RunContext(guard=guard))
        except LeaseLostError:
            lost += 1
            assert stood, job
        # A run may end well that was denied nothing but a hint: what counts is what it did from then on.
        if stood:
            assert opened(made).revision == stood["revision"], job
            assert retained(made) == stood["rows"], job
            gone = stood["files"].keys() - contents(made.uri).keys()
            # An upload of another thread was in progress when the lease got lost: its file is renamed or removed.
            gone = {path for path in gone if "#" not in path}
            assert all(guard.may_remove(path) for path in gone), (job, gone)
        assert made.read() == made.expected(), job
        assert run(kind, opened(made), job).exit_code == 0, job
        assert made.read() == made.expected(), job
    assert lost or allowed, "no job asks"


class Liar(StoreWrapper):
    """A store of which one kind of answer is wrong, once or for ever; what was asked is done."""

    def __init__(self, store: Any, verb: str, answer: Callable[[Any], Any], times: int) -> None:
        super().__init__(store)
        self._verb, self._answer, self._left = verb, answer, times

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        self._left -= verb == self._verb
        return self._answer(arguments) if verb == self._verb and self._left >= 0 else result


def _lost(arguments: Any) -> Any:
    raise StoreUnavailableError(f"{arguments[0]}: connection reset by peer.")


def _not_deleted(arguments: Any) -> DeleteReport:
    return DeleteReport(0, dict.fromkeys([*arguments[0]], "connection reset by peer"))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        pytest.param("put_if_absent", _lost, id="put-lost"),
        pytest.param("put_if_absent", lambda _: False, id="told-exists"),
        pytest.param("get", _lost, id="get-lost"),
        pytest.param("list", _lost, id="list-lost"),
        pytest.param("delete_many", _not_deleted, id="delete-lost"),
    ],
)
@pytest.mark.parametrize("times", [1, 1000])
def test_lost_answers(kind: FormatUnderTest, made: TableUnderTest, verb: str, answer: Any, times: int) -> None:
    for job in steps_of(opened(made)):
        table = opened(made)
        probe._proven.add(table.store.root)
        try:
            report = run(kind, kind.with_store(table, Liar(table.store, verb, answer, times)), job)
        except MemwalOpsError as error:
            assert error.exit_code > 2, job
            assert error.remedy, job
        else:
            assert report.describe(), job
        assert made.read() == made.expected(), job
        assert run(kind, opened(made), job).exit_code == 0, job
        assert made.read() == made.expected(), job
    assert made.read_revision(opened(made).revision) == made.expected()


def test_a_store_that_overwrites_is_found_out_before_the_first_write(
    kind: FormatUnderTest, made: TableUnderTest
) -> None:
    if not kind.conditional:
        pytest.skip("its commits rest on the locks and transactions of a file system, not on conditional writes")

    class Overwrites(StoreWrapper):
        def put_if_absent(self, path: str, data: bytes) -> bool:
            self.put(path, data)
            return True

    table, before = opened(made), contents(made.uri)
    probe._proven.clear()
    with pytest.raises(ConditionalWriteUnsupportedError):
        run(kind, kind.with_store(table, Overwrites(table.store)), "merge")
    assert contents(made.uri) == before
