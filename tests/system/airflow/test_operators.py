"""The operators in a real Airflow: how tasks end, what XCom holds, and that no secret is shown or stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("airflow.sdk", reason="needs Airflow, which has an environment of its own: make test-airflow")

from airflow.sdk import DAG

import memwal_ops.airflow as ours
from memwal_ops.airflow.tasks import TaskArgumentError
from memwal_ops.errors import InvalidUsageError
from tests.support.gc_options import AT_ONCE
from tests.support.tables import damage
from tests.support.tables.plain import PlainTable
from tests.support.tables.reading import read_base
from tests.support.tables.workload import Workload, assert_same
from tests.system.airflow.refusing_store import RefusingStore
from tests.system.airflow.runs import ONE_TASK, load_dag, run_task

# The documented examples, no real ones.
KEY_ID = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "IQoJb3JpZ2luX2VjEXAMPLE//////////wEaCXVzLWVhc3QtMSJHMEUCIQ=="
FORMS = [KEY_ID, SECRET, TOKEN, quote(SECRET, safe=""), quote(TOKEN, safe=""), SECRET.replace("/", "\\/")]


@pytest.fixture
def blocked(tmp_path: Path) -> tuple[Workload, str]:
    """A table of two regions, one of which cannot be merged."""
    table = Workload(3, regions=2, base_rows=30).create(str(tmp_path / "t.lance"))
    table.put([0, 2])
    table.put([1, 3])
    table.flush()
    damage.remove_generation(table.uri, table.regions[0], 1)
    return table, table.regions[0]


def test_a_blocked_region_fails_the_task_at_once_with_its_reason(
    dags: Path, blocked: tuple[Workload, str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    table, region = blocked
    task = run_task(dags, monkeypatch, "MemWalMergeOperator", uri=table.uri, retries=3)
    assert (task.state, task.tries) == ("failed", 1)
    assert task.xcom["decision"] == "blocked"
    assert [one["region_id"] for one in task.xcom["blocked"]] == [region]
    assert_same(read_base(table.uri), table.expected({region: 0, table.regions[1]: 1}))
    out, err = capfd.readouterr()
    assert f"blocked (exit code 10): Region {region}, generation 1: generation_missing" in out + err


def test_or_skips_it(dags: Path, blocked: tuple[Workload, str], monkeypatch: pytest.MonkeyPatch) -> None:
    table, region = blocked
    task = run_task(dags, monkeypatch, "MemWalMergeOperator", uri=table.uri, soft_fail_on_blocked=True)
    assert task.state == "skipped"
    assert [one["region_id"] for one in task.xcom["blocked"]] == [region]
    assert_same(read_base(table.uri), table.expected({region: 0, table.regions[1]: 1}))


def test_what_is_not_a_blocked_region_fails_all_the_same(
    dags: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = str(tmp_path / "none.lance")
    task = run_task(dags, monkeypatch, "MemWalMaintainOperator", uri=uri, soft_fail_on_blocked=True, retries=2)
    assert (task.state, task.tries, task.xcom) == ("failed", 1, None)


def test_a_job_on_a_branch(dags: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = PlainTable(str(tmp_path / "t.lance")).create(fragments=2)
    main.dataset.create_branch("dev")
    branch = PlainTable(f"{main.uri}/tree/dev")
    branch.model, branch._next = dict(main.model), 1000
    for _ in range(3):
        branch.append()
    version, rows = main.dataset.version, branch.dataset.count_rows()
    task = run_task(dags, monkeypatch, "MemWalJobOperator", job="compact", uri=main.uri, branch="dev")
    assert (task.state, task.xcom["decision"]) == ("success", "compacted")
    assert (branch.dataset.count_rows(), len(branch.dataset.get_fragments())) == (rows, 1)
    assert (main.dataset.version, len(main.dataset.get_fragments())) == (version, 2)
    task = run_task(dags, monkeypatch, "MemWalJobOperator", job="compact", uri=main.uri, branch="nope", retries=2)
    assert (task.state, task.tries, task.xcom) == ("failed", 1, None)


def test_maintain_deletes_nothing_by_default(dags: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Workload(5, regions=1, base_rows=20).create(str(tmp_path / "t.lance")).step(5)
    table.flush()
    careless = {
        "expire": {"older_than": "0", "allow_unsafe": True},
        "gc": AT_ONCE,
    }
    planned = run_task(dags, monkeypatch, "MemWalMaintainOperator", uri=table.uri, options=careless)
    steps = {one["step"]: one["decision"] for one in planned.xcom["steps"]}
    assert (steps["merge"], steps["expire"]) == ("merged", "planned")
    assert planned.xcom["apply"] is False
    done = run_task(dags, monkeypatch, "MemWalMaintainOperator", uri=table.uri, options=careless, apply=True)
    steps = {one["step"]: one["decision"] for one in done.xcom["steps"]}
    assert (steps["expire"], steps["gc"]) == ("expired", "deleted")
    assert_same(read_base(table.uri), table.expected())


@pytest.mark.parametrize("name", sorted(name for name in ours.__all__ if name.endswith("Operator")))
def test_templates_are_rendered_and_defaults_delete_nothing(name: str) -> None:
    operator = getattr(ours, name)
    job = {"job": "merge"} if name == "MemWalJobOperator" else {}
    task = operator(
        task_id="task",
        uri="s3://bucket/{{ table }}.lance",
        options={"budget": "{{ budget }}"},
        storage_conn_id="{{ store }}",
        storage_options={"aws_region": "{{ region }}"},
        **job,
    )
    assert bool(task.apply) is (task.job in {"merge", "catchup", "compact", "snapshot"} and not job)
    task.render_template_fields({"table": "t", "budget": "5m", "store": "conn", "region": "eu-west-1"})
    assert (task.uri, task.options, task.storage_conn_id, task.storage_options) == (
        "s3://bucket/t.lance",
        {"budget": "5m"},
        "conn",
        {"aws_region": "eu-west-1"},
    )


def test_secrets_are_refused_where_airflow_would_show_them() -> None:
    for make in (ours.MemWalMergeOperator, ours.MemWalBacklogSensor):
        with pytest.raises(InvalidUsageError, match="aws_secret_access_key") as refused:
            make(task_id="task", uri="s3://b/t.lance", storage_options={"aws_secret_access_key": SECRET})
        assert SECRET not in str(refused.value)
        for text in (f'{{"aws_secret_access_key": "{SECRET}"}}', f"{{{{ {{'account_key': '{SECRET}'}} }}}}"):
            with pytest.raises(TaskArgumentError) as refused:
                make(task_id="task", uri="s3://b/t.lance", storage_options=text)
            assert SECRET not in str(refused.value)


def rendered(operator: str, *, native: bool = False, **arguments: Any) -> Any:
    """A task with its templates rendered; by ``native`` as in a DAG with render_template_as_native_obj=True."""
    kind = getattr(ours, operator)
    with DAG("rendered", schedule=None, render_template_as_native_obj=native):
        task = kind(task_id="task", **{"uri": "s3://b/t.lance"} | arguments)
    task.render_template_fields({"no": False, "options": {"max_bytes": "1MiB"}, "secret": SECRET, "quoted": FORMS[3]})
    return task


OPERATORS = sorted(name for name in ours.__all__ if name.endswith("Operator") and name != "MemWalJobOperator")


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_text_is_no_boolean(operator: str) -> None:
    """``apply="{{ params.apply }}"`` renders to ``"False"``, which counts as true: it deleted."""
    for given in ("no", "false", "", 0, 1, "{{ no }}"):
        with pytest.raises(TaskArgumentError, match=r"apply must be True, False or None.*native_obj=True"):
            rendered(operator, apply=given)
    assert rendered(operator, native=True, apply="{{ no }}").apply is False
    with pytest.raises(TaskArgumentError, match="soft_fail_on_blocked must be True or False"):
        rendered(operator, soft_fail_on_blocked="no")
    with pytest.raises(TaskArgumentError, match="deferrable must be True or False"):
        rendered("MemWalBacklogSensor", deferrable="no")


@pytest.mark.parametrize("operator", ["MemWalMergeOperator", "MemWalBacklogSensor"])
def test_what_a_template_gives_is_checked_before_it_is_stored(operator: str) -> None:
    for storage_options in (
        {"aws_endpoint": "http://user:{{ quoted }}@host"},
        {"headers": "Authorization: Bearer {{ secret }}"},
        "{{ {'aws_region': secret} }}",
    ):
        with pytest.raises(TaskArgumentError) as refused:
            rendered(operator, storage_options=storage_options)
        assert SECRET not in str(refused.value)
    for name, given in {"storage_options": "{{ options }}", "uri": None, "branch": 5, "storage_conn_id": ["a"]}.items():
        with pytest.raises(TaskArgumentError, match=f"{name} must be a .*native_obj=True"):
            rendered(operator, **{name: given})
    with pytest.raises(TaskArgumentError, match="options must be a dictionary, not text"):
        rendered("MemWalMergeOperator", options="{{ options }}")
    assert rendered("MemWalMergeOperator", native=True, options="{{ options }}").options == {"max_bytes": "1MiB"}


def test_a_refused_argument_is_not_retried_and_not_stored(dags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"uri": "s3://b/t.lance", "retries": 2, "storage_options": {"x": "http://u:{{ 'SEK' ~ 'RIT' }}@h"}}
    task = run_task(dags, monkeypatch, "MemWalMergeOperator", **arguments)
    assert (task.state, task.tries, task.xcom) == ("failed", 1, None)
    stored = b"".join(path.read_bytes() for path in Path(os.environ["AIRFLOW_HOME"]).rglob("*") if path.is_file())
    assert b"SEKRIT" not in stored


def test_maintain_deletes_by_its_options_too(tmp_path: Path) -> None:
    table = PlainTable(str(tmp_path / "t.lance")).create(fragments=2)
    given = {"apply": True, "expire": {"older_than": "0", "allow_unsafe": True}}

    def run(**arguments: Any) -> Any:
        return ours.MemWalMaintainOperator(task_id="task", uri=table.uri, **arguments).execute({})

    with pytest.raises(TaskArgumentError, match="contradicts"):
        run(options=given, apply=False)
    assert run(options=given | {"apply": False}, apply=False)["apply"] is False
    assert run(options=given)["apply"] is True


@pytest.mark.parametrize("operator", ["MemWalMergeOperator", "MemWalBacklogSensor"])
def test_a_connections_secrets_reach_the_store_and_nothing_else(
    dags: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], operator: str
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with RefusingStore(KEY_ID, SECRET, TOKEN) as store:
        extra = {
            "aws_session_token": TOKEN,
            "region_name": "eu-west-1",
            "endpoint_url": store.endpoint,
            "storage_options": {"allow_http": True},
        }
        connection = {"conn_type": "aws", "login": KEY_ID, "password": SECRET, "extra": extra}
        monkeypatch.setenv("AIRFLOW_CONN_STORE", json.dumps(connection))
        arguments = {"uri": "s3://bucket/t.lance", "storage_conn_id": "store"}
        task = run_task(dags, monkeypatch, operator, **arguments)
        assert any(f"Credential={KEY_ID}/" in one and "eu-west-1" in one for one in store.authorizations)
    out, err = capfd.readouterr()
    assert task.state == "failed"
    assert "storage_credentials (exit code 21)" in out + err
    stored = b"".join(path.read_bytes() for path in Path(os.environ["AIRFLOW_HOME"]).rglob("*") if path.is_file())
    assert b"s3://bucket/t.lance" in stored
    for form in FORMS:
        assert form not in out + err
        assert form.encode() not in stored


def test_reading_a_dag_loads_neither_pylance_nor_a_client_of_a_store(dags: Path) -> None:
    script = (
        "import runpy, sys; runpy.run_path(sys.argv[1])\n"
        "print(*sorted({'lance', 'pyarrow', 'obstore', 'boto3', 'numpy'} & set(sys.modules)))\n"
    )
    spec = json.dumps({"operator": "MemWalMergeOperator", "arguments": {"uri": "s3://bucket/t.lance"}})
    environment = {**os.environ, "MEMWAL_TEST_TASK": spec}
    done = subprocess.run(
        [sys.executable, "-c", script, str(ONE_TASK)], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_dag_is_stored_with_what_it_was_given(dags: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    arguments = {"uri": "s3://bucket/t.lance", "options": {"max_bytes": "1GiB"}, "storage_conn_id": "store"}
    monkeypatch.setenv("MEMWAL_TEST_TASK", json.dumps({"operator": "MemWalMergeOperator", "arguments": arguments}))
    stored = json.dumps(DagSerialization.serialize_dag(load_dag(dags, ONE_TASK)))
    assert "s3://bucket/t.lance" in stored
    assert "1GiB" in stored
