"""The service as processes: workers that die, a service that is killed, stopped, reloaded, and two that share."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections import Counter
from contextlib import suppress
from pathlib import Path

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.leases import list_leases
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.memwal import read
from tests.integration.contracts import small
from tests.integration.formats.lance.jobs.adopt.test_drained import without_sizes
from tests.support.plugin_packages import install
from tests.support.receivers import silent_server
from tests.support.run_cli import run_process
from tests.support.service import PATIENCE, alive, configure, service
from tests.support.tables import damage
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.plain import PlainTable
from tests.support.tables.reading import rows_by_key
from tests.support.tables.region_layout import RegionLayout
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.support.waiting import until


def held(uri: str) -> list[str]:
    return [lease.job for lease in list_leases(open_table(uri).store) if lease.ended is None]


@pytest.mark.long
def test_a_trigger_by_sizes_that_no_writer_recorded(tmp_path: Path) -> None:
    """The log of an older release: rows and bytes are those of its files, and the trigger fires by them."""
    (tmp_path / "tables").mkdir()
    uri = small.make(tmp_path / "tables")
    for number in range(66):
        small.flush(uri, small.rows(10 * number, 10 * number + 10, 1.0))
    without_sizes(uri)
    when = "rows >= 500 or bytes >= 100KiB"
    with service(configure(tmp_path, f"merge: {{schedule: '0 0 29 2 *', when: {when}}}")) as running:
        until(lambda: [one for one in running.runs(job="merge") if one["outcome"] == "succeeded"])
        (run,) = running.runs(job="merge")
        assert (run["why"], run["decision"], run["figures"]["rows_merged"]) == (f"when: {when}", "merged", 660)
    assert small.values(uri) == {key: [1.0] for key in range(660)}


@pytest.mark.long
def test_a_day_of_a_service(tables: list[Workload], tmp_path: Path) -> None:
    """It merges, serves, keeps its configuration when a bad one comes, takes a good one, and stops when told to."""
    config = configure(tmp_path, "merge: {schedule: 1h, when: generations >= 1}")
    with service(config) as running:
        until(
            lambda: (
                Counter(one["table"] for one in running.runs() if one["outcome"] == "succeeded")
                >= Counter(["t0", "t1", "t2"])
            )
        )
        for table in tables:
            assert_same(read_base(table.uri), table.expected())
        until(lambda: running.get("/healthz") == "ok\n")
        until(lambda: running.get("/readyz") == "ready\n")
        until(lambda: 'memwal_ops_backlog_generations{table="t2"} 0.0' in running.get("/metrics"))
        status = running.get("/api/v1/status")
        assert [table["name"] for table in status["tables"]] == ["t0", "t1", "t2"]
        assert all(f'<a href="/tables/t{number}">t{number}</a>' in running.get("/") for number in range(3))
        page = running.get("/tables/t1")  # at the first visit it has the history, too
        assert ">merged</td>" in page
        assert ">memwal-ops merge</td>" in page
        number = running.runs(table="t1")[0]["id"]
        assert f"run {number}" in running.get(f"/runs/{number}")
        ended = [run for run in running.get("/api/v1/runs?job=merge")["runs"] if run["outcome"] != "running"]
        assert {run["decision"] for run in ended} <= {"merged", "nothing_to_merge"}
        # new work, found by a look
        known = {one["id"] for one in running.runs(table="t1")}
        tables[1].put([3, 5])
        tables[1].flush()
        found = until(lambda: [one for one in running.runs(table="t1") if one["id"] not in known])
        assert {one["why"] for one in found} == {"when: generations >= 1"}
        # a bad file
        good = config.read_text()
        config.write_text(good + "htp: {}\n")
        running.process.send_signal(signal.SIGHUP)
        event = until(lambda: running.events("config_not_reloaded"))[0]
        assert f"{config}:" in event["error"]
        assert "htp" in running.get("/api/v1/status")["service"]["config"]["error"]
        until(lambda: "memwal_ops_config_ok 0.0" in running.get("/metrics"))
        tables[2].put([3, 5])
        tables[2].flush()
        until(lambda: not read_backlog(open_table(tables[2].uri)).pending)
        # a good one again, without the first table
        fewer = good.replace("/*.lance", "/t[12].lance")
        config.write_text(fewer)
        running.process.send_signal(signal.SIGHUP)
        until(lambda: len(running.get("/api/v1/status")["tables"]) == 2)
        assert running.get("/api/v1/status")["service"]["config"]["error"] is None
        until(lambda: 'table="t0"' not in running.get("/metrics"))
        # what a restart alone takes up is told until then, however often the file is read, and not when it is undone
        config.write_text(fewer + "misfire_grace: 2h\n")
        for times in (1, 2):
            running.process.send_signal(signal.SIGHUP)
            until(lambda times=times: len(running.events("config_needs_restart")) == times)
        assert "misfire_grace" in running.get("/api/v1/status")["service"]["config"]["error"]
        config.write_text(fewer)
        running.process.send_signal(signal.SIGHUP)
        until(lambda: running.get("/api/v1/status")["service"]["config"]["error"] is None)
        port = running.port
        nagios = run_process("check", "--nagios", tables[0].uri)
        assert (nagios.code, nagios.out.count("\n")) == (0, 1)
        assert nagios.out.startswith("MEMWAL OK - 0 generations waiting | generations=0;32;128")
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE) == 0
    assert port
    assert running.events("stopped")
    assert "Traceback" not in running.log_path.read_text()
    for table in tables:
        assert held(table.uri) == []


@pytest.mark.req("S0-020")
@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_snapshot_of_the_regions_follows_them(layout: type[Workload | RegionLayout], tmp_path: Path) -> None:
    """A reader of the snapshot, who lists nothing, sees each flush a moment later, and regions that are new."""
    table = layout(3, regions=2, base_rows=20).create(str(tmp_path / "tables/t.lance"))

    def seen() -> bool:
        rows = read(table.uri, "snapshot").scan().to_table()
        return rows_by_key(rows, table.model.keys) == table.expected()

    with service(configure(tmp_path, "snapshot: {schedule: 1s}")):
        for number in range(4):  # the keys of both regions
            table.put([number, number + 100])
            table.flush()
            until(seen)


@pytest.mark.long
def test_killed_and_stopped_in_the_middle(tables: list[Workload], tmp_path: Path) -> None:
    """A worker that is killed, a service that is killed, a service that is stopped: each with a running job."""
    environ = install(["moody"], tmp_path)
    marks = tmp_path / "marks"
    jobs = f"moody: {{schedule: 10m, options: {{mood: steps, marks: {marks}}}}}"
    config = configure(tmp_path, jobs, more="backoff: {failures: 1, first: 1h}\nstop_grace: 10m")
    with service(config, environ) as running:
        # kill -9 of the worker: that run died, another table's begins
        first = until(lambda: running.events("run_started"))[0]
        until(lambda: marks.exists() and marks.read_text().count("end") >= 1)
        os.kill(first["pid"], signal.SIGKILL)
        died = until(lambda: running.runs(failed=True))[0]
        assert (died["table"], died["outcome"], died["error"]["reason"]) == (first["table"], "died", "worker_died")
        second = until(lambda: running.events("run_started")[1:])[0]
        assert second["table"] != first["table"]
        assert held(tables[0].uri if second["table"] == "t0" else f"{tmp_path}/tables/{second['table']}.lance") == [
            "moody"
        ]
        # kill -9 of the service: its workers end by themselves
        running.kill()
        until(lambda: not alive(second["pid"]))
        assert [one["table"] for one in running.runs() if one["outcome"] == "running"] == [second["table"]]
    with service(config, environ) as again:
        # its own lease is taken over at once, not after five minutes
        third = until(lambda: again.events("run_started")[2:])[0]
        assert third["table"] == second["table"], "what was killed is due first"
        (killed,) = [one for one in again.runs() if one["outcome"] == "killed"]
        assert killed["table"] == second["table"]
        begun = marks.read_text().count("begin")
        until(lambda: marks.read_text().count("begin") > begun)
        # SIGTERM: the current step ends
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(PATIENCE) == 0
        assert marks.read_text().endswith("end\n")
        stopped = again.runs()[0]
        assert (stopped["outcome"], stopped["decision"]) == ("stopped", "stopped")
        assert stopped["versions"], "what it did until then is written down"
        assert held(f"{tmp_path}/tables/{third['table']}.lance") == []
    with service(config, environ) as last:
        fourth = until(lambda: last.events("run_started")[3:])[0]
        # a second signal does not wait for the step
        last.process.send_signal(signal.SIGTERM)
        until(lambda: last.events("stopping")[1:])
        last.process.send_signal(signal.SIGTERM)
        assert last.process.wait(PATIENCE) == 0
        assert not alive(fourth["pid"])
        assert [one for one in last.runs() if one["outcome"] == "running"] == []
        assert held(f"{tmp_path}/tables/{fourth['table']}.lance") == []


@pytest.mark.long
def test_two_supervisors_share(tables: list[Workload], tmp_path: Path) -> None:
    """Both see the same backlog; each piece of work is done by one of them, and when one dies the other goes on."""
    jobs = "merge: {schedule: 1h, when: generations >= 1}"
    configs = [configure(tmp_path, jobs, name=name, more="leases: {ttl: 3s}") for name in ("one", "two")]
    with service(configs[0]) as one, service(configs[1]) as two:
        until(lambda: all(not read_backlog(open_table(table.uri)).pending for table in tables))
        until(lambda: one.events("ready") and two.events("ready"))
        for table in tables:
            table.put([3, 5, 7])
            table.flush()
        until(lambda: all(not read_backlog(open_table(table.uri)).pending for table in tables))
        versions = Counter(
            (run["table"], version)
            for running in (one, two)
            for run in running.runs()
            for version in run["versions"] or []
        )
        assert set(versions.values()) == {1}
        one.kill()
        for table in tables:
            table.put([3, 9])
            table.flush()
        until(lambda: all(not read_backlog(open_table(table.uri)).pending for table in tables))
        for table in tables:
            assert_same(read_base(table.uri), table.expected())


MOODS = {
    "good": ("succeeded", 0),
    "hangs": ("hung", 54),
    "busy": ("hung", 54),
    "dies": ("died", 53),
    "leaks": ("died", 53),
    "fails": ("failed", 24),
    "breaks": ("failed", 51),
}


@pytest.mark.long
def test_once_with_jobs_of_every_mood(tmp_path: Path) -> None:
    """Whatever a job does, the others are done, and the exit code is the worst of theirs."""
    environ = install(["moody", "audit"], tmp_path)
    table = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "tables/t.lance"))
    entries = []
    off = ", ".join(f"{job}: {{enabled: false}}" for job in ("merge", "catchup", "compact", "snapshot", "verify"))
    # Two are ended by a limit, which comes for certain; the others have none that a busy machine could come to.
    limits = {"busy": "timeout: 1s", "hangs": "hung_after: 2s"}
    for mood in MOODS:
        os.symlink(table.uri, tmp_path / mood)
        limit = limits.get(mood, "hung_after: 1h")
        entries.append(
            f"  - {{uri: {tmp_path / mood}, name: {mood}, jobs: {{moody: {{{limit}, options: {{mood: {mood}}}}}}}}}"
        )
    config = tmp_path / "c.yaml"
    audit = "audit: {options: {min_rows: 21}, when: base_rows > 5}"
    config.write_text(
        f"state_dir: {tmp_path}/state\nleases: {{enabled: false}}\n"
        f"pools: {{build: {{workers: 2, memory: 700MiB}}}}\ndefaults: {{jobs: {{{off}}}}}\ntables:\n"
        + "\n".join(entries)
        + f"\n  - {{uri: {table.uri}, name: audited, jobs: {{{audit}}}}}\n"
    )
    done = run_process("run", "--once", "--config", str(config), "--json", **environ)
    runs = {one["table"]: one for one in done.document["runs"]}
    assert {name: (one["outcome"], one["exit_code"]) for name, one in runs.items() if name != "audited"} == MOODS
    assert done.code == 54
    assert "a bug" in runs["breaks"]["error"]["message"]
    assert "made no progress" in runs["hangs"]["error"]["message"]
    assert "ran longer" in runs["busy"]["error"]["message"]
    assert "exit code 7" in runs["dies"]["error"]["message"]
    assert "exceeded its memory limit" in runs["leaks"]["error"]["message"]
    audited = runs["audited"]
    assert (audited["outcome"], audited["exit_code"], audited["decision"]) == ("partial", 10, "too_few")
    assert audited["report"]["rows"] == lance.dataset(table.uri).count_rows()
    assert audited["figures"]["rows_audited"] == 20
    assert "Traceback" not in done.err.replace("RuntimeError", "") or "unexpected_error" in done.err


@pytest.mark.long
def test_a_store_that_never_answers_keeps_no_named_table_waiting(tables: list[Workload], tmp_path: Path) -> None:
    """Nor the process from ending: what looks at the pattern is left behind."""
    config = configure(tmp_path, "merge: {schedule: 1h}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = {
            "aws_endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}", "allow_http": "true",
            "aws_region": "us-east-1", "aws_access_key_id": "none", "aws_secret_access_key": "none",
        }  # fmt: skip
        hangs = f"{{pattern: 's3://bucket/*.lance', storage_options: {json.dumps(store)}}}"
        head = config.read_text().rpartition("tables:")[0]
        config.write_text(f"{head}tables: [{{uri: {tables[0].uri}}}, {hangs}]\n")
        with service(config) as running:
            until(running.runs)
            until(lambda: not read_backlog(open_table(tables[0].uri)).pending)
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(PATIENCE) == 0
            events = [json.loads(line)["event"] for line in running.log_path.read_text().splitlines()]
    assert "pattern_failed" not in events[: events.index("run_started")], "it did not wait for the pattern"
    assert held(tables[0].uri) == []


@pytest.mark.long
@pytest.mark.s3
def test_on_s3_no_secret_is_printed(bucket: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    """Keys from the environment reach the store by the worker's pipe, and nothing else."""
    root, options = bucket
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # the documented example, no real one
    table = Workload(1, regions=1, base_rows=20).create(f"{root}/t.lance", options)
    table.put([1, 2])
    table.flush()
    given = {key: value for key, value in options.items() if key != "aws_secret_access_key"}
    file = tmp_path / "c.yaml"
    file.write_text(
        f"state_dir: {tmp_path}/state\nlog_level: debug\n"
        f"defaults:\n  storage_options: {json.dumps(given | {'aws_secret_access_key': '${S3_SECRET}'})}\n"
        "  jobs: {catchup: {enabled: false}, compact: {enabled: false}, snapshot: {enabled: false},"
        " verify: {enabled: false}}\n"
        f"tables: [{{pattern: '{root}/*.lance'}}]\n"
    )
    done = run_process("run", "--once", "--config", str(file), "--json", S3_SECRET=secret)
    assert done.code == 0, done.err
    (run,) = done.document["runs"]
    assert (run["job"], run["decision"], run["table"]) == ("merge", "merged", "t")
    assert_same(read_base(table.uri, options), table.expected())
    lease = next(one for one in list_leases(open_table(table.uri, options).store) if one.job == "merge")
    assert lease.ended == "released"
    assert lease.last is not None
    assert lease.last.outcome == "succeeded"
    checked = run_process("config", "check", str(file), S3_SECRET=secret)
    stored = b"".join(path.read_bytes() for path in (tmp_path / "state").iterdir())
    for form in (secret, secret.replace("/", "\\/"), secret.replace("/", "%2F")):
        assert form not in done.out + done.err + checked.out + checked.err
        assert form.encode() not in stored


