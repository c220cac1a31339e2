"""A worker process that polls: with a fingerprint it reads nothing again, and no write is missed."""

from __future__ import annotations

import queue
import signal
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops.formats.lance.retention.schema_recorder import SCHEMA_FOLDER
from memwal_ops.supervisor.workers import pools
from memwal_ops.supervisor.workers.pools import WorkerProcess
from memwal_ops.supervisor.workers.protocol import PollRequest, RunRequest
from tests.support.run_cli import contents
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Workload]:
    table = Workload(1, regions=1, base_rows=5).create(str(tmp_path / "t.lance"))
    yield table
    table.close()


@contextmanager
def polling() -> Iterator[Callable[..., dict[str, Any]]]:
    answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    worker = WorkerProcess("watch", lambda _, message: answers.put(message), "ERROR")

    def ask(uri: str, fingerprint: str | None, *, record: bool = False) -> dict[str, Any]:
        worker.send(PollRequest(1, uri, {}, ("merge", "gc"), fingerprint=fingerprint, record=record))
        while (answer := answers.get(timeout=600)) is not None and answer["type"] != "done":
            pass
        assert answer is not None
        return answer

    yield ask
    worker.quit()
    assert worker.wait(600)


@pytest.fixture(scope="module")
def ask() -> Iterator[Callable[..., dict[str, Any]]]:
    """One worker for all tests, as a service has one for all tables."""
    with polling() as asked:
        yield asked


@pytest.fixture
def poll(made: Workload, ask: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return partial(ask, made.uri)


def test_an_idle_table_is_read_once(made: Workload, poll: Callable[[str | None], dict[str, Any]]) -> None:
    assert poll(None)["fingerprint"] is None, "not asked for"
    first = poll("")
    assert first["figures"]["generations"] == 0
    known = first["fingerprint"]
    assert known.startswith("lance log:")
    for _ in range(2):
        again = poll(known)
        assert (again["unchanged"], again["figures"], again["fingerprint"]) == (True, {}, known)
    made.put([1])
    made.flush()
    written = poll(known)
    assert (written["unchanged"], written["figures"]["generations"]) == (False, 1)
    assert poll(written["fingerprint"])["unchanged"]


def test_a_poll_of_the_supervisor_records_versions(made: Workload, poll: Callable[..., dict[str, Any]]) -> None:
    """Once for each version; a poll by a command, which only reads, records nothing."""
    before = contents(made.uri)
    poll(None)
    assert contents(made.uri) == before
    assert poll(None, record=True)["outcome"] == "succeeded"
    recorded = contents(made.uri)
    (path,) = recorded.keys() - before.keys()
    assert path.startswith(SCHEMA_FOLDER)
    poll(None, record=True)
    assert contents(made.uri) == recorded
    lance.dataset(made.uri).update_config({"any": "thing"})
    poll(None, record=True)
    (later,) = (one for one in contents(made.uri) if one.startswith(SCHEMA_FOLDER))
    assert later > path


@pytest.mark.sampled(2)
@pytest.mark.parametrize("known", ["lance log:0", "lance plain:0", "zeppelin x", "no such format", "lance"])
def test_another_fingerprint_reads_all(poll: Callable[[str | None], dict[str, Any]], known: str) -> None:
    answer = poll(known)
    assert (answer["outcome"], answer["unchanged"]) == ("succeeded", False)
    assert answer["figures"]["generations"] == 0


def test_a_package_upgraded_below_the_service_is_refused(made: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "__version__", "0.0.9")
    with polling() as ask:
        refused = ask(made.uri, None)
    assert (refused["outcome"], refused["reason"]) == ("failed", "unsupported_feature")
    assert "is installed, but the service runs 0.0.9" in refused["message"]
    assert refused["remedy"] == "Restart the service."


def test_a_worker_that_a_signal_ends_leaves_what_it_opened_last(made: Workload) -> None:
    messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    worker = WorkerProcess("watch", lambda _, message: messages.put(message), "ERROR")
    worker.request = 1
    worker.send(RunRequest(1, made.uri, {}, "verify", {"deep": True}, apply=False))
    while (message := messages.get(timeout=600)) is not None and message["type"] != "done":
        pass
    worker.signal(signal.SIGKILL)
    last = messages.get(timeout=600)
    assert last is not None
    assert (last["type"], made.uri in last["what"]) == ("opened", True)
    assert messages.get(timeout=600) is None
