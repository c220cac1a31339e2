"""Read the settings of an S3 bucket by which it deletes objects, or keeps deleted ones, independently of gc."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import botocore.config
from botocore import UNSIGNED
from botocore.exceptions import BotoCoreError, ClientError

from memwal_ops.storage.aws import session_with
from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from memwal_ops.storage.aws import AwsAccess

_TIMEOUT_SECONDS = 10


@dataclass(frozen=True)
class BucketSettings:
    """What is known of a bucket.

    Attributes:
        versioning: ``Enabled``, ``Suspended`` or ``off``; None if it could not be read.
        why: why it could not be read; else empty.
        expiring: the prefixes below which a lifecycle rule deletes current objects by age.
        expires_noncurrent: whether a rule deletes what versioning keeps.
    """

    versioning: str | None
    why: str = ""
    expiring: tuple[str, ...] = ()
    expires_noncurrent: bool = False


def bucket_settings(access: AwsAccess, bucket: str) -> BucketSettings:
    """Ask for versioning and lifecycle rules: two requests. A store that has neither, or forbids it, gives a reason."""
    session = session_with(access.credentials)
    config = botocore.config.Config(
        connect_timeout=_TIMEOUT_SECONDS, read_timeout=_TIMEOUT_SECONDS, retries={"total_max_attempts": 2},
        signature_version=UNSIGNED if access.credentials is None else None,
    )  # fmt: skip
    client: Any = session.client("s3", region_name=access.region, endpoint_url=access.endpoint, config=config)
    try:
        versioning = client.get_bucket_versioning(Bucket=bucket).get("Status", "off")
    except (BotoCoreError, ClientError) as error:
        return BucketSettings(None, redact(str(error)))
    try:
        rules = client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", [])
    except (BotoCoreError, ClientError):  # NoSuchLifecycleConfiguration, or not allowed to ask
        rules = []
    active = [rule for rule in rules if rule.get("Status") == "Enabled"]
    return BucketSettings(
        versioning,
        expiring=tuple(_prefix(rule) for rule in active if {"Days", "Date"} & {*rule.get("Expiration", ())}),
        expires_noncurrent=any("NoncurrentVersionExpiration" in rule for rule in active),
    )


def _prefix(rule: Any) -> str:
    """The prefix that a rule applies to; empty if it has none, also for a rule that filters by tags only."""
    where = rule.get("Filter", {})
    return str(where.get("Prefix") or where.get("And", {}).get("Prefix") or rule.get("Prefix") or "")
