"""runbooks/alerts/: a page for every alert, and every page followed while what it is about is really the case."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import numpy as np
import promql_parser as promql
import pyarrow as pa
import pytest
import yaml

from memwal_ops import open_table
from memwal_ops.core.leases import Holder, acquire
from memwal_ops.core.registry import clear_caches
from memwal_ops.formats.lance.jobs import adopt, merge
from memwal_ops.formats.lance.options import AdoptOptions
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store
from memwal_ops.supervisor.membership.records import MemberRecord, MemberRecords
from tests.support.plugin_packages import install
from tests.support.run_cli import run_here
from tests.support.service import PATIENCE, Running, service
from tests.support.tables import damage
from tests.support.tables.answering import DIMENSION, rebuilt_elsewhere, vectors
from tests.support.tables.workload import Workload, assert_same, read_base
from tests.support.waiting import until
from tests.system.deploy.promql import metrics
from tests.system.drills.in_process import follow, steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[3]
PAGES = {page.stem: page for page in sorted((ROOT / "runbooks/alerts").glob("*.md"))}
RULES = yaml.safe_load((ROOT / "configs/prometheus/memwal-ops.rules.yaml").read_text())
ALERTS = {rule["alert"]: rule for group in RULES["groups"] for rule in group["rules"]}
INDEX = "by_vector"
THEM = Holder("them", "somebody@elsewhere pid 7")

# A store whose clock is an hour slow, as the service sees it; its workers go by other files' times.
CLOCK = """
import sys
from dataclasses import replace
from datetime import timedelta
if "run" in sys.orig_argv:
    from memwal_ops.storage import object_store
    from memwal_ops.storage.local import LocalObjectStore
    def slow(meta_of):
        def found(*given):
            meta = meta_of(*given)
            return meta and replace(meta, last_modified=meta.last_modified - timedelta(hours=1))
        return found
    object_store.to_meta = slow(object_store.to_meta)
    LocalObjectStore._meta = slow(LocalObjectStore._meta)
"""
# Two jobs that nobody should install: one that lives and does not end, and one whose figure is no number; and a bug.
JOBS = """
import time
from dataclasses import dataclass
from datetime import timedelta
from memwal_ops.core.job import JobSpec, MetricSpec
from memwal_ops.core.options import Options
from memwal_ops.supervisor.scheduling import scheduler
from memwal_ops.supervisor.workers.pools import Pools

@dataclass(frozen=True)
class Report:
    decision: str = "done"
    exit_code: int = 0
    def describe(self):
        return self.decision
    def to_json(self):
        return {"decision": self.decision}

class Endless:
    def plan(self, table, options, context):
        return Report()
    def apply(self, table, options, context):
        while True:
            context.checkpoint()
            context.heartbeat()
            time.sleep(0.1)

class Wordy:
    def backlog(self, table):
        return {"words": "a few"}
    def plan(self, table, options, context):
        return Report()
    apply = plan

ENDLESS_JOB, WORDY_JOB = Endless(), Wordy()
ENDLESS = JobSpec(
    name="endless", summary="", options=Options, load="drill_jobs:ENDLESS_JOB", pool="collect",
    every=timedelta(hours=1), in_maintain=False,
)
WORDY = JobSpec(
    name="wordy", summary="", options=Options, load="drill_jobs:WORDY_JOB", when="words > 5", in_maintain=False,
    metrics={"words": MetricSpec("count", "Words.")},
)

# This module is imported by the service, too.
poll = scheduler.Scheduler.poll

def buggy(self, table, **named):
    if table == "endless" and isinstance(self.pools, Pools):  # of the service, not of a plan
        raise RuntimeError("a bug")
    poll(self, table, **named)

scheduler.Scheduler.poll = buggy
"""
CONFIG = """\
state_dir: {root}/state-config
http: {{port: {port}}}
backoff: {{failures: 1, first: 1h}}
leases: {{ttl: 3s}}
fleet: {{uri: {root}/ops, name: here, heartbeat: 15s}}
budget: {{requests: 1, shadow: true}}
defaults:
  poll: 2s
  jobs:
    merge: {{enabled: false}}
    catchup: {{enabled: false}}
    compact: {{enabled: false}}
    snapshot: {{enabled: false}}
    verify: {{enabled: false}}
