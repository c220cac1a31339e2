"""Tables of two formats under one configuration: each has the jobs and defaults of its own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memwal_ops.airflow.work import run_job as run_task
from memwal_ops.core.registry import job_specs, package_of
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.workers.protocol import RunRequest
from tests.conformance.formats import SHARD, TOY, TableUnderTest, opened
from tests.conformance.test_front_ends import _work as work
from tests.support.run_cli import contents, run_here, run_process
from tests.support.service import service
from tests.support.waiting import until

Both = tuple[TableUnderTest, TableUnderTest]


@pytest.fixture
def both(tmp_path: Path) -> Both:
    """A Lance table and a toy table, side by side, each with a backlog."""
    (tmp_path / "tables").mkdir()
    return SHARD.make(str(tmp_path / "tables/l.lance")), TOY.make(str(tmp_path / "tables/j"))


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(f"state_dir: {tmp_path}/state-c\nhttp: {{port: 0}}\n{text}")
    return file


def effective(capfd: pytest.CaptureFixture[str], file: Path) -> dict[str, Any]:
    shown = run_here(capfd, "config", "check", str(file), "--json")
    assert shown.code == 0, shown.out
    return {one["key"]: one["value"] for one in shown.document["effective"]}


def problems(capfd: pytest.CaptureFixture[str], file: Path) -> list[tuple[int, str, str]]:
    shown = run_here(capfd, "config", "check", str(file), "--json")
    assert shown.code == 50
    return [(one["line"], one["message"], one["fix"]) for one in shown.document["problems"]]


@pytest.mark.parametrize("entries", ["named", pytest.param("pattern", marks=pytest.mark.long)])
def test_run_once(tmp_path: Path, both: Both, toy_environment: dict[str, str], entries: str) -> None:
    """What the fleet says for one format is left out for the other; each table gets its format's own jobs."""
    listed = "".join(f"  - uri: {one.uri}\n" for one in both)
    if entries == "pattern":
        listed = f"  - pattern: {tmp_path}/tables/*\n"
    file = write(
        tmp_path,
        "defaults: {jobs: {merge: {when: generations >= 1, options: {max_bytes: 1GiB}}, gc: {schedule: 1h}}}\n"
        f"tables:\n{listed}",
    )
    done = run_process("run", "--once", "--config", str(file), "--json", **toy_environment)
    assert done.code == 0, done.out
    runs = {(one["table"], one["job"]): one for one in done.document["runs"]}
    assert {job for table, job in runs if table == "j"} == {"merge", "gc"}, "the toy has no others"
    assert {job for table, job in runs if table == "l"} == {"merge", "catchup", "compact", "snapshot", "gc", "verify"}
    assert {one["outcome"] for one in runs.values()} == {"succeeded"}
    assert runs["j", "merge"]["decision"] == "merged"
    assert runs["j", "merge"]["plan"]["options"] == {}
    assert runs["l", "merge"]["plan"]["options"] == {"max_bytes": "1GiB"}
    for made in both:
        assert made.read_revision(opened(made).revision) == made.expected()


def test_the_service(tmp_path: Path, both: Both, toy_environment: dict[str, str]) -> None:
    """Triggers of either format fire on its own figures, for tables that are found by a pattern, too."""
    file = write(
        tmp_path,
        "defaults: {poll: 1s, jobs: {merge: {schedule: 12h}, catchup: {enabled: false}, compact: {enabled: false},"
        " snapshot: {enabled: false}, verify: {enabled: false}}}\n"
        f"tables:\n  - uri: {both[0].uri}\n  - pattern: {tmp_path}/tables/*\n",
    )
    with service(file, toy_environment) as running:
        merged = lambda table, count: (  # noqa: E731
            len([one for one in running.runs(table=table, job="merge") if one["outcome"] == "succeeded"]) >= count
        )
        until(lambda: merged("l", 1) and merged("j", 1))
        for _ in range(3):
            both[1].write()
        until(lambda: merged("j", 2))
        assert running.runs(table="j", job="merge")[0]["why"] == "when: entries >= 8"
        status = {one["name"]: one for one in running.get("/api/v1/status")["tables"]}
        assert (sorted(status["j"]["jobs"]), sorted(status["l"]["jobs"])) == (["merge"], ["merge"])
        assert status["j"]["jobs"]["merge"]["when"] == "entries >= 8"
        assert not running.runs(failed=True)
    for made in both:
        assert made.read() == made.expected()


