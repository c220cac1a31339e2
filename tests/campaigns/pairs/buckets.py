"""Buckets of an S3 server in this process, for rows whose table is not on local files."""

from __future__ import annotations

import os
import shutil
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def _endpoint() -> str:
    """Of an S3 server in this process, which ends with it; programs reach it by their environment."""
    from tests.support.s3_server import options_for, start_server

    host, port = start_server().get_host_and_port()
    for name, value in options_for(f"http://{host}:{port}").items():
        os.environ[name.upper()] = value
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": os.environ["AWS_REGION"]}
    return f"http://{host}:{port}"


def new_bucket() -> str:
    """The URI of an empty bucket."""
    from tests.support.s3_server import REGION, s3_client

    name = f"pairs-{uuid.uuid4().hex[:12]}"
    s3_client(_endpoint()).create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": REGION})
    return f"s3://{name}"


def offer_store(row: Mapping[str, str]) -> None:
    """A bucket for a row that needs one, named in the environment of its program."""
    if row.get("store", "local") != "local":
        os.environ["PAIRS_BUCKET"] = new_bucket()


def mirror(uri: str) -> Path:
    """The files below a URI; of a bucket as they are now, in a folder that is made anew."""
    if "://" not in uri:
        return Path(uri)
    from tests.support.s3_server import s3_client

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    place = Path("mirror", prefix).absolute()
    shutil.rmtree(place, ignore_errors=True)
    client = s3_client(_endpoint())
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix + "/"):
        for one in page.get("Contents", ()):
            path = place / one["Key"].removeprefix(prefix + "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=bucket, Key=one["Key"])["Body"].read())
    return place
