"""Commands around the supervisor: leases, checks, and those that other packages add."""

from __future__ import annotations

import io
import json
import os
import re
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.core.anchors import LeaseGuard
from memwal_ops.core.job import MetricSpec
from memwal_ops.core.leases import Holder, Lease, acquire, break_lease, check
from memwal_ops.core.options import Options, count
from memwal_ops.core.registry import clear_caches, job_specs, load_spec
from memwal_ops.errors import JobPluginError, LeaseLostError
from memwal_ops.formats.lance.jobs import expire, merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.state.directory import StateDir
from memwal_ops.text import size_text
from tests.support.gc_options import AT_ONCE, IMMEDIATE
from tests.support.listeners import at_checkpoint
from tests.support.plugin_packages import install
from tests.support.run_cli import contents, run_here, run_process
from tests.support.tables import damage
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload, assert_same, read_base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.metadata import EntryPoint

    from memwal_ops.formats.lance.table import Table

DOCS = Path(__file__).parents[3] / "docs/configuration.md"
ZERO = timedelta(0)
US, THEM = Holder("us", "us@here"), Holder("them", "them@there")


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(1, regions=1, base_rows=40).create(str(tmp_path / "t.lance"))
    for _ in range(3):
        made.put([1, 2, 50])
        made.flush()
    return made


