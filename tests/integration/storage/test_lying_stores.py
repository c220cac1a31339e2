"""Answers that get lost, come late or lie: what a retry may and may not conclude from them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import pytest

from memwal_ops.errors import (
    ConditionalWriteUnsupportedError,
    MemwalOpsError,
    ReadOnlyStoreError,
    StorageCredentialsError,
    StoreUnavailableError,
    TableNotFoundError,
)
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.errors import RetryPolicy, conditional_write
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_compare_and_swap, probe_conditional_writes
from tests.integration.storage.conftest import IMPATIENT
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import options_for, put_many, s3_client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.storage.objects import ObjectStore

FOREVER = 10_000
ANY_LOSS = [
    pytest.param("before", None, id="reset-before"),
    pytest.param("after", None, id="reset-after"),
    pytest.param("before", 503, id="503-before"),
    pytest.param("after", 500, id="500-after"),
    pytest.param("after", 504, id="504-after"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("when", "status"), ANY_LOSS)
def test_put_if_absent_whose_answer_is_lost_is_ours(
    behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy, when: str, status: int | None
) -> None:
    proxy.faults = [Fault("PUT", "v/7", when, status)]  # type: ignore[arg-type]
    assert behind.put_if_absent("v/7", b"ours") is True
    assert direct.get("v/7") == b"ours"
    assert proxy.faults[0].times == 0
    assert proxy.count("PUT") == (1 if when == "after" else 2), "a write that landed is not repeated"


@pytest.mark.parametrize(("when", "status"), ANY_LOSS)
def test_put_if_absent_whose_answer_is_lost_may_be_anothers(
    behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy, when: str, status: int | None
) -> None:
    assert direct.put_if_absent("v/7", b"theirs") is True
    proxy.faults = [Fault("PUT", "v/7", when, status)]  # type: ignore[arg-type]
    assert behind.put_if_absent("v/7", b"ours") is False
    assert direct.get("v/7") == b"theirs"


def test_the_read_back_may_fail_too(behind: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.faults = [
        Fault("PUT", "v/7", "after"),
        Fault("GET", "v/7", "before", 503, times=2),
        Fault("GET", "v/7", "after"),
    ]
    assert behind.put_if_absent("v/7", b"ours") is True
    assert proxy.count("PUT") == 1


def test_a_definite_refusal_costs_one_request(behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    direct.put("v/7", b"theirs")
    assert behind.put_if_absent("v/7", b"ours") is False
    assert [method for method, _ in proxy.seen] == ["PUT"]


def test_conflict_of_two_conditional_writes_is_no_refusal(behind: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault("PUT", "v/7", "before", 409, "ConditionalRequestConflict")]
    assert behind.put_if_absent("v/7", b"ours") is True


def test_a_late_request_of_ours_is_recognised() -> None:
    """The first put arrives after we looked and before we put again."""
    stands: list[bytes] = []
    attempts = 0

    def write() -> bool:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise TimeoutError("timed out")
        stands.append(b"ours")
        return False

    answers: Iterator[bool | None] = iter([None, True])
    policy = RetryPolicy(deadline=600, first_wait=0.001, max_wait=0.002)
    assert conditional_write(write, lambda: next(answers), path="v/7", policy=policy) is True
    assert attempts == 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("when", "status"), ANY_LOSS)
def test_compare_and_swap_whose_answer_is_lost(
    behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy, when: str, status: int | None
) -> None:
    direct.put("object", b"old")
    meta = direct.head("object")
    assert meta is not None
    assert meta.e_tag is not None
    proxy.faults = [Fault("PUT", "object", when, status)]  # type: ignore[arg-type]
    assert behind.compare_and_swap("object", b"new", meta.e_tag) is True
    proxy.faults = [Fault("PUT", "object", when, status)]  # type: ignore[arg-type]
    assert behind.compare_and_swap("object", b"late", meta.e_tag) is False
    assert direct.get("object") == b"new"


def test_reads_are_repeated(behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy) -> None:
    direct.put("a/object", b"0123456789")
    for fault in ("before", 503), ("after", None), ("before", 429):
        when, status = fault
        for verb, method in (
            (lambda: behind.get("a/object"), "GET"),
            (lambda: behind.get_range("a/object", 0, 10), "GET"),
            (lambda: behind.head("a/object") and b"0123456789", "HEAD"),
            (lambda: behind.list_level("a").objects and b"0123456789", "GET"),
        ):
            proxy.faults = [Fault(method, ".", when, status, "SlowDown", times=2)]  # type: ignore[arg-type]
            assert verb() == b"0123456789"
            assert proxy.faults[0].times == 0


def test_after_the_deadline_the_store_is_unavailable(hasty: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault(method, ".", "before", 503, "SlowDown", FOREVER) for method in ("GET", "PUT", "HEAD", "POST")]
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="SlowDown"):
        hasty.put_if_absent("v/7", b"ours")
    assert 1.0 < time.monotonic() - start < RetryPolicy().deadline
    for verb in (lambda: hasty.get("x"), lambda: list(hasty.list())):
        with pytest.raises(StoreUnavailableError):
            verb()
    report = hasty.delete_many(["a", "b"])
    assert report.deleted == 0
    assert set(report.failed) == {"a", "b"}


def test_a_definite_error_is_not_repeated(behind: ObjectStore, proxy: FaultyProxy) -> None:
    cases: list[tuple[int, str, type[MemwalOpsError], type[MemwalOpsError]]] = [
        (403, "AccessDenied", StorageCredentialsError, ReadOnlyStoreError),
        (403, "InvalidAccessKeyId", StorageCredentialsError, StorageCredentialsError),
        (403, "SignatureDoesNotMatch", StorageCredentialsError, StorageCredentialsError),
        (400, "ExpiredToken", StorageCredentialsError, StorageCredentialsError),
        (401, "Unauthorized", StorageCredentialsError, StorageCredentialsError),
        (404, "NoSuchBucket", TableNotFoundError, TableNotFoundError),
    ]
    for status, code, on_read, on_write in cases:
        proxy.faults = [Fault(method, ".", "before", status, code, FOREVER) for method in ("GET", "PUT", "POST")]
        proxy.seen.clear()
        for read in (lambda: behind.get("x"), lambda: list(behind.list()), lambda: behind.get_range("x", 0, 1)):
            with pytest.raises(on_read):
                read()
        for write in (lambda: behind.put("x", b""), lambda: behind.put_if_absent("x", b"")):
            with pytest.raises(on_write):
                write()
        with pytest.raises(on_write):
            behind.compare_and_swap("x", b"", "tag")
        assert len(proxy.seen) == 6, code
        report = behind.delete_many(f"object {number}" for number in range(1500))
        assert (report.deleted, len(report.failed)) == (0, 1500)
        assert proxy.count("POST") <= 2, code


def test_a_listing_continues_where_a_page_failed(behind: ObjectStore, s3_bucket: str, proxy: FaultyProxy) -> None:
    names = {f"p/ä +%/{number:05d}" for number in range(2300)}
    put_many(s3_bucket, (f"t.lance/{name}" for name in names))
    proxy.faults = [
        Fault("GET", "continuation-token|start-after", "before", 503, "SlowDown", times=2),
        Fault("GET", "start-after", "after", None, times=1),
    ]
    listed = [meta.path for meta in behind.list("p")]
    assert len(listed) == len(names)
    assert set(listed) == names
    assert [fault.times for fault in proxy.faults] == [0, 0]


def test_failed_deletes_are_named(behind: ObjectStore, s3_bucket: str, s3_endpoint: str, proxy: FaultyProxy) -> None:
    names = [f"object {number}" for number in range(40)]
    for name in names:
        behind.put(name, b"x")
    kept = {"object 7", "object 31"}
    proxy.undeletable = {f"t.lance/{name}" for name in kept}
    report = behind.delete_many(names)
    assert set(report.failed) == kept
    assert report.deleted == 38
    standing = s3_client(s3_endpoint).list_objects_v2(Bucket=s3_bucket)["Contents"]
    assert {entry["Key"].removeprefix("t.lance/") for entry in standing} == kept


@pytest.mark.req("S3-044", "S3-045")
def test_the_probe_finds_a_store_that_ignores_the_condition(
    behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy
) -> None:
    proxy.drop_condition = True
    with pytest.raises(ConditionalWriteUnsupportedError):
        probe_conditional_writes(behind)
    assert list(direct.list()) == []
    proxy.drop_condition = False
    probe_conditional_writes(behind)
    proxy.seen.clear()
    probe_conditional_writes(behind)
    assert proxy.seen == [], "a proof holds for the process"


@pytest.mark.req("S4-021")
@pytest.mark.parametrize("quoted", ["compared", "refused"])
def test_a_tag_is_sent_as_the_store_compares_it(
    behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy, quoted: Literal["compared", "refused"]
) -> None:
    proxy.quoted_tags = quoted
    direct.put("object", b"old")
    meta = behind.head("object")
    assert meta is not None
    assert meta.e_tag is not None
    assert behind.compare_and_swap("object", b"new", meta.e_tag) is True
    proxy.seen.clear()
    assert behind.compare_and_swap("object", b"late", meta.e_tag) is False
    assert proxy.count("PUT") == 1, "how to spell a tag is found out once"
    assert direct.get("object") == b"new"
    probe_compare_and_swap(behind)
    assert [entry.path for entry in direct.list()] == ["object"]


@pytest.mark.sampled(1)
@pytest.mark.req("S4-021")
@pytest.mark.parametrize(("quoted", "drops"), [("refused", False), ("compared", True)])
def test_a_store_that_ignores_a_tag_has_no_compare_and_swap(
    behind: ObjectStore, direct: ObjectStore, proxy: FaultyProxy, quoted: Literal["compared", "refused"], drops: bool
) -> None:
    """Were the second spelling tried on the object itself, it would be overwritten."""
    proxy.quoted_tags, proxy.bare_tags, proxy.drop_condition = quoted, "ignored", drops
    direct.put("object", b"old")
    meta = direct.head("object")
    assert meta is not None
    assert meta.e_tag is not None
    for tag in (meta.e_tag, "another"):
        with pytest.raises(ConditionalWriteUnsupportedError, match="compare-and-swap"):
            behind.compare_and_swap("object", b"new", tag)
    with pytest.raises(ConditionalWriteUnsupportedError):
        probe_compare_and_swap(behind)
    assert {entry.path: direct.get(entry.path) for entry in direct.list()} == {"object": b"old"}


def test_a_store_whose_client_has_no_swap_by_tag() -> None:
    """GCS compares generations; obstore says so before any request."""
    store = open_store(resolve("gs://bucket/t.lance", {"google_skip_signature": "true"}), retry=IMPATIENT)
    with pytest.raises(ConditionalWriteUnsupportedError, match="no compare-and-swap"):
        store._swap("object", b"new", "tag")


def test_the_probe_names_a_store_that_refuses_the_condition(behind: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.faults = [Fault("PUT", ".", "before", 501, "NotImplemented", FOREVER)]
    with pytest.raises(ConditionalWriteUnsupportedError):
        probe_conditional_writes(behind)


def test_no_server_at_the_endpoint() -> None:
    store = open_store(
        resolve("s3://bucket/t.lance", options_for("http://127.0.0.1:1")),
        retry=RetryPolicy(deadline=0.3, first_wait=0.01),
    )
    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
        store.get("x")
