"""Packages whose jobs cannot be imported or fail, and jobs that leave processes behind."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import memwal_ops
from memwal_ops.core.registry import clear_caches
from tests.support.run_cli import Outcome, run_here, run_process
from tests.support.service import alive, configure, service
from tests.support.tables.workload import Workload
from tests.support.waiting import until

pytestmark = pytest.mark.long

_JOB = """
from dataclasses import dataclass
from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import Options as Base, text

@dataclass(frozen=True)
class Options(Base):
    pass

JOB = JobSpec(name={name!r}, summary="Do harm.", options=Options, load=__name__, in_maintain=False)
"""
_count = iter(range(1000))

Package = Callable[..., dict[str, str]]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    """Install a package, of its code before and after its job, here and in what the environment is given to."""

    def make(before: str = "", after: str = "", *, name: str = "hostile", code: str = _JOB) -> dict[str, str]:
        module = f"memwal_hostile_{os.getpid()}_{next(_count)}"
        folder = tmp_path / f"packages_{module}"
        info = folder / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[memwal_ops.jobs]\nlance.{name} = {module}:JOB\n")
        (folder / f"{module}.py").write_text(
            f"import os, sys\n{before}\n{code.replace('{name!r}', repr(name))}\n{after}\n"
        )
        monkeypatch.syspath_prepend(str(folder))
        clear_caches()
        inherited = os.environ.get("PYTHONPATH", "")
        return {"PYTHONPATH": os.pathsep.join([str(folder), *([inherited] if inherited else [])])}

    yield make
    clear_caches()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    table = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "tables/t.lance"))
    file.write_text(f"state_dir: {tmp_path}/state\nhttp: {{enabled: false}}\ntables: [{{uri: {table.uri}}}]\n")
    return file


def assert_refused(done: Outcome, says: str) -> None:
    error = done.document["error"]
    assert (done.code, error["reason"]) == (51, "job_plugin")
    assert says in error["message"]
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("sys.exit(0)", "", "cannot be imported: SystemExit(0)"),
        ("raise RuntimeError('oh')", "", "cannot be imported: RuntimeError('oh')"),
        ("", "Options.__init__ = lambda self: sys.exit(0)", "SystemExit(0)"),
    ],
)
def test_a_package_that_cannot_be_imported_is_named(
    config: Path, package: Package, capfd: pytest.CaptureFixture[str], before: str, after: str, says: str
) -> None:
    package(before, after)
    package(name="good")
    assert_refused(run_here(capfd, "config", "check", str(config), "--json"), says)
    assert_refused(run_here(capfd, "run", "--once", "--config", str(config), "--json"), says)
    assert_refused(run_here(capfd, "hostile", "--json"), says)
    nagios = run_here(capfd, "check", "--nagios", "--config", str(config))
    assert (nagios.code, nagios.err) == (3, "")
    assert "MEMWAL UNKNOWN - job_plugin: The job 'lance.hostile'" in nagios.out
    shown = run_here(capfd, "--help").out
    assert shown.count("(cannot be used: call it to see why)") == 1
    assert re.search(r"good +Do harm\.", shown)


def test_options_that_end_the_process_when_they_are_made(
    config: Path, package: Package, capfd: pytest.CaptureFixture[str]
) -> None:
    """With values that the configuration gives, which no probe knows."""
    package(
        code=_JOB.replace(
            "    pass", "    way: str = text('', help='')\n    def validate(self):\n        if self.way: exec(self.way)"
        )
    )
    good = config.read_text()
    for way, says in (("sys.exit(0)", "SystemExit: 0"), ("raise RuntimeError('oh')", "RuntimeError: oh")):
        config.write_text(good + f'defaults: {{jobs: {{hostile: {{schedule: 1h, options: {{way: "{way}"}}}}}}}}\n')
        assert_refused(run_here(capfd, "config", "check", str(config), "--json"), says)


@pytest.mark.parametrize("where", ["apply", "to_json"])
def test_what_a_packages_job_raises_is_reported_as_its_own(
    config: Path, package: Package, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    package(
        code=_JOB,
        after="class Report:\n    decision, exit_code = 'fine', 0\n    def describe(self): return 'fine'\n"
        f"    def to_json(self): {'raise KeyError(3)' if where == 'to_json' else 'return {}'}\n"
        f"def apply(table, options, run):\n    {'raise KeyError(3)' if where == 'apply' else 'return Report()'}\n",
    )
    uri = str(config.parent / "tables/t.lance")
    done = run_here(capfd, "hostile", uri, "--json")
    assert (done.code, done.document["error"]["reason"]) == (51, "job_plugin")
    assert "The job 'hostile' of memwal_hostile_" in done.document["error"]["message"]
    assert "raised KeyError: 3" in done.document["error"]["message"]
    assert "bug in memwal-ops" not in done.err
    if where == "apply":
        with pytest.raises(memwal_ops.JobPluginError, match="raised KeyError: 3"):
            memwal_ops.run_job(uri, "hostile")


def test_a_poll_that_raises_hides_no_figure_of_ours(config: Path, package: Package) -> None:
    environ = package(
        after="def backlog(table):\n    raise KeyError(3)\n",
        code=_JOB.replace("import JobSpec", "import JobSpec, MetricSpec").replace(
            "in_maintain=False", "in_maintain=False, enabled=True, when='odd > 3',"
            " metrics={'odd': MetricSpec('count', '', role='age')}",
        ),
    )  # fmt: skip
    uri = str(config.parent / "tables/t.lance")
    told = run_process("status", "--config", str(config), "--json", **environ)
    (table,) = told.document["tables"]
    assert (told.code, table["error"]["reason"], table["error"]["exit_code"]) == (2, "job_plugin", 51)
    assert "raised KeyError: 3" in table["error"]["message"]
    assert table["backlog"]["generations"] == 0
    nagios = run_process("check", "--nagios", uri, **environ)
    assert (nagios.code, nagios.out.startswith("MEMWAL UNKNOWN - job_plugin: The ")) == (3, True)


_LITTER = """
import os, subprocess, sys, time
from dataclasses import dataclass
from memwal_ops.core.job import JobSpec, MetricSpec
from memwal_ops.core.options import Options as Base, text

