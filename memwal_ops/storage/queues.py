"""Receive messages of a queue of SQS."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from memwal_ops.errors import InvalidUsageError

# The longest that SQS has, so that an empty queue costs three requests a minute.
WAIT_SECONDS = 20
# A message is another receiver's after this time, if this process died with it.
_IN_FLIGHT_SECONDS = 15
_BATCH = 10
_ARN = re.compile(r"arn:(aws[a-z-]*):sqs:([a-z0-9-]+):(\d{12}):([A-Za-z0-9_-]{1,80})")
_URL = re.compile(r"(https?://[^/\s?#@]+)/(\d+)/([A-Za-z0-9_-]{1,80})", re.IGNORECASE)
_REGION = re.compile(r"(?:^|\.)(?:sqs\.([a-z]{2}-[a-z0-9-]+)\.|([a-z]{2}-[a-z0-9-]+)\.queue\.amazonaws)")


@dataclass(frozen=True, slots=True)
class QueueMessage:
    """One message.

    ``sent``: when it was sent, in seconds since 1970 by the clock of SQS; None: the queue did not say.
    """

    id: str
    body: str
    handle: str
    receives: int = 1
    sent: float | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a queue is: its URL, the endpoint of requests, and its region, if the URL or the ARN has it."""

    url: str
    endpoint: str
    region: str | None


def address_of(queue: str, endpoint: str | None = None) -> Address:
    """Return where the queue of a URL or an ARN is.

    ``endpoint``: of requests; None: the host of the URL.

    Raises:
        InvalidUsageError: it is neither, or it is a queue that S3 cannot send to.
    """
    if queue.endswith(".fifo"):
        raise InvalidUsageError(
            "S3 sends no events to a FIFO queue.", remedy="Give a standard queue: the order of events does not matter."
        )
    if arn := _ARN.fullmatch(queue):
        partition, region, account, name = arn.groups()
        at = endpoint or f"https://sqs.{region}.amazonaws.com{'.cn' if partition == 'aws-cn' else ''}"
        return Address(f"{at.rstrip('/')}/{account}/{name}", at, region)
    url = _URL.fullmatch(queue)
    if url is None:
        raise InvalidUsageError(
            "It is neither the URL nor the ARN of a queue.",
            remedy="Write https://sqs.REGION.amazonaws.com/ACCOUNT/NAME, as aws sqs get-queue-url prints it.",
        )
    match = _REGION.search(str(urlsplit(url[1]).hostname))
    return Address(queue, endpoint or url[1], None if match is None else match[1] or match[2])


class Queue:
    """One queue. Used by one thread.

    ``storage_options``: ``aws_*`` options for credentials and the region, as those of tables. ``region``: that of the
    queue; None: that of the address, else of the options.
    """

    def __init__(self, address: Address, storage_options: Mapping[str, str], region: str | None = None) -> None:
        """Send no request to the queue. Raises if options contradict each other, or no credentials can be had."""
        from botocore.config import Config  # noqa: PLC0415 - boto3: for S3 only

        from memwal_ops.storage.aws import resolve_aws, session_with  # noqa: PLC0415 - boto3, as above
        from memwal_ops.storage.options import canonical  # noqa: PLC0415 - as above

        self._url = address.url
        access = resolve_aws(canonical(storage_options, "s3"))
        access.frozen()  # registers the secrets, and fails here if there are none
        client: Any = session_with(access.credentials).client
        self._client = client(
            "sqs",
            region_name=region or address.region or access.region,
            endpoint_url=address.endpoint,
            config=Config(
                retries={"mode": "standard", "total_max_attempts": 2}, connect_timeout=5, read_timeout=WAIT_SECONDS + 10
            ),
        )

    def receive(self, seconds: int = WAIT_SECONDS) -> list[QueueMessage]:
        """Return the next messages, at most 10; none: there were none for ``seconds``.

        Raises ``MemwalOpsError``: the queue failed, or refused.
        """
        response = self._request(
            "receive",
            "receive_message",
            MaxNumberOfMessages=_BATCH,
            WaitTimeSeconds=seconds,
            VisibilityTimeout=_IN_FLIGHT_SECONDS,
            MessageSystemAttributeNames=["ApproximateReceiveCount", "SentTimestamp"],
        )
        return [_message(message) for message in response.get("Messages") or ()]

    def delete(self, messages: Sequence[QueueMessage]) -> None:
        """Delete messages. Raises: see :meth:`receive`."""
        self._batch("delete", "delete_message_batch", [(message, {}) for message in messages])

    def hide(self, messages: Iterable[tuple[QueueMessage, int]]) -> None:
        """Leave messages in the queue, each to be received again after so many seconds. Raises: see :meth:`receive`."""
        changed = [(message, {"VisibilityTimeout": seconds}) for message, seconds in messages]
        self._batch("release", "change_message_visibility_batch", changed)

    def _batch(self, action: str, name: str, messages: Sequence[tuple[QueueMessage, Mapping[str, int]]]) -> None:
        """What fails for one message alone is not an error: it is received again."""
        entries = [
            {"Id": str(number), "ReceiptHandle": message.handle, **more}
            for number, (message, more) in enumerate(messages)
        ]
        if entries:
            self._request(action, name, Entries=entries)

    def _request(self, action: str, name: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 - boto3, as above

        from memwal_ops.storage.errors import translate  # noqa: PLC0415 - as above

        try:
            return getattr(self._client, name)(QueueUrl=self._url, **arguments)
        except (BotoCoreError, ClientError, OSError) as error:
            raise translate(error, path=self._url, action=f"{action} messages of") from error


def _message(given: Mapping[str, Any]) -> QueueMessage:
    attributes = given.get("Attributes") or {}
    sent = attributes.get("SentTimestamp")
    return QueueMessage(
        str(given.get("MessageId", "")),
        str(given.get("Body", "")),
        str(given["ReceiptHandle"]),
        int(attributes.get("ApproximateReceiveCount") or 1),
        None if sent is None else int(sent) / 1000,
    )
