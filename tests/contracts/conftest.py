"""An S3 stand-in for the contracts that speak of object stores."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="session")
def bucket() -> Iterator[tuple[str, dict[str, str]]]:
    """(URI of an empty bucket, storage options)."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {
        "aws_access_key_id": "testing", "aws_secret_access_key": "testing", "aws_region": "us-east-1",
        "aws_endpoint": f"http://{host}:{port}", "allow_http": "true",
    }  # fmt: skip
    s3 = boto3.client(
        "s3", endpoint_url=options["aws_endpoint"], region_name="us-east-1",
        aws_access_key_id="testing", aws_secret_access_key="testing",
    )  # fmt: skip
    s3.create_bucket(Bucket="contracts")
    yield "s3://contracts", options
    server.stop()