tables:
  - {{uri: {root}/blocked.lance, jobs: {{merge: {{enabled: true, schedule: 1h, when: null}}}}}}
  - {{uri: {root}/broken.lance, jobs: {{merge: {{enabled: true, schedule: 1h, when: null}}}}}}
  - {{uri: {root}/answers.lance, jobs: {{verify: {{enabled: true, schedule: 3s}}}}}}
  - {{uri: {root}/held.lance, jobs: {{merge: {{enabled: true, schedule: 1h, when: null}}}}}}
  - uri: {root}/races.lance
    jobs:
      merge: {{enabled: true, schedule: null, when: generations > 0, options: {{max_generations: 1}}}}
  - {{uri: {root}/dies.lance, jobs: {{moody: {{options: {{mood: dies}}}}}}}}
  - {{uri: {root}/hangs.lance, jobs: {{moody: {{hung_after: 1s, options: {{mood: hangs}}}}}}}}
  - {{uri: {root}/late.lance, jobs: {{audit: {{options: {{min_rows: 1000}}}}}}}}
  - {{uri: {root}/endless.lance, jobs: {{endless: {{schedule: 1h}}}}}}
  - {{uri: {root}/wordy.lance, jobs: {{wordy: {{when: words > 5}}}}}}
  - uri: {root}/grown.lance
    jobs:
      gc: {{enabled: true, apply: false, schedule: null, when: merged_generations > 0}}
      catchup: {{enabled: true, schedule: null, when: generations > 1000}}
      snapshot: {{enabled: true, schedule: null, when: generations > 1000}}
  - {{uri: {root}/left.lance, expect_writes_within: 1h}}
  - {{uri: {root}/gone.lance}}
  - {{pattern: '{root}/fleet/*.lance', max_tables: 1}}
"""


class Drill:
    """A running service, on which everything that alerts are about is the case at once."""

    def __init__(self, root: Path, capfd: pytest.CaptureFixture[str], running: Running) -> None:
        self.root, self.capfd, self.running = root, capfd, running
        self.followed: set[str] = set()

    def uri(self, table: str) -> str:
        return str(self.root / f"{table}.lance")

    def told(self, event: str, table: str, times: int) -> None:
        """Wait until the log has told something of a table so many times."""
        until(lambda: self.has_told(event, table, times))

    def has_told(self, event: str, table: str, times: int) -> bool:
        """Whether it has."""
        return sum(one["table"] == table for one in self.running.events(event)) >= times

    def series(self) -> dict[str, float]:
        lines = self.running.get("/metrics").splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def shows(self, alert: str, series: str, holds: Callable[[float], bool]) -> None:
        """Wait until a series that the alert looks at says that it is the case."""
        assert series.partition("{")[0] in metrics(promql.parse(ALERTS[alert]["expr"])), alert
        until(lambda: series in (found := self.series()) and holds(found[series]))

    def follow(
        self, alert: str, table: str = "", job: str = "", ends: dict[int, int] | None = None, **more: str
    ) -> list[str]:
        self.followed.add(alert)
        running = self.running
        variables = {
            "CONFIG": str(running.config), "SERVICE": f"http://127.0.0.1:{running.port}", "URI": self.uri(table),
            "TABLE": table, "JOB": job, "PID": str(running.process.pid), "INDEX": INDEX, **more,
        }  # fmt: skip
        return follow(PAGES[alert], variables, self.capfd, ends)


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Jobs of all moods, for the service and for the commands in this process."""
    found = install(["moody", "audit"], tmp_path)
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    (tmp_path / "drill_jobs.py").write_text(JOBS)
    info = tmp_path / "drill_jobs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: drill_jobs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[memwal_ops.jobs]\nany.endless = drill_jobs:ENDLESS\nany.wordy = drill_jobs:WORDY\n"
    )
    for path in reversed(found["PYTHONPATH"].split(os.pathsep)[:3]):
        monkeypatch.syspath_prepend(path)
    clear_caches()
    yield found
    clear_caches()


