"""Traces and metrics as a collector of OpenTelemetry gets them, from processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import lance
import pytest
import structlog

from memwal_ops.core.tracing import exports
from tests.support.receivers import Receiver, http_receiver
from tests.support.run_cli import run_process
from tests.support.service import service
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload
from tests.support.waiting import until

pytest.importorskip("opentelemetry.sdk", reason="the extra memwal-ops[otel] is not installed")
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
# As Airflow runs it: in the task's process, with the carrier of the task. Of the package's own modules only those are
# loaded that need no Airflow.
TASK = """
import json, os, sys, types, memwal_ops
package = types.ModuleType("memwal_ops.airflow")
package.__path__ = [os.path.join(os.path.dirname(memwal_ops.__file__), "airflow")]
sys.modules["memwal_ops.airflow"] = package
from memwal_ops.airflow.work import run_job
outcome = run_job("merge", sys.argv[1], {}, apply=True, storage={}, trace=json.loads(sys.argv[2]))
assert outcome.failure is None, outcome
"""
# A program with OpenTelemetry of its own, which calls the package.
PROGRAM = """
import shutil, sys
from itertools import pairwise
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import memwal_ops
memwal_ops.run_job(sys.argv[1], "merge", apply=False)  # before it is set up
kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
with trace.get_tracer("own").start_as_current_span("own") as own:
    memwal_ops.run_job(sys.argv[1], "maintain")
spans = {span.name: span for span in kept.get_finished_spans()}
maintain, merge = spans["memwal_ops maintain"], spans["memwal_ops merge"]
assert maintain.parent.span_id == own.get_span_context().span_id
assert merge.parent.span_id == maintain.context.span_id
assert spans["collapse"].parent.span_id == merge.context.span_id
assert merge.attributes["memwal_ops.decision"] == "merged"
kept.clear()
table = memwal_ops.open_table(sys.argv[1])
shutil.rmtree(sys.argv[1])
try:
    memwal_ops.run_job(table, "expire")
except memwal_ops.MemwalOpsError as error:
    (span,) = (one for one in kept.get_finished_spans() if one.name == "memwal_ops expire")
    assert span.attributes["error.type"] == error.reason == "table_not_found"
    assert (span.status.status_code.name, span.attributes["memwal_ops.exit_code"]) == ("ERROR", error.exit_code)
    assert "memwal_ops.decision" not in span.attributes
else:
    raise AssertionError("there is no table")
