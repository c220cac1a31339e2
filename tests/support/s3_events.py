"""Events as S3 sends them."""

from __future__ import annotations

from typing import Any


def created(bucket: str, key: str, event: str = "ObjectCreated:Put") -> dict[str, Any]:
    """A notification of S3, with the key as it is given."""
    return {"Records": [{"eventName": event, "s3": {"bucket": {"name": bucket}, "object": {"key": key}}}]}
