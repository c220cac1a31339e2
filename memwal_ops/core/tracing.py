"""Trace runs by OpenTelemetry: a span for each run, one for each of its phases, each with its requests to stores.

Nothing is imported, and nothing is measured, unless a program has set up OpenTelemetry in this process, or its standard
variables name a collector (``OTEL_EXPORTER_OTLP_ENDPOINT``, or that of traces). A run belongs to the trace of the span
that is current where it starts, else to that of a carrier (:func:`parent`), else to that of ``TRACEPARENT``.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from memwal_ops.errors import MemwalOpsError
from memwal_ops.log import get_logger
from memwal_ops.storage import metering
from memwal_ops.storage.locations import Location
from memwal_ops.storage.options import redact
from memwal_ops.version import __version__

_NAME = "memwal_ops"
_PROTOCOL = "http/protobuf"
# Nothing waits for a collector that is away but the end of a process, at most this long.
_TIMEOUT_SECONDS, _FLUSH_MILLISECONDS = 5, 5000


@dataclass(slots=True)
class _Run:
    """The run that is traced on this thread.

    ``performed``: its code has begun; that of another job within it has a span of its own. ``local``: its table is in
    files; None: it is not open yet.
    """

    job: str
    span: Any = None
    performed: bool = False
    local: bool | None = None

    @property
    def meters(self) -> tuple[metering.Meter, ...]:
        """Those that count the requests to its table."""
        return (
            (metering.LOCAL, metering.REMOTE)
            if self.local is None
            else (metering.LOCAL,)
            if self.local
            else (metering.REMOTE,)
        )


_run: ContextVar[_Run | None] = ContextVar("memwal_ops_traced_run", default=None)
_carrier: ContextVar[Mapping[str, str] | None] = ContextVar("memwal_ops_trace_carrier", default=None)


@contextmanager
def parent(carrier: Mapping[str, str] | None) -> Iterator[None]:
    """Runs of the block belong to the trace of a carrier: ``traceparent`` and ``tracestate``, as W3C has them.

    Those of an empty carrier have traces of their own, whatever ``TRACEPARENT`` is.
    """
    before = _carrier.set(carrier)
    try:
        yield
    finally:
        _carrier.reset(before)


@contextmanager
def run_span(job: str, uri: str) -> Iterator[None]:
    """Trace the block as a run of a job on a table: its opening, and what :func:`performed` is called for."""
    tracer = _tracer()
    if tracer is None:
        yield
        return
    run = _Run(job)
    with _span(tracer, run, f"{_NAME} {job}", _parent()) as run.span:
        run.span.set_attributes({f"{_NAME}.job": job, f"{_NAME}.table": redact(uri)})
        before = _run.set(run)
        try:
            yield
        finally:
            _run.reset(before)


@contextmanager
def performed(
    job: str, location: Location, format_name: str, figures: Mapping[str, Any], revisions: Sequence[int], *, act: bool
) -> Iterator[Callable[[Any], None]]:
    """Trace the block as the code of a job, in the span of its run.

    Args:
        figures: sums of the run, complete when the block ends.
        revisions: what it publishes, complete when the block ends.
        act: it does not only plan.

    Yields:
        What the block calls with its report.
    """
    with ExitStack() as stack:
        if (run := _run.get()) is None or run.performed or run.job != job:
            stack.enter_context(run_span(job, location.uri))
            run = _run.get() if _tracer() is not None else None
        if run is None:
            yield lambda _: None
            return
        span, run.performed, run.local = run.span, True, location.scheme == "file"
        span.set_attributes({f"{_NAME}.format": format_name, f"{_NAME}.apply": act})
        try:
            yield lambda report: _reported(span, report)
        except BaseException as error:
            _failed(span, error)  # the caller may turn it into a result
            raise
        finally:
            span.set_attributes(
                {f"{_NAME}.{name}": (value if type(value) is int else float(value)) for name, value in figures.items()}
            )
            if revisions:
                span.set_attribute(f"{_NAME}.versions", [int(revision) for revision in revisions])


def _reported(span: Any, report: Any) -> None:
    """Record how a run ended. The report of another package's job is checked later: it may be anything."""
    span.set_attribute(f"{_NAME}.decision", str(getattr(report, "decision", "")))
    if type(code := getattr(report, "exit_code", None)) is int:
        span.set_attribute(f"{_NAME}.exit_code", code)


def phase(name: str) -> AbstractContextManager[Any]:
    """Trace the block as a phase of the run of this thread, if that is traced."""
    run = _run.get()
    return nullcontext() if run is None else _span(_tracer(), run, name, None)


