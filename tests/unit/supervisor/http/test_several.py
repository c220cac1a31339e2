"""Actions on several tables at once, and what a run reports to who waits for it."""

from __future__ import annotations

import json
import logging
from email.message import Message
from io import BytesIO
from typing import Any

import pytest

from memwal_ops.core.context import Progress
from memwal_ops.log import _LibraryLogger
from memwal_ops.supervisor.actions import ActionConflictError, UnknownTargetError
from memwal_ops.supervisor.http.acting import acting_routes, check_fields
from memwal_ops.supervisor.http.connections import FORM, JSON, SEPARATOR, HttpError, Request
from memwal_ops.supervisor.http.routes import Routes
from memwal_ops.supervisor.state.tables import RunState
from memwal_ops.supervisor.workers.worker import Worker


class Actions:
    def __init__(self) -> None:
        self.paused: list[tuple[str | None, str | None]] = []

    def pause(self, table: str | None, job: str | None, by: str, **_: Any) -> dict[str, Any]:
        if table == "gone":
            raise UnknownTargetError("The service has no table 'gone'.")
        self.paused.append((table, job))
        return {"paused": {"by": by}}

    def retry(self, table: str | None, job: str | None, by: str) -> dict[str, Any]:
        raise ActionConflictError("Nothing here waits in backoff, and no circuit breaker is open.")


def act(actions: Actions, word: str, tables: str) -> dict[str, Any]:
    route, found, _ = Routes(acting_routes(actions)).find("POST", f"/api/v1/tables/{word}")  # type: ignore[arg-type]
    assert route is not None
    assert route.act is not None
    fields = {"tables": tables} if tables else {}
    check_fields(route, fields)
    return route.act(found, fields, type("C", (), {"name": "ann"})())[1]


def test_several_tables_are_paused_and_one_that_is_gone_keeps_none() -> None:
    actions = Actions()
    done = act(actions, "pause", SEPARATOR.join(["a", "gone", "b\n", "a"]))
    assert actions.paused == [("a", None), ("b\n", None)]
    assert done["done"].keys() == {"a", "b\n"}
    assert done["refused"] == {"gone": "The service has no table 'gone'."}


def test_without_a_table_nothing_is_paused() -> None:
    """A form of which no box is checked would else pause the whole fleet."""
    actions = Actions()
    with pytest.raises(ValueError, match="Choose at least one table"):
        act(actions, "pause", "")
    assert actions.paused == []
    with pytest.raises(ActionConflictError, match="a: Nothing here waits"):
        act(actions, "retry", "a")


@pytest.mark.parametrize(
    ("kind", "body"), [(FORM, b"csrf=c&tables=a&tables=b%0A"), (JSON, b'{"csrf": "c", "tables": ["a", "b\\n"]}')]
)
def test_the_field_of_tables_may_be_given_several_times(kind: str, body: bytes) -> None:
    headers = Message()
    headers["Content-Type"] = kind
    request = Request("POST", "/", "", headers, "127.0.0.1", body)
    assert request.fields() == {"csrf": "c", "tables": f"a{SEPARATOR}b\n"}
    twice = Request("POST", "/", "", headers, "x", b"reason=a&reason=b" if kind == FORM else b'{"reason": ["a"]}')
    with pytest.raises(HttpError):
        twice.fields()


def test_a_worker_sends_what_its_run_does() -> None:
    out = BytesIO()
    worker = Worker(BytesIO(), out)
    worker._current = 7
    worker._progress(Progress("merging", "rows", 5, 20))
    worker._progress_sent = 0.0
    worker._progress()  # a heartbeat repeats it
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert first == second
    assert first["doing"] == {"activity": "merging", "unit": "rows", "done": 5, "total": 20, "detail": ""}


def test_the_time_that_a_run_still_takes() -> None:
    run = RunState(1, None, 0.0, None, 0.0)  # type: ignore[arg-type]  # without a worker
    assert run.doing_status(5.0) is None
    run.report({"activity": "merging", "unit": "rows", "done": 10, "total": 50}, 100.0)
    status = run.doing_status(101.0)
    assert status is not None
    assert status["seconds_left"] is None, "nothing to compare with yet"
    run.report({"activity": "merging", "unit": "rows", "done": 30, "total": 50}, 110.0)
    run.report(None, 111.0)  # a heartbeat without details
    status = run.doing_status(110.0)
    assert status is not None
    assert (status["done"], status["seconds_left"], run.progress) == (30, 10.0, 111.0)
    run.report({"activity": "writing", "unit": "rows", "done": 3, "total": None}, 120.0)
    status = run.doing_status(125.0)
    assert status is not None
    assert (status["activity"], status["seconds_left"]) == ("writing", None)


def test_a_logger_of_the_standard_library_takes_levels(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a run is logged at the level of its outcome; without structlog the scheduler failed there."""
    logger = _LibraryLogger(logging.getLogger("of.a.test"))
    logger.log(logging.WARNING, "run_finished", outcome="failed")
    logger.error("other")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "event='run_finished' outcome='failed'"), ("ERROR", "event='other'"),
    ]  # fmt: skip
