"""Parse the messages that S3 sends: notifications of a bucket, also by SNS, and events of EventBridge."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CREATED = "ObjectCreated:"
_EVENT_BRIDGE_CREATED = "Object Created"
# SNS may send to a queue what EventBridge sent to it.
_MAX_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Created:
    """An object that was written, or copied, to a bucket. ``keys``: its key, as it may have been encoded."""

    bucket: str
    keys: tuple[str, ...]


class UnreadableError(Exception):
    """The message is not one that S3 sends."""


def objects_created(body: str) -> list[Created]:
    """Return the objects of which a message says that they were created; none: it says something else.

    Raises:
        UnreadableError: the message is not one that S3 sends.
    """
    try:
        return [*_created(body, _MAX_DEPTH)]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{type(error).__name__}: {error}") from error


def _created(body: Any, depth: int) -> Iterator[Created]:
    found: Any = json.loads(body) if isinstance(body, str) else body
    if depth and found.get("Type") == "Notification":  # SNS, without raw message delivery
        yield from _created(found["Message"], depth - 1)
    elif "Records" in found:
        for record in found["Records"]:
            yield from _of_record(record)
    elif found.get("source") == "aws.s3":
        if found["detail-type"] == _EVENT_BRIDGE_CREATED:
            detail = found["detail"]
            # Not encoded, other than in a notification; both are tried, as not all that send such events agree.
            key = _text(detail["object"]["key"])
            yield Created(_text(detail["bucket"]["name"]), tuple(dict.fromkeys((key, unquote_plus(key)))))
    elif found.get("Event") != "s3:TestEvent":
        raise ValueError("it is no event of S3")


def _of_record(record: Mapping[str, Any]) -> Iterator[Created]:
    of = record["s3"]
    bucket, key = _text(of["bucket"]["name"]), _text(of["object"]["key"])
    if str(record["eventName"]).removeprefix("s3:").startswith(_CREATED):
        yield Created(bucket, (unquote_plus(key),))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a name is empty, or is not text")
    return value
