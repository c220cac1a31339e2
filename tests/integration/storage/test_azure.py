"""What Azure and Azurite answer that S3 does not, by a stand-in that gives the same answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from memwal_ops.errors import (
    InvalidUsageError,
    ObjectNotFoundError,
    ReadOnlyStoreError,
    StorageCredentialsError,
    StoreUnavailableError,
    TableNotFoundError,
)
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.errors import translate
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.options import redact
from memwal_ops.storage.probe import probe_compare_and_swap, probe_conditional_writes
from tests.integration.storage.conftest import IMPATIENT
from tests.support.azure_server import SAS, AzureServer, by_utf16

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.storage.objects import ObjectStore

URI = "az://c/some/t.lance"
SIGNATURE = SAS.partition("sig=")[2]


@pytest.fixture
def server() -> Iterator[AzureServer]:
    with AzureServer() as running:
        yield running


@pytest.fixture
def store(server: AzureServer) -> ObjectStore:
    return open_store(resolve(URI, server.options()), retry=IMPATIENT)


@pytest.fixture
def by_sas(server: AzureServer) -> ObjectStore:
    return open_store(resolve(URI, server.options(sas=True)), retry=IMPATIENT)


def filled(server: AzureServer, names: list[str]) -> None:
    server.blobs = {f"some/t.lance/{name}": name.encode() for name in names}


# -- listings


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_listing_has_each_object_once(server: AzureServer, store: ObjectStore, ignores: bool, broken: int) -> None:
    """Of 1,000 objects each is handed on; a failed page thereafter is asked for again from the last of them."""
    names = [f"p/{number:04}" for number in range(2300)]
    filled(server, names)
    server.page, server.ignores_start, server.broken = 1100, ignores, broken
    assert [meta.path for meta in store.list("p")] == names
    assert sum("startFrom" in path for _, path in server.seen) == broken
    server.broken = broken
    assert [meta.path for meta in store.list("p", after="p/0004")] == names[5:]
    server.broken = broken
    assert [meta.path for meta in store.list(after="p/0004x")] == names[5:]
    assert server.broken == 0
    assert list(store.list("p", after=names[-1])) == []


def test_a_listing_by_utf16_leaves_nothing_out(server: AzureServer, store: ObjectStore) -> None:
    """U+1F600 is before U+FB03 for JavaScript, and after it by bytes."""
    names = ["a/1", "a/\ufb03", "a/\U0001f600", "b"]
    filled(server, names)
    server.order = by_utf16
    assert {meta.path for meta in store.list()} == set(names)
    for after in names:
        assert {meta.path for meta in store.list(after=after)} == set(names[names.index(after) + 1 :])


def test_where_a_listing_would_continue_is_not_guessed(server: AzureServer, store: ObjectStore) -> None:
    names = [*(f"a/{number:04}" for number in range(999)), "a/\U0001f600", "a/\ufb03", "b"]
    filled(server, names)
    server.order, server.page, server.broken = by_utf16, 1000, 1
    with pytest.raises(StoreUnavailableError):
        list(store.list())
    assert {meta.path for meta in store.list()} == set(names)


def test_tags_are_spelled_alike_in_every_answer(server: AzureServer, by_sas: ObjectStore) -> None:
    store = by_sas
    store.put("a/x", b"1")
    (listed,), (level,), head = store.list("a"), store.list_level("a").objects, store.head("a/x")
    assert head is not None
    assert head.e_tag is not None
    assert '"' not in head.e_tag
    assert listed.e_tag == level.e_tag == head.e_tag
    probe_compare_and_swap(store)
    assert store.compare_and_swap("a/x", b"2", f'"{head.e_tag}"') is True, "as it comes from elsewhere"
    assert store.compare_and_swap("a/x", b"3", head.e_tag) is False
    assert list(server.blobs.values()) == [b"2"]


def test_a_range_of_an_empty_blob(store: ObjectStore) -> None:
    store.put("empty", b"")
    for start, length in ((0, 1), (0, 2), (1, 1), (0, 0), (7, 100)):
        assert store.get_range("empty", start, length) == b""
    with pytest.raises(ObjectNotFoundError):
        store.get_range("absent", 0, 1)


# -- deletes


def test_single_deletes_where_a_batch_is_refused(server: AzureServer, by_sas: ObjectStore) -> None:
    names = [f"ä +%/{number} a%20b#?&" for number in range(300)]
    filled(server, [*names, "kept"])
    report = by_sas.delete_many([*names, "absent"])
    assert (report.deleted, dict(report.failed)) == (301, {})
    assert set(server.blobs) == {"some/t.lance/kept"}
    assert server.methods().count("POST") == 2, "one for each 256"


def test_of_single_deletes_the_failed_are_named_without_the_signature(server: AzureServer, by_sas: ObjectStore) -> None:
    names = [f"d/{number}" for number in range(20)]
    filled(server, names)
    server.locked = {"some/t.lance/d/7", "some/t.lance/d/11"}
    report = by_sas.delete_many(names)
    assert (report.deleted, set(report.failed)) == (18, {"d/7", "d/11"})
    for said in report.failed.values():
        assert "AuthorizationPermissionMismatch" in said
        assert "\n" not in said
        assert SIGNATURE not in said
        assert "sig=" not in said
    assert server.methods().count("POST") == 1


def test_a_store_that_is_away_is_waited_for_once(server: AzureServer, by_sas: ObjectStore) -> None:
    filled(server, [f"d/{number}" for number in range(600)])
    server.single = 503
    began = time.monotonic()
    report = by_sas.delete_many(f"d/{number}" for number in range(600))
    assert (report.deleted, len(report.failed)) == (0, 600)
    assert time.monotonic() - began < 15 * IMPATIENT.deadline, "and not for each of the 600"


def test_a_busy_store_is_no_refusal_of_batches(server: AzureServer, by_sas: ObjectStore) -> None:
    filled(server, ["d/1", "d/2"])
    server.batch = 503
    assert set(by_sas.delete_many(["d/1", "d/2"]).failed) == {"d/1", "d/2"}
    assert set(server.methods()) == {"POST"}


def test_no_other_identity_deletes(server: AzureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an account key beside it the SAS signs nothing, and so deletes nothing."""
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", SAS)
    filled(server, ["d/1"])
    with_key = open_store(resolve(URI, server.options()), retry=IMPATIENT)
    assert set(with_key.delete_many(["d/1"]).failed) == {"d/1"}
    assert set(server.methods()) == {"POST"}