def test_lease_list_and_break(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_here(capfd, "lease", "list", table.uri).out == "No lease of this table was ever taken.\n"
    store = open_table(table.uri).store
    taken, _ = acquire(store, "merge", US)
    acquire(store, "gc", THEM)
    assert taken is not None
    (gc_lease, merge_lease) = run_here(capfd, "lease", "list", table.uri, "--json").document["leases"]
    assert (gc_lease["job"], gc_lease["holder"], gc_lease["state"]) == ("gc", "them@there", "held")
    assert set(merge_lease) == {
        "job", "holder", "instance", "token", "acquired", "renewed", "expires", "ended", "last_run", "state",
    }  # fmt: skip
    (only,) = run_here(capfd, "lease", "list", table.uri, "--json", "--job", "merge").document["leases"]
    assert only == merge_lease
    broken = run_here(capfd, "lease", "break", table.uri, "--job", "merge", "--json")
    assert (broken.code, broken.document["leases"][0]["state"]) == (0, "broken")
    with pytest.raises(LeaseLostError, match="broken by"):
        check(store, taken)
    assert run_here(capfd, "lease", "break", table.uri, "--job", "merge").code == 2
    text = run_here(capfd, "lease", "list", table.uri)
    assert re.search(r"merge +broken +us@here", text.out)
    assert run_here(capfd, "lease", "break", table.uri).out == "broken: the lease of gc, which them@there held.\n"
    assert run_here(capfd, "lease", "break", table.uri).code == 2


def test_a_user_without_a_name_breaks_a_lease(
    table: Workload, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may run with a user id that has no name."""

    def getuser() -> str:
        raise KeyError("no such user")

    acquire(open_table(table.uri).store, "merge", US)
    monkeypatch.setattr("getpass.getuser", getuser)
    (broken,) = run_here(capfd, "lease", "break", table.uri, "--json").document["leases"]
    assert broken["ended"].startswith("broken by unknown@")


def test_check_of_a_table(table: Workload, capfd: pytest.CaptureFixture[str]) -> None:
    def line(*arguments: str) -> tuple[int, str]:
        outcome = run_here(capfd, "check", "--nagios", *arguments)
        assert outcome.out.count("\n") == 1
        return outcome.code, outcome.out

    assert line(table.uri)[0] == 0
    assert line(table.uri, "--warn-generations", "3")[0] == 1
    code, said = line(table.uri, "--crit-generations", "3")
    assert (code, said.split(" |")[0]) == (2, "MEMWAL CRITICAL - generations 3")
    assert line(table.uri, "--crit-age", "0s")[0] == 2
    damage.remove_generation(table.uri, table.regions[0], 1)
    code, said = line(table.uri)
    assert (code, said.split(" |")[0]) == (2, "MEMWAL CRITICAL - 1 region blocked")
    assert line(str(Path(table.uri).parent / "none.lance"))[0] == 3
    assert run_here(capfd, "check", table.uri).code == 2


def test_check_of_a_service_that_is_not_there(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http: {port: 1}\ntables: [{uri: /a}]\n")
    outcome = run_here(capfd, "check", "--nagios", "--config", str(file))
    said = "MEMWAL CRITICAL - the service does not respond on 127.0.0.1:1 (Connection refused)\n"
    assert (outcome.code, outcome.out) == (2, said)
    file.write_text("htp: {}\n")
    assert run_here(capfd, "check", "--nagios", "--config", str(file)).code == 3


def test_check_names_the_table_that_is_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tables: [{uri: /a}, {uri: /b}]\n")
    config: dict[str, str | None] = {"error": None}
    tables = [
        {"name": name, "backlog": backlog, "look_error": None, "jobs": {}}
        for name, backlog in (("a", {"generations": 3.0}), ("b", {"generations": 40.0, "oldest_age": 9.0}))
    ]
    status: dict[str, Any] = {"service": {"instance": "i", "ready": True, "config": config}, "tables": tables}
    monkeypatch.setattr("urllib.request.OpenerDirector.open", lambda *_, **__: io.BytesIO(json.dumps(status).encode()))

    def line(*more: str) -> str:
        return run_here(capfd, "check", "--nagios", "--config", str(file), *more).out.split(" | ")[0]

    assert line() == "MEMWAL WARNING - b: generations 40"
    enough = ("--warn-generations", "50")
    assert line(*enough) == "MEMWAL OK - 2 tables, at most 40 generations waiting in one (b)"
    assert line(*enough, "--crit-age", "5s", "--warn-age", "5s") == "MEMWAL CRITICAL - b: oldest 9s"
    tables[1]["look_error"] = "It is away. " * 40
    tables[1]["backlog"] = {"blocked_regions": 1.0}
    assert line().startswith("MEMWAL CRITICAL - b: 1 region blocked; b cannot be read: "), "the worst first"
    assert "  ..." not in line()
    tables[1] |= {"look_error": None, "backlog": {"generations": 40.0}}
    status["service"]["state_dir"] = "/of/another"
    assert line(*enough).startswith("MEMWAL OK"), "a default state folder is that of the user who asks"
    file.write_text(f"state_dir: {tmp_path}\ntables: [{{uri: /a}}, {{uri: /b}}]\n")
    another = "the service at that address runs another configuration (its state_dir is /of/another)"
    assert line(*enough) == f"MEMWAL CRITICAL - {another}\n"
    status["service"]["state_dir"] = str(tmp_path)
    assert line(*enough).startswith("MEMWAL OK")
    config["error"] = "http: takes effect at a restart only; the rest is in effect"
    assert line(*enough).endswith(
        "not applied, or only in part: http: takes effect at a restart only; the rest is in effect"
    )


JOBS: list[tuple[str, Callable[[Table], Any]]] = [
    ("merge", lambda table: merge.apply(table, merge.MergeOptions())),
    ("catchup", lambda table: catchup.apply(table, catchup.CatchupOptions())),
    ("snapshot", lambda table: snapshot.apply(table, snapshot.SnapshotOptions())),
    ("gc", lambda table: gc.apply(table, IMMEDIATE)),
    ("expire", lambda table: expire.apply(table, expire.ExpireOptions(older_than=ZERO, allow_unsafe=True))),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "job"), JOBS, ids=[name for name, _ in JOBS])
def test_who_lost_the_lease_publishes_and_deletes_nothing(
    table: Workload, name: str, job: Callable[[Table], Any]
) -> None:
    if name in {"catchup", "gc", "expire"}:
        merge.apply(open_table(table.uri), merge.MergeOptions())
    if name in {"gc", "expire"}:
        catchup.apply(open_table(table.uri), catchup.CatchupOptions())
        table.put([3])
        table.flush()
        merge.apply(open_table(table.uri), merge.MergeOptions())
        catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    if name == "gc":
        expire.apply(open_table(table.uri), expire.ExpireOptions(older_than=ZERO, allow_unsafe=True))
    opened = open_table(table.uri)
    lease, _ = acquire(opened.store, name, US)
    assert lease is not None
    break_lease(opened.store, name, "somebody")
    requests = []
    guard = LeaseGuard(lambda: check(opened.store, lease), lambda: requests.append(1))
    before = contents(table.uri)
    outcome: Any = None
    try:
        outcome = job(opened.with_guard(guard))
    except LeaseLostError:
        pass
    else:
        assert name == "catchup", "what fails with one index is told with it"
        assert {one.error.reason for one in outcome.indexes if one.error} == {"lease_lost"}
    assert requests
    after = contents(table.uri)
    assert open_table(table.uri).version == opened.version
    assert [path for path in before if path not in after] == []
    kept: Lease | None = acquire(opened.store, name, US)[0]
    assert kept is not None
    job(opened.with_guard(LeaseGuard(lambda: check(opened.store, kept))))
    assert contents(table.uri).keys() != after.keys(), "with the lease it does what it is for"
    merge.apply(open_table(table.uri), merge.MergeOptions())
    assert_same(read_base(table.uri), table.expected())


def test_a_compaction_asks_before_it_commits(table: Workload) -> None:
    """pylance commits it, past our store: the job asks at its checkpoint right before."""
    merge.apply(open_table(table.uri), merge.MergeOptions())
    catchup.apply(open_table(table.uri), catchup.CatchupOptions())
    opened = open_table(table.uri)

    def lost() -> None:
        raise LeaseLostError("gone")

    with pytest.raises(LeaseLostError):
        compact.apply(opened, compact.CompactOptions(), at_checkpoint(lost))
    assert open_table(table.uri).version == opened.version
    assert compact.apply(opened, compact.CompactOptions()).decision == "compacted"


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The example package, installed in this process too."""
    environ = install(["audit"], tmp_path)
    for path in reversed(environ["PYTHONPATH"].split(os.pathsep)[:2]):
        monkeypatch.syspath_prepend(path)
    clear_caches()
    yield environ
    clear_caches()


@pytest.mark.long
def test_a_package_adds_a_job_with_options_and_a_command(
    table: Workload, tmp_path: Path, audit: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    done = run_process("audit", table.uri, "--min-rows", "41", "--json", **audit)
    assert (done.code, json.loads(done.out)) == (10, {"decision": "too_few", "rows": 40})
    assert run_process("audit", table.uri, **audit).out == "audited: 40 rows.\n"
    file = tmp_path / "c.yaml"
    file.write_text(
        f"tables:\n  - uri: {table.uri}\n    jobs:\n      audit:\n        when: base_rows > 5\n"
        "        options: {max_bytes: 1MiB, patience: 2h, min_row: 3}\n"
    )
    bad = run_here(capfd, "config", "check", str(file), "--json")
    assert [(one["line"], one["fix"]) for one in bad.document["problems"]] == [(6, "Did you mean min_rows?")]
    file.write_text(file.read_text().replace("min_row:", "min_rows:"))
    good = run_here(capfd, "config", "check", str(file), "--json")
    assert "audit" in good.document["jobs"]
    options = job_specs("lance")["audit"].options.read(load_settings(str(file), {}).tables[0].jobs["audit"].options)
    assert (options.min_rows, options.max_bytes, options.patience) == (3, 1 << 20, timedelta(hours=2))
    file.write_text(file.read_text().replace("min_rows: 3", "min_rows: -3"))
    refused = run_here(capfd, "config", "check", str(file), "--json")
    assert refused.document["problems"][0]["message"] == "min_rows must be at least 0, not -3."


@pytest.mark.long
def test_a_broken_package_is_named_and_affects_no_other(table: Workload, tmp_path: Path) -> None:
    environ = install(["moody"], tmp_path)
    points = next(tmp_path.glob("*.dist-info")) / "entry_points.txt"
    points.write_text("[memwal_ops.jobs]\nlance.broken = no_such_module:JOB\n")
    assert run_process("inspect", table.uri, **environ).code == 0
    called = run_process("broken", "--whatever", **environ)
    assert called.code == 51
    assert "no_such_module" in called.err


@pytest.mark.long
def test_an_error_of_a_package_has_its_exit_code_and_page(table: Workload, tmp_path: Path) -> None:
    called = run_process("moody", table.uri, "--mood", "refuses", **install(["moody"], tmp_path))
    assert called.code == 70
    assert "Be kind to it." in called.err
    assert "See https://example.com/moods" in called.err
    told = run_process("moody", table.uri, "--mood", "refuses", "--json", **install(["moody"], tmp_path))
    assert told.document["error"]["runbook"] == "https://example.com/moods"


def test_a_package_is_found_however_early_this_process_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(capfd, "broken").code == 2
    environ = install(["moody"], tmp_path)
    (next(tmp_path.glob("*.dist-info")) / "entry_points.txt").write_text(
        "[memwal_ops.jobs]\nlance.broken = no_such:JOB\n"
    )
    for path in environ["PYTHONPATH"].split(os.pathsep)[:2]:
        monkeypatch.syspath_prepend(path)
    assert run_here(capfd, "broken").code == 51


@dataclass(frozen=True)
class Needy(Options):
    wanted: int = count(None, help="Needed.")

    def validate(self) -> None:
        if self.wanted is None:
            raise ValueError("give wanted")


class _Entry:
    name, value, group = "lance.odd", "odd:ODD", "memwal_ops.jobs"

    def __init__(self, found: object) -> None:
        self.load = lambda: found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "not a memwal_ops.core.job.JobSpec"),
        ({"name": "other"}, "its name is 'other'"),
        ({"name": "odd", "pool": "swimming"}, "its pool is 'swimming'"),
        ({"name": "odd", "options": dict}, "not a subclass"),
        ({"name": "odd", "options": Needy}, "cannot be made without values"),
        ({"name": "odd", "metrics": {"Odd figure": MetricSpec("count", "")}}, "Odd figure"),
        ({"name": "odd", "metrics": {"figure": MetricSpec("furlongs", "")}}, "figure"),
        ({"name": "odd", "pages": {"mood": "docs/moods.md"}}, "docs/moods.md are no URLs"),
    ],
)
def test_what_is_no_job_is_refused(change: dict[str, Any] | None, says: str) -> None:
    found = "a text" if change is None else replace(job_specs("lance")["merge"], **change)
    entry: EntryPoint = _Entry(found)  # type: ignore[assignment]
    with pytest.raises(JobPluginError, match=says):
        load_spec(entry)


