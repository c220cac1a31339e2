"""What S3, SNS and EventBridge send is understood; anything else is refused, and raises nothing else."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest

from memwal_ops.supervisor.events import Created, UnreadableError, objects_created
from tests.support.s3_events import created

ORDERS = [Created("b", ("lake/a b/1.manifest",))]
PLAIN = created("b", "lake/a+b/1.manifest")
BRIDGE = {
    "source": "aws.s3",
    "detail-type": "Object Created",
    "detail": {"bucket": {"name": "b"}, "object": {"key": "lake/a+b/1.manifest"}},
}


def by_sns(body: object) -> dict[str, Any]:
    return {"Type": "Notification", "TopicArn": "arn:aws:sns:eu-west-1:1:t", "Message": json.dumps(body)}


@pytest.mark.parametrize("body", [PLAIN, by_sns(PLAIN), created("b", "lake/a%20b/1.manifest", "s3:ObjectCreated:Copy")])
def test_notifications_and_their_keys_are_decoded(body: object) -> None:
    assert objects_created(json.dumps(body)) == ORDERS


@pytest.mark.parametrize("body", [BRIDGE, by_sns(BRIDGE)])
def test_event_bridge_does_not_encode_keys(body: object) -> None:
    assert objects_created(json.dumps(body)) == [Created("b", ("lake/a+b/1.manifest", "lake/a b/1.manifest"))]


@pytest.mark.parametrize(
    "body",
    [
        {"Service": "Amazon S3", "Event": "s3:TestEvent", "Time": "2026-01-01T00:00:00.000Z", "Bucket": "b"},
        {"Records": []},
        created("b", "k", "ObjectRemoved:Delete"),
        created("b", "k", "LifecycleExpiration:Delete"),
        {**BRIDGE, "detail-type": "Object Deleted"},
    ],
)
def test_of_other_events_nothing_follows(body: object) -> None:
    assert objects_created(json.dumps(body)) == []


def test_one_message_may_have_several_records() -> None:
    records = [*created("b", "x")["Records"], *created("c", "y")["Records"]]
    assert [one.bucket for one in objects_created(json.dumps({"Records": records}))] == ["b", "c"]


@pytest.mark.parametrize(
    "body",
    [
        "", "no JSON", "null", "1", '"text"', "[]", "{}", '{"Records": 1}', '{"Records": [1]}', '{"Records": [{}]}',
        '{"Records": [{"s3": null}]}', '{"Records": [{"s3": {"bucket": {"name": 1}, "object": {"key": "k"}}}]}',
        '{"Type": "Notification"}', '{"Type": "Notification", "Message": "x"}', '{"source": "aws.s3"}', "[" * 100_000,
        json.dumps(by_sns(by_sns(by_sns(by_sns(by_sns(PLAIN)))))), json.dumps(created("b", "")),
    ],
)  # fmt: skip
def test_what_is_not_of_s3_is_refused(body: str) -> None:
    with pytest.raises(UnreadableError):
        objects_created(body)


def test_no_damage_raises_anything_else() -> None:
    chance = random.Random(43)
    for body in (PLAIN, BRIDGE, by_sns(PLAIN)):
        for _ in range(300):
            text = [*json.dumps(body)]
            for _ in range(chance.randint(1, 3)):
                text[chance.randrange(len(text))] = chance.choice('{}[]",:\\0n\u2603')
            with suppress(UnreadableError):
                objects_created("".join(text))
