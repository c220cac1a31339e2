"""A store that passed the probe is remembered for a day; whatever is doubtful about that, it is tried again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from memwal_ops.errors import ConditionalWriteUnsupportedError
from memwal_ops.storage import probe
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.storage.wrapper import StoreWrapper
from tests.integration.storage.conftest import IMPATIENT
from tests.support.faulty_proxy import FaultyProxy
from tests.support.run_cli import run_here
from tests.support.s3_server import options_for

if TYPE_CHECKING:
    from collections.abc import Callable

DAY = 24 * 3600
FILES = "memwal-ops/proven-stores/*.json"
TRY = """
import json, sys
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.storage.probe import probe_conditional_writes
probe_conditional_writes(open_store(resolve(sys.argv[1], json.loads(sys.argv[2]))))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder of a user who ran nothing yet."""
    monkeypatch.delenv(probe.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def requests_of_a_command(proxy: FaultyProxy, s3_bucket: str) -> Callable[..., int]:
    """How many requests the probe makes in a process that remembers nothing by itself."""

    def count(table: str = "t.lance", **options: str) -> int:
        probe._proven.clear()
        proxy.seen.clear()
        store = open_store(resolve(f"s3://{s3_bucket}/{table}", {**options_for(proxy.endpoint), **options}))
        probe_conditional_writes(StoreWrapper(store))
        return len(proxy.seen)

    return count


@pytest.mark.long
def test_a_store_is_tried_once_a_day(requests_of_a_command: Callable[..., int], cache: Path) -> None:
    assert requests_of_a_command() > 10
    assert requests_of_a_command() == 0
    assert requests_of_a_command("another/table.lance") == 0
    assert requests_of_a_command(aws_access_key_id="another", aws_secret_access_key="identity") == 0
    [file] = cache.glob(FILES)
    for moved, tried in ((-3600, False), (-DAY - 1, True), (3600, True)):
        document = json.loads(file.read_text())
        file.write_text(json.dumps({**document, "proven": time.time() + moved}))
        assert (requests_of_a_command() > 0) is tried, moved
        assert requests_of_a_command() == 0


@pytest.mark.long
def test_another_store_is_tried(
    requests_of_a_command: Callable[..., int], s3_bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert requests_of_a_command() > 0
    assert requests_of_a_command(user_agent="through another gateway") > 0
    with FaultyProxy(s3_endpoint) as other:
        probe_conditional_writes(open_store(resolve(f"s3://{s3_bucket}/t.lance", options_for(other.endpoint))))
        assert other.seen
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert requests_of_a_command() > 0
    monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setattr(probe, "_RELEASES", "another release")
    assert requests_of_a_command() > 0


@pytest.mark.parametrize(
    ("user", "one", "other"),
    [
        ("any", "http://disaster-recovery:9000", "http://disaster-recovery:9001"),
        ("any", "http://kansas-1.example.com:9000", "http://kansas-1.example.com:9001"),
        (None, "http://tenant-1.example.com", "http://tenant-2.example.com"),
    ],
)
def test_endpoints_that_look_like_secrets_are_told_apart(
    user: str | None, one: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's name may be the name of the host; ``sas`` is an option's name, and a part of other names."""

    def service(endpoint: str) -> str | None:
        name = user or endpoint.removeprefix("http://").removesuffix(".example.com")
        return probe.service_of(resolve("s3://b/t", {**options_for(endpoint), "aws_access_key_id": name}))

    assert service(one) == service(one) != service(other)
    services = set()
    for proxy in (one, other, one.replace("//", "//user:word@")):
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        services.add(service("http://s3"))
    assert len(services) == 2, "a user in a URL is left out"


def test_two_endpoints_in_one_process_are_two_stores(proxy: FaultyProxy, s3_bucket: str, s3_endpoint: str) -> None:
    uri = f"s3://{s3_bucket}/t.lance"
    probe_conditional_writes(open_store(resolve(uri, options_for(s3_endpoint))))
    proxy.drop_condition = True
    with pytest.raises(ConditionalWriteUnsupportedError):
        probe_conditional_writes(open_store(resolve(uri, options_for(proxy.endpoint)), retry=IMPATIENT))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"\xff", b"[" * 4096, b"{}", b'{"proven": "now"}', b'{"proven": 1' + b"0" * 400 + b"}"],
)
def test_a_damaged_file_counts_for_nothing(
    requests_of_a_command: Callable[..., int], cache: Path, content: bytes
) -> None:
    requests_of_a_command()
    [file] = cache.glob(FILES)
    file.write_bytes(content)
    assert requests_of_a_command() > 0
    assert requests_of_a_command() == 0