def test_the_reference_has_every_key_and_default(tmp_path: Path) -> None:
    text = DOCS.read_text()
    file = tmp_path / "c.yaml"
    file.write_text("tables: [{uri: /t}]\n")
    settings = load_settings(str(file), {})
    for key, value, _ in settings.effective():
        if key.startswith("tables."):
            continue
        row = re.sub(r"^pools\.\w+", "pools.POOL", key)
        row = re.sub(r"^prices\.\w+\.\w+", "prices.STORE.PRICE", row)
        (found,) = re.findall(rf"^\| `{re.escape(row)}` \| (.*?) \|", text, re.MULTILINE)
        if value is not None and row == key:
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            assert f"`{'60s' if shown == '1m' else shown}`" in found, key
    for name, job in settings.tables[0].jobs.items():
        (pool, enabled, every, when, hung) = re.findall(
            rf"^\| `{name}` \| (\w+) \| ([\w ]+) \| `(\w+)` \|(.*?)\| `(\w+)` \|$", text, re.MULTILINE
        )[0]
        assert (pool, enabled == "yes") == (job.job.pool, job.enabled)
        assert str(job.schedule).startswith(f"every {every}")
        assert when.strip(" `") == ("" if job.when is None else job.when.text)
        assert job.values().get("hung_after", hung) == hung
    figures = {name for job in job_specs("lance").values() for name in job.backlog_metrics}
    assert [name for name in sorted(figures) if f"`{name}`" not in text] == []


