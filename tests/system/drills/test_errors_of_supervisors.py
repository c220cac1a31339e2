"""Drills of errors that a supervisor tells: its file, its jobs, its leases, its workers, its state folder."""

from __future__ import annotations

import importlib
import re
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from memwal_ops import open_table
from memwal_ops.core.leases import break_lease
from memwal_ops.core.registry import clear_caches
from memwal_ops.supervisor.state.directory import StateDir
from memwal_ops.supervisor.state.history import History
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.plugin_packages import install
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload
from tests.system.drills.tables import with_generations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.run_cli import Outcome
    from tests.system.drills.drill import Drill

pytestmark = pytest.mark.long

GENERATION_DATA = re.compile(r"_gen_\d+/data/")
ONLY_MERGE = (
    "catchup: {enabled: false}, compact: {enabled: false}, snapshot: {enabled: false}, verify: {enabled: false}"
)


@dataclass
class Watcher(FaultyProxy):
    """A proxy that calls ``on_merge`` as soon as rows of a generation are read: a merge is running."""

    on_merge: Callable[[], None] | None = field(default=None)

    def note(self, method: str, path: str) -> None:
        if self.on_merge is not None and method == "GET" and GENERATION_DATA.search(path):
            called, self.on_merge = self.on_merge, None
            called()


@pytest.fixture
def config(drill: Drill, tmp_path: Path) -> Path:
    """A good configuration of no table, with a state folder of its own."""
    path = tmp_path / "config.yaml"
    path.write_text(
        f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\ntables: [{{pattern: '{tmp_path}/*.none'}}]\n"
    )
    drill.given(CONFIG=str(path), STATE=str(tmp_path / "state"))
    return path


@pytest.fixture
def table(drill: Drill, tmp_path: Path) -> Workload:
    made = with_generations(str(tmp_path / "t.lance"))
    drill.given(URI=made.uri)
    return made


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Watcher]:
    with Watcher(s3_endpoint) as running:
        yield running


def merging(config: Path, uri: str, job: str = "", more: str = "") -> None:
    """Let the configuration merge this table, and do nothing else."""
    jobs = f"merge: {{schedule: 1h{job}}}, {ONLY_MERGE}"
    state, http, *_ = config.read_text().splitlines()
    config.write_text(f"{state}\n{http}\n{more}\ndefaults: {{jobs: {{{jobs}}}}}\ntables: [{{uri: '{uri}'}}]\n")


def ran(drill: Drill, outcome: Outcome) -> None:
    """The run of a supervisor ended with the page's error, in its exit code and in the account of the one run."""
    assert outcome.code == drill.code, outcome
    (one,) = outcome.document["runs"]
    assert (one["exit_code"], one["error"]["reason"]) == (drill.code, drill.reason)


def test_50_invalid_config(drill: Drill, config: Path) -> None:
    good = config.read_text()
    config.write_text(f"{good}htp: {{}}\n")
    drill.refused('memwal-ops run --once --config "$CONFIG"')
    (told,) = drill.follow()
    assert f"{config}:4: error: htp" in told.out
    config.write_text(good)
    drill.rest()


def test_51_job_plugin(
    drill: Drill, config: Path, table: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    environ = install(["moody"], packages)
    (info,) = packages.glob("*.dist-info")
    (info / "entry_points.txt").write_text("[memwal_ops.jobs]\nlance.broken = no_such_module:JOB\n")
    drill.given(**environ)
    monkeypatch.syspath_prepend(str(packages))
    clear_caches()
    try:
        assert "no_such_module" in drill.refused("memwal-ops broken")["message"]
        _, registered, _ = drill.follow(3)
        assert "lance.broken no_such_module:JOB" in registered.out
        shutil.rmtree(info)
        importlib.invalidate_caches()
        clear_caches()
        drill.rest()
    finally:
        clear_caches()


@pytest.mark.s3
def test_52_lease_lost(
    drill: Drill, config: Path, remote: Workload, proxy: Watcher, s3_options: dict[str, str]
) -> None:
    merging(config, remote.uri)
    store = open_table(remote.uri, s3_options).store
    proxy.on_merge = lambda: break_lease(store, "merge", "somebody@elsewhere") and None
    ran(drill, drill.run('memwal-ops run --once --config "$CONFIG" --json'))
    assert read_base(remote.uri, s3_options) == remote.expected({})
    leases, failed, _, last = drill.rest()
    assert "broken" in leases.out
    assert "lease_lost" in failed.out
    assert "succeeded" in last.out
    assert_same(read_base(remote.uri, s3_options), remote.expected())


def test_53_worker_died(drill: Drill, config: Path, table: Workload) -> None:
    merging(config, table.uri, more="pools: {merge: {memory: 1MiB}}")
    ran(drill, drill.run('memwal-ops run --once --config "$CONFIG" --json'))
    failed, limits = drill.follow(2)
    assert "exceeded its memory limit" in failed.out
    assert "pools.merge.memory: 1048576 " in limits.out
    config.write_text(config.read_text().replace("1MiB", "4GiB"))
    drill.rest()
    assert_same(read_base(table.uri), table.expected())


@pytest.mark.s3
def test_54_job_hung(drill: Drill, config: Path, remote: Workload, proxy: Watcher, s3_options: dict[str, str]) -> None:
    merging(config, remote.uri, job=", hung_after: 1s")
    proxy.faults = [Fault("GET", GENERATION_DATA.pattern, "late", times=10**9, stall=20)]
    ran(drill, drill.run('memwal-ops run --once --config "$CONFIG" --json'))
    proxy.faults.clear()
    failed, limits, _ = drill.rest()
    assert "made no progress" in failed.out
    assert "merge.hung_after: 1s" in limits.out
    assert_same(read_base(remote.uri, s3_options), remote.expected())


def test_55_already_running(drill: Drill, config: Path, table: Workload, tmp_path: Path) -> None:
    other = StateDir(str(tmp_path / "state"))
    History.open(str(tmp_path / "state/history.sqlite")).close()
    drill.refused('memwal-ops run --once --config "$CONFIG"')
    drill.follow_until(other.close, before="memwal-ops run")
    assert_same(read_base(table.uri), table.expected())


def test_56_history(drill: Drill, config: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/history.sqlite").write_bytes(b"no database " * 1000)
    (tmp_path / "state/history.sqlite-wal").write_bytes(b"the last runs")
    drill.refused('memwal-ops run --once --config "$CONFIG"')
    *_, last = drill.rest()
    assert last.out == "No run.\n"
    assert (tmp_path / "state/history.sqlite.damaged").exists()
    assert (tmp_path / "state/history.sqlite.damaged-wal").read_bytes() == b"the last runs", "nothing is deleted"