def make_tables(root: Path) -> tuple[Workload, Path]:
    """One small table, and copies of it in all conditions; what was taken from the damaged ones stands in ``kept``."""
    table = Workload(1, regions=1, base_rows=40).create(str(root / "whole.lance"))
    for _ in range(3):
        table.put([1, 2, 50])
        table.flush()
    table.close()
    foreign_centroids(root)
    kept = root / "kept"
    kept.mkdir()
    for name in ("blocked", "broken", "held", "races", "grown"):
        damage.copy_table(table.uri, str(root / f"{name}.lance"))
    for name in ("dies", "hangs", "late", "endless", "wordy"):
        os.symlink(table.uri, root / f"{name}.lance")
    for name in ("fleet/a", "fleet/b"):
        damage.copy_table(table.uri, str(root / f"{name}.lance"))
    # Damaged, and not gone: a look, which only lists, cannot see it.
    shutil.copytree(damage.generation_path(str(root / "blocked.lance"), table.regions[0], 2), kept / "generation")
    damage.truncate_generation_manifest(str(root / "blocked.lance"), table.regions[0], 2)
    shutil.move(root / "broken.lance/_versions", kept / "versions")
    shutil.copytree(kept / "versions", root / "broken.lance/_versions")
    for manifest in (root / "broken.lance/_versions").glob("*.manifest"):
        manifest.write_bytes(manifest.read_bytes()[:40])
    long_ago = time.time() - 4 * 3600
    for path in (root / "held.lance").glob("_mem_wal/*/*_gen_*/**/*"):
        os.utime(path, (long_ago, long_ago))
    # Its index is younger than that now, which somebody has to explain before it is merged.
    adopt.apply(open_table(str(root / "held.lance")), AdoptOptions(answer="unmerged"))
    lease, _ = acquire(open_table(str(root / "held.lance")).store, "merge", THEM, timedelta(days=1))
    assert lease is not None
    merge.apply(open_table(str(root / "grown.lance")), merge.MergeOptions())
    return table, kept