def test_a_blocked_merge_runs_once(tmp_path: Path) -> None:
    """It merges the other region; the polls after it find the blocked generations, and do not start it again."""
    table = Workload(1, regions=2, base_rows=40).create(str(tmp_path / "tables/t.lance"))
    table.step(12)
    table.flush()
    region = min(path.name for path in Path(table.uri, "_mem_wal").iterdir())
    damage.remove_generation_data(table.uri, region, 1)
    config = configure(tmp_path, "merge: {when: generations >= 1}")
    with service(config) as running:
        until(lambda: [run for run in running.runs() if run["outcome"] == "partial"])
        began = running.runs()[0]["finished"]
        until(lambda: (running.get("/api/v1/status")["tables"][0]["looked_at"] or "") > began)
        seen: set[str] = set()
        until(lambda: seen.add(running.get("/api/v1/status")["tables"][0]["looked_at"]) or len(seen) >= 4)
        (run,) = running.runs()
        (line,) = running.events("run_finished")
    assert run["versions"], "the other region is merged"
    assert (line["region_id"], line["generation"], line["blocked"]) == (region, 1, 1)
    assert line.keys() >= {"reason", "detail", "remedy", "runbook"}


def test_what_was_not_read_is_not_ok_and_a_store_that_hangs_delays_no_other(tmp_path: Path) -> None:
    PlainTable(str(tmp_path / "local.lance")).create(rows=3)
    config = tmp_path / "c.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port_of_service = taken.getsockname()[1]
    off = ", ".join(f"{job}: {{enabled: false}}" for job in ("compact", "catchup", "expire", "gc", "verify", "merge"))
    with silent_server() as port:
        options = (
            f"storage_options: {{aws_region: us-east-1, aws_endpoint: 'http://127.0.0.1:{port}', allow_http: 'true', "
            "aws_access_key_id: x, aws_secret_access_key: yyyyyyyyyy}"
        )
        config.write_text(
            f"state_dir: {tmp_path}/state-c\nhttp: {{port: {port_of_service}}}\npools: {{watch: {{workers: 1}}}}\n"
            f"defaults: {{poll: 1s, jobs: {{{off}}}}}\ntables:\n"
            f"  - {{uri: 's3://away/t.lance', format: lance, name: away, {options}}}\n"
            f"  - {{pattern: 's3://away/*.lance', {options}}}\n"
            f"  - {{uri: {tmp_path}/local.lance, name: local}}\n"
        )

        def get(path: str) -> str:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port_of_service}{path}") as answer:
                return str(answer.read().decode())
            return "{}"

        def states() -> dict[str, str]:
            return {one["name"]: one["state"] for one in json.loads(get("/api/v1/tables")).get("tables", ())}

        with service(config):
            until(lambda: states().get("local") == "read")
            assert states() == {"away": "not_read", "local": "read"}
            document = json.loads(get("/api/v1/tables"))
            assert (document["total"], document["not_read"]) == (2, 1)
            assert {one["name"] for one in document["tables"] if one["looked_at"] is None} == {"away"}
            assert "memwal_ops_tables_not_read 1.0" in get("/metrics")
            page = get("/")
            assert "Not read yet: 1 of 2." in page
            assert "Not listed yet: s3://away/*.lance" in page
            outcome = run_process("check", "--nagios", "--config", str(config))
            assert outcome.code == 3, outcome.out
            assert "not read yet: 1 of 2 tables" in outcome.out
            assert "no table" not in outcome.out
