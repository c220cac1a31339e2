"""Push the metrics of ``/metrics`` by OTLP, where no Prometheus scrapes them.

The standard variables of OpenTelemetry decide: ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or that of metrics) names the
collector, ``OTEL_METRIC_EXPORT_INTERVAL`` has the milliseconds between two pushes. Names, labels and values are those
of Prometheus, and sums are cumulative: the same dashboards work.
"""

from __future__ import annotations

import os
import threading
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memwal_ops.core.tracing import exports, not_installed, resource
from memwal_ops.log import get_logger
from memwal_ops.storage.redaction import redact
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.samples import Sample

_INTERVAL_MILLISECONDS, _MIN_MILLISECONDS = 60_000, 100
_TIMEOUT_SECONDS, _CLOSE_SECONDS = 5, 6.0
_BATCH = 10_000


class OtlpMetrics:
    """Pushes the metrics of a registry from a thread: a collector that is away delays nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Start to push.

        Raises:
            ImportError: the extra ``otel`` is not installed.
        """
        self._registry = registry
        self._export: Any = import_module("opentelemetry.sdk.metrics.export")
        scope: Any = import_module("opentelemetry.sdk.util.instrumentation")
        otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
        self._exporter = otlp.OTLPMetricExporter(timeout=_TIMEOUT_SECONDS, max_export_batch_size=_BATCH)
        self._resource, self._scope = resource(), scope.InstrumentationScope("memwal_ops", __version__)
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
        """The values of all metrics now, as the SDK's ``MetricsData``."""
        export, now = self._export, time.time_ns()
        metrics = [
            export.Metric(name, family.documentation, family.unit, data)
            for family in self._registry.collect()
            for name, data in self._series(family, now)
        ]
        scope = export.ScopeMetrics(self._scope, metrics, "")
        return export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])

    def _series(self, family: Metric, now: int) -> Iterator[tuple[str, Any]]:
        """What a family becomes: its name and data; nothing if it has no value."""
        export = self._export
        cumulative = export.AggregationTemporality.CUMULATIVE
        samples = [one for one in family.samples if not one.name.endswith("_created")]
        if family.type == "histogram":
            points = [*self._histograms(family.name, samples, now)]
            found = family.name, export.Histogram(points, cumulative)
        else:
            points = [export.NumberDataPoint(one.labels, self._began, now, one.value) for one in samples]
            counts = family.type == "counter"
            name = f"{family.name}_total" if counts else family.name
            found = name, export.Sum(points, cumulative, True) if counts else export.Gauge(points)  # noqa: FBT003 - its own
        if points:
            yield found

    def _histograms(self, name: str, samples: list[Sample], now: int) -> Iterator[Any]:
        """The points of a histogram, of which Prometheus has the counts up to each bound."""
        by_labels: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
        for one in samples:
            labels = tuple((key, value) for key, value in one.labels.items() if key != "le")
            part = one.labels["le"] if one.name == f"{name}_bucket" else one.name.removeprefix(name)
            by_labels.setdefault(labels, {})[part] = one.value
        for labels, parts in by_labels.items():
            total, count = parts.pop("_sum"), int(parts.pop("_count"))
            bounds = sorted(parts, key=float)
            upto = [int(parts[bound]) for bound in bounds]
            counts = [after - before for before, after in zip([0, *upto], upto, strict=False)]
            yield self._export.HistogramDataPoint(
                dict(labels), self._began, now, count, total, counts, [float(one) for one in bounds[:-1]], None, None
            )


def push(registry: CollectorRegistry) -> OtlpMetrics | None:
    """Push the metrics of a registry, if the environment names a collector; a missing package is only logged."""
    if not exports("metrics", os.environ):
        return None
    try:
        return OtlpMetrics(registry)
    except ImportError as error:
        not_installed("metrics_not_exported", error)
        return None


def _interval(environ: Mapping[str, str]) -> float:
    """Seconds between two pushes."""
    given = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")
    known = given.isascii() and given.isdigit()
    return max(_MIN_MILLISECONDS, int(given) if known else _INTERVAL_MILLISECONDS) / 1000