def race(drill: Drill, region: str) -> None:
    """Another writer commits to the base table while merges run, until one of them has lost."""
    uri, row = drill.uri("races"), lance.dataset(drill.uri("races")).take([0])
    for turn in count(1):
        drill.told("run_started", "races", turn)
        for times in count():
            if drill.has_told("run_finished", "races", turn):
                break
            lance.write_dataset(row, uri, mode="append")
            time.sleep(0.01 * times)  # less and less often, or no merge would ever win
        if drill.series()['memwal_ops_conflicts_total{job="merge",table="races"}']:
            return
        with lance.dataset(uri).mem_wal_writer(region) as writer:
            writer.put(row)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_page_helps(tmp_path: Path, environ: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    table, kept = make_tables(tmp_path)
    left, gone = left_behind(tmp_path), without_its_log(tmp_path)
    config = tmp_path / "config.yaml"
    good = CONFIG.format(root=tmp_path, port=0)
    config.write_text(good)
    with service(config, environ) as running:
        drill = Drill(tmp_path, capfd, running)
        race(drill, table.regions[0])
        jobs_hang_die_and_wait(drill)
        tables_are_behind(drill, table)
        tables_are_damaged(drill, table, kept)
        an_index_answers_badly(drill)
        a_writer_is_gone(drill, left)
        a_region_is_gone(drill, gone)
        a_member_dies(tmp_path)
        the_fleet_is_short(drill)
        the_file_is_bad(drill, good)
        the_service_is_gone(drill)
    assert drill.followed == set(PAGES) == set(ALERTS)


def a_member_dies(root: Path) -> None:
    """It wrote one record, and never another one."""
    document = MemberRecord("p", "gone", "ops@gone pid 7", "0", "2026-01-01T00:00:00+00:00", 1, 1, "")
    records = MemberRecords(open_store(resolve(str(root / "ops"), {})), "gone")
    records.begin(records.listed())
    records.beat(document)


def the_fleet_is_short(drill: Drill) -> None:
    drill.shows("MemwalOpsMemberMissing", 'memwal_ops_fleet_member_up{member="gone"}', lambda up: up == 0)
    for alert in ("MemwalOpsMemberMissing", "MemwalOpsFleetSplit"):
        _, fleet = drill.follow(alert, ends={0: 2})
        assert 'member_up{member="gone"} 0.0' in fleet
    drill.shows("MemwalOpsFleetSplit", "memwal_ops_fleet_ok", lambda ok: ok == 1)

    drill.shows("MemwalOpsBudgetUsedUp", 'memwal_ops_budget_used{kind="requests"}', lambda used: used > 1)
    planned, _, budget = drill.follow("MemwalOpsBudgetUsedUp")
    assert "of 1 requests" in " ".join(planned.split())
    assert 'memwal_ops_budget_limit{kind="requests"} 1.0' in budget

    drill.shows(
        "MemwalOpsBreakerOpen", 'memwal_ops_breaker_open{job="moody",table="dies"}', lambda is_open: is_open == 0
    )
    until(lambda: drill.running.runs(table="dies"))
    history, explained, _ = drill.follow("MemwalOpsBreakerOpen", "dies", "moody", ends={2: 1})
    assert "died" in history
    assert "dies moody" in explained


def jobs_hang_die_and_wait(drill: Drill) -> None:
    drill.shows("MemwalOpsJobHung", 'memwal_ops_runs_total{job="moody",outcome="hung",table="hangs"}', bool)
    drill.shows("MemwalOpsJobHung", 'memwal_ops_running_seconds{job="endless",table="endless"}', bool)
    first, running, pids = drill.follow("MemwalOpsJobHung", "hangs", "moody")
    assert "made no progress for" in " ".join(first.split())
    assert 'job="endless",table="endless"' in running
    assert '"pid":' in pids

    drill.shows("MemwalOpsWorkersDie", 'memwal_ops_worker_deaths_total{pool="build"}', bool)
    until(lambda: [one for one in drill.running.runs(failed=True) if one["outcome"] == "died"])
    first, deaths = drill.follow("MemwalOpsWorkersDie")
    assert "died" in first
    assert "exit code 7" in first
    assert 'pool="build"} 0' not in deaths

    drill.shows("MemwalOpsJobLate", 'memwal_ops_seconds_since_success{job="audit",table="late"}', bool)
    until(lambda: drill.running.runs(table="late", failed=True))
    first, _, waiting, report = drill.follow("MemwalOpsJobLate", "late", "audit")
    assert "partial" in first
    assert "too_few" in first
    assert '"waiting_for": "' in waiting
    assert '"exit_code": 10' in report
    assert '"rows": 40' in report

    drill.shows("MemwalOpsStarving", 'memwal_ops_waiting_seconds{job="gc",table="grown"}', bool)
    busy, running, waiting, _, _ = drill.follow("MemwalOpsStarving")
    assert 'memwal_ops_pool_busy{pool="collect"} 1.0' in busy
    assert 'table="endless"' in running
    assert 'job="gc",table="grown"' in waiting

    drill.shows("MemwalOpsInternalErrors", "memwal_ops_internal_errors_total", bool)
    count, _, hanging = drill.follow("MemwalOpsInternalErrors")
    assert not count.endswith(" 0.0\n")
    assert "endless" in hanging
    assert "RuntimeError: a bug" in drill.running.events("internal_error")[0]["exception"]

    drill.shows("MemwalOpsConflicts", 'memwal_ops_conflicts_total{job="merge",table="races"}', bool)
    history, versions, _ = drill.follow("MemwalOpsConflicts", "races")
    assert "races" in history
    assert "another writer" in versions
    # The page shows the last ten, and the other writer commits many between two merges.
    until(lambda: "merge" in drill.follow("MemwalOpsConflicts", "races")[1])

    drill.shows("MemwalOpsClockSkew", 'memwal_ops_clock_skew_seconds{table="blocked"}', lambda skew: 3500 < skew < 3700)
    probed, skews, _ = drill.follow("MemwalOpsClockSkew", "blocked")
    assert "clock" in probed
    assert 'table="blocked"} 3' in skews


def tables_are_behind(drill: Drill, table: Workload) -> None:
    drill.shows("MemwalOpsIndexBehind", 'memwal_ops_uncovered_rows{table="grown"}', bool)
    before = drill.follow("MemwalOpsIndexBehind", "grown")[0]
    assert "would_update" in before
    drill.shows("MemwalOpsIndexBehind", 'memwal_ops_uncovered_rows{table="grown"}', lambda rows: rows == 0)

    drill.shows("MemwalOpsSnapshotStale", 'memwal_ops_snapshot_age_seconds{table="grown"}', lambda age: age > 1e6)
    drill.follow("MemwalOpsSnapshotStale", "grown")
    drill.shows("MemwalOpsSnapshotStale", 'memwal_ops_snapshot_age_seconds{table="grown"}', lambda age: age < 1e6)

    drill.shows("MemwalOpsGcFreesNothing", 'memwal_ops_merged_generations{table="grown"}', lambda many: many == 3)
    first, *_, holds = drill.follow("MemwalOpsGcFreesNothing", "grown")
    assert "needed by version" in " ".join(first.split())
    assert holds

    # One table that waits for long, because another supervisor has its lease.
    drill.shows("MemwalOpsLeaseElsewhere", 'memwal_ops_lease_elsewhere_seconds{job="merge",table="held"}', bool)
    drill.shows("MemwalOpsBacklogGrowing", 'memwal_ops_backlog_generations{table="held"}', lambda many: many == 3)
    drill.shows("MemwalOpsBacklogOld", 'memwal_ops_backlog_oldest_seconds{table="held"}', lambda age: age > 10800)
    history, _, leases, plan, merged = drill.follow("MemwalOpsBacklogOld", "held")
    assert "No run." in history
    assert "held" in leases
    assert THEM.name in leases
    assert "3" in plan
    assert "merged" in merged, "by hand no lease is asked for"
    assert_same(read_base(drill.uri("held")), table.expected())
    drill.shows("MemwalOpsBacklogOld", 'memwal_ops_backlog_oldest_seconds{table="held"}', lambda age: age == 0)
    _, phases, _, _, again = drill.follow("MemwalOpsBacklogGrowing", "held")
    assert 'phase="commit"' in phases
    assert "nothing_to_merge" in again or "othing to merge" in again
    first, *_, broken = drill.follow("MemwalOpsLeaseElsewhere", "held", "merge")
    assert THEM.name in first
    assert THEM.name in broken
    drill.shows(
        "MemwalOpsLeaseElsewhere", 'memwal_ops_lease_elsewhere_seconds{job="merge",table="held"}', lambda age: age == 0
    )


def tables_are_damaged(drill: Drill, table: Workload, kept: Path) -> None:
    series = 'memwal_ops_blocked_regions{table="blocked"}'
    drill.shows("MemwalOpsMergeBlocked", series, lambda many: many == 1)
    first, regions, merged, history = drill.follow("MemwalOpsMergeBlocked", "blocked", ends={2: 10})
    assert '"reason": "generation_corrupt"' in first
    assert table.regions[0] in regions
    assert '"reason": "generation_corrupt"' in merged
    assert "partial" in history
    folder = damage.generation_path(drill.uri("blocked"), table.regions[0], 2)
    shutil.rmtree(folder)
    shutil.move(kept / "generation", folder)
    assert run_here(drill.capfd, "merge", drill.uri("blocked")).code == 0
    drill.shows("MemwalOpsMergeBlocked", series, lambda many: many == 0)

    failing = 'memwal_ops_consecutive_failures{job="merge",table="broken"}'
    drill.shows("MemwalOpsJobFailing", failing, lambda many: many >= 1)
    first, *_ = drill.follow("MemwalOpsJobFailing", "broken", "merge", ends={1: 9})
    assert "table_corrupt" in first
    series = 'memwal_ops_polls_total{outcome="failed",table="broken"}'
    drill.shows("MemwalOpsPollsFail", series, lambda many: many > 1)
    first, said, history = drill.follow("MemwalOpsPollsFail", "broken", ends={0: 9})
    assert "table_corrupt" in first
    assert '"look_error": "' in said
    assert "The job 'wordy' of" in said, "a figure that is no number is its package's fault"
    assert "failed" in history
    shutil.rmtree(drill.root / "broken.lance/_versions")
    shutil.move(kept / "versions", drill.root / "broken.lance/_versions")
    drill.shows("MemwalOpsPollsFail", series.replace("failed", "succeeded"), bool)


def left_behind(root: Path) -> Workload:
    """A table whose writer put rows two hours ago, and did nothing since."""
    table = Workload(2, regions=1, base_rows=10).create(str(root / "left.lance"))
    table.put([1, 2])
    long_ago = time.time() - 2 * 3600
    for path in (root / "left.lance").glob("_mem_wal/*/wal/*"):
        os.utime(path, (long_ago, long_ago))
    return table


def a_writer_is_gone(drill: Drill, table: Workload) -> None:
    drill.shows("MemwalOpsUnflushedRows", 'memwal_ops_unflushed_entries{table="left"}', bool)
    shown, listed, figures = drill.follow("MemwalOpsUnflushedRows", "left")
    assert "not flushed yet" in shown
    assert table.regions[0] in listed
    assert 'memwal_ops_unflushed_entries{table="left"}' in figures
    drill.shows("MemwalOpsNoWrites", 'memwal_ops_seconds_since_last_write{table="left"}', lambda age: age > 3600)
    _, figures, expected = drill.follow("MemwalOpsNoWrites", "left")
    assert 'memwal_ops_expect_writes_seconds{table="left"} 3600.0' in figures
    assert "expect_writes_within: 1h" in expected
    table.put([3])
    table.flush()
    drill.shows("MemwalOpsUnflushedRows", 'memwal_ops_unflushed_entries{table="left"}', lambda many: many == 0)
    drill.shows("MemwalOpsNoWrites", 'memwal_ops_seconds_since_last_write{table="left"}', lambda age: age < 3600)


def without_its_log(root: Path) -> Workload:
    """A table of which one generation is merged, and another is in a copy alone, with all of the log."""
    table = Workload(3, regions=1, base_rows=10).create(str(root / "gone.lance"))
    for rows in ([1], [2, 99]):
        table.put(rows)
        table.flush()
        if rows == [1]:
            merge.apply(open_table(table.uri), merge.MergeOptions())
    table.close()
    (root / "backup").mkdir()
    shutil.move(root / "gone.lance/_mem_wal", root / "backup")
    return table


def a_region_is_gone(drill: Drill, table: Workload) -> None:
    series, region = 'memwal_ops_regions_gone{table="gone"}', table.regions[0]
    drill.shows("MemwalOpsRegionsGone", series, lambda many: many == 1)
    first, found, _, _, _, merged = drill.follow(
        "MemwalOpsRegionsGone", "gone", BACKUP=str(drill.root / "backup"), REGION=region
    )
    assert "had not merged is lost" in first
    assert region in found
    assert "progress_of_unknown_region" in found
    assert "merged" in merged
    assert_same(read_base(table.uri), table.expected())
    drill.shows("MemwalOpsRegionsGone", series, lambda many: many == 0)


def foreign_centroids(root: Path) -> None:
    """A table with a vector index that was built for other vectors."""
    random = np.random.default_rng(4)
    uri = str(root / "answers.lance")

    def some() -> pa.Table:
        return pa.table({"vector": vectors(random, 2000, centers=3 * random.normal(size=(30, DIMENSION)))})

    lance.write_dataset(some(), uri)
    arguments = {"metric": "l2", "num_partitions": 64, "num_sub_vectors": 8}
    rebuilt_elsewhere(uri, str(root / "aside.lance"), INDEX, "vector", "IVF_PQ", lambda _: some(), **arguments)


def an_index_answers_badly(drill: Drill) -> None:
    labels = f'{{index="{INDEX}",table="answers"}}'
    drill.shows("MemwalOpsIndexWrong", f"memwal_ops_index_findings{labels}", bool)
    drill.shows("MemwalOpsIndexRecallFalls", f"memwal_ops_index_recall{labels}", lambda recall: recall < 0.9)
    before = drill.series()[f"memwal_ops_index_recall{labels}"]
    found, history, shown, built, after = drill.follow("MemwalOpsIndexWrong", "answers", ends={0: 9})
    assert "index_recall_low" in found
    assert "findings" in history
    assert INDEX in shown
    assert "caught_up" in built
    assert "healthy: 0 findings" in after
    drill.shows("MemwalOpsIndexWrong", f"memwal_ops_index_findings{labels}", lambda many: many == 0)
    drill.shows("MemwalOpsIndexRecallFalls", f"memwal_ops_index_recall{labels}", lambda recall: recall > before)
    first, history, *_ = drill.follow("MemwalOpsIndexRecallFalls", "answers")
    assert "recall 0." in first
    assert "healthy" in history


def the_file_is_bad(drill: Drill, good: str) -> None:
    drill.shows("MemwalOpsPatternFails", "memwal_ops_pattern_faults", lambda many: many == 1)
    config = drill.running.config
    # What the page says: raised, before it is read again by the page's last command.
    config.write_text(good.replace("max_tables: 1", "max_tables: 2"))
    said, uris, *_ = drill.follow("MemwalOpsPatternFails")
    assert "more than max_tables = 1" in said
    assert "fleet/a.lance" in uris
    drill.shows("MemwalOpsPatternFails", "memwal_ops_pattern_faults", lambda many: many == 0)

    config.write_text(good + "htp: {}\n")
    os.kill(drill.running.process.pid, signal.SIGHUP)
    drill.shows("MemwalOpsConfigBad", "memwal_ops_config_ok", lambda fine: fine == 0)
    first, said, _ = drill.follow("MemwalOpsConfigBad", ends={0: 50})
    assert re.search(r"config\.yaml:\d+: error: .*htp", first)
    assert "htp" in said
    config.write_text(good)
    assert drill.follow("MemwalOpsConfigBad")[-1] == ""
    drill.shows("MemwalOpsConfigBad", "memwal_ops_config_ok", lambda fine: fine == 1)


def the_service_is_gone(drill: Drill) -> None:
    running = drill.running
    port = running.port
    running.process.terminate()
    assert running.process.wait(PATIENCE) == 0
    running.config.write_text(CONFIG.format(root=drill.root, port=port))
    first, ready, _, history = drill.follow("MemwalOpsDown", ends={0: 2})
    assert "the service does not respond" in first
    assert ready == "no answer\n"
    assert "answers  verify" in history, "it ran until the end, every few seconds"


def test_a_page_for_every_alert_and_an_alert_for_every_page() -> None:
    assert set(PAGES) == set(ALERTS)
    for name, page in PAGES.items():
        text = page.read_text()
        assert text.startswith(f"# {name}\n\n")
        assert 20 <= text.count("\n") <= 45, name
        for part in ("**Look.**", "**Do.**", "**Never"):
            assert text.count(part) == 1, (name, part)
        first = re.sub(r"\s+# .*", "", steps(page)[0])
        told = ALERTS[name]["annotations"]["first_command"]
        assert first == re.sub(r"{{ \$labels.(\w+) }}", lambda label: f"${label[1].upper()}", told)


def test_links_lead_to_pages() -> None:
    for name, page in PAGES.items():
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (name, target)