def test_the_file_of_another_store_counts_for_nothing(requests_of_a_command: Callable[..., int], cache: Path) -> None:
    requests_of_a_command()
    [file] = cache.glob(FILES)
    file.write_text(json.dumps({**json.loads(file.read_text()), "service": "s3://another 0"}))
    assert requests_of_a_command() > 0


def test_a_home_that_cannot_be_written(requests_of_a_command: Callable[..., int], cache: Path) -> None:
    cache.write_text("a file where the folder belongs: nobody can write below it, not even root")
    assert requests_of_a_command() > 0
    assert requests_of_a_command() > 0
    assert cache.is_file()


@pytest.mark.parametrize("value", ["", "not/absolute"])
def test_nothing_is_remembered_where_it_is_not_wanted(
    requests_of_a_command: Callable[..., int], cache: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(probe.CACHE_VARIABLE, value)
    assert requests_of_a_command() > 0
    assert requests_of_a_command() > 0
    assert not cache.exists()
    assert not os.path.exists("not")


@pytest.mark.long
def test_a_failure_is_not_remembered_and_ends_an_earlier_success(
    proxy: FaultyProxy, s3_bucket: str, requests_of_a_command: Callable[..., int], cache: Path
) -> None:
    proxy.drop_condition = True
    for _ in range(2):
        with pytest.raises(ConditionalWriteUnsupportedError):
            requests_of_a_command()
        assert not list(cache.glob(FILES))
    proxy.drop_condition = False
    requests_of_a_command()
    assert list(cache.glob(FILES))
    proxy.drop_condition = True
    store = open_store(resolve(f"s3://{s3_bucket}/t.lance", options_for(proxy.endpoint)))
    with pytest.raises(ConditionalWriteUnsupportedError):
        probe_conditional_writes(store, again=True)
    assert not list(cache.glob(FILES))
    with pytest.raises(ConditionalWriteUnsupportedError):
        probe_conditional_writes(store)


def test_the_command_that_tries_a_store_always_tries(
    proxy: FaultyProxy, s3_bucket: str, requests_of_a_command: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    requests_of_a_command()
    proxy.drop_condition = True
    options = [
        part for key, value in options_for(proxy.endpoint).items() for part in ("--storage-option", f"{key}={value}")
    ]
    assert run_here(capfd, "probe", f"s3://{s3_bucket}/t.lance", *options).code == 23


def test_local_files_are_always_tried(tmp_path: Path, cache: Path) -> None:
    probe_conditional_writes(open_store(resolve(tmp_path / "t.lance")))
    assert not cache.exists()


def test_two_processes(proxy: FaultyProxy, s3_bucket: str, cache: Path) -> None:
    """At the same time both may try it; what they leave is one whole file, by which the next one does not."""
    arguments = [sys.executable, "-c", TRY, f"s3://{s3_bucket}/t.lance", json.dumps(options_for(proxy.endpoint))]
    both = [subprocess.Popen(arguments) for _ in range(2)]
    assert [process.wait(600) for process in both] == [0, 0]
    assert proxy.seen
    assert [path.suffix for path in (cache / "memwal-ops/proven-stores").iterdir()] == [".json"]
    proxy.seen.clear()
    subprocess.run(arguments, check=True, timeout=600)
    assert proxy.seen == []


def test_no_secret_is_written_and_old_files_go(requests_of_a_command: Callable[..., int], cache: Path) -> None:
    folder = cache / "memwal-ops/proven-stores"
    folder.mkdir(parents=True)
    old, young = folder / "old.json", folder / "young.json"
    for file, age in ((old, DAY + 60), (young, 60)):
        file.write_text("{}")
        os.utime(file, (time.time() - age, time.time() - age))
    requests_of_a_command(aws_secret_access_key="do-not-write-me")
    assert not old.exists()
    assert young.exists()
    assert all("do-not-write-me" not in file.read_text() for file in folder.iterdir())
