"""A queue of SQS beside the S3 server of the tests, which a bucket notifies as the documentation has it."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY, s3_client

if TYPE_CHECKING:
    from moto.sqs.models import Queue


class EventQueue:
    """A queue; ``config``: the value of ``events:`` in a configuration."""

    def __init__(self, endpoint: str, bucket: str, name: str | None = None) -> None:
        import boto3
        from moto.sqs.models import Queue

        Queue.wait_for_messages = _wait_for_messages
        keys: Any = {"endpoint_url": endpoint, "region_name": REGION}
        keys |= {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
        self.endpoint, self.bucket = endpoint, bucket
        self.client, self.sns = boto3.client("sqs", **keys), boto3.client("sns", **keys)
        self.name = name or f"queue-{uuid.uuid4().hex[:8]}"
        self.url = self.client.create_queue(QueueName=self.name)["QueueUrl"]
        attributes = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=["QueueArn"])
        self.arn = attributes["Attributes"]["QueueArn"]

    @property
    def config(self) -> str:
        return f"{{queue: '{self.url}', region: {REGION}}}"

    def notify(self, prefix: str = "lake/", *suffixes: str) -> None:
        """Have the bucket notify the queue of what is created."""
        s3_client(self.endpoint).put_bucket_notification_configuration(
            Bucket=self.bucket, NotificationConfiguration=notification(self.arn, prefix, *suffixes)
        )

    def send(self, body: str | Mapping[str, Any]) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.client.send_message(QueueUrl=self.url, MessageBody=text)

    def left(self) -> tuple[int, int]:
        """How many messages are visible, and how many are not."""
        names: Any = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = self.client.get_queue_attributes(QueueUrl=self.url, AttributeNames=names)["Attributes"]
        return int(found[names[0]]), int(found[names[1]])


def notification(arn: str, prefix: str, *suffixes: str) -> Any:
    """The configuration of a bucket's notifications, as in docs/events.md."""
    rules = [{"Name": "prefix", "Value": prefix}]
    return {
        "QueueConfigurations": [
            {
                "QueueArn": arn,
                "Events": ["s3:ObjectCreated:*"],
                "Filter": {"Key": {"FilterRules": [*rules, *([{"Name": "suffix", "Value": one}] if one else [])]}},
            }
            for one in suffixes or ("",)
        ]
    }


def _wait_for_messages(queue: Queue, timeout: int) -> None:
    """Wait as SQS does, also for a message that becomes visible: moto wakes up for new ones alone."""
    end = time.monotonic() + timeout
    while not queue.messages and time.monotonic() < end:
        time.sleep(0.05)
