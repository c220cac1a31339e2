"""repair of a namespace releases leases of supervisors, and writes nothing of the namespace itself."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.leases import Holder, acquire
from memwal_ops.errors import InvalidFormatError, InvalidUsageError
from tests.support.run_cli import contents, run_here
from tests.support.zeppelin.namespace import NamespaceUnderTest


@pytest.fixture(params=["wiki", "native"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> NamespaceUnderTest:
    found = NamespaceUnderTest(str(tmp_path / "ns"), request.param)
    found.write()
    run_job(found.uri, "merge", clusters=2)
    found.write()
    return found


@pytest.mark.sampled(1)
def test_an_expired_lease_is_released(made: NamespaceUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_job(made.uri, "repair").decision == "nothing_to_repair"
    acquire(open_table(made.uri).store, "gc", Holder("1", "op@host"), timedelta(seconds=1))
    time.sleep(1.2)
    assert [one["check"] for one in run_job(made.uri, "verify").to_json()["findings"]] == ["lease_expired"]
    before = contents(made.uri)
    assert run_here(capfd, "repair", made.uri, "--json").document["decision"] == "planned"
    assert contents(made.uri) == before
    assert run_job(made.uri, "repair", apply=True).decision == "repaired"
    after = contents(made.uri)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed
    assert all(path.startswith("_mem_wal_ops/") for path in changed)
    assert run_job(made.uri, "verify").to_json()["findings"] == []


def test_everything_else_is_for_a_person(made: NamespaceUnderTest) -> None:
    Path(made.uri, "lease.json").write_text("{")
    before = contents(made.uri)
    report = run_job(made.uri, "repair", apply=True)
    assert contents(made.uri) == before
    assert (report.decision, report.exit_code) == ("decision_needed", 9)
    (decision,) = report.to_json()["decisions"]
    assert decision["check"] == "compactor_lease"
    assert len(decision["choices"]) == 2
    assert not any("delete" in one["choice"] for one in decision["choices"]), "lease.json must stay"
    with pytest.raises((InvalidUsageError, InvalidFormatError)):
        run_job(made.uri, "repair", apply=True, undo="0123456789abcdef")
