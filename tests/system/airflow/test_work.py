"""What a task does, without Airflow: real jobs on real tables, and every bad end with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pytest

from memwal_ops import errors, open_table
from memwal_ops.airflow import failures
from memwal_ops.airflow.work import RunResult, poll, run_job
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.format import LanceFormat
from tests.support.gc_options import AT_ONCE
from tests.support.tables import damage
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload, assert_same

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(3, regions=2, base_rows=30).create(str(tmp_path / "t.lance"))
    for _ in range(2):
        made.put([0, 2])
        made.put([1, 3])
        made.flush()
    return made


def run(job: str, uri: str, *, apply: bool | None = None, **options: Any) -> RunResult:
    return run_job(job, uri, options, apply=apply, storage={})


def test_a_merge_and_its_report(table: Workload) -> None:
    outcome = run("merge", table.uri, max_bytes="64MiB", max_generations="1")
    assert outcome.failure is None
    assert outcome.document is not None
    assert outcome.document["decision"] == "merged"
    assert len(outcome.document["passes"]) == 4
    assert_same(read_base(table.uri), table.expected())


@pytest.mark.parametrize("job", ["merge", "catchup", "compact", "snapshot"])
def test_building_jobs_act_by_default(table: Workload, job: str) -> None:
    before = open_table(table.uri).version
    outcome = run(job, table.uri, apply=False)
    assert outcome.failure is None
    assert outcome.document is not None
    assert outcome.document["decision"] == "dry_run"
    assert open_table(table.uri).version == before


@pytest.mark.parametrize("job", ["expire", "gc"])
def test_deleting_jobs_plan_by_default(table: Workload, job: str) -> None:
    for _ in range(2):
        assert run("merge", table.uri).failure is None
    files = sorted(Path(table.uri).rglob("*"))
    careless = {"older_than": "0", "allow_unsafe": True, "keep": 1} if job == "expire" else AT_ONCE
    if job == "gc":
        run("expire", table.uri, apply=True, older_than="0", allow_unsafe=True)
        files = sorted(Path(table.uri).rglob("*"))
    assert run(job, table.uri, **careless).document["decision"] == "planned"
    assert sorted(Path(table.uri).rglob("*")) == files
    done = run(job, table.uri, apply=True, **careless)
    assert done.document["decision"] == ("expired" if job == "expire" else "deleted")
    assert_same(read_base(table.uri), table.expected())


def test_a_job_and_a_poll_on_a_branch(table: Workload) -> None:
    lance.dataset(table.uri).create_branch("dev")
    branch = f"{table.uri}/tree/dev"
    with lance.dataset(branch).mem_wal_writer(table.regions[0]) as writer:
        writer.put(lance.dataset(branch).to_table(limit=1))
    before = sorted(Path(table.uri).glob("_versions/*"))
    assert poll("merge", table.uri, "generations == 1", storage={}, branch="dev").fires
    outcome = run_job("merge", table.uri, {}, branch="dev", apply=None, storage={})
    assert outcome.document["decision"] == "merged"
    assert poll("merge", table.uri, "generations == 0", storage={}, branch="dev").fires
    assert sorted(Path(table.uri).glob("_versions/*")) == before
    assert_same(read_base(table.uri), table.expected(dict.fromkeys(table.regions, 0)))
    refused = run_job("merge", table.uri, {}, branch="nope", apply=None, storage={})
    assert refused.failure is not None
    assert "it has main, dev" in str(refused.failure)


def test_maintain_takes_the_options_of_its_steps(table: Workload) -> None:
    outcome = run("maintain", table.uri, merge={"max_generations": 1}, budget="30m")
    assert outcome.failure is None
    steps = {one["step"]: one for one in outcome.document["steps"]}
    assert len(steps["merge"]["report"]["passes"]) == 4
    assert steps["gc"]["report"]["apply"] is False


def test_a_blocked_region_is_an_outcome_with_a_report(table: Workload) -> None:
    region = table.regions[0]
    damage.remove_generation(table.uri, region, 1)
    outcome = run("merge", table.uri)
    assert outcome.document is not None
    assert outcome.document["decision"] == "blocked"
    failure = outcome.failure
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.retry, failure.is_blocked) == ("blocked", 10, False, True)
    assert failure.message.startswith(f"blocked (exit code 10): Region {region}, generation 1: generation_missing: ")
    assert "runbooks/merge-blocked.md" in failure.message
    whole = run("maintain", table.uri)
    assert whole.failure.exit_code == 10
    assert f"merge: Region {region}, generation 1: generation_missing" in whole.failure.message


@pytest.mark.parametrize("job", ["snapshot", "gc"])
def test_an_unreadable_region_is_named(table: Workload, job: str) -> None:
    region = table.regions[0]
    damage.truncate_region_manifest(table.uri, region)
    outcome = run(job, table.uri)
    assert outcome.failure is not None
    assert outcome.failure.exit_code == 10
    assert region in outcome.failure.message


def test_an_index_that_fails_is_named(table: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("merge", table.uri).failure is None

    def fail(*_: object, **__: object) -> None:
        raise errors.StorageError("no space left on device")

    monkeypatch.setattr("memwal_ops.formats.lance.jobs.catchup.building.update_index", fail)
    outcome = run("catchup", table.uri)
    assert outcome.document is not None
    assert outcome.failure is not None
    assert (outcome.failure.reason, outcome.failure.exit_code, outcome.failure.retry) == ("indexes_behind", 18, True)
    assert "storage: no space left on device" in outcome.failure.message


@pytest.mark.parametrize(
    ("job", "options", "said"),
    [
        ("merg", {}, "merg does not apply to "),
        ("merge", {"max_byte": "1GiB"}, "There is no option 'max_byte'; there are: regions, engine, max_bytes"),
        ("merge", {"max_bytes": "a lot"}, "max_bytes: 'a lot'"),
        ("merge", {"max_bytes": 0}, "max_bytes must be at least 1B, not 0"),
        ("gc", {"reader_grace": "0"}, "reader_grace "),
        ("gc", {"allow_unsafe": "no"}, "allow_unsafe must be True or False, not 'no'. Give one; a template gives text"),
        ("maintain", {"merge": {"engine": "none"}}, "engine must be local, spark or auto, not 'none'"),
    ],
)
def test_options_that_cannot_be_used(table: Workload, job: str, options: dict[str, Any], said: str) -> None:
    outcome = run(job, table.uri, **options)
    assert outcome.document is None
    assert outcome.failure is not None
    assert (outcome.failure.reason, outcome.failure.retry) == ("invalid_usage", False)
    assert said in outcome.failure.message
    assert "--help" not in outcome.failure.message


def test_no_table(tmp_path: Path) -> None:
    failure = run("merge", str(tmp_path / "none.lance")).failure
    assert failure is not None
    assert (failure.reason, failure.exit_code, failure.retry) == ("table_not_found", 3, False)
    found = poll("merge", str(tmp_path / "none.lance"), None, storage={})
    assert found.failure == failure
    assert not found.fires


def test_an_unexpected_error_has_a_trace_without_secrets(table: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("aws_secret_access_key=wJalrXUtnFEMI")

    monkeypatch.setattr("memwal_ops.core.run.open_table", fail)
    outcome = run("merge", table.uri)
    assert outcome.failure is not None
    assert outcome.trace is not None
    assert (outcome.failure.reason, outcome.failure.exit_code, outcome.failure.retry) == ("error", 1, True)
    assert "RuntimeError" in outcome.trace
    assert "wJalrXUtnFEMI" not in outcome.trace + outcome.failure.message


@pytest.mark.s3
def test_storage_options_reach_the_store(
    s3_bucket: str, s3_options: Mapping[str, str], no_aws_environment: None
) -> None:
    remote = Workload(4, regions=1, base_rows=20).create(f"s3://{s3_bucket}/t.lance", dict(s3_options)).step(5)
    remote.flush()
    waiting = poll("merge", remote.uri, "generations >= 1", storage=s3_options)
    assert waiting.fires
    outcome = run_job("merge", remote.uri, {}, apply=True, storage=s3_options)
    assert outcome.failure is None
    assert not poll("merge", remote.uri, "generations >= 1", storage=s3_options).fires
    refused = run_job("merge", remote.uri, {}, apply=True, storage={**s3_options, "aws_endpoint": "nowhere"})
    assert refused.failure is not None


def test_the_sensors_look(table: Workload) -> None:
    found = poll("merge", table.uri, "generations >= 4 and bytes < 1GiB", storage={})
    assert found.fires
    assert found.figures["generations"] == 4
    assert json.loads(json.dumps(found.figures)) == found.figures
    assert not poll("merge", table.uri, "generations > 4", storage={}).fires
    assert poll("merge", table.uri, None, storage={}).failure is None
    assert poll("catchup", table.uri, "uncovered_rows >= 1", storage={}).failure is None


@pytest.mark.parametrize(
    ("job", "when", "said"),
    [
        ("merge", "generation >= 1", "did you mean generations?"),
        ("merge", "", "expected the name of a metric"),
        ("snapshot", None, "has no trigger of its own"),
        ("maintain", "generations > 1", "has no backlog metrics"),
    ],
)
def test_triggers_that_cannot_be_used(table: Workload, job: str, when: str | None, said: str) -> None:
    found = poll(job, table.uri, when, storage={})
    assert found.failure is not None
    assert found.failure.reason == "invalid_usage"
    assert said in found.failure.message
    assert "--help" not in found.failure.message


def test_every_error_has_whether_a_retry_can_help() -> None:
    """A class that is added later is not retried, unless it is listed."""
    classes = {
        found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, MemwalOpsError)
    }
    again = {found.reason for found in classes if failures.from_error(found("why")).retry}
    assert again == {
        "error",
        "indexes_behind",
        "storage",
        "storage_credentials",
        "store_unavailable",
        "object_not_found",
        "version_gone",
        "deletes_failed",
        "commit_conflict",
        "commit_state_unknown",
        "table_replaced",
    }


def test_a_long_list_of_troubles_is_cut() -> None:
    failed = [{"path": f"_mem_wal/{n}", "error": "denied"} for n in range(40)]
    failure = failures.from_report(27, {"decision": "incomplete", "failed": failed}, LanceFormat().part_of)
    assert failure is not None
    assert failure.retry
    assert failure.message.count("denied") == 5
    assert "And 35 more, in the report (XCom)." in failure.message
