"""Keys, decisions and exit codes that scripts rely on (docs/jobs.md, runbooks/README.md)."""

from __future__ import annotations

import fcntl
import inspect as python_inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pytest

from memwal_ops import errors, open_table
from memwal_ops.formats.lance.commit import commit
from memwal_ops.formats.lance.engines.merge import collapse
from memwal_ops.formats.lance.engines.merge.passes import LocalMergeEngine
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.jobs import merge
from memwal_ops.formats.lance.jobs.demo import table as demo_table
from tests.support.run_cli import contents, run_here, run_process
from tests.support.tables import damage
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

ROOT = Path(__file__).parents[3]
INSPECT = {
    "uri", "layout", "version", "rows", "fragments", "primary_key", "regions", "indexes", "snapshot", "backlog",
    "strays", "versions", "truncated", "branch", "branches", "last_writer", "merged_elsewhere",
    "next_runs", "most_data_files", "indexes_dropped", "dropped_column_bytes",
}  # fmt: skip
REGION = {
    "region_id", "spec_id", "status", "writer_epoch", "manifest_version", "current_generation", "replay_after_wal_id",
    "wal_id_last_seen", "unflushed_wal_entries", "merged_generation", "generation_counts", "generations",
    "truncated", "error", "foreign_root",
}  # fmt: skip
GENERATION = {"generation", "path", "rows", "bytes", "state"}
INDEX = {
    "name",
    "type",
    "covered_fragments",
    "uncovered_fragments",
    "uncovered_rows",
    "caught_up",
    "index_catchup",
    "problem",
}
BACKLOG = {"regions", "generations", "rows", "bytes"}
MERGE = {
    "decision",
    "passes",
    "blocked",
    "backlog_after",
    "seconds",
    "engine",
    "engine_reason",
    "version",
    "commit_conflicts",
    "drained",
    "overwritten",
    "lost_races",
    "run_id",
}
PASS = {
    "regions", "rows_read", "rows_upserted", "rows_deleted", "bytes_read", "version", "use_index", "seconds", "phases",
    "metrics",
}  # fmt: skip
BLOCKED = {"region_id", "generation", "reason", "detail", "remedy"}


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(1, regions=2, base_rows=100).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        made.step(6)
        made.flush()
    return made