@dataclass(frozen=True)
class Options(Base):
    way: str = text("", help="")
    marks: str = text("", help="")

@dataclass(frozen=True)
class Report:
    decision: str = "fine"
    exit_code: int = 0
    def describe(self):
        return self.decision
    def to_json(self):
        return {"decision": self.decision}

def note(marks, pid):
    with open(marks, "a") as file:
        file.write(f"{pid}\\n")

def apply(table, options, run):
    if options.way == "forks":
        note(options.marks, os.fork() or os.getpid())
    if options.way == "starts":
        note(options.marks, subprocess.Popen(["sleep", "1000"]).pid)
    if options.way == "stubborn":
        child = subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
        time.sleep(0.3)
        note(options.marks, child.pid)
    if options.way == "daemon":
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                note(options.marks, os.getpid())
                os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
        while not (os.path.exists(options.marks) and os.path.getsize(options.marks)):
            time.sleep(0.05)  # the end of this run ends it, noted or not
    if options.way == "dies":
        note(options.marks, subprocess.Popen(["sleep", "1000"], stdout=1).pid)
        if os.fork() == 0:
            note(options.marks, os.getpid())
            time.sleep(1000)
        os._exit(7)
    if options.way == "exits":
        sys.exit(0)
    time.sleep(0.5)
    return Report()

def backlog(table):
    marks = os.environ.get("LOOK_MARKS")
    if marks:
        note(marks, subprocess.Popen(["sleep", "1000"]).pid)
    return {"odd": 1}

JOB = JobSpec(
    name={name!r}, summary="", options=Options, load=__name__, in_maintain=False,
    metrics={"odd": MetricSpec("count", "")},
)
"""

WAYS = {
    "forks": "succeeded",
    "starts": "succeeded",
    "stubborn": "succeeded",
    "daemon": "succeeded",
    "dies": "died",
    "exits": "failed",
}


@pytest.mark.long
def test_a_run_leaves_no_process_behind(package: Package, tmp_path: Path) -> None:
    """While the service goes on: whatever way a job took, its processes end with its run, and it is told once."""
    marks = tmp_path / "marks"
    environ = package(code=_LITTER) | {"LOOK_MARKS": f"{marks}-poll"}
    table = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "tables/t.lance"))
    jobs = "hostile: {schedule: 1h}, merge: {schedule: 1h}"
    file = configure(tmp_path, jobs)
    off = ", ".join(f"{job}: {{enabled: false}}" for job in ("merge", "catchup", "compact", "snapshot", "verify"))
    lines = []
    for way in WAYS:
        os.symlink(table.uri, tmp_path / way)
        options = json.dumps({"way": way, "marks": f"{marks}-{way}"})
        lines.append(
            f"  - {{uri: {tmp_path / way}, name: {way}, jobs: {{hostile: {{schedule: 1h, options: {options}}}}}}}"
        )
    head = file.read_text().rpartition("defaults:")[0]
    file.write_text(
        f"{head}leases: {{enabled: false}}\nbackoff: {{failures: 1, first: 1h}}\n"
        f"defaults: {{poll: 1s, jobs: {{{off}}}}}\ntables:\n" + "\n".join(lines) + "\n"
    )
    with service(file, environ) as running:
        done = until(lambda: (runs := running.runs(job="hostile")) and len(runs) == len(WAYS)
                     and all(one["outcome"] != "running" for one in runs) and runs)  # fmt: skip
        assert {one["table"]: one["outcome"] for one in done} == WAYS
        exits = next(one for one in done if one["table"] == "exits")
        assert (exits["exit_code"], "SystemExit: 0" in exits["error"]["message"]) == (51, True)
        for way in (*WAYS, "poll"):
            if way == "exits":
                continue
            pids = until(lambda path=Path(f"{marks}-{way}"): path.exists() and path.read_text().split())
            until(lambda pids=pids: not any(alive(int(pid)) for pid in pids[:3]))
        # The copies of workers that forked did not stay either: workers that are left are those of the pools.
        workers = lambda: [  # noqa: E731
            int(path.name) for path in Path("/proc").glob("[0-9]*")
            if str(tmp_path) in _environ(path) and b"supervisor.worker" in _command(path) and alive(int(path.name))
        ]  # fmt: skip
        until(lambda: len(workers()) <= 2)
        left = workers()
    until(lambda: not any(alive(pid) for pid in left))


def _environ(path: Path) -> str:
    try:
        return (path / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _command(path: Path) -> bytes:
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""
