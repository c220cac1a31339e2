"""docs/events.md and runbooks/no-events.md: their commands, and a commit that comes by the queue that they make."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import lance
import pyarrow as pa
import pytest

from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage.queues import Queue, QueueMessage, address_of
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.events import Created, objects_created
from tests.support.event_queue import EventQueue
from tests.support.run_cli import run_here
from tests.support.runbook import commands
from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY, options_for
from tests.support.waiting import until

pytest_plugins = ["tests.support.s3_server"]
ROOT = Path(__file__).parents[3]
EVENTS, NO_EVENTS = (ROOT / "docs/events.md").read_text(), (ROOT / "runbooks/no-events.md").read_text()
Bucket = tuple[str, dict[str, str]]


@pytest.fixture
def bucket(moto_endpoint: str, moto_bucket: str) -> Bucket:
    return f"s3://{moto_bucket}", options_for(moto_endpoint)


@pytest.fixture
def events(moto_endpoint: str, moto_bucket: str) -> EventQueue:
    return EventQueue(moto_endpoint, moto_bucket)


def aws(endpoint: str, line: str, files: Mapping[str, Any]) -> Any:
    """Run a command of the AWS command line by boto3, which has the same operations and parameters."""
    _, service, operation, *options = shlex.split(line.partition("   #")[0])
    given: dict[str, Any] = {}
    for name, value in zip(options[::2], options[1::2], strict=True):
        key = "".join(part.title() for part in name.removeprefix("--").split("-"))
        given[key] = files[value.removeprefix("file://")] if value.startswith("file://") else value
    if "AttributeNames" in given:
        given["AttributeNames"] = [given["AttributeNames"]]
    keys: Any = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    client: Any = boto3.client(service.removesuffix("api"), endpoint_url=endpoint, region_name=REGION, **keys)  # type: ignore[call-overload]
    return getattr(client, operation.replace("-", "_"))(**given)


def open_queue(queue: EventQueue, options: Mapping[str, str]) -> Queue:
    return Queue(address_of(queue.url), options, REGION)


def received(queue: Queue) -> list[QueueMessage]:
    """What is in the queue, until nothing comes any more."""
    found: list[QueueMessage] = []
    while more := queue.receive(0):
        found += more
    return found


def test_the_commands_of_the_pages(
    tmp_path: Path, bucket: Bucket, events: EventQueue, capfd: pytest.CaptureFixture[str]
) -> None:
    here = EVENTS.replace("warehouse", events.bucket).replace("memwal-ops", events.name)
    texts = re.findall(r"^```json\n(.*?)^```", here, re.MULTILINE | re.DOTALL)
    files = {"queue.json": json.loads(texts[0]), "notification.json": json.loads(texts[1])}
    policy = json.loads(files["queue.json"]["Policy"])["Statement"][0]
    assert (policy["Resource"], policy["Condition"]["ArnEquals"]["aws:SourceArn"][13:]) == (events.arn, events.bucket)
    events.client.delete_queue(QueueUrl=events.url)
    made, before, put = (aws(events.endpoint, line, files) for line in commands(here) if line.startswith("aws"))
    assert made["QueueUrl"] == events.url
    assert "QueueConfigurations" not in before
    assert put["ResponseMetadata"]["HTTPStatusCode"] == 200

    # The configuration of the page, and a commit below its prefix.
    (settings,) = re.findall(r"^```yaml\n(.*?)^```", EVENTS, re.MULTILINE | re.DOTALL)
    (tmp_path / "page.yaml").write_text(settings)
    assert run_here(capfd, "config", "check", str(tmp_path / "page.yaml")).code == 0
    config = load_settings(str(tmp_path / "page.yaml")).config.events
    assert config is not None
    assert config.queue.endswith("/123456789012/memwal-ops")
    queue = open_queue(events, bucket[1])
    received(queue)  # a test event of S3 may be there
    for name in ("lance/a b+c.lance", "other/t.lance"):
        lance.write_dataset(pa.table({"id": [1]}), f"{bucket[0]}/{name}", storage_options=bucket[1])
    (message,) = received(queue)
    (created,) = objects_created(message.body)
    assert created.bucket == events.bucket
    assert re.fullmatch(r"lance/a b\+c\.lance/_versions/\d+\.manifest", created.keys[0])

    for line in commands(NO_EVENTS.replace("$BUCKET", events.bucket).replace("$QUEUE", events.url)):
        if line.startswith("aws"):
            assert {"Attributes", "QueueConfigurations"} & aws(events.endpoint, line, {}).keys()


def test_a_queue_behind_a_topic(bucket: Bucket, events: EventQueue) -> None:
    topic = events.sns.create_topic(Name=events.name)["TopicArn"]
    events.sns.subscribe(TopicArn=topic, Protocol="sqs", Endpoint=events.arn)
    queue = open_queue(events, bucket[1])
    client = boto3.client(
        "s3", endpoint_url=events.endpoint, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY
    )
    client.put_bucket_notification_configuration(
        Bucket=events.bucket,
        NotificationConfiguration={"TopicConfigurations": [{"TopicArn": topic, "Events": ["s3:ObjectCreated:*"]}]},
    )
    received(queue)
    client.put_object(Bucket=events.bucket, Key="a b/ü+%.manifest", Body=b"x")
    (message,) = received(queue)
    assert '"Type": "Notification"' in message.body
    assert objects_created(message.body) == [Created(events.bucket, ("a b/ü+%.manifest",))]


def test_messages_are_deleted_or_left_for_later(bucket: Bucket, events: EventQueue) -> None:
    for number in range(12):
        events.send(str(number))
    queue = open_queue(events, bucket[1])
    messages = received(queue)
    assert sorted(int(one.body) for one in messages) == [*range(12)]
    assert {one.receives for one in messages} == {1}
    assert all(one.sent is not None for one in messages)
    queue.delete(messages[:9])
    queue.hide([(messages[9], 0), (messages[10], 0), (messages[11], 3600)])
    again = until(lambda: received(queue))
    assert {one.body for one in again} == {messages[9].body, messages[10].body}
    assert {one.receives for one in again} == {2}
    assert events.left() == (0, 3)


def test_a_queue_that_is_gone_is_an_error(bucket: Bucket, events: EventQueue) -> None:
    queue = open_queue(events, bucket[1])
    events.client.delete_queue(QueueUrl=events.url)
    with pytest.raises(MemwalOpsError, match="Cannot receive messages of 'http"):
        queue.receive(0)