def test_inspect(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(table.uri)
    outcome = run_here(capfd, "inspect", table.uri, "--json")
    document = outcome.document
    assert outcome.code == 0
    assert contents(table.uri) == before
    assert set(document) == INSPECT
    assert document["layout"] == "shard"
    assert document["version"] == lance.dataset(table.uri).version
    assert document["rows"] == 100
    assert document["primary_key"] == ["id"]
    assert set(document["backlog"]) == BACKLOG
    assert len(document["regions"]) == 2
    for region in document["regions"]:
        assert set(region) == REGION
        assert region["status"] == "active"
        assert region["merged_generation"] == 0
        numbers = [generation["generation"] for generation in region["generations"]]
        assert numbers == list(range(1, region["current_generation"]))
        for generation in region["generations"]:
            assert set(generation) == GENERATION
            assert generation["state"] == "pending"
            assert Path(table.uri, "_mem_wal", region["region_id"], generation["path"]).is_dir()
    waiting = [generation for region in document["regions"] for generation in region["generations"]]
    assert document["backlog"]["generations"] == len(waiting)
    assert document["backlog"]["rows"] == sum(generation["rows"] for generation in waiting)
    assert document["backlog"]["bytes"] == sum(generation["bytes"] for generation in waiting)
    (index,) = document["indexes"]
    assert set(index) == INDEX
    assert index["caught_up"] is True
    assert set(document["next_runs"]) == {"compact", "catchup"}
    for run in document["next_runs"].values():
        assert set(run) == {"debt", "bytes_read", "bytes_written", "seconds", "why"}
    run_here(capfd, "merge", table.uri)
    after = run_here(capfd, "inspect", table.uri, "--json").document
    assert {generation["state"] for region in after["regions"] for generation in region["generations"]} == {"merged"}
    assert after["backlog"] == dict.fromkeys(BACKLOG, 0)
    assert {region["unflushed_wal_entries"] for region in after["regions"]} == {0}
    for region in range(2):
        table.put([region])  # which claims it, too
    after = run_here(capfd, "inspect", table.uri, "--json").document
    assert {region["unflushed_wal_entries"] for region in after["regions"]} == {2}
    assert "4 log entries not flushed yet" in run_here(capfd, "inspect", table.uri).out
    assert after["indexes"][0]["caught_up"] is False
    assert after["indexes"][0]["uncovered_rows"] > 0


def test_a_missing_generation_is_shown(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    damage.remove_generation(table.uri, table.regions[0], 1)
    document = run_here(capfd, "inspect", table.uri, "--json").document
    states = {
        (region["region_id"], generation["generation"]): generation["state"]
        for region in document["regions"]
        for generation in region["generations"]
    }
    assert states.pop((table.regions[0], 1)) == "missing"
    assert set(states.values()) == {"pending"}
    text = run_here(capfd, "inspect", table.uri)
    assert text.code == 0
    assert "missing" in text.out


def test_merge(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(table.uri)
    dry = run_here(capfd, "merge", table.uri, "--json", "--dry-run", "--max-generations", "2")
    assert (dry.code, dry.document["decision"]) == (0, "dry_run")
    assert set(dry.document) == MERGE | {"cost"}
    assert contents(table.uri) == before
    outcome = run_here(capfd, "merge", table.uri, "--json", "--max-generations", "2", "--max-bytes", "1GiB")
    document = outcome.document
    assert (outcome.code, document["decision"]) == (0, "merged")
    assert set(document) == MERGE
    assert set(document["backlog_after"]) == BACKLOG
    assert document["backlog_after"]["generations"] == 0
    assert [set(one) for one in document["passes"]] == [PASS] * len(document["passes"])
    assert [one["regions"] for one in document["passes"]] == [one["regions"] for one in dry.document["passes"]]
    assert len(document["passes"]) > 1
    reached: dict[str, int] = {}
    for one in document["passes"]:
        for region, (first, last) in one["regions"].items():
            assert first == reached.get(region, 0) + 1
            reached[region] = last
    versions = [one["version"] for one in document["passes"]]
    assert versions == sorted(versions)
    assert versions[-1] == lance.dataset(table.uri).version == document["version"]
    again = run_here(capfd, "merge", table.uri, "--json")
    assert (again.code, again.document["decision"], again.document["passes"]) == (0, "nothing_to_merge", [])


def test_one_region_only(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    document = run_here(capfd, "merge", table.uri, "--json", "--region", table.regions[1][:8]).document
    assert {region for one in document["passes"] for region in one["regions"]} == {table.regions[1]}
    assert document["decision"] == "merged"
    assert document["backlog_after"]["generations"] == 0


def test_superseded(table: Workload, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Another merger lands everything between our plan and our commit."""
    real = LocalMergeEngine.run

    def run_late(self: LocalMergeEngine, pinned: Table, *rest: object) -> collapse.PassResult:
        monkeypatch.setattr(LocalMergeEngine, "run", real)
        merge.apply(pinned, merge.MergeOptions())
        return self.run(pinned, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalMergeEngine, "run", run_late)
    outcome = run_here(capfd, "merge", table.uri, "--json")
    assert (outcome.code, outcome.document["decision"]) == (0, "superseded")
    assert outcome.document["commit_conflicts"] == outcome.document["lost_races"] == 1
    assert not [path for path in contents(table.uri) if "/d" in path and path.startswith("_versions")]


def test_blocked(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    damage.remove_generation(table.uri, table.regions[0], 2)
    outcome = run_here(capfd, "merge", table.uri, "--json")
    document = outcome.document
    assert (outcome.code, document["decision"]) == (10, "blocked")
    (entry,) = document["blocked"]
    assert set(entry) == BLOCKED
    assert (entry["region_id"], entry["generation"], entry["reason"]) == (table.regions[0], 2, "generation_missing")
    state = run_here(capfd, "inspect", table.uri, "--json").document["regions"]
    merged = {region["region_id"]: region["merged_generation"] for region in state}
    assert merged[table.regions[0]] == 1, "what stands before the fault is merged"
    assert merged[table.regions[1]] == max(
        generation["generation"] for region in state for generation in region["generations"]
        if region["region_id"] == table.regions[1]
    )  # fmt: skip
    text = run_here(capfd, "merge", table.uri)
    assert text.code == 10
    for part in (table.regions[0], "generation_missing", "What to do", "runbooks/merge-blocked.md"):
        assert part in text.out


def test_logs_go_to_stderr_as_json_lines(table: Workload) -> None:
    outcome = run_process("--log-level", "info", "merge", table.uri, "--json")
    assert outcome.code == 0
    assert outcome.document["decision"] == "merged"
    events = [json.loads(line) for line in outcome.err.splitlines()]
    assert "pass_merged" in {event["event"] for event in events}


@pytest.mark.long
def test_quiet_where_all_is_well(table: Workload) -> None:
    assert run_process("merge", table.uri).err == ""
    assert run_process("inspect", table.uri).err == ""


def test_a_terminal_gets_a_progress_bar_and_no_json(table: Workload) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "memwal_ops", "--log-level", "info", "merge", table.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, text=True) as process:
        os.close(follower)
        said = b""
        while True:
            try:
                piece = os.read(leader, 4096)
            except OSError:
                break
            if not piece:
                break
            said += piece
        out, _ = process.communicate()
    os.close(leader)
    assert process.returncode == 0
    assert out.startswith("merged:")
    assert b"merging" in said
    assert b"pass_merged" in said
    assert b'{"event"' not in said


# A process in the background of a script ignores Ctrl-C, and so do its children.
HEEDS_SIGNALS = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.mark.long
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_cleanly(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    made = Workload(2, regions=1, base_rows=50, max_memtable_rows=60).create(str(tmp_path / "t.lance")).step(200)
    made.close()
    command = [sys.executable, "-m", "memwal_ops", "--log-level", "info", "merge", made.uri, "--max-generations", "1"]
    command = [sys.executable, "-c", HEEDS_SIGNALS, *command]
    # It cannot run ahead of who reads: after a few lines it waits for room in the pipe.
    said, stderr = os.pipe()
    fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, 4096)
    with (
        open(said) as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        os.close(stderr)
        first = said.readline()
        process.send_signal(sent)
        err = said.read()
        out, _ = process.communicate()
    assert "pass_merged" in first
    assert process.returncode == code
    assert "Traceback" not in err
    assert "nothing is half-written" in err
    assert out == ""


def test_a_closed_pipe_is_no_error(table: Workload) -> None:
    command = f"{sys.executable} -m memwal_ops inspect {table.uri} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_demo(tmp_path: Path) -> None:
    before_it = os.times()
    outcome = run_process("demo", "--dir", str(tmp_path / "new"))
    assert outcome.code == 0, outcome.err
    spent = os.times().children_user - before_it.children_user
    assert spent < 120, "two minutes, the clone included, are what a new user has"
    for part in ("1. A TABLE", "2. THE BACKLOG", "3. THE MERGE", "4. THE PROOF", "nothing to do"):
        assert part in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 110 + len(str(tmp_path))
    table = tmp_path / "new/orders.lance"
    assert run_process("merge", str(table), "--json").document["decision"] == "nothing_to_merge"
    before = contents(str(table))
    again = run_process("demo", "--dir", str(tmp_path / "new"))
    assert again.code == 2
    assert "exists already" in again.err
    assert contents(str(table)) == before


@pytest.mark.long
@pytest.mark.req("S0-122", "S0-207", "S0-208")
def test_demo_of_the_region_layout(tmp_path: Path) -> None:
    """A writer is killed and replaced; the reader and the base have all that was acknowledged."""
    outcome = run_process("demo", "--layout", "region", "--dir", str(tmp_path))
    assert outcome.code == 0, outcome
    for words in (
        "kill -9",
        "with epoch 2 and replays",
        "with epoch 3",
        "this writer, of epoch 2, is fenced",
        "THE PROOF",
    ):
        assert words in outcome.out
    table = open_table(str(tmp_path / "orders.lance"))
    assert (table.layout.name, len(table.regions.region_ids)) == ("region", 1)
    assert len(demo_table.base_rows(table)) > demo_table.BASE_ORDERS
    again = run_process("demo", "--layout", "region", "--dir", str(tmp_path))
    assert again.code == 2


def test_demo_without_the_merge(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It leaves a table with something waiting, and each command that it prints works on it."""
    outcome = run_here(capfd, "demo", "--no-merge", "--dir", str(tmp_path))
    assert outcome.code == 0, outcome.err
    assert "THE MERGE" not in outcome.out
    assert f"rm -r {tmp_path}/orders.lance" in outcome.out
    table = open_table(str(tmp_path / "orders.lance"))
    assert sum(len(region.pending) for region in read_backlog(table).regions.values()) == 12
    waiting = demo_table.last_write_wins(table)
    assert demo_table.base_rows(table) != waiting
    printed = re.findall(r"memwal-ops (\w+) (\S+)((?: --[\w-]+)*) {2,}", outcome.out.partition("YOUR TURN")[2])
    assert [command for command, *_ in printed] == ["merge", "merge", "inspect", "maintain"]
    for command, uri, options in printed:
        assert run_here(capfd, command, uri, *options.split()).code == 0
    assert demo_table.base_rows(open_table(str(tmp_path / "orders.lance"))) == waiting


def test_every_error_class_has_a_code_of_the_table() -> None:
    page = (ROOT / "runbooks" / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ?(?:\[(\w+)\]\([^)]+\))? ?\| (.+) \|$", page, re.MULTILINE)
    listed = {int(code): reason for code, reason, _ in rows}
    classes = [
        found
        for module in (errors, commit, collapse)
        for _, found in python_inspect.getmembers(module, python_inspect.isclass)
        if issubclass(found, errors.MemwalOpsError)
    ]
    own = {found.exit_code: found.reason for found in classes if found.__module__ == errors.__name__}
    assert len(own) == len({found for found in classes if found.__module__ == errors.__name__}), "a code is used twice"
    assert {code: reason for code, reason in listed.items() if reason} == own
    assert set(listed) - set(own) == {0, 130, 143}
    for found in classes:
        assert found.exit_code in own
        assert found.remedy
