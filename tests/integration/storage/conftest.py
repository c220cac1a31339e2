"""Stores to run the contract on."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.locations import Location
from memwal_ops.storage.objects import ObjectStore, open_store
from tests.support.faulty_proxy import FaultyProxy
from tests.support.s3_server import options_for, put_many

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.support.servers import RealStore

# For stores that never answer well, and for those that do after some attempts, however long they take.
IMPATIENT = RetryPolicy(deadline=2.0, first_wait=0.01, max_wait=0.05)
PATIENT = RetryPolicy(deadline=600.0, first_wait=0.01, max_wait=0.05)


REAL = [pytest.param(name, marks=pytest.mark.real_store) for name in ("azurite", "rgw")]


@pytest.fixture(params=["local", "memory", "s3", "moto", *REAL])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty place in each kind of store."""
    if request.param in {"azurite", "rgw"}:
        return place_in(request.getfixturevalue(request.param))
    if request.param == "local":
        return resolve(tmp_path / "table.lance")
    if request.param == "memory":
        return resolve(f"memory://{uuid.uuid4().hex}")
    bucket = request.getfixturevalue(f"{request.param}_bucket")
    options = options_for(request.getfixturevalue(f"{request.param}_endpoint"))
    return resolve(f"s3://{bucket}/some/table.lance", options)


def place_in(real: RealStore, name: str = "table.lance") -> Location:
    """A place of its own in a bucket that tests share."""
    return resolve(f"{real.uri}/{uuid.uuid4().hex[:12]}/{name}", real.options)


@pytest.fixture
def store(location: Location) -> ObjectStore:
    """The store there."""
    return open_store(location)


@pytest.fixture
def fill(request: pytest.FixtureRequest, location: Location, store: ObjectStore) -> Callable[[Iterable[str]], None]:
    """Puts objects of one byte under many names."""

    def put(names: Iterable[str]) -> None:
        if request.node.callspec.params["location"] in {"s3", "moto"}:
            bucket, _, prefix = location.uri.removeprefix("s3://").partition("/")
            put_many(bucket, (f"{prefix}/{name}" for name in names))
        else:
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda name: store.put(name, b"x"), names))

    return put


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultyProxy]:
    """A proxy before the S3 server."""
    with FaultyProxy(s3_endpoint) as running:
        yield running


@pytest.fixture
def behind(proxy: FaultyProxy, s3_bucket: str) -> ObjectStore:
    """A store that goes through the proxy, and does not give up."""
    return open_store(resolve(f"s3://{s3_bucket}/t.lance", options_for(proxy.endpoint)), retry=PATIENT)


@pytest.fixture
def hasty(proxy: FaultyProxy, s3_bucket: str) -> ObjectStore:
    """The same, which gives up after two seconds."""
    return open_store(resolve(f"s3://{s3_bucket}/t.lance", options_for(proxy.endpoint)), retry=IMPATIENT)


@pytest.fixture
def direct(s3_options: dict[str, str], s3_bucket: str) -> ObjectStore:
    """The same store past the proxy."""
    return open_store(resolve(f"s3://{s3_bucket}/t.lance", s3_options))
