"""The address of a queue follows from its URL or its ARN."""

from __future__ import annotations

import pytest

from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.queues import Address, address_of

AWS = "https://sqs.eu-west-1.amazonaws.com"
PRIVATE = "https://vpce-1.sqs.eu-west-1.vpce.amazonaws.com"


@pytest.mark.parametrize(
    ("queue", "endpoint", "expected"),
    [
        (f"{AWS}/123456789012/q", None, Address(f"{AWS}/123456789012/q", AWS, "eu-west-1")),
        (f"{AWS}/123456789012/q", PRIVATE, Address(f"{AWS}/123456789012/q", PRIVATE, "eu-west-1")),
        (f"{PRIVATE}/123456789012/q", None, Address(f"{PRIVATE}/123456789012/q", PRIVATE, "eu-west-1")),
        ("arn:aws:sqs:eu-west-1:123456789012:q", None, Address(f"{AWS}/123456789012/q", AWS, "eu-west-1")),
        (
            "arn:aws-cn:sqs:cn-north-1:123456789012:q",
            None,
            Address(
                "https://sqs.cn-north-1.amazonaws.com.cn/123456789012/q",
                "https://sqs.cn-north-1.amazonaws.com.cn",
                "cn-north-1",
            ),
        ),
        (
            "https://eu-west-1.queue.amazonaws.com/123456789012/q",
            None,
            Address(
                "https://eu-west-1.queue.amazonaws.com/123456789012/q",
                "https://eu-west-1.queue.amazonaws.com",
                "eu-west-1",
            ),
        ),
        ("http://127.0.0.1:9/1/q", None, Address("http://127.0.0.1:9/1/q", "http://127.0.0.1:9", None)),
    ],
)
def test_addresses(queue: str, endpoint: str | None, expected: Address) -> None:
    assert address_of(queue, endpoint) == expected


@pytest.mark.parametrize(
    "queue",
    [
        "", "q", "arn:aws:sns:eu-west-1:123456789012:q", "https://sqs.eu-west-1.amazonaws.com/q", f"{AWS}/1/q.fifo",
        "https://key:secret@sqs.eu-west-1.amazonaws.com/1/q", f"{AWS}/1/q?x=1", "s3://b/q",
    ],
)  # fmt: skip
def test_what_is_no_queue_is_refused(queue: str) -> None:
    with pytest.raises(InvalidUsageError):
        address_of(queue)