def test_the_readme_configuration_is_good(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    file = tmp_path / "memwal.yaml"
    file.write_text(block)
    settings = load_settings(str(file), {})
    for table in settings.tables:
        deletes = {name: job.apply for name, job in table.jobs.items() if job.enabled and name in {"expire", "gc"}}
        assert deletes == {"expire": True, "gc": True}, "a copy of it deletes old versions, in a database, too"


def test_what_keeps_a_service_from_starting(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        file.write_text(
            f"state_dir: {tmp_path}/state\nhttp: {{port: {taken.getsockname()[1]}}}\ntables: [{{uri: /nothing}}]\n"
        )
        refused = run_here(capfd, "run", "--config", str(file))
    assert refused.code == 2
    assert "cannot be bound" in refused.err
    other = StateDir(str(tmp_path / "state"))  # the first attempt has let go of it
    twice = run_here(capfd, "run", "--once", "--json", "--config", str(file))
    assert (twice.code, twice.document["error"]["reason"]) == (55, "already_running")
    other.close()
    assert run_here(capfd, "run", "--config", str(tmp_path / "none.yaml")).code == 50


@pytest.mark.long
def test_one_round_prints_what_applies_and_what_it_left(tmp_path: Path) -> None:
    """A plain table has neither a log to merge nor regions; what compact replaces is too young to be deleted."""
    table = PlainTable(str(tmp_path / "t.lance")).create(fragments=4, rows=50)
    jobs = {"expire": {"enabled": True, "apply": True}, "gc": {"enabled": True, "apply": True}}
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"state_dir": f"{tmp_path}/state", "tables": [{"uri": table.uri, "jobs": jobs}]}))
    done = run_process("run", "--once", "--config", str(file))
    assert done.code == 0, done.err
    assert "not_applicable" not in done.out
    assert "t compact: succeeded, compacted" in done.out
    later = run_job(table.uri, "expire", apply=False).to_json()["later"]
    left = f"Up to {size_text(later['bytes'])} are left that were too young to be deleted; all are old enough by "
    assert left in done.out


@pytest.mark.long
@pytest.mark.parametrize("apply", [False, True])
def test_a_supervised_maintain_deletes_only_by_its_own_option(table: Workload, tmp_path: Path, *, apply: bool) -> None:
    """``apply`` of a job's settings is to act; it is true where nothing is said, and lets nothing go."""
    options = {
        "apply": apply,
        "expire": {"older_than": "0s", "allow_unsafe": True},
        "gc": AT_ONCE,
    }
    jobs: dict[str, Any] = {
        "maintain": {"enabled": True, "apply": True, "options": options},
        "merge": {"enabled": False},
    }
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"state_dir": f"{tmp_path}/state", "tables": [{"uri": table.uri, "jobs": jobs}]}))
    generation = damage.generation_path(table.uri, table.regions[0], 1)
    assert generation.exists()
    done = run_process("run", "--once", "--json", "--config", str(file))
    assert done.code == 0, done.err
    assert open_table(table.uri).index.merged_generations  # type: ignore[attr-defined]
    assert generation.exists() is not apply
