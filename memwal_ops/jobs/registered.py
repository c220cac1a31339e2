"""Our own jobs, as the supervisor sees them: registered by entry point, like anybody else's (pyproject.toml).

Nothing is decided here: each entry says how its job tells of its steps, its figures and its exit code.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.jobs import catchup, compact, expire, gc, looks, maintain, merge, snapshot
from memwal_ops.jobs.api import Job, Run

if TYPE_CHECKING:
    from memwal_ops.core.table import Table
    from memwal_ops.jobs.catchup_report import CatchupReport


def _merge(table: Table, options: merge.MergeOptions, run: Run) -> merge.MergeReport:
    def landed(one: merge.PassReport) -> None:
        if one.result is not None:
            run.figures["bytes_merged"] += one.result.bytes_read
            run.figures["rows_merged"] += one.result.rows_read
            for phase, seconds in one.result.phases.items():
                run.took(phase, seconds)
            run.versions.append(one.result.version)
        run.checkpoint()

    report = merge.apply(table, options, on_rows=lambda _: run.progress(), on_pass=landed)
    run.figures["conflicts"] += report.lost_races
    run.figures["regions_blocked"] = len({fault.region_id for fault in report.blocked})
    return report


def _catchup(table: Table, options: catchup.CatchupOptions, run: Run) -> CatchupReport:
    report = catchup.apply(table, options, on_index=lambda _: run.checkpoint())
    run.figures["conflicts"] += report.lost_races
    run.figures["indexes_updated"] += sum(one.decision == "updated" for one in report.indexes)
    if report.decision == "caught_up":
        run.versions.append(report.version)
    return report


def _compact(table: Table, options: compact.CompactOptions, run: Run) -> compact.CompactReport:
    report = compact.apply(table, options, on_task=run.checkpoint, on_commit=run.committing)
    run.figures["conflicts"] += report.lost_races
    run.figures["bytes_compacted"] += report.bytes_written or 0
    if report.decision == "compacted":
        run.versions.append(report.version)
    return report


def _snapshot(table: Table, options: snapshot.SnapshotOptions, run: Run) -> snapshot.SnapshotReport:
    report = snapshot.apply(table, options, on_region=run.progress)
    run.figures["conflicts"] += report.lost_races
    if report.decision == "built":
        run.versions.append(report.version)
    return report


def _expire(table: Table, options: expire.ExpireOptions, run: Run) -> expire.ExpireReport:
    report = expire.apply(table, options)
    run.figures["bytes_collected"] += report.bytes if report.decision == "expired" else 0
    run.figures["versions_expired"] += len(report.versions)
    return report


def _gc(table: Table, options: gc.GcOptions, run: Run) -> gc.GcReport:
    report = gc.apply(table, options, on_item=lambda _: run.checkpoint())
    run.figures["bytes_collected"] += report.deleted_bytes
    run.figures["objects_collected"] += report.deleted_objects
    run.figures["generations_drained"] += report.drained
    return report


def _maintain(table: Table, options: maintain.MaintainOptions, run: Run) -> maintain.MaintainReport:
    before = table.version
    report = maintain.maintain(table, options, on_step=lambda _: run.checkpoint(), on_commit=run.committing)
    for step in report.steps:
        run.took(step.step, step.seconds)
        done: Any = step.report
        if done is None:
            continue
        run.figures["conflicts"] += getattr(done, "lost_races", 0)
        if step.step == "merge":
            landed = [one.result for one in done.passes if one.result is not None]
            run.figures["bytes_merged"] += sum(result.bytes_read for result in landed)
            run.figures["rows_merged"] += sum(result.rows_read for result in landed)
            run.figures["regions_blocked"] = len({fault.region_id for fault in done.blocked})
        elif step.step == "gc":
            run.figures["bytes_collected"] += done.deleted_bytes
            run.figures["objects_collected"] += done.deleted_objects
        elif step.decision == "expired":
            run.figures["bytes_collected"] += done.bytes
    if report.version > before:
        run.versions.append(report.version)
    return report


def _maintain_plan(table: Table, options: maintain.MaintainOptions) -> maintain.MaintainReport:
    steps = {name: getattr(options, name) for name in ("budget", *maintain.STEPS)}
    return maintain.maintain(table, maintain.MaintainOptions(apply=False, dry_run=True, **steps))


def _own_code(report: Any) -> int:
    """Of a report that knows it."""
    return int(report.exit_code)


MERGE = Job(
    name="merge",
    options=merge.MergeOptions,
    plan=merge.dry_run,
    apply=_merge,
    exit_code=_own_code,
    pool="merge",
    enabled=True,
    every=timedelta(minutes=10),
    when="generations >= 8 or bytes >= 256MiB",
    figures=looks.MERGE,
    look=looks.merge,
)
CATCHUP = Job(
    name="catchup",
    options=catchup.CatchupOptions,
    plan=catchup.dry_run,
    apply=_catchup,
    exit_code=_own_code,
    enabled=True,
    every=timedelta(minutes=30),
    when="uncovered_rows >= 100000",
    hung_after=timedelta(hours=2),
    figures=looks.CATCHUP,
    look=looks.catchup,
)
COMPACT = Job(
    name="compact",
    options=compact.CompactOptions,
    plan=compact.dry_run,
    apply=_compact,
    enabled=True,
    every=timedelta(hours=6),
    when=None,
    hung_after=timedelta(hours=2),
    figures=looks.COMPACT,
    look=looks.compact,
)
SNAPSHOT = Job(
    name="snapshot",
    options=snapshot.SnapshotOptions,
    plan=snapshot.dry_run,
    apply=_snapshot,
    exit_code=_own_code,
    enabled=True,
    every=timedelta(minutes=15),
    figures=looks.SNAPSHOT,
    look=looks.snapshot,
)
EXPIRE = Job(
    name="expire",
    options=expire.ExpireOptions,
    plan=expire.plan,
    apply=_expire,
    pool="collect",
    deletes=True,
    every=timedelta(hours=6),
    hung_after=timedelta(hours=2),
    figures=looks.EXPIRE,
    look=looks.expire,
)
GC = Job(
    name="gc",
    options=gc.GcOptions,
    plan=gc.plan,
    apply=_gc,
    exit_code=_own_code,
    pool="collect",
    deletes=True,
    every=timedelta(hours=1),
    figures=looks.GC,
    look=looks.gc,
)
MAINTAIN = Job(
    name="maintain",
    options=maintain.MaintainOptions,
    plan=_maintain_plan,
    apply=_maintain,
    exit_code=_own_code,
    every=timedelta(hours=1),
    hung_after=timedelta(hours=2),
)
