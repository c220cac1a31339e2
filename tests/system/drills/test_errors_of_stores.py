"""Drills of errors that a store brings about: S3 behind a proxy that fails, and folders without permission."""

from __future__ import annotations

import os
import shutil
import time
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops.storage.errors import RetryPolicy
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import options_for
from tests.support.tables import damage
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload
from tests.system.drills.tables import with_generations

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.system.drills.drill import Drill

FOREVER = 10**9
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
LONG_AGO = 5 * 86_400


@pytest.fixture
def local(drill: Drill, tmp_path: Path) -> Iterator[Workload]:
    """The same on local files; commands are run as somebody whom permissions hold."""
    made = with_generations(str(tmp_path / "t.lance"))
    drill.given(URI=made.uri)
    drill.wrap = damage.held_by_permissions
    yield made
    damage.make_writable(made.uri)


def failing(status: int, code: str, methods: tuple[str, ...] = METHODS) -> list[Fault]:
    return [Fault(method, ".", "before", status, code, FOREVER) for method in methods]


def all_is_merged(table: Workload) -> None:
    assert_same(read_base(table.uri, table.storage_options), table.expected())


@pytest.mark.s3
def test_20_storage(drill: Drill, remote: Workload, proxy: FaultyProxy) -> None:
    proxy.faults = failing(400, "OverdueAccount")
    assert "OverdueAccount" in drill.refused('memwal-ops inspect "$URI"')["message"]
    drill.follow_until(proxy.faults.clear, before="memwal-ops merge")
    all_is_merged(remote)


@pytest.mark.long
@pytest.mark.s3
def test_21_storage_credentials(drill: Drill, remote: Workload, proxy: FaultyProxy) -> None:
    proxy.faults = failing(403, "InvalidAccessKeyId")
    assert "InvalidAccessKeyId" in drill.refused('memwal-ops merge "$URI"')["message"]
    proxy.faults.clear()
    drill.given(AWS_PROFILE="nobody")
    assert "nobody" in drill.refused('memwal-ops inspect "$URI"')["message"]
    _, profiles, source, inspected = drill.rest()
    assert (profiles.out, source.out) == ("[]\n", "env\n")
    assert "2 (1 to 2)" in inspected.out


@pytest.mark.long
def test_22_read_only_store(drill: Drill, local: Workload) -> None:
    damage.make_read_only(local.uri)
    version = lance.dataset(local.uri).version
    *_, refused = drill.follow(3)
    drill.told(refused)
    assert lance.dataset(local.uri).version == version
    drill.rest()
    all_is_merged(local)


@pytest.mark.s3
def test_23_conditional_write_unsupported(
    drill: Drill, remote: Workload, proxy: FaultyProxy, s3_endpoint: str, s3_options: dict[str, str]
) -> None:
    proxy.drop_condition = True
    version = lance.dataset(remote.uri, storage_options=s3_options).version
    drill.refused('memwal-ops merge "$URI"')
    drill.follow_until(lambda: drill.given(AWS_ENDPOINT_URL=s3_endpoint), before="memwal-ops merge")
    assert lance.dataset(remote.uri, storage_options=s3_options).version == version + 1, "nothing landed before"
    all_is_merged(remote)


@pytest.mark.s3
def test_24_store_unavailable(
    drill: Drill, remote: Workload, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memwal_ops.storage.errors.RetryPolicy", lambda: RetryPolicy(deadline=0.3, first_wait=0.01))
    proxy.faults = failing(503, "SlowDown")
    assert "SlowDown" in drill.refused('memwal-ops merge "$URI"')["message"]
    outcomes = drill.follow_until(proxy.faults.clear, before="memwal-ops merge")
    assert outcomes[1].out == "reached\n"
    all_is_merged(remote)


@pytest.mark.long
def test_27_deletes_failed(drill: Drill, local: Workload) -> None:
    listed = damage.generation_path(local.uri, local.regions[0], 1)
    orphan = listed.with_name("0badcafe_gen_1")
    shutil.copytree(listed, orphan)
    then = time.time() - LONG_AGO
    for path in [orphan, *orphan.rglob("*")]:
        os.utime(path, (then, then))
    damage.make_read_only(str(orphan))
    first, *_ = drill.rest()
    assert first.document["decision"] == "incomplete"
    assert {one["path"].split("/")[2] for one in first.document["failed"]} == {orphan.name}
    assert all(one["error"] for one in first.document["failed"])
    assert not [path for path in orphan.rglob("*") if path.is_file()]
    assert listed.is_dir()


@pytest.mark.s3
def test_31_commit_state_unknown(drill: Drill, remote: Workload, proxy: FaultyProxy) -> None:
    """The commit lands, its answer is lost, and the store then refuses to be read."""
    # Versions are named by what is left of 64 bits.
    version = lance.dataset(remote.uri, storage_options=options_for(proxy.endpoint)).version + 1
    manifest = f"_versions/{2**64 - 1 - version:020d}"

    proxy.faults = [
        Fault("PUT", manifest, "after", 500),
        Fault("GET", manifest, "before", 403, "AccessDenied", FOREVER),
    ]
    drill.told(drill.follow()[0])
    proxy.faults.clear()
    *_, again = drill.rest()
    assert again.out.startswith("nothing_to_merge")
    all_is_merged(remote)
