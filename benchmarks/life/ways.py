"""The processes that maintain a table: ``python -m benchmarks.life.ways WAY URI OPTIONS ROUNDS_A_DAY``."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
from lance.mem_wal import CompactedSsTable

from benchmarks.life.loop import Calendar, serve
from benchmarks.memory import as_command
from memwal_ops import run_job
from memwal_ops.core.figures import poll_cache
from memwal_ops.core.maintain import ordered
from memwal_ops.core.protocols import DetectsChanges
from memwal_ops.core.registry import open_table
from memwal_ops.core.triggers import parse_trigger
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.options import CatchupOptions, CompactOptions, ExpireOptions, GcOptions
from memwal_ops.formats.lance.table import open_lance_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.options import Options
    from memwal_ops.core.protocols import Table

WEEK = 7
_POLLS = 3  # of a round: a merge makes a catch-up due


def pylance(uri: str, options: dict[str, str], calendar: Calendar) -> Callable[[], list[str]]:
    """What pylance's documentation advises, once a day."""

    def maintain() -> list[str]:
        if calendar.day_ends:
            dataset = lance.dataset(uri, storage_options=options)
            dataset.optimize.compact_files()
            dataset.optimize.optimize_indices()
            dataset.cleanup_old_versions(older_than=calendar.age(WEEK))
            return ["daily"]
        return []

    return maintain


def pylance_log(uri: str, options: dict[str, str], calendar: Calendar) -> Callable[[], object]:
    """The same after the log was merged by hand in each round, as in benchmarks/ways.py."""
    daily = pylance(uri, options, calendar)

    def maintain() -> object:
        return merged_by_hand(uri, options) + daily()

    return maintain


def merged_by_hand(uri: str, options: dict[str, str]) -> list[str]:
    """One marked merge_insert for each generation of a table with a log."""
    pending = read_backlog(open_lance_table(uri, options)).pending
    for ref in pending:
        source = lance.dataset(f"{uri}/{ref.folder}", storage_options=options).to_table()
        live = source.filter(pa.compute.invert(source["_tombstone"])).drop(["_tombstone"])
        upsert = lance.dataset(uri, storage_options=options).merge_insert("id")
        upsert = upsert.when_matched_update_all().when_not_matched_insert_all()
        upsert.mark_sstables_as_compacted([CompactedSsTable(str(ref.region_id), ref.generation)])
        upsert.execute(live)
    return ["merge_insert"] * len(pending)


def ours(uri: str, options: dict[str, str], calendar: Calendar) -> Callable[[], object]:
    """What the service would run: each job by its default schedule and trigger, expire and gc with ``apply``."""
    as_command()
    service = Service(uri, options, calendar)
    return service.run


class Service:
    """Decides as the service does, by the hours of the month instead of a clock."""

    def __init__(self, uri: str, options: dict[str, str], calendar: Calendar) -> None:
        """Nothing has run yet."""
        self._uri, self._options, self._calendar = uri, options, calendar
        self._ran: dict[str, float] = {}
        self._idle: dict[str, str | None] = {}

    def run(self) -> list[str]:
        """Poll and run what is due until nothing is; returns the names and decisions."""
        done: list[str] = []
        for _ in range(_POLLS):
            table = open_table(self._uri, self._options)
            rest = {"rest_after": f"{self._calendar.age(1).total_seconds():.3f}s"}
            with poll_cache({"catchup": rest, "compact": rest}):
                due = [spec for spec in ordered(table.jobs.values()) if spec.in_maintain and self._is_due(spec, table)]
            if not due:
                break
            done += [self._run(spec, table.newest()) for spec in due]
        return done

    def _run(self, spec: JobSpec, table: Table) -> str:
        found, revision = _fingerprint(table), table.revision
        report = run_job(table, spec.name, self._chosen(spec), apply=True)
        if report.exit_code:
            raise SystemExit(report.describe())
        self._ran[spec.name] = self._calendar.hours
        self._idle[spec.name] = found if table.newest().revision == revision else None
        return f"{spec.name}: {report.decision}"

    def _is_due(self, spec: JobSpec, table: Table) -> bool:
        hours = self._calendar.hours - self._ran.get(spec.name, 0.0)
        figures: Mapping[str, Any] = spec.job.backlog(table) if spec.backlog_metrics else {}
        if spec.every is not None and timedelta(hours=hours) >= spec.every:
            if spec.debt is not None and spec.debt.skips:
                return not spec.debt.has_nothing_to_do(figures)
            idle = self._idle.get(spec.name)
            return not spec.skip_if_unchanged or idle is None or idle != _fingerprint(table)
        when = spec.when if spec.debt is None else spec.debt.when
        kinds = {name: metric.unit for name, metric in spec.backlog_metrics.items()}
        return when is not None and parse_trigger(when, kinds).is_met(figures)

    def _chosen(self, spec: JobSpec) -> Options:
        """The defaults, with ages as long as the month is."""
        if spec.name == "expire":
            return ExpireOptions(older_than=self._calendar.age(WEEK), allow_unsafe=True)
        if spec.name == "gc":
            age = self._calendar.age
            return GcOptions(
                reader_grace=age(0.02), orphan_min_age=age(3), drain_after=age(30), fence_retention=age(30),
                allow_unsafe=True,
            )  # fmt: skip
        resting = {"catchup": CatchupOptions, "compact": CompactOptions}.get(spec.name)
        return spec.options() if resting is None else resting(rest_after=self._calendar.age(1))


def _fingerprint(table: Table) -> str | None:
    return table.format.fingerprint(table) if isinstance(table.format, DetectsChanges) else None


WAYS = {"pylance": pylance, "pylance_log": pylance_log, "ours": ours}

if __name__ == "__main__":
    serve(WAYS[sys.argv[1]])
