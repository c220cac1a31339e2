"""A store that hangs delays the polls of no other one, however few workers the pool has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import Stage, vars_of

LOCAL, AWAY = ("a", "b", "c"), tuple(f"x{number}" for number in range(6))
OPTIONS = "{aws_endpoint: 'http://away', aws_region: us-east-1}"
NAMED = [
    *(f"{{uri: 's3://bucket/{name}', name: {name}, storage_options: {OPTIONS}}}" for name in AWAY),
    *(f"{{uri: /{name}}}" for name in LOCAL),
]
TEXT = f"pools: {{watch: {{workers: 1}}}}\ntables: [{', '.join(NAMED)}]\n"


class Polls:
    """Polls of a scheduler; those of the store that is away get no answer."""

    def __init__(self, folder: Path) -> None:
        self.stage = Stage(folder, TEXT)

    @property
    def in_flight(self) -> dict[str, tuple[Any, PollRequest]]:
        """By name of the table."""
        return {
            request.uri.rpartition("/")[2]: (worker, request)
            for worker, request in self.stage.pools.given
            if isinstance(request, PollRequest) and worker.request == request.id
        }

    def answer(self, table: str, outcome: str = "succeeded") -> None:
        worker, request = self.in_flight[table]
        details: dict[str, Any] = {"figures": {}, "version": 1} if outcome == "succeeded" else {"message": "no answer"}
        self.stage.scheduler.on_message(worker, vars_of(Result(request.id, outcome, exit_code=0, **details)))
        self.stage.turn()

    def answer_local(self) -> set[str]:
        """Answer the polls of local tables until none is in flight; return which there were."""
        answered = set()
        while local := {*self.in_flight} & {*LOCAL}:
            self.answer(local.pop())
            answered |= {*LOCAL} & {*self.stage.scheduler.tables} - {*self.in_flight}
        return answered


def test_local_tables_are_read_first_and_what_hangs_is_set_aside(tmp_path: Path) -> None:
    polls = Polls(tmp_path)
    for table in (*AWAY, *LOCAL):
        polls.stage.scheduler.poll(table)
    polls.stage.turn()
    assert {*polls.in_flight} <= {*LOCAL}
    assert polls.answer_local() == {*LOCAL}
    assert len(polls.in_flight) == 1
    polls.stage.turn(6)
    assert len(polls.in_flight) == 1, "of a store that may hang, one poll at a time"
    for table in LOCAL:
        polls.stage.scheduler.poll(table)
    polls.stage.turn()
    assert polls.answer_local() == {*LOCAL}, "the only worker is free again"


def test_a_store_that_hung_is_polled_aside_until_it_answers(tmp_path: Path) -> None:
    polls = Polls(tmp_path)
    for table in AWAY:
        polls.stage.scheduler.poll(table)
    polls.stage.turn(1)
    polls.stage.turn(30)
    (first,) = polls.in_flight
    polls.answer(first, "failed")
    (second,) = polls.in_flight
    assert second != first
    polls.stage.scheduler.poll("a")
    polls.stage.turn()
    assert {*polls.in_flight} == {"a", second}, "without any delay"
    polls.answer("a")
    polls.answer(second)
    third = {*polls.in_flight}
    assert len(third) == 1
    polls.answer(third.pop())
    assert not any(worker.aside for worker, _ in polls.in_flight.values())


def test_a_request_of_a_lease_that_hangs_keeps_no_worker_from_other_tables(tmp_path: Path) -> None:
    """Of one table whose store was dead, the jobs took turns for the only worker: others waited for hours."""
    stage = Stage(tmp_path, TEXT + "defaults: {jobs: {merge: {schedule: 1h}, compact: {schedule: 1h}}}\n")
    stage.leases.hanging = {*AWAY}
    for job in ("compact", "catchup"):
        stage.scheduler.enqueue("x0", job, "request")
    stage.scheduler.enqueue("x1", "compact", "request")
    stage.turn()
    (first,) = stage.leases.unanswered
    for table in LOCAL:
        stage.scheduler.enqueue(table, "compact", "schedule")
    stage.turn(1)
    assert stage.scheduler.runs == {}, "its store may only be slow"
    for _ in LOCAL:
        stage.turn(6)
        (entry,) = stage.scheduler.runs.values()
        stage.answer(entry.table.name, "compact")
    assert {run["table"] for run in stage.history.runs() if run["outcome"] == "succeeded"} == {*LOCAL}
    assert [*stage.leases.unanswered] == [first], "one request at a time waits for a store that hangs"
    stage.leases.hanging = set()
    stage.leases.unanswered[first]()
    stage.turn(31)
    assert [entry.table.name[0] for entry in stage.scheduler.runs.values()] == ["x"], "the others follow"
