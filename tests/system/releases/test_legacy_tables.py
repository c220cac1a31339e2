"""Tables of the releases that had the legacy MemWAL index: made by them, merged and migrated by us, read by them again.

Python of these releases cannot write the index's details, so the test puts them. Each release is installed into an
environment of its own; without it the test is skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from tests.support.tables.legacy_table import LegacyTable, base_rows, rows, say_release, states_of

pytestmark = pytest.mark.long

USE = Path(__file__).parent / "use_legacy.py"
RELEASES = ["1.0.4", "0.36.0"]


@pytest.fixture(scope="module", params=RELEASES)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the release."""
    home = tmp_path_factory.mktemp("release")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    made = str(home / "bin/python")
    command = [made, "-m", "pip", "install", "--quiet", f"pylance=={request.param}", f"pyarrow=={pa.__version__}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pylance {request.param} cannot be installed here: {done.stderr[-300:]}")
    return made


def use(python: str, step: str, uri: str) -> dict[str, Any]:
    """What a step says."""
    environment = {**os.environ, "RUST_LOG": "off"}
    done = subprocess.run([python, str(USE), step, uri], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def made_by(python: str, uri: str) -> tuple[LegacyTable, str]:
    """A base of the release with two flushed generations and an open one; and which release it is."""
    release = use(python, "make", uri)["release"]
    table = LegacyTable(uri, marked=False)
    table.model = {number: float(number) for number in range(21) if number != 5}
    table.merged = dict(table.model)
    table.flushed("a", 0, {1: 100.0, 5: 55.0, 50: 5.0})
    table.flushed("a", 1, {1: 101.0})
    table.other("a", 2, "OPEN")
    table.finish()
    say_release(uri, release)
    return table, release


@pytest.mark.req("S1-019", "S1-028")
def test_made_by_it_merged_by_us_and_used_by_it(python: str, tmp_path: Path) -> None:
    """What it began before the merge loses against it; what it begins after keeps the index as it is."""
    table, release = made_by(python, str(tmp_path / "t.lance"))
    shown = run_job(table.uri, "inspect").to_json()["mem_wals"]
    assert {(one["writer_release"], one["flushed_means"]) for one in shown if one["state"] == "FLUSHED"} == {
        (release, "unmerged")
    }
    with subprocess.Popen(
        [python, str(USE), "hold", table.uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "RUST_LOG": "off"},
    ) as holding:  # fmt: skip
        assert holding.stdout is not None
        held = json.loads(holding.stdout.readline())
        assert held["version"] == lance.dataset(table.uri).version
        assert run_job(table.uri, "merge", primary_key="id").decision == "merged"
        out, _ = holding.communicate("go\n", timeout=600)
    refused = json.loads(out.splitlines()[-1])
    assert "incompatible with concurrent transaction UpdateMemWalState" in refused["refused"]
    assert {int(key): value for key, value in refused["rows"].items()} == table.merged == base_rows(table.uri)
    after = use(python, "upsert", table.uri)
    assert "__lance_mem_wal" in after["indexes"]
    assert {int(key): value for key, value in after["rows"].items()} == {**table.merged, 901: 9.0, 1: 7.0}
    assert states_of(table.uri) == {("a", 0): "MERGED", ("a", 1): "MERGED", ("a", 2): "OPEN"}


def test_made_by_it_and_migrated(python: str, tmp_path: Path) -> None:
    """Current pylance writes to it, and the release still reads it."""
    table, _ = made_by(python, str(tmp_path / "t.lance"))
    with pytest.raises(OSError, match="snapshot_ts_millis"):
        lance.write_dataset(rows({900: 9.0}), table.uri, mode="append")
    report = run_job(table.uri, "migrate", primary_key="id", apply=True)
    assert report.decision == "migrated"
    assert "migrate_manifest_paths_v2" in report.describe()
    lance.dataset(table.uri).migrate_manifest_paths_v2()  # these releases name manifests by the V1 scheme
    assert run_job(table.uri, "merge").decision == "merged"
    schema = lance.dataset(table.uri).schema
    lance.write_dataset(rows({900: 9.0}, schema), table.uri, mode="append")
    with lance.dataset(table.uri).mem_wal_writer(str(run_job(table.uri, "inspect").regions[0].region_id)) as writer:
        writer.put(rows({2: 2.5}, schema))
    assert run_job(table.uri, "maintain", apply=True).exit_code == 0
    expected = {**table.merged, 900: 9.0, 2: 2.5}
    assert base_rows(table.uri) == expected
    read = use(python, "read", table.uri)
    assert {int(key): value for key, value in read["rows"].items()} == expected