def test_the_probe_takes_away_only_what_it_wrote(server: AzureServer, by_sas: ObjectStore) -> None:
    server.denied = True
    for probe in (probe_conditional_writes, probe_compare_and_swap):
        with pytest.raises(ReadOnlyStoreError):
            probe(by_sas)
    with pytest.raises(ReadOnlyStoreError):
        by_sas.compare_and_swap("x", b"1", "tag")
    assert server.methods() == ["PUT", "PUT", "PUT"]
    server.denied = False
    probe_conditional_writes(by_sas)
    probe_compare_and_swap(by_sas)
    assert server.blobs == {}


# -- names


def test_a_backslash_is_refused(server: AzureServer, store: ObjectStore) -> None:
    store.put("a/b", b"theirs")
    server.seen.clear()
    for verb in (
        store.get,
        store.head,
        lambda path: store.get_range(path, 0, 1),
        lambda path: store.put(path, b"ours"),
        lambda path: store.put_if_absent(path, b"ours"),
        lambda path: store.compare_and_swap(path, b"ours", "tag"),
        lambda path: list(store.list(path)),
        store.list_level,
    ):
        with pytest.raises(InvalidUsageError, match="backslash"):
            verb("a\\b")
    report = store.delete_many(["a\\b"])
    assert (report.deleted, set(report.failed)) == (0, {"a\\b"})
    assert (server.seen, server.blobs) == ([], {"some/t.lance/a/b": b"theirs"})
    for uri in ("az://c/a\\b", "azure://c/a%5Cb", "abfss://c@acc.dfs.core.windows.net/a\\b"):
        with pytest.raises(InvalidUsageError, match="backslash"):
            resolve(uri)


@pytest.mark.parametrize(
    ("uri", "resolved", "account"),
    [
        ("az://c/p/t.lance", "az://c/p/t.lance", None),
        ("azure://c/p/t.lance/", "az://c/p/t.lance", None),
        ("abfss://c/p/t.lance", "az://c/p/t.lance", None),
        ("abfs://c/p/t.lance", "az://c/p/t.lance", None),
        ("abfss://c@Acc1.dfs.core.windows.net/p/t%20.lance", "az://c/p/t%20.lance", "acc1"),
        ("ABFS://c@acc1.blob.core.windows.net/p/t.lance", "az://c/p/t.lance", "acc1"),
        ("abfss://c@acc1.dfs.core.windows.net", "az://c", "acc1"),
    ],
)
def test_spellings_of_one_place(uri: str, resolved: str, account: str | None) -> None:
    found = resolve(uri, {"azure_storage_account_key": "bm8ga2V5"})
    assert (found.uri, found.scheme) == (resolved, "az")
    assert found.lance_options.get("azure_storage_account_name") == account
    assert resolve(uri, {"account_name": account or "x"}).lance_options.get("azure_storage_account_name") is None


