"""An S3 server on the loopback interface that counts what it is asked for."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.s3_buckets import Server

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

_KEY = "bench"
BUCKET = "bench"


@contextmanager
def counting_server() -> Iterator[tuple[dict[str, str], Counter[str]]]:
    """Storage options that reach the bucket :data:`BUCKET`, and the requests by method so far."""
    server = Server()
    try:
        server.buckets.objects[BUCKET] = {}
        options = {
            "aws_endpoint": server.endpoint,
            "aws_region": "us-east-1",
            "allow_http": "true",
            "aws_access_key_id": _KEY,
            "aws_secret_access_key": _KEY,
        }
        yield options, server.buckets.counts
    finally:
        server.shutdown()
        server.server_close()
