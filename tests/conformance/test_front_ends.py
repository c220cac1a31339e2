"""One table of each format through every front end: commands, and the supervisor's worker."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops.core.leases import LEASES_FOLDER
from memwal_ops.core.maintain import ordered
from memwal_ops.supervisor.workers.protocol import PollRequest, RunRequest, encode
from tests.conformance.formats import FormatUnderTest, TableUnderTest, opened
from tests.support.run_cli import contents, run_here, run_process

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.sampled(2)
def test_commands(
    kind: FormatUnderTest, made: TableUnderTest, toy_environment: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    before = contents(made.uri)
    planned = run_process("merge", made.uri, "--dry-run", "--json", **toy_environment)
    assert (planned.code, planned.document["decision"]) == (0, "dry_run")
    assert contents(made.uri) == before
    merged = run_here(capfd, "merge", made.uri, "--json")
    assert (merged.code, merged.document["decision"]) == (0, "merged")
    assert made.read_revision(opened(made).revision) == made.expected()
    assert run_here(capfd, "merge", made.uri).out.startswith("nothing_to_merge: ")
    assert run_here(capfd, "gc", made.uri, "--apply", "--json").code == 0
    maintained = run_here(capfd, "maintain", made.uri, "--json")
    assert (maintained.code, maintained.document["decision"]) == (0, "maintained")
    assert made.read() == made.expected()


@pytest.mark.sampled(3)
def test_a_report(
    kind: FormatUnderTest, made: TableUnderTest, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before, file = contents(made.uri), tmp_path / "report.html"
    written = run_here(capfd, "report", made.uri, "-o", str(file))
    assert (written.code, written.err) == (0, "")
    page = file.read_text()
    assert made.uri in page
    assert "No supervisor holds a lease." in page
    document = run_here(capfd, "report", made.uri, "--json").document
    assert document["backlog"]
    assert (document["history"] is None) == (kind.name != "lance")
    # Not the times: an LM-DiskANN folder's lock file gets the same content again.
    assert {path: one[1] for path, one in contents(made.uri).items()} == {path: one[1] for path, one in before.items()}


@pytest.mark.sampled(2)
def test_a_scan(kind: FormatUnderTest, made: TableUnderTest, capfd: pytest.CaptureFixture[str]) -> None:
    """Before and after merges: no format's plan has keys that another one lacks, and nothing is written."""
    for merged in range(3):
        if merged:
            assert run_here(capfd, "merge", made.uri).code == 0
        before = contents(made.uri)
        scanned, shown = run_here(capfd, "scan", made.uri, "--json"), run_here(capfd, "scan", made.uri)
        assert (scanned.code, scanned.err, shown.code, shown.err) == (0, "", 0, "")
        [found] = scanned.document["tables"]
        assert (found["version"], found["errors"], found["blocked"]) == (opened(made).revision, [], [])
        needs = {one["job"]: one["what"] for one in found["needs"]}
        assert ("merge" in needs) == (not merged)
        assert [*needs] == [name for name in run_order(made) if name in needs]
        assert all(" ".join(what.split()[:2]) in " ".join(shown.out.split()) for what in needs.values())
        assert {path: one[1] for path, one in contents(made.uri).items()} == {
            path: one[1] for path, one in before.items()
        }
        if merged == 1:
            made.write()


def run_order(made: TableUnderTest) -> list[str]:
    return [spec.name for spec in ordered(opened(made).jobs.values())]


def test_an_option_of_another_format_is_refused(
    kind: FormatUnderTest, made: TableUnderTest, capfd: pytest.CaptureFixture[str]
) -> None:
    foreign = kind.foreign
    before = contents(made.uri)
    refused = run_here(capfd, "merge", made.uri, *foreign, "--json")
    assert refused.code == 2
    assert foreign[0] in refused.document["error"]["message"]
    assert contents(made.uri) == before
    assert f"{foreign[0]} " in run_here(capfd, "merge", "--help").out


@pytest.mark.sampled(2)
def test_the_supervisors_worker(kind: FormatUnderTest, made: TableUnderTest, toy_environment: dict[str, str]) -> None:
    jobs = tuple(opened(made).jobs)
    requests = [
        PollRequest(1, made.uri, {}, jobs),
        RunRequest(2, made.uri, {}, "merge", {}, apply=False),
        RunRequest(3, made.uri, {}, "merge", {}, apply=True),
        RunRequest(4, made.uri, {}, "compost", {}, apply=True),
        PollRequest(5, made.uri, {}, jobs),
    ]
    answers = {answer["id"]: answer for answer in _work(requests, toy_environment) if answer["type"] == "done"}
    assert [answers[number]["outcome"] for number in (1, 2, 3, 4, 5)] == [
        "succeeded", "succeeded", "succeeded", "failed", "succeeded",
    ]  # fmt: skip
    waiting = [name for name, value in answers[1]["figures"].items() if value and not answers[5]["figures"][name]]
    assert waiting, "the backlog was there, and is gone"
    assert answers[2]["decision"] == "dry_run"
    assert answers[3]["decision"] == "merged"
    assert answers[3]["versions"][-1] == answers[5]["version"]
    assert (answers[4]["exit_code"], answers[4]["reason"]) == (2, "invalid_usage")
    assert made.read_revision(opened(made).revision) == made.expected()
    assert not os.path.exists(f"{made.uri}/{LEASES_FOLDER}")


def _work(requests: list[Any], environment: dict[str, str]) -> list[dict[str, Any]]:
    """What a worker process says, with one request after the other."""
    command = [sys.executable, "-m", "memwal_ops.supervisor.workers.worker"]
    said = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
    ) as worker:
        assert isinstance(worker.stdin, io.BufferedWriter)
        assert worker.stdout is not None
        for request in [*requests, {"do": "quit"}]:
            worker.stdin.write(encode(request))
        worker.stdin.flush()
        said = [json.loads(line) for line in worker.stdout]  # it ends when it is told to; not when its input does
        worker.stdin.close()
    assert worker.returncode == 0
    return said