@pytest.mark.parametrize(
    "uri",
    [
        "abfss://c@acc1.dfs.fabric.microsoft.com/p",
        "az://acc1.blob.core.windows.net/c/p",
        "az://c@acc1.dfs.core.windows.net/p",
        "abfss://@acc1.dfs.core.windows.net/p",
        "abfss://c:secret@acc1.dfs.core.windows.net/p",
    ],
)
def test_a_container_that_cannot_be_read(uri: str) -> None:
    with pytest.raises(InvalidUsageError) as refused:
        resolve(uri)
    assert "az://CONTAINER/PATH" in refused.value.remedy
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["wasbs", "adl", "https", "ftp"])
def test_other_schemes_are_refused_with_the_spellings_that_are_known(scheme: str) -> None:
    with pytest.raises(InvalidUsageError, match=r"az://CONTAINER/PATH.*abfss://CONTAINER@ACCOUNT"):
        resolve(f"{scheme}://c/p")


def test_two_accounts_are_refused() -> None:
    for key in ("azure_storage_account_name", "account_name"):
        with pytest.raises(InvalidUsageError, match="acc1"):
            resolve("abfss://c@acc1.dfs.core.windows.net/p", {key: "other"})


# -- messages


def test_messages_are_one_line_and_speak_of_azure(server: AzureServer, by_sas: ObjectStore) -> None:
    server.denied = True
    with pytest.raises(ReadOnlyStoreError) as refused:
        by_sas.put("x", b"")
    assert str(refused.value) == (
        "Cannot write 'x': the store responded with 403 AuthorizationPermissionMismatch: "
        "This request is not authorized to perform this operation."
    )
    assert "SAS" in refused.value.remedy
    with pytest.raises(ObjectNotFoundError) as absent:
        by_sas.get("x")
    assert (
        str(absent.value)
        == "Cannot read 'x': the store responded with 404 BlobNotFound: The specified blob does not exist."
    )


XML = (
    '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n<Error>\n  <Code>{}</Code>\n  <Message>{}\n'
    "RequestId:e813cbf0-ba7d-46d8-8cab-262037017e9e\nTime:2026-11-22T01:24:13.370Z</Message>\n</Error>"
)


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [
        (403, "AuthorizationFailure", "Server failed to authenticate the request. Make sure", StorageCredentialsError),
        (403, "AuthenticationFailed", "Server failed to authenticate the request.", StorageCredentialsError),
        (403, "AuthorizationFailure", "This request is not authorized", ReadOnlyStoreError),
        (404, "ContainerNotFound", "The specified container does not exist.", TableNotFoundError),
    ],
)
def test_azures_errors(status: int, code: str, message: str, kind: type[Exception]) -> None:
    said = OSError(
        f"LanceError(IO): The operation lacked the necessary privileges to complete for path t/x: Error performing PUT "
        f"http://h/c/t/x in 3ms - Server returned non-2xx status code: {status} X: {XML.format(code, message)}"
    )
    for action in ("write", "commit to"):
        found = translate(said, path=URI, action=action)
        assert type(found) is kind
        assert str(found) == f"Cannot {action} {URI!r}: the store responded with {status} {code}: {message}"
        assert "AWS" not in found.remedy
        assert "account" in found.remedy
    for action in ("read", "list"):
        assert "AWS" not in translate(said, path=URI, action=action).remedy


def test_one_object_of_a_batch_is_no_whole_request() -> None:
    """obstore's words for a blob that may not go, among others that went."""
    said = OSError(
        "Generic MicrosoftAzure error: Bulk delete request failed for key t/a/0: This request is not authorized to "
        "perform this operation using this permission. (code: 403)"
    )
    found = translate(said, path="a/0", action="delete")
    assert type(found) is ReadOnlyStoreError
    assert "SAS" in found.remedy


def test_the_signature_of_a_sas_is_no_text() -> None:
    """Also of one that was never an option here."""
    signature = "bmV2ZXIgc2VlbiBiZWZvcmU%3D"
    sas = SAS.replace(SIGNATURE, signature)
    for text in (f"GET http://h/c/x?{sas} failed", f"'{sas}'", f"uri: Some(\n http://h/c/x?{sas},\n)"):
        assert signature not in redact(text)
