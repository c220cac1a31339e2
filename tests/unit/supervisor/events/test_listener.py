"""What becomes of messages, and of a queue that fails."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from memwal_ops.errors import StorageCredentialsError
from memwal_ops.storage.queues import Queue, QueueMessage
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.events import EventListener, TableRoutes
from memwal_ops.supervisor.scheduling.discovery import FoundTable
from tests.support.s3_events import created
from tests.support.waiting import until

TEXT = """
events: {queue: https://sqs.eu-west-1.amazonaws.com/123456789012/q}
tables: [{uri: s3://b/lake/mine.lance}, {uri: s3://b/lake/theirs.lance}, {pattern: "s3://b/lake/*.lance"}]
"""


class FakeQueue(Queue):
    """Its messages, once; then it is empty. ``errors`` come first."""

    def __init__(self, *bodies: object, receives: int = 1) -> None:
        self.waiting = [
            QueueMessage(
                str(number), body if isinstance(body, str) else json.dumps(body), f"h{number}", receives, time.time()
            )
            for number, body in enumerate(bodies)
        ]
        self.errors: list[Exception] = []
        self.deleted: list[str] = []
        self.hidden: dict[str, int] = {}
        self.made = 0

    def make(self) -> Queue:
        self.made += 1
        return self

    def receive(self, seconds: int = 20) -> list[QueueMessage]:
        if self.errors:
            raise self.errors.pop(0)
        found, self.waiting = self.waiting[:10], self.waiting[10:]
        if not found:
            time.sleep(0.01)
        return found

    def delete(self, messages: object) -> None:
        self.deleted += [one.id for one in messages]  # type: ignore[attr-defined]

    def hide(self, messages: object) -> None:
        self.hidden |= {one.id: seconds for one, seconds in messages}  # type: ignore[attr-defined]


class Heard:
    """A listener with what it reported."""

    def __init__(self, folder: Path, queue: FakeQueue, *, shared: bool = False) -> None:
        path = folder / "config.yaml"
        path.write_text(TEXT)
        settings = load_settings(str(path), {})
        self.polled: list[str] = []
        self.new: list[str] = []
        self.alive: list[bool] = []
        self.outcomes: list[str] = []
        assert settings.config.events is not None
        self.listener = EventListener(
            settings.config.events,
            shared=shared,
            ready=lambda: True,
            elsewhere=lambda uri: "other" if "theirs" in uri else "",
            on_event=self.polled.extend,
            on_new=self.new.append,
            on_alive=self.alive.append,
            count=self.outcomes.append,
            queue=queue.make,
        )
        tables = [replace(one, format="lance") for one in settings.tables]
        found = [FoundTable(one.name, one.uri, one) for one in tables if one.uri is not None]
        self.listener.routes = TableRoutes(found, tables)

    def hear(self, messages: int) -> None:
        """Until so many messages were received."""
        self.listener.start()
        try:
            until(lambda: len(self.outcomes) >= messages and self.listener.status(0, [])["lag_seconds"] == 0.0)
        finally:
            self.listener.stop()


def commit(table: str) -> dict[str, object]:
    return created("b", f"lake/{table}.lance/_versions/1.manifest")


@pytest.mark.parametrize(
    ("body", "shared", "receives", "outcome", "hidden"),
    [
        (commit("mine"), False, 1, "polled", None),
        (created("b", "lake/mine.lance/data/1.lance"), False, 1, "ignored", None),
        (created("b", "elsewhere"), False, 1, "unknown", None),
        ({"Event": "s3:TestEvent"}, False, 1, "ignored", None),
        ("garbage", False, 1, "unreadable", 3600),
        ("garbage", True, 99, "unreadable", 3600),
        (commit("theirs"), False, 1, "elsewhere", None),
        (commit("theirs"), True, 1, "elsewhere", 0),
        (commit("theirs"), True, 40, "elsewhere", 3),
        (commit("theirs"), True, 61, "elsewhere", None),
        (commit("fresh"), False, 1, "new", 5),
        (commit("fresh"), False, 13, "new", None),
    ],
)
def test_what_becomes_of_a_message(
    tmp_path: Path, body: object, shared: bool, receives: int, outcome: str, hidden: int | None
) -> None:
    queue = FakeQueue(body, receives=receives)
    heard = Heard(tmp_path, queue, shared=shared)
    heard.hear(1)
    assert heard.outcomes == [outcome]
    assert (queue.deleted, queue.hidden) == ((["0"], {}) if hidden is None else ([], {"0": hidden}))
    assert heard.polled == (["mine"] if outcome == "polled" else [])
    assert heard.new == (["s3://b/lake/fresh.lance"] if outcome == "new" else [])


def test_what_comes_while_it_stops_is_left_to_others(tmp_path: Path) -> None:
    queue = FakeQueue()
    heard = Heard(tmp_path, queue)
    heard.listener.start()
    until(lambda: heard.alive)
    late = FakeQueue(commit("mine")).waiting
    queue.receive = lambda _=20: heard.listener.stop() or late  # type: ignore[assignment, func-returns-value]
    until(lambda: queue.hidden)
    assert (queue.hidden, queue.deleted, heard.polled) == ({"0": 0}, [], [])


def test_of_many_records_none_is_lost(tmp_path: Path) -> None:
    both = {"Records": [*commit("theirs")["Records"], *commit("mine")["Records"]]}  # type: ignore[misc]
    queue = FakeQueue(both, *[commit("mine")] * 25)
    heard = Heard(tmp_path, queue, shared=True)
    heard.hear(26)
    assert set(heard.polled) == {"mine"}
    assert queue.hidden == {"0": 0}
    assert len(queue.deleted) == 25


def test_a_folder_that_is_no_table_is_listed_a_few_times_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal_ops.supervisor.events._ASK_AGAIN_SECONDS", 0.0)
    queue = FakeQueue(*[commit("fresh")] * 8)
    heard = Heard(tmp_path, queue)
    heard.hear(8)
    assert len(heard.new) == 3
    assert heard.outcomes == ["new"] * 3 + ["unknown"] * 5


def test_a_queue_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memwal_ops.supervisor.events._FIRST_WAIT", 0.01)
    queue = FakeQueue(commit("mine"))
    queue.errors = [StorageCredentialsError("The token has expired."), RuntimeError("a bug")]
    heard = Heard(tmp_path, queue)
    heard.hear(1)
    assert heard.alive == [False, True]
    assert queue.made == 3
    assert heard.polled == ["mine"]
    assert heard.listener.status(1, [])["error"] is None


def test_the_reason_is_reported(tmp_path: Path) -> None:
    queue = FakeQueue()
    queue.errors = [StorageCredentialsError("The token has expired.")] * 1000
    heard = Heard(tmp_path, queue)
    heard.listener.start()
    until(lambda: heard.alive)
    status = heard.listener.status(0, [])
    heard.listener.stop()
    assert (status["state"], status["error"]) == ("unreachable", "The token has expired.")


def test_without_the_right_to_delete_it_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is empty until its messages come again: it would seem to work for most of the time."""
    monkeypatch.setattr("memwal_ops.supervisor.events._FIRST_WAIT", 0.01)

    class Denied(FakeQueue):
        denied = True

        def delete(self, messages: object) -> None:
            if self.denied and messages:
                raise StorageCredentialsError("It is denied.")
            super().delete(messages)

    queue = Denied()
    heard = Heard(tmp_path, queue)
    heard.listener.start()
    until(lambda: heard.alive == [True])
    for times in (1, 2, 3):
        queue.waiting = FakeQueue(commit("mine")).waiting
        until(lambda times=times: queue.made > times)  # type: ignore[misc]  # it is called at once
    assert heard.alive == [True, False]
    assert heard.listener.status(0, [])["error"] == "It is denied."
    queue.denied = False
    queue.waiting = FakeQueue(commit("mine")).waiting
    until(lambda: heard.alive == [True, False, True])
    heard.listener.stop()
    assert queue.deleted == ["0"]
