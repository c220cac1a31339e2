"""Requests are counted one by one, with their bytes, and those of a library as long as it lives and afterwards."""

from __future__ import annotations

import gc

import pytest
from botocore.hooks import HierarchicalEmitter

from memwal_ops.storage.aws import session_with
from memwal_ops.storage.locations import resolve_folder
from memwal_ops.storage.metering import REMOTE, Meter, Traffic
from memwal_ops.storage.objects import open_store


def test_each_request_counts_with_its_bytes() -> None:
    store = open_store(resolve_folder("memory://metered"))
    before = REMOTE.traffic()
    store.put("a/x", b"12345")
    assert store.put_if_absent("a/x", b"123") is False
    assert store.get("a/x") == b"12345"
    assert store.get_range("a/x", 1, 2) == b"23"
    assert store.head("a/y") is None
    assert [one.path for one in store.list("a")] == ["a/x"]
    assert not list(store.list("nothing"))
    store.list_level("")
    store.delete_many(["a/x"])
    found = REMOTE.traffic().since(before)
    assert found.requests == {"get": 3, "put": 2, "list": 3, "delete": 1}
    assert (found.bytes_read, found.bytes_written) == (7, 8)


def test_what_a_library_sends_counts_until_its_owner_is_gone() -> None:
    class Owner:
        """Lives as long as the dataset that it stands for."""

    meter, sent = Meter(), {"get": 1}
    owner = Owner()
    meter.watch(owner, lambda: Traffic(dict(sent), bytes_read=10))
    assert meter.traffic().requests["get"] == 1
    sent["get"] = 5
    assert meter.traffic().requests["get"] == 5
    del owner
    gc.collect()
    assert meter.traffic() == Traffic({"get": 5}, 10)
    sent["get"] = 100
    assert meter.traffic() == Traffic({"get": 5}, 10), "read once more after it ended, and not again"
    meter.count("put", written=3)
    assert meter.traffic() == Traffic({"get": 5, "put": 1}, 10, 3)


@pytest.mark.usefixtures("no_aws_environment")
def test_a_store_does_not_register_botocores_handlers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took 20 ms of a processor for each session, and a run opens dozens of stores; each session has its own."""
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region": "eu-west-1"}
    locations = [resolve_folder(f"s3://bucket/{name}", keys) for name in "ab"]
    registered: list[str] = []
    plain = HierarchicalEmitter.register
    monkeypatch.setattr(
        HierarchicalEmitter, "register", lambda self, name, *more: (registered.append(name), plain(self, name, *more))
    )
    stores = [open_store(location) for location in (*locations, resolve_folder("s3://bucket/c", keys))]
    assert (registered, len(stores)) == ([], 3)
    one, other = session_with(None), session_with(None)
    one.events.register("creating-client-class.s3", lambda **_: registered.append("called"))
    other.client("s3", region_name="eu-west-1")
    assert registered.count("called") == 0
    one.client("s3", region_name="eu-west-1")
    assert registered.count("called") == 1
