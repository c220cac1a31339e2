"""An S3 server on the loopback interface that counts what it is asked for."""

from __future__ import annotations

import logging
import re
import urllib.request
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import boto3

from tests.support.s3_server import start_server

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = "bench"
BUCKET = "bench"


class _Counting(logging.Handler):
    """Counts the lines that the server writes for each request."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """One request."""
        found = re.search(r"(GET|HEAD|PUT|POST|DELETE) /", record.getMessage())
        if found is not None:
            self.counts[found[1]] += 1


@contextmanager
def counting_server() -> Iterator[tuple[dict[str, str], Counter[str]]]:
    """Storage options that reach the bucket :data:`BUCKET`, and the requests by method so far."""
    counting, server = _Counting(), start_server()
    logger = logging.getLogger("werkzeug")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(counting)
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        urllib.request.urlopen(f"{endpoint}/moto-api/reset", b"").close()  # what an earlier server of this process had
        boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=_KEY, aws_secret_access_key=_KEY
        ).create_bucket(Bucket=BUCKET)
        options = {
            "aws_endpoint": endpoint,
            "aws_region": "us-east-1",
            "allow_http": "true",
            "aws_access_key_id": _KEY,
            "aws_secret_access_key": _KEY,
        }
        yield options, counting.counts
    finally:
        server.stop()
