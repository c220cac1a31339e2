"""Buckets for rows whose table is not on local files."""

from __future__ import annotations

import os
import shutil
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.s3_buckets import Buckets, server

if TYPE_CHECKING:
    from collections.abc import Mapping


@cache
def _buckets() -> Buckets:
    """Of a server that ends with this process; programs reach it by their environment."""
    from tests.support.s3_server import options_for

    endpoint = server().endpoint
    for name, value in options_for(endpoint).items():
        os.environ[name.upper()] = value
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": os.environ["AWS_REGION"]}
    return server().buckets


def offer_store(row: Mapping[str, str]) -> None:
    """A bucket for a row that needs one, named in the environment of its program; those of earlier rows go."""
    if row.get("store", "local") != "local":
        name = f"pairs-{uuid.uuid4().hex[:12]}"
        _buckets().objects = {name: {}}
        os.environ["PAIRS_BUCKET"] = f"s3://{name}"


def mirror(uri: str) -> Path:
    """The files below a URI; of a bucket as they are now, in a folder that is made anew."""
    if "://" not in uri:
        return Path(uri)
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    place = Path("mirror", prefix).absolute()
    shutil.rmtree(place, ignore_errors=True)
    for key, stored in [*_buckets().objects[bucket].items()]:
        if key.startswith(prefix + "/"):
            path = place / key.removeprefix(prefix + "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(stored.body)
    return place
