"""A commit to a table in S3 reaches its job by an event: tables are polled once an hour."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from tests.support.event_queue import EventQueue
from tests.support.s3_events import created
from tests.support.s3_server import options_for
from tests.support.service import Running, service
from tests.support.waiting import PATIENCE, until

pytest_plugins = ["tests.support.s3_server"]

Bucket = tuple[str, dict[str, str]]
OFF = ", ".join(f"{job}: {{enabled: false}}" for job in ("merge", "catchup", "snapshot", "verify"))
ROWS = pa.table({"id": pa.array(range(100), pa.int64())})


@pytest.fixture
def bucket(moto_endpoint: str, moto_bucket: str) -> Bucket:
    return f"s3://{moto_bucket}", options_for(moto_endpoint)


@pytest.fixture
def events(moto_endpoint: str, moto_bucket: str) -> EventQueue:
    """A new queue, which the bucket notifies of manifests below ``lake/``."""
    queue = EventQueue(moto_endpoint, moto_bucket)
    queue.notify("lake/", ".manifest", ".binpb")
    return queue


def configure(tmp_path: Path, bucket: Bucket, events: str, tables: str, more: str = "", name: str = "config") -> Path:
    """Each table is compacted as soon as a poll finds three fragments."""
    options = ", ".join(f"{key}: '{value}'" for key, value in bucket[1].items())
    compact = "compact: {schedule: null, when: fragments >= 3}"
    path = tmp_path / f"{name}.yaml"
    path.write_text(
        f"state_dir: {tmp_path}/state-{name}\nhttp: {{port: 0}}\ndiscover: 1h\nevents: {events}\n{more}\n"
        f"defaults: {{poll: 1h, storage_options: {{{options}}}, jobs: {{{compact}, {OFF}}}}}\ntables: [{tables}]\n"
    )
    return path


def append(bucket: Bucket, name: str, times: int = 1) -> None:
    for _ in range(times):
        lance.write_dataset(ROWS, f"{bucket[0]}/lake/{name}.lance", mode="append", storage_options=bucket[1])


def status(running: Running) -> dict[str, Any]:
    found: dict[str, Any] = running.get("/api/v1/status")
    return found


def polled(running: Running, *names: str) -> bool:
    return {table["name"] for table in status(running)["tables"] if table["looked_at"] is not None} >= {*names}


def listens(running: Running) -> bool:
    return bool(status(running)["service"]["events"]["state"] == "listening")


def compacted(running: Running, name: str) -> bool:
    return any(run["outcome"] == "succeeded" for run in running.runs(table=name, job="compact"))


@pytest.mark.timeout(3 * PATIENCE)
def test_a_commit_and_a_new_table_reach_their_jobs(tmp_path: Path, bucket: Bucket, events: EventQueue) -> None:
    append(bucket, "orders")
    table = f"{{pattern: '{bucket[0]}/lake/*.lance'}}"
    with service(configure(tmp_path, bucket, events.config, table)) as running:
        until(lambda: listens(running) and polled(running, "orders"))
        append(bucket, "orders", 2)
        until(lambda: compacted(running, "orders"))
        assert [run["why"] for run in running.runs(table="orders")] == ["when: fragments >= 3"]
        # What the compaction committed had the table polled once more, and that found nothing to do.
        until(lambda: events.left() == (0, 0))
        assert len(running.runs(table="orders")) == 1

        # A table that no listing has found yet.
        append(bucket, "users", 3)
        until(lambda: compacted(running, "users"))

        found = status(running)["service"]["events"]
        assert (found["error"], found["tables"], found["missed"], found["unreadable"]) == (None, 2, [], 0)
        text = running.get("/metrics")
        assert "memwal_ops_events_ok 1.0" in text
        assert "memwal_ops_events_tables 2.0" in text
        assert 'memwal_ops_events_total{outcome="polled"}' in text
        assert "Events announce the commits of 2 tables" in running.get("/")


@pytest.mark.long
@pytest.mark.timeout(3 * PATIENCE)
def test_members_of_a_fleet_share_a_queue(tmp_path: Path, bucket: Bucket, events: EventQueue) -> None:
    names = [f"t{number}" for number in range(4)]
    for name in names:
        append(bucket, name)
    options = ", ".join(f"{key}: '{value}'" for key, value in bucket[1].items())
    fleet = f"fleet: {{uri: {bucket[0]}/ops/, heartbeat: 5s, storage_options: {{{options}}}, name: "
    tables = ", ".join(f"{{uri: '{bucket[0]}/lake/{table}.lance'}}" for table in names)
    with ExitStack() as stack:
        files = [configure(tmp_path, bucket, events.config, tables, f"{fleet}{name}}}", name) for name in "ab"]
        members = [stack.enter_context(service(file)) for file in files]
        until(lambda: all(map(listens, members)))
        until(lambda: sorted(one["name"] for member in members for one in status(member)["tables"]) == names)
        until(lambda: all(polled(member, *(one["name"] for one in status(member)["tables"])) for member in members))
        for name in names:
            append(bucket, name, 2)
        # Whoever received the event: the one that has the table compacts it.
        until(lambda: all(any(compacted(member, name) for member in members) for name in names))
        until(lambda: events.left() == (0, 0))


@pytest.mark.long
@pytest.mark.timeout(3 * PATIENCE)
def test_a_queue_with_anything_in_it_that_is_closed_and_comes_back(
    tmp_path: Path, bucket: Bucket, events: EventQueue
) -> None:
    append(bucket, "orders")
    name = bucket[0].removeprefix("s3://")
    garbage = ["no JSON", "[]", "{}", '{"Records": 1}', '{"Records": [{"s3": null}]}', "\u2603" * 1000]
    harmless = [
        {"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": name},
        created("other", "lake/x"),
        created(name, "%ff+%"),
    ]
    for body in [*garbage, *harmless]:
        events.send(body)
    table = f"{{uri: '{bucket[0]}/lake/orders.lance'}}"
    with service(configure(tmp_path, bucket, events.config, table)) as running:
        until(lambda: listens(running) and polled(running, "orders"))
        # What is not S3's is left in the queue, and reported; the rest is deleted.
        until(lambda: events.left() == (0, len(garbage)))
        assert status(running)["service"]["events"]["unreadable"] == len(garbage)
        assert "has messages that are not S3&#39;s" in running.get("/")
        append(bucket, "orders", 2)
        until(lambda: compacted(running, "orders"))

        events.client.delete_queue(QueueUrl=events.url)
        until(lambda: status(running)["service"]["events"]["state"] == "unreachable")
        assert "The queue of events cannot be read" in running.get("/")
        assert "memwal_ops_events_ok 0.0" in running.get("/metrics")
        assert status(running)["service"]["ready"], "polls go on"
        again = EventQueue(events.endpoint, events.bucket, events.name)
        assert again.url == events.url
        runs = len(running.runs(table="orders"))
        until(lambda: listens(running))
        append(bucket, "orders", 2)
        until(lambda: len(running.runs(table="orders")) > runs)
