"""Export Prometheus metrics. Names and labels are a contract: docs/http.md lists them, a test compares.

Labels are bounded: tables are those of the configuration, jobs, pools, outcomes and phases are few. The series of a
table that is no longer configured are removed. The metrics of jobs come from their specs (``JobSpec.metrics``).

A service has some 140 series for each table. The client library keeps an object of each, and makes another one at each
scrape: with a thousand tables 40 MB, and a second of processor time. The text here is the same.

Where the standard variables of OpenTelemetry name a collector, the metrics are pushed to it by OTLP, with the same
names, labels and cumulative values.
"""

from __future__ import annotations

import os
import threading
import time
from array import array
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from memwal_ops.core import tracing
from memwal_ops.core.figures import Figures, backlog_of, exported_metrics
from memwal_ops.core.job import POOLS, MetricSpec
from memwal_ops.log import get_logger
from memwal_ops.storage.metering import KINDS
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.events import OUTCOMES
from memwal_ops.supervisor.observe import status_document
from memwal_ops.supervisor.observe.findings import CRITICAL, NOT_READ, state_level
from memwal_ops.supervisor.state.history import FAILURES
from memwal_ops.supervisor.state.tables import WATCH
from memwal_ops.text import printable
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.core import Metric
    from prometheus_client.samples import Sample


