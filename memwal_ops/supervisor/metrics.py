"""What Prometheus is told. Names and labels are a contract: docs/supervisor.md lists them, a test compares.

Labels are bounded: tables are those of the configuration (at most ``max_tables`` for a pattern), jobs,
pools, outcomes and phases are few. A table that is no longer configured takes its series along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from memwal_ops.jobs.api import POOLS
from memwal_ops.supervisor.history import FAILURES
from memwal_ops.supervisor.state import WATCH
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

PREFIX = "memwal_ops"
_BUCKETS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)
_MOST_PHASES = 40
_BACKLOG = {
    "generations": ("backlog_generations", "Flushed generations that wait to be merged."),
    "rows": ("backlog_rows", "Rows that wait to be merged, by the writers' account."),
    "bytes": ("backlog_bytes", "Bytes that wait to be merged, by the writers' account."),
    "oldest_age": ("backlog_oldest_seconds", "Age of the oldest generation that waits."),
    "blocked_regions": ("blocked_regions", "Regions that cannot be merged to their end."),
    "uncovered_rows": ("uncovered_rows", "Rows that the base index furthest behind does not cover."),
    "fragments": ("fragments", "Fragments of the base table."),
    "versions": ("versions", "Base versions that stand."),
    "merged_generations": ("merged_generations", "Merged generations that are still on a region's list."),
    "snapshot_age": ("snapshot_age_seconds", "Age of the snapshot of the regions."),
}
_LEASE_STATES = ("free", "held", "elsewhere")
_BOTH = ("succeeded", "failed")
_ENDINGS = ("succeeded", "partial", *FAILURES)
_SKIPS = ("held", "shared")
_PUT_OFF = ("window", "budget")


class Metrics:
    """The registry of one service. ``status`` gives what ``/api/v1/status`` shows; gauges come from it."""

    def __init__(self, status: Callable[[], Mapping[str, object]]) -> None:
        """Make all series."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series, and tell nothing
        self.registry = CollectorRegistry()
        counter = self._counter
        self.runs = counter("runs", "Runs by how they ended.", "table", "job", "outcome")
        self.skipped = counter(
            "skipped", "Runs that were due and not begun: held or shared by another supervisor.", "table", "job", "why"
        )
        self.conflicts = counter("conflicts", "Races for the next version that were lost.", "table", "job")
        self.merged_bytes = counter("merged_bytes", "Bytes of generations that were merged.", "table")
        self.merged_rows = counter("merged_rows", "Rows of generations that were merged.", "table")
        self.collected_bytes = counter("collected_bytes", "Bytes that gc and expire deleted.", "table")
        self.collected_objects = counter("collected_objects", "Objects that gc deleted.", "table")
        self.looks = counter("looks", "Looks at a table's backlog by outcome.", "table", "outcome")
        self.heartbeats = counter("heartbeats", "Heartbeat URLs fetched, by outcome.", "outcome")
        self.worker_starts = counter("worker_starts", "Worker processes that were started.", "pool")
        self.worker_deaths = counter("worker_deaths", "Worker processes that died in a run.", "pool")
        self.reloads = counter("config_reloads", "Configuration files that were read again, by outcome.", "outcome")
        self.internal_errors = counter("internal_errors", "Bugs that were caught; please report them.")
        self.run_seconds = Histogram(
            f"{PREFIX}_run_seconds", "How long runs took.", ("job",), buckets=_BUCKETS, registry=self.registry
        )
        self.phase_seconds = Histogram(
            f"{PREFIX}_phase_seconds",
            "How long each phase of a run took.",
            ("job", "phase"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        # A counter that comes into being at 1 has not risen, as Prometheus sees it: what alerts ask for begins at 0.
        for of in (self.heartbeats, self.reloads):
            for outcome in _BOTH:
                of.labels(outcome)
        for pool in (*POOLS, WATCH):
            self.worker_starts.labels(pool)
            self.worker_deaths.labels(pool)
        info = Gauge(f"{PREFIX}_build_info", "The release that runs.", ("version",), registry=self.registry)
        info.labels(__version__).set(1)
        self._phases: set[tuple[str, str]] = set()
        self.registry.register(_StatusCollector(status))

    def expose(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)

    def observe_phases(self, job: str, phases: Mapping[str, float]) -> None:
        """Count phases; beyond the 40th of a job they are one, called ``other``."""
        for name, seconds in phases.items():
            phase = name[:40]
            if (job, phase) not in self._phases:
                if sum(one == job for one, _ in self._phases) >= _MOST_PHASES:
                    phase = "other"
                self._phases.add((job, phase))
            self.phase_seconds.labels(job, phase).observe(seconds)

    def count_figures(self, table: str, job: str, figures: Mapping[str, float]) -> None:
        """Add a run's sums."""
        self.conflicts.labels(table, job).inc(figures.get("conflicts", 0))
        for name, counter in (
            ("bytes_merged", self.merged_bytes),
            ("rows_merged", self.merged_rows),
            ("bytes_collected", self.collected_bytes),
            ("objects_collected", self.collected_objects),
        ):
            if figures.get(name, 0) > 0:
                counter.labels(table).inc(figures[name])

    def know(self, table: str, jobs: Iterable[str]) -> None:
        """Begin the counters of a table and its jobs at 0."""
        for outcome in _BOTH:
            self.looks.labels(table, outcome)
        for of in (self.merged_bytes, self.merged_rows, self.collected_bytes, self.collected_objects):
            of.labels(table)
        for job in jobs:
            self.conflicts.labels(table, job)
            for why in _SKIPS:
                self.skipped.labels(table, job, why)
            for outcome in _ENDINGS:
                self.runs.labels(table, job, outcome)

    def forget_table(self, table: str) -> None:
        """Drop all series of a table."""
        for counter in (
            self.runs, self.skipped, self.conflicts, self.merged_bytes, self.merged_rows, self.collected_bytes,
            self.collected_objects, self.looks,
        ):  # fmt: skip
            for labels in [*counter._metrics]:  # noqa: SLF001 - the library has no list of its children
                if labels[0] == table:
                    counter.remove(*labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)


class _StatusCollector(Collector):
    """Gauges, read from the status at the moment of a scrape."""

    def __init__(self, status: Callable[[], Mapping[str, object]]) -> None:
        self._status = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every gauge of every table and job."""
        status: Mapping[str, object] = self._status()
        service, tables, pools = status["service"], status["tables"], status["pools"]
        assert isinstance(service, dict)  # noqa: S101 - for the type checker
        assert isinstance(tables, list)  # noqa: S101 - for the type checker
        assert isinstance(pools, dict)  # noqa: S101 - for the type checker
        yield self._one("ready", "Whether the service is ready.", [((), float(service["ready"]))])
        yield self._one("tables", "Tables that are maintained.", [((), float(len(tables)))])
        faults = [((), float(len(service["discovery_faults"])))]
        yield self._one("pattern_faults", "Patterns that could not be looked at, or find too many tables.", faults)
        good = 0.0 if service["config"]["error"] else 1.0
        yield self._one("config_ok", "1 where the configuration file was good when it was read last.", [((), good)])
        for name in ("workers", "busy", "queued"):
            rows = [((pool,), float(figures[name])) for pool, figures in pools.items()]
            yield self._one(f"pool_{name}", f"Of each pool: {name}.", rows, "pool")
        for figure, (name, text) in _BACKLOG.items():
            known = [((one["name"],), one["backlog"][figure]) for one in tables if figure in one["backlog"]]
            yield self._one(name, text, known, "table")
        looked = [
            ((one["name"],), one["seconds_since_look"]) for one in tables if one["seconds_since_look"] is not None
        ]
        yield self._one("look_age_seconds", "Seconds since the backlog was last read.", looked, "table")
        for name, text in (
            ("seconds_since_success", "Seconds since the last success; before the first, since the job is known."),
            ("consecutive_failures", "Failures in a row."),
            ("waiting_seconds", "Seconds since it has been due and not begun; 0 where it is not due."),
            ("running_seconds", "Seconds that the run in hand has taken; 0 where there is none."),
            ("backoff_seconds", "Seconds that it is still left alone after failures."),
            ("schedule_seconds", "Seconds between two runs by its schedule; 0 where it has none."),
        ):
            values = [((one["name"], job), float(of[name])) for one in tables for job, of in one["jobs"].items()]
            yield self._one(name, text, values, "table", "job")
        off = [
            ((one["name"], job), float(of["waiting_for"] in _PUT_OFF))
            for one in tables
            for job, of in one["jobs"].items()
        ]
        text = "1 where it is due, and a closed window or a spent budget puts it off."
        yield self._one("put_off", text, off, "table", "job")
        states = [
            ((one["name"], job, state), float(of["lease"]["state"] == state))
            for one in tables
            for job, of in one["jobs"].items()
            for state in _LEASE_STATES
        ]
        text = "1 for the state of the lease: free, held (by this service), elsewhere."
        yield self._one("lease_state", text, states, "table", "job", "state")
        away = [
            ((one["name"], job), float(of["lease"]["elsewhere_seconds"]))
            for one in tables
            for job, of in one["jobs"].items()
        ]
        text = "Seconds since another supervisor's lease has kept this one from a job that is due."
        yield self._one("lease_elsewhere_seconds", text, away, "table", "job")
        skews = [((one["name"],), one["clock_skew_seconds"]) for one in tables if one["clock_skew_seconds"] is not None]
        yield self._one(
            "clock_skew_seconds", "Our clock minus the store's, when a lease was last written.", skews, "table"
        )

    @staticmethod
    def _one(name: str, text: str, rows: Sequence[tuple[tuple[str, ...], float]], *labels: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
        for values, value in rows:
            family.add_metric(values, value)
        return family