"""


def spans(server: Receiver) -> list[Any]:
    found = []
    for path, _, body in list(server.received):
        if path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(body)
            found += [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
    return found


def metrics(server: Receiver) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, _, body in list(server.received):
        if path == "/v1/metrics":
            request = ExportMetricsServiceRequest.FromString(body)
            all_of = (one for each in request.resource_metrics for scope in each.scope_metrics for one in scope.metrics)
            found |= {one.name: one for one in all_of}
    return found


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def run_python(script: str, *arguments: str, **environ: str) -> None:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def table(tmp_path: Path) -> Workload:
    made = Workload(3, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    made.put([1, 2])
    made.flush()
    return made


def test_a_run_by_hand_with_its_phases_and_requests(table: Workload) -> None:
    with http_receiver() as server:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": server.url, "TRACEPARENT": PARENT}
        assert run_process("merge", table.uri, **environment).code == 0
    found = {span.name: span for span in spans(server)}
    run = found.pop("memwal_ops merge")
    assert (run.trace_id.hex(), run.parent_span_id.hex()) == (TRACE, SPAN)
    shown = attributes(run)
    assert shown["memwal_ops.decision"] == "merged"
    assert (shown["memwal_ops.table"], shown["memwal_ops.format"]) == (table.uri, "lance")
    assert (shown["memwal_ops.rows_merged"], shown["memwal_ops.apply"]) == (2, True)
    assert [one.int_value for one in shown["memwal_ops.versions"].values] == [lance.dataset(table.uri).version]
    assert found.keys() >= {"open", "collapse", "locate", "rewrite", "commit"}
    assert {span.parent_span_id for span in found.values()} == {run.span_id}
    # The phases follow each other within the run, and each has the requests of its own.
    times = sorted((span.start_time_unix_nano, span.end_time_unix_nano) for span in found.values())
    assert run.start_time_unix_nano <= times[0][0] <= times[-1][1] <= run.end_time_unix_nano
    assert all(before[1] <= after[0] for before, after in pairwise(times))
    puts = {name: attributes(span)["memwal_ops.requests.put"] for name, span in found.items()}
    assert puts["commit"] > 0
    assert puts["collapse"] == 0
    assert sum(puts.values()) <= shown["memwal_ops.requests.put"]
    assert shown["memwal_ops.requests.get"] > 0


@pytest.mark.long
def test_a_refusal_has_no_trace_and_a_plan_has_one(tmp_path: Path) -> None:
    plain = PlainTable(str(tmp_path / "p.lance")).create(rows=3)
    with http_receiver() as server:
        url = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{server.url}/v1/traces"}
        assert run_process("snapshot", plain.uri, **url).code == 5
        assert spans(server) == [], "it was refused before anything ran"
        assert run_process("compact", plain.uri, "--dry-run", **url).code == 0
    (run,) = [span for span in spans(server) if span.name == "memwal_ops compact"]
    assert (attributes(run)["memwal_ops.apply"], run.parent_span_id) == (False, b"")


def test_a_collector_that_is_away_changes_nothing(table: Workload) -> None:
    outcome = run_process("merge", table.uri, "--json", OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert (outcome.code, outcome.document["decision"]) == (0, "merged")
    assert "Traceback" not in outcome.err
    assert len(outcome.err.splitlines()) <= 6, outcome.err


def test_what_turns_it_on_and_off() -> None:
    url = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    own = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4318/v1/metrics"}
    assert [exports("traces", one) for one in (url, own, {})] == [True, False, False]
    assert [exports("metrics", one) for one in (url, own, {})] == [True, True, False]
    assert not exports("traces", {**url, "OTEL_SDK_DISABLED": "TRUE"})
    assert not exports("traces", {**url, "OTEL_TRACES_EXPORTER": "none"})
    assert exports("metrics", {**url, "OTEL_TRACES_EXPORTER": "none"})
    assert exports("traces", {**url, "OTEL_TRACES_EXPORTER": "console,otlp"})
    with structlog.testing.capture_logs() as logged:
        assert not exports("traces", {**url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in logged[0]["remedy"]
    assert exports("traces", {**url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", **_OVER_HTTP})


_OVER_HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


@pytest.mark.long
def test_without_a_collector_nothing_is_imported(table: Workload) -> None:
    run_python(
        "import sys, memwal_ops; memwal_ops.run_job(sys.argv[1], 'merge');"
        "assert not [one for one in sys.modules if one.startswith('opentelemetry')]",
        table.uri,
    )


@pytest.mark.long
def test_the_trace_of_a_task_of_airflow(table: Workload) -> None:
    with http_receiver() as server:
        carrier = json.dumps({"traceparent": PARENT})
        run_python(TASK, table.uri, carrier, OTEL_EXPORTER_OTLP_ENDPOINT=server.url)
    (run,) = [span for span in spans(server) if span.name == "memwal_ops merge"]
    assert (run.trace_id.hex(), run.parent_span_id.hex()) == (TRACE, SPAN)


@pytest.mark.long
def test_the_trace_of_a_program_that_has_one(table: Workload) -> None:
    run_python(PROGRAM, table.uri)


@pytest.mark.long
def test_a_service_pushes_traces_and_metrics(table: Workload, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"state_dir: {tmp_path}/state-c\nhttp: {{port: 0}}\ntables:\n"
        f"- {{uri: {table.uri}, poll: 1s, jobs: {{merge: {{schedule: 1s}}, verify: {{enabled: false}}}}}}\n"
    )
    with http_receiver() as server:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": server.url, "OTEL_METRIC_EXPORT_INTERVAL": "500",
            "OTEL_BSP_SCHEDULE_DELAY": "300", "TRACEPARENT": PARENT,
        }  # fmt: skip
        with service(config, environment):
            until(lambda: [span for span in spans(server) if attributes(span).get("memwal_ops.decision") == "merged"])
            until(lambda: _value(metrics(server), "memwal_ops_merged_rows_total") == 2)
            until(lambda: {"memwal_ops_run_seconds", "memwal_ops_backlog_generations"} <= metrics(server).keys())
        seen, traced = metrics(server), spans(server)
    (run,) = [span for span in traced if attributes(span).get("memwal_ops.decision") == "merged"]
    assert (run.trace_id.hex() == TRACE, run.parent_span_id) == (False, b""), "a trace of its own"
    phases = [span.name for span in traced if span.parent_span_id == run.span_id]
    assert {"open", "collapse", "commit"} <= {*phases}
    assert seen["memwal_ops_merged_rows_total"].sum.is_monotonic
    points = seen["memwal_ops_backlog_generations"].gauge.data_points
    assert [(one.key, one.value.string_value) for one in points[0].attributes] == [("table", "t")]
    (seconds,) = seen["memwal_ops_run_seconds"].histogram.data_points
    assert seconds.count == sum(seconds.bucket_counts) > 0
    assert len(seconds.bucket_counts) == len(seconds.explicit_bounds) + 1
    assert sorted(seconds.explicit_bounds) == list(seconds.explicit_bounds)


@pytest.mark.long
def test_a_run_once_pushes_its_metrics_at_its_end(table: Workload, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"state_dir: {tmp_path}/state-c\ntables: [{{uri: {table.uri}}}]\n")
    with http_receiver() as server:
        done = run_process("run", "--once", "--config", str(config), OTEL_EXPORTER_OTLP_ENDPOINT=server.url)
    assert done.code == 0, done.err
    assert _value(metrics(server), "memwal_ops_merged_rows_total") == 2
    assert "memwal_ops merge" in {span.name for span in spans(server)}


def _value(found: dict[str, Any], name: str) -> float:
    points = found[name].sum.data_points if name in found else []
    return sum(point.as_double or point.as_int for point in points)