def test_config_check_shows_each_tables_own_jobs(tmp_path: Path, both: Both, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path, f"tables: [{{uri: {both[0].uri}}}, {{uri: {both[1].uri}}}, {{uri: 's3://b/r', format: jsonlog}}]\n"
    )
    shown = effective(capfd, file)
    for name in ("j", "r"):
        assert shown[f"tables.{name}.format"] == "jsonlog"
        assert shown[f"tables.{name}.jobs.merge.when"] == "entries >= 8"
        assert f"tables.{name}.jobs.catchup.enabled" not in shown
    assert shown["tables.l.format"] == "lance"
    assert shown["tables.l.jobs.merge.when"] == job_specs("lance")["merge"].when
    assert shown["tables.l.jobs.catchup.enabled"] is True


def test_config_check_refuses_a_job_that_the_table_lacks(
    tmp_path: Path, both: Both, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path,
        f"tables:\n  - uri: {both[1].uri}\n    jobs:\n      catchup: {{schedule: 1h}}\n"
        "      merge: {when: generations >= 3, options: {max_bytes: 1GiB}}\n  - uri: s3://b/r\n    format: jsonlg\n",
    )
    found = problems(capfd, file)
    assert (6, "catchup does not apply to j, a jsonlog table.", "The jobs that do: gc, maintain, merge.") in found
    assert [line for line, *_ in found] == [6, 7, 7, 9]
    assert "The job 'merge' has no option 'max_bytes'." in {message for _, message, _ in found}
    assert (9, "There is no format 'jsonlg'.", "Did you mean jsonlog?") in found


def test_what_no_format_has_is_refused_in_the_defaults(
    tmp_path: Path, both: Both, capfd: pytest.CaptureFixture[str]
) -> None:
    listed = ", ".join(f"{{uri: {one.uri}}}" for one in both)
    options = "options: {max_bytes: 1GiB, max_entries: 3, max_byte: 3}"
    file = write(
        tmp_path,
        f"defaults: {{jobs: {{merge: {{when: furlongs > 3, {options}}}, compost: {{}}}}}}\ntables: [{listed}]\n",
    )
    assert {message.split(":")[0] for _, message, _ in problems(capfd, file)} == {
        "The job 'merge' has no option 'max_byte'.", "'furlongs > 3'", "There is no job 'compost'.",
    }  # fmt: skip


def test_a_job_that_no_entry_names_is_not_applicable(both: Both, toy_environment: dict[str, str]) -> None:
    uri = both[1].uri
    before = contents(uri)
    requests = [
        RunRequest(1, uri, {}, "catchup", {}, apply=True, named=False),
        RunRequest(2, uri, {}, "catchup", {}, apply=True),
    ]
    default, named = [one for one in work(requests, toy_environment) if one["type"] == "done"]
    assert (default["outcome"], default["decision"], default["exit_code"]) == ("succeeded", "not_applicable", 0)
    assert json.loads(json.dumps(default["report"])) == {"decision": "not_applicable"}
    assert (named["outcome"], named["exit_code"]) == ("failed", 2)
    assert "gc, inspect, maintain, merge" in named["remedy"]
    assert contents(uri) == before


def test_a_fault_is_blamed_on_the_package_of_the_tables_format(both: Both) -> None:
    """Both formats have a job ``merge``: an error of ours is none of the other package's."""
    assert package_of(opened(both[0]).jobs["merge"]) is None
    assert package_of(opened(both[1]).jobs["merge"]) == "memwal-jsonlog 1.0"


@pytest.mark.long
def test_status_and_airflow_name_what_blocks_a_table_of_any_format(
    tmp_path: Path, both: Both, toy_environment: dict[str, str]
) -> None:
    """In the words of its format: both read the keys of Lance's entries before."""
    for made in both:
        made.remove_entry()
    listed = ", ".join(f"{{uri: {one.uri}}}" for one in both)
    file = write(tmp_path, f"tables: [{listed}]\n")
    told = run_process("status", "--config", str(file), "--json", **toy_environment)
    assert told.code == 2
    findings = {table["name"]: [one["what"] for one in table["findings"]] for table in told.document["tables"]}
    missing = "Log entry 1 is missing or damaged."
    assert f"The log is blocked at entry 1: blocked. {missing}" in findings["j"]
    assert any(what.startswith("Region ") and " is blocked at generation 1: " in what for what in findings["l"])
    for made, says in (
        (both[1], f"The log, entry 1: blocked: {missing}"),
        (both[0], ", generation 1: generation_missing"),
    ):
        failure = run_task("merge", made.uri, {}, apply=None, storage={}).failure
        assert failure is not None
        assert (failure.exit_code, says in failure.message) == (10, True), failure.message


def test_a_name_leaves_out_what_folders_of_a_format_end_with(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tables: [{uri: /a/orders.lance}, {uri: /a/events.log}, {uri: /a/.lance}]\n")
    assert [one.name for one in load_settings(str(file), {}).tables] == ["orders", "events.log", "/a/.lance"]