@dataclass(frozen=True, slots=True)
class Family:
    """The series of one name.

    Attributes:
        name: as it is exposed: that of a counter ends with ``_total``.
        kind: ``counter`` or ``gauge``.
        rows: of each series the values of its labels, in the order of ``labels``, and its value; read once.
        lines: in place of rows, returns by the first label's value the lines of its series, with a null for it.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    rows: Iterable[tuple[tuple[str, ...], float]]
    lines: Callable[[_Around, Mapping[float, str]], Iterator[tuple[str, str]]] | None = None


def exposition(parts: Iterable[Iterable[Family] | str]) -> Iterator[bytes]:
    """Yield families as text, with text of the same format between them.

    Unprintable characters (a label may be a folder's name) are escaped. Lines are kept of a part of one family at a
    time: ten thousand tables have two million.
    """
    values, numbers = _Values(), _Numbers()
    for part in parts:
        if isinstance(part, str):
            yield "".join(f"{_safe(line)}\n" for line in part.split("\n") if line).encode()
            continue
        for family in part:
            name, text = family.name, _safe(family.help.replace("\\", r"\\").replace("\n", r"\n"))
            yield f"# HELP {name} {text}\n# TYPE {name} {family.kind}\n".encode()
            around, rows, size = _Around(family, values), iter(family.rows), _LINES
            if not family.labels:
                rows = ((("",), value) for _, value in rows)
            texts = (
                f"{(of := around[labels[1:]])[0]}{values[labels[0]]}{of[1]}{numbers[value]}\n" for labels, value in rows
            )
            if family.lines is not None:
                texts, size = (text.replace("\0", values[of]) for of, text in family.lines(around, numbers)), _TABLES
            while some := [*islice(texts, size)]:
                yield "".join(some).encode()


_LINES, _TABLES = 5000, 100


class _Around(dict[tuple[str, ...], tuple[str, str]]):
    """The text before and after the first label's value, by the other values. Names are sorted."""

    def __init__(self, family: Family, values: _Values) -> None:
        self._family, self._values = family, values

    def __missing__(self, others: tuple[str, ...]) -> tuple[str, str]:
        texts = dict(zip(self._family.labels, ("\0", *(self._values[one] for one in others)), strict=False))
        labels = ",".join(f'{name}="{texts[name]}"' for name in sorted(texts))
        before, _, after = (f"{{{labels}}} " if texts else " ").partition("\0")
        self[others] = f"{self._family.name}{before}", after
        return self[others]


class _Values(dict[str, str]):
    """The escaped text of label values. The same few are in many series."""

    def __missing__(self, value: str) -> str:
        text = _safe(value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        self[value] = text
        return text


class _Numbers(dict[float, str]):
    """The text of numbers: most are 0."""

    def __missing__(self, value: float) -> str:
        text: str = floatToGoString(value + 0.0)  # type: ignore[no-untyped-call]  # -0.0 is the same key as 0.0
        self[value] = text
        return text


def _safe(text: str) -> str:
    if text.isprintable():
        return text
    # The backslash is an escape of the format itself.
    return "".join(
        character if character.isprintable() else printable(character).replace("\\", "\\\\") for character in text
    )


_INTERVAL_MILLISECONDS, _MIN_MILLISECONDS = 60_000, 100
_TIMEOUT_SECONDS, _CLOSE_SECONDS = 5, 6.0
_BATCH = 10_000


class OtlpMetrics:
    """Pushes the metrics of a registry from a thread: a collector that is away delays nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start to push. Raises ``ImportError``: the extra ``otel`` is not installed."""
        self._registry = registry
        self._export: Any = import_module("opentelemetry.sdk.metrics.export")
        scope: Any = import_module("opentelemetry.sdk.util.instrumentation")
        otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        self._exporter = otlp.OTLPMetricExporter(timeout=_TIMEOUT_SECONDS, max_export_batch_size=_BATCH)
        self._resource, self._scope = tracing.resource(), scope.InstrumentationScope("memwal_ops", __version__)
        self._began = time.time_ns()
        self._closed = threading.Event()
        self._interval = _interval(os.environ)
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push the last values, within some seconds, and stop."""
        self._closed.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._closed.wait(self._interval)
            try:
                self._exporter.export(self._collected())
            except Exception as error:  # noqa: BLE001 - a metric that cannot be sent ends neither the thread nor the service
                get_logger(__name__).warning("metrics_not_pushed", error=redact(f"{type(error).__name__}: {error}"))

    def _collected(self) -> Any:
        export, now = self._export, time.time_ns()
        metrics = [
            export.Metric(name, family.documentation, family.unit, data)
            for family in self._registry.collect()
            for name, data in self._series(family, now)
        ]
        scope = export.ScopeMetrics(self._scope, metrics, "")
        return export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])

    def _series(self, family: Metric, now: int) -> Iterator[tuple[str, Any]]:
        export = self._export
        cumulative = export.AggregationTemporality.CUMULATIVE
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        if family.type == "histogram":
            points = [*self._histograms(family.name, samples, now)]
            kind = family.name, export.Histogram(points, cumulative)
        else:
            points = [export.NumberDataPoint(sample.labels, self._began, now, sample.value) for sample in samples]
            counts = family.type == "counter"
            name = f"{family.name}_total" if counts else family.name
            kind = name, export.Sum(points, cumulative, True) if counts else export.Gauge(points)  # noqa: FBT003 - its own
        if points:
            yield kind

    def _histograms(self, name: str, samples: list[Sample], now: int) -> Iterator[Any]:
        by_labels: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
        for sample in samples:
            labels = tuple((key, value) for key, value in sample.labels.items() if key != "le")
            part = sample.labels["le"] if sample.name == f"{name}_bucket" else sample.name.removeprefix(name)
            by_labels.setdefault(labels, {})[part] = sample.value
        for labels, parts in by_labels.items():
            total, count = parts.pop("_sum"), int(parts.pop("_count"))
            bounds = sorted(parts, key=float)
            upto = [int(parts[bound]) for bound in bounds]
            counts = [after - before for before, after in zip([0, *upto], upto, strict=False)]
            ends = [float(bound) for bound in bounds[:-1]]
            point = self._export.HistogramDataPoint
            yield point(dict(labels), self._began, now, count, total, counts, ends, None, None)


def push(registry: CollectorRegistry) -> OtlpMetrics | None:
    """Push the metrics of a registry, if the environment names a collector; a missing package is only logged."""
    if not tracing.exports("metrics", os.environ):
        return None
    try:
        return OtlpMetrics(registry)
    except ImportError as error:
        tracing.not_installed("metrics_not_exported", error)
        return None


def _interval(environ: Mapping[str, str]) -> float:
    given = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    known = given.isascii() and given.isdigit()
    return max(_MIN_MILLISECONDS, int(given) if known else _INTERVAL_MILLISECONDS) / 1000


PREFIX = "memwal_ops"
_BUCKETS = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)
_MAX_PHASES = 40
_LEASE_STATES = ("free", "held", "elsewhere")
_BOTH = ("succeeded", "failed")
_OUTCOMES = ("succeeded", "partial", *FAILURES)
_SKIPS = ("held", "shared", "unchanged", "not_due")
_DEFERRED = ("window", "budget", "over_budget", "paused")


class TableCounter(Collector):
    """A counter with series for each table. Those that are 0 are made at a scrape, and take no memory.

    Args:
        tables: the jobs of each table, by its name: their series start at 0.
        per_job: it has a label ``job`` after ``table``.
        words: the name of the last label, and its values; empty: there is none.
    """

    def __init__(
        self, name: str, text: str, tables: Mapping[str, Sequence[str]], *, per_job: bool, words: Sequence[str] = ()
    ) -> None:
        self.name, self.text, self.label_names = f"{PREFIX}_{name}", text, ("table", *(["job"] * per_job), *words[:1])
        self._tables, self._per_job, self._words = tables, per_job, words[1:]
        self._values: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, table: str, *others: str, by: float = 1.0) -> None:
        """Add to one series."""
        values = self._values.setdefault(table, {})
        values[others] = values.get(others, 0.0) + by

    def value(self, table: str, *others: str) -> float:
        """Return one value."""
        return self._values.get(table, {}).get(others, 0.0)

    def forget(self, tables: Collection[str]) -> None:
        """Remove the series of tables."""
        for table in tables:
            self._values.pop(table, None)

    def series(self) -> Iterator[tuple[str, Sequence[tuple[str, ...]], Mapping[tuple[str, ...], float]]]:
        """Yield of each table the other labels that it starts with, and its values; another thread may add to them."""
        values = self._values.copy()
        known: dict[Sequence[str], list[tuple[str, ...]]] = {}
        words: list[tuple[str, ...]] = [(word,) for word in self._words] or [()]
        for table, names in [*self._tables.items()]:
            if names not in known:
                jobs = [(name,) for name in names] if self._per_job else [()]
                known[names] = [job + word for job in jobs for word in words]
            yield table, known[names], values.pop(table, {}).copy()
        yield from ((table, [], of.copy()) for table, of in values.items())

    def rows(self) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield all series."""
        for table, known, values in self.series():
            yield from (((table, *others), value) for others, value in {**dict.fromkeys(known, 0.0), **values}.items())

    def lines(self, around: _Around, numbers: Mapping[float, str]) -> Iterator[tuple[str, str]]:
        """Yield each table with its lines, a null in place of its name: most are 0, and those are made once."""
        zeros: dict[int, dict[tuple[str, ...], str]] = {}
        for table, known, values in self.series():
            if id(known) not in zeros:
                zeros[id(known)] = {of: f"{around[of][0]}\0{around[of][1]}0.0\n" for of in known}
            lines = zeros[id(known)]
            if values:
                lines = lines | {of: f"{around[of][0]}\0{around[of][1]}{numbers[at]}\n" for of, at in values.items()}
            yield table, "".join(lines.values())

    def describe(self) -> Iterator[CounterMetricFamily]:
        """Yield it without series: its name is taken."""
        yield CounterMetricFamily(self.name, self.text, labels=self.label_names)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield it with all series."""
        for family in self.describe():
            for labels, value in self.rows():
                family.add_metric(labels, value)
            yield family


class Metrics:
    """The metrics registry of one service. Gauges are made from ``status``, the document of ``/api/v1/status``."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series, and add nothing
        self.registry = CollectorRegistry()
        counter, of_tables = self._counter, self._of_tables
        self._tables: dict[str, tuple[str, ...]] = {}
        # Tables with the same jobs share the tuple of their names.
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._counters: list[TableCounter] = []
        self.runs = of_tables("runs", "Runs by outcome.", "outcome", *_OUTCOMES, per_job=True)
        text = "Runs that were due and not started: held or shared by another supervisor, or nothing was written."
        self.skipped = of_tables("skipped", text, "why", *_SKIPS, per_job=True)
        self.requests = of_tables("requests", "Requests of runs to the store, by kind.", "kind", *KINDS)
        self.read = of_tables("read_bytes", "Bytes of objects that runs read.")
        self.written = of_tables("written_bytes", "Bytes of objects that runs wrote.")
        self.cpu = of_tables("cpu_seconds", "Processor seconds of runs.")
        self.cost = of_tables("cost", "What runs cost, in the currency of the configured prices.")
        self.polls = of_tables("polls", "Polls of a table's backlog by outcome.", "outcome", *_BOTH)
        self.heartbeats = counter("heartbeats", "Heartbeat URLs fetched, by outcome.", "outcome")
        self.notifications = counter(
            "notifications", "Notifications of findings, by target and outcome.", "target", "outcome"
        )
        self.events = counter("events", "Messages about events of the store, by what became of them.", "outcome")
        self.worker_starts = counter("worker_starts", "Worker processes that were started.", "pool")
        self.worker_deaths = counter("worker_deaths", "Worker processes that died in a run.", "pool")
        self.reloads = counter("config_reloads", "Configuration files that were read again, by outcome.", "outcome")
        self.internal_errors = counter("internal_errors", "Bugs that were caught; please report them.")
        histogram = partial(Histogram, namespace=PREFIX, buckets=_BUCKETS, registry=self.registry)
        self.run_seconds = histogram("run_seconds", "How long runs took.", ("job",))
        self.phase_seconds = histogram("phase_seconds", "How long each phase of a run took.", ("job", "phase"))
        # Series that alerts use start at 0: to Prometheus, a counter that first appears with 1 has not increased.
        for reported in (self.heartbeats, self.reloads):
            for outcome in _BOTH:
                reported.labels(outcome)
        for outcome in OUTCOMES:
            self.events.labels(outcome)
        for pool in (*POOLS, WATCH):
            self.worker_starts.labels(pool)
            self.worker_deaths.labels(pool)
        info = Gauge(f"{PREFIX}_build_info", "The release that runs.", ("version",), registry=self.registry)
        info.labels(__version__).set(1)
        self._phases: set[tuple[str, str]] = set()
        # By exported name: the counter, and whether it has a label for the job.
        self._sums: dict[str, tuple[TableCounter, bool]] = {}
        for name, metric in exported_metrics("run").items():
            self._add_sum(name, metric)
        self.registry.register(_StatusCollector(status, self.registry))

    def expose(self) -> Iterator[bytes]:
        """Yield the text format by pieces; unprintable characters in labels are escaped."""
        return exposition(map(_exposed, [*self.registry._collector_to_names]))  # noqa: SLF001 - it has no list

    def observe_phases(self, job: str, phases: Mapping[str, float]) -> None:
        """Observe the phases of a run, in seconds; from the 41st phase of a job on they count as ``other``."""
        for name, seconds in phases.items():
            phase = name[:40]
            if (job, phase) not in self._phases:
                if sum(known == job for known, _ in self._phases) >= _MAX_PHASES:
                    phase = "other"
                self._phases.add((job, phase))
            self.phase_seconds.labels(job, phase).observe(seconds)

    def count_figures(self, table: str, job: str, figures: Figures) -> None:
        """Add a run's sums."""
        for figure, metric in figures.metrics.items():
            if figures.values.get(figure, 0) > 0 and metric.exported in self._sums:
                counter, per_job = self._sums[metric.exported]
                counter.add(*((table, job) if per_job else (table,)), by=figures.values[figure])

    def count_usage(self, table: str, used: Mapping[str, Any], money: float) -> None:
        """Add what a run used, see :class:`memwal_ops.core.usage.Measurement`, and what it cost."""
        for kind in KINDS:
            self.requests.add(table, kind, by=max(0, used["requests"].get(kind, 0)))
        self.read.add(table, by=max(0, used["bytes_read"]))
        self.written.add(table, by=max(0, used["bytes_written"]))
        self.cpu.add(table, by=max(0.0, used["cpu_seconds"]))
        self.cost.add(table, by=money)

    def init_table(self, table: str, jobs: Iterable[str]) -> None:
        """Initialize the counters of a table and its jobs with 0."""
        names = (*jobs,)
        self._tables[table] = self._names.setdefault(names, names)

    def init_targets(self, targets: Iterable[str]) -> None:
        """Initialize the counters of the targets of notifications with 0."""
        for target in targets:
            for outcome in _BOTH:
                self.notifications.labels(target, outcome)

    def forget_tables(self, tables: Collection[str]) -> None:
        """Remove all series of tables."""
        for table in tables:
            self._tables.pop(table, None)
        for counter in self._counters if tables else ():
            counter.forget(tables)

    def _add_sum(self, name: str, metric: MetricSpec) -> None:
        try:
            self._sums[name] = (self._of_tables(name, metric.help, per_job=metric.per_job), metric.per_job)
        except ValueError:  # the service itself uses the name: a package's job must not keep it from starting
            get_logger(__name__).warning("metric_not_exported", metric=name, why="the name is taken")

    def _of_tables(self, name: str, text: str, *words: str, per_job: bool = False) -> TableCounter:
        counter = TableCounter(name, text, self._tables, per_job=per_job, words=words)
        self.registry.register(counter)
        self._counters.append(counter)
        return counter

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)


def _exposed(collector: Collector) -> Iterable[Family] | str:
    if isinstance(collector, _StatusCollector):
        return collector.families()
    if isinstance(collector, TableCounter):
        family = Family(
            f"{collector.name}_total", "counter", collector.text, collector.label_names, (), collector.lines
        )
        return [family]
    return generate_latest(collector).decode()


class _StatusCollector(Collector):
    """Gauges, made from the status at each scrape."""

    def __init__(self, status: Callable[[], Mapping[str, Any]], registry: CollectorRegistry) -> None:
        self._status = status
        self._registry = registry

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all gauges."""
        for family in self.families():
            gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for labels, value in family.rows:
                gauge.add_metric(labels, value)
            yield gauge

    def families(self) -> Iterator[Family]:
        """Yield all gauges; of two with the same name, the service's own, else the first one."""
        status = self._status()
        # Prometheus rejects the whole page if a name occurs twice.
        taken = set(self._registry._names_to_collectors)  # noqa: SLF001 - the library has no list of its names
        of_tables = _FleetFigures(status["tables"])
        for family in chain(self._service_gauges(status, of_tables), of_tables.families()):
            if family.name not in taken:
                taken.add(family.name)
                yield family

    def _service_gauges(self, status: Mapping[str, Any], of_tables: _FleetFigures) -> Iterator[Family]:
        service, budget = status["service"], status["service"]["budget"]
        faults, bad_config = len(service["discovery_faults"]), service["config"]["error"]
        yield from _gauges(
            ("ready", "Whether the service is ready.", service["ready"]),
            ("tables", "Tables that are maintained.", of_tables.count),
            ("tables_not_read", "Those of which no poll has ended yet: nothing is known of them.", of_tables.not_read),
            ("tables_unreadable", "Those whose last poll failed: critical, as in check.", of_tables.unreadable),
            ("pattern_faults", "Patterns that could not be expanded, or match too many tables.", faults),
            ("config_ok", "1 if the configuration file was valid when it was last read.", not bad_config),
        )
        for name in ("workers", "busy", "queued"):
            rows = [((pool,), float(figures[name])) for pool, figures in status["pools"].items()]
            yield _gauge(f"pool_{name}", f"Of each pool: {name}.", rows, "pool")
        for name, text, amounts in (
            ("limit", "Limits of the budget of the fleet.", {} if budget is None else budget["limits"]),
            ("used", "What is charged to the budget of the fleet.", {} if budget is None else budget["used"]),
            ("used_own", "What runs of this service used of it.", {} if budget is None else budget["own"]["used"]),
        ):
            yield _gauge(f"budget_{name}", text, [((kind,), amount) for kind, amount in amounts.items()], "kind")
        fleet, events = service.get("fleet"), service.get("events")
        members = [] if fleet is None else [((member["name"],), member) for member in fleet["members"]]
        reached = None if fleet is None else fleet["error"] is None
        yield from _gauges(("fleet_ok", "1 if the store of the fleet could be read and written.", reached))
        for name, text, key in (
            ("member_up", "1 if this member sees that member live.", "living"),
            ("member_tables", "Tables that a member maintains.", "tables"),
            ("heartbeat_age_seconds", "Seconds since a member's last heartbeat.", "seconds_since_heartbeat"),
        ):
            rows = [(who, float(member[key])) for who, member in members if member[key] is not None]
            yield _gauge(f"fleet_{name}", text, rows, "member")
        known = events is not None
        yield from _gauges(
            ("events_ok", "1 if the queue of events could be read.", events["error"] is None if known else None),
            ("events_lag_seconds", "Age of the oldest message when it was received.",
             events["lag_seconds"] or 0.0 if known else None),
            ("events_tables", "Tables that events come for.", events["tables"] if known else None),
            ("events_missed_tables", "Tables with a commit that no event announced.",
             len(events["missed"]) if known else None),
        )  # fmt: skip


def _gauges(*found: tuple[str, str, float | None]) -> Iterator[Family]:
    """Yield gauges without labels; None: there is no value."""
    for name, text, value in found:
        yield _gauge(name, text, [] if value is None else [((), float(value))])


def _gauge(name: str, text: str, rows: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Family:
    return Family(f"{PREFIX}_{name}", "gauge", text, labels, rows)


_GAUGES: Mapping[str, tuple[str, ...]] = {
    "poll_age_seconds": ("Seconds since the backlog was last read.", "table"),
    "expect_writes_seconds": ("Seconds within which a write is expected (expect_writes_within).", "table"),
    "clock_skew_seconds": ("This host's clock minus the store's, when a lease was last written.", "table"),
    "index_recall": ("Recall of a vector index, by the last verification.", "table", "index"),
    "index_wrong_answers": ("Queries that an index answered wrongly in the last verification.", "table", "index"),
    "index_findings": ("Findings on the answers of an index in the last verification.", "table", "index"),
    "index_segments": ("Segments of an index, by the last verification.", "table", "index"),
    "seconds_since_success": (
        "Seconds since the last success; before the first, since it was first seen.", "table", "job",
    ),
    "consecutive_failures": ("Consecutive failures.", "table", "job"),
    "waiting_seconds": ("Seconds since the job became due without being started; 0 if it is not due.", "table", "job"),
    "running_seconds": ("Seconds since the run in flight started; 0 if there is none.", "table", "job"),
    "backoff_seconds": ("Seconds until the backoff after failures ends.", "table", "job"),
    "schedule_seconds": ("Seconds between two runs by the schedule; 0 if the job has none.", "table", "job"),
    "breaker_open": ("1 if the job's circuit breaker is open: it keeps failing, or achieves nothing.", "table", "job"),
    "deferred": ("1 if the job is due, and deferred by a closed window, a spent budget or a pause.", "table", "job"),
    "lease_elsewhere_seconds": ("Seconds since another supervisor's lease first prevented a due run.", "table", "job"),
}  # fmt: skip


_OF = {last: [name for name, of in _GAUGES.items() if of[-1] == last] for last in ("table", "job", "index")}


class _FleetFigures:
    """The gauges of tables, jobs and indexes. ``tables``: their documents, which are read once and not kept.

    A value has eight bytes: with objects, ten thousand tables had 300 MB at each scrape.
    """

    def __init__(self, tables: Iterable[Mapping[str, Any]]) -> None:
        self.count = self.not_read = self.unreadable = 0
        exported = {name: (one.help, "table") for name, one in exported_metrics("backlog").items()}
        self._about = {**exported, **_GAUGES}
        self._columns = {name: (list[tuple[str, ...]](), array("d")) for name in self._about}
        self._leases: list[tuple[tuple[str, str], str]] = []
        for table in tables:
            self.count += 1
            self.not_read += table.get("state") == NOT_READ
            self.unreadable += state_level(table) == CRITICAL
            self._add_table(table)

    def _add_table(self, table: Mapping[str, Any]) -> None:
        metrics = backlog_of(table).metrics
        self._add((table["name"],), {**table, "poll_age_seconds": table["seconds_since_look"]}, _OF["table"])
        named = {metrics[figure].exported: value for figure, value in table["backlog"].items() if figure in metrics}
        self._add((table["name"],), named, named.keys() & self._columns.keys() - _GAUGES.keys())
        for answer in table["answers"]:
            figures = {
                "index_recall": answer.get("recall"),
                "index_wrong_answers": None if answer.get("skipped") else answer.get("wrong", 0),
                "index_findings": len(answer.get("findings") or ()),
                "index_segments": answer.get("segments", 0),
            }
            self._add((table["name"], str(answer["index"])), figures, _OF["index"])
        for job, of in status_document.applicable_jobs(table).items():
            lease, labels = of["lease"], (table["name"], job)
            self._add(labels, of, _OF["job"])
            more = {"breaker_open": of["breaker"] is not None, "deferred": of["waiting_for"] in _DEFERRED}
            more["lease_elsewhere_seconds"] = lease["elsewhere_seconds"]
            self._add(labels, more, more)
            self._leases.append((labels, lease["state"]))

    def _add(self, labels: tuple[str, ...], figures: Mapping[Any, Any], names: Iterable[Any]) -> None:
        for name in names:
            if (value := figures.get(name)) is not None:
                known, values = self._columns[name]
                known.append(labels)
                values.append(value)

    def families(self) -> Iterator[Family]:
        """Yield them."""
        leases = (((*key, state), float(of == state)) for key, of in self._leases for state in _LEASE_STATES)
        text = "1 for the state of the lease: free, held (by this service), elsewhere."
        yield _gauge("lease_state", text, leases, "table", "job", "state")
        for name, (text, *labels) in self._about.items():
            yield _gauge(name, text, zip(*self._columns[name], strict=True), *labels)