@contextmanager
def _span(tracer: Any, run: _Run, name: str, context: Any) -> Iterator[Any]:
    """A span with the requests of its time; an error is its status, without secrets."""
    before = {id(meter): meter.traffic() for meter in (metering.LOCAL, metering.REMOTE)}
    with tracer.start_as_current_span(
        name, context=context, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except BaseException as error:
            _failed(span, error)
            raise
        finally:
            used = [meter.traffic().since(before[id(meter)]) for meter in run.meters]
            attributes = {
                f"requests.{kind}": sum(usage.requests.get(kind, 0) for usage in used) for kind in metering.KINDS
            }
            attributes["bytes_read"] = sum(usage.bytes_read for usage in used)
            attributes["bytes_written"] = sum(usage.bytes_written for usage in used)
            span.set_attributes({f"{_NAME}.{kind}": number for kind, number in attributes.items()})


def _failed(span: Any, error: BaseException) -> None:
    """Record an error; a run that was asked to stop (``StopRequested``, Ctrl-C) has none."""
    if not isinstance(error, Exception):
        span.set_attribute(f"{_NAME}.decision", "stopped")
        return
    trace: Any = import_module("opentelemetry.trace")
    span.set_status(trace.Status(trace.StatusCode.ERROR, redact(f"{type(error).__name__}: {error}")))
    if isinstance(error, MemwalOpsError):
        span.set_attributes({"error.type": error.reason, f"{_NAME}.exit_code": error.exit_code})


def flush() -> None:
    """Send what was traced, within some seconds: for a process that ends without Python's own exit."""
    if _own_provider.cache_info().currsize and (provider := _own_provider()) is not None:
        provider.force_flush(_FLUSH_MILLISECONDS)


def _parent() -> Any:
    """The context that a run belongs to; None: the current one."""
    trace: Any = import_module("opentelemetry.trace")
    if trace.get_current_span().get_span_context().is_valid:
        return None
    carrier = _carrier.get()
    if carrier is None and (parent := os.environ.get("TRACEPARENT")):
        carrier = {"traceparent": parent, "tracestate": os.environ.get("TRACESTATE", "")}
    if not carrier:
        return None
    propagation: Any = import_module("opentelemetry.trace.propagation.tracecontext")
    return propagation.TraceContextTextMapPropagator().extract(dict(carrier))


def _tracer() -> Any:
    """The tracer of this process; None: nothing is traced."""
    if "opentelemetry.sdk.trace" in sys.modules:
        trace: Any = import_module("opentelemetry.trace")
        provider = trace.get_tracer_provider()
        if hasattr(provider, "force_flush"):  # of the program that imports this package
            return provider.get_tracer(_NAME, __version__)
    own = _own_provider()
    return None if own is None else own.get_tracer(_NAME, __version__)


@cache
def _own_provider() -> Any:
    """A provider that exports to the collector that the environment names; None: it names none."""
    if not exports("traces", os.environ):
        return None
    try:
        sdk: Any = import_module("opentelemetry.sdk.trace")
        export: Any = import_module("opentelemetry.sdk.trace.export")
        otlp: Any = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        not_installed("traces_not_exported", error)
        return None
    provider = sdk.TracerProvider(resource=resource(), shutdown_on_exit=False)
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(timeout=_TIMEOUT_SECONDS)))
    atexit.register(flush)
    return provider


def exports(signal: str, environ: Mapping[str, str]) -> bool:
    """Return whether the standard variables ask for an export of ``traces`` or ``metrics`` that we can do.

    A collector that is to be reached by gRPC is logged: we send OTLP by HTTP.
    """
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    upper = signal.upper()
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{upper}_ENDPOINT")
    if disabled or not any(environ.get(name) for name in endpoints):
        return False
    if "otlp" not in environ.get(f"OTEL_{upper}_EXPORTER", "otlp").lower().split(","):
        return False
    variable = f"OTEL_EXPORTER_OTLP_{upper}_PROTOCOL"
    protocol = environ.get(variable) or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOL
    if protocol == _PROTOCOL:
        return True
    remedy = f"Set {variable}={_PROTOCOL}, and the endpoint of that protocol (port 4318 of most collectors)."
    get_logger(__name__).warning(f"{signal}_not_exported", protocol=protocol, remedy=remedy)
    return False


def not_installed(event: str, error: ImportError) -> None:
    """Log that OpenTelemetry is asked for, and not installed."""
    get_logger(__name__).warning(event, error=str(error), remedy="pip install 'memwal-ops[otel]'")


def resource() -> Any:
    """What this process is, for a collector; ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` add to it."""
    resources: Any = import_module("opentelemetry.sdk.resources")
    name = os.environ.get("OTEL_SERVICE_NAME", "memwal-ops")
    return resources.Resource.create({"service.name": name, "service.version": __version__})
