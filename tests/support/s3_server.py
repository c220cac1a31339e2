"""S3 servers on the loopback interface, one of each per test process, with a fresh bucket per test.

A plugin: ``pytest_plugins = ["tests.support.s3_server"]`` gives the fixtures ``s3_endpoint``, ``s3_bucket``,
``s3_options`` and, of the last two, ``bucket``, of the server in :mod:`tests.support.s3_buckets`; ``moto_endpoint`` and
``moto_bucket`` are for what that server lacks: queues, DynamoDB, settings of buckets. Both enforce
``If-None-Match: *`` and ``If-Match``; they do not check signatures. Only tests that ask import moto, boto3.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.s3_buckets import Stored, server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from moto.server import ThreadedMotoServer

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
REGION = "eu-west-1"


def options_for(endpoint: str) -> dict[str, str]:
    """Storage options that reach ``endpoint`` without any help from the environment."""
    return {
        "aws_endpoint": endpoint,
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "aws_region": REGION,
        "allow_http": "true",
    }


def start_server() -> ThreadedMotoServer:
    """Moto's server in threads of this process, on a free port.

    moto looks whether an object exists and puts it then; of two requests at once both may find nothing, which
    S3 rules out. So one is carried out after the other.
    """
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    if not hasattr(S3Response.put_object, "__wrapped__"):
        S3Response.put_object = _one_at_a_time(S3Response.put_object)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    return moto


def _one_at_a_time(put_object: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.Lock()

    @functools.wraps(put_object)
    def put(*arguments: Any) -> Any:
        with lock:
            return put_object(*arguments)

    return put


def put_many(bucket: str, keys: Iterable[str]) -> None:
    """Objects of one byte in a server of this process, past HTTP: a hundred times as fast."""
    if (objects := server().buckets.objects.get(bucket)) is not None:
        objects.update(dict.fromkeys(keys, Stored.of(b"x")))
        return
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for key in keys:
        backend.put_object(bucket, key, b"x")


@pytest.fixture(scope="session")
def s3_endpoint() -> str:
    """The server's URL."""
    return server().endpoint


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """That of moto's server."""
    moto = start_server()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def s3_bucket(s3_endpoint: str) -> Iterator[str]:
    """The name of a new, empty bucket."""
    buckets = server().buckets.objects
    buckets[name := f"bucket-{uuid.uuid4().hex[:12]}"] = {}
    yield name
    del buckets[name]


@pytest.fixture
def moto_bucket(moto_endpoint: str) -> str:
    """The same in moto's server."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    s3_client(moto_endpoint).create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
    return name


@pytest.fixture
def s3_options(s3_endpoint: str) -> dict[str, str]:
    """Storage options for the server."""
    return options_for(s3_endpoint)


@pytest.fixture
def bucket(s3_bucket: str, s3_options: dict[str, str]) -> tuple[str, dict[str, str]]:
    """URI of a new, empty bucket, and the storage options that reach it."""
    return f"s3://{s3_bucket}", s3_options


@pytest.fixture
def no_aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """An environment in which nothing about AWS is set, and no metadata service is asked."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    empty = tmp_path_factory.mktemp("aws")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(empty / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(empty / "credentials"))


def s3_client(endpoint: str):  # type: ignore[no-untyped-def]
    """A boto3 client, to look at a bucket past the code under test."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )
