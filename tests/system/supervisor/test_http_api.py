"""The API is what it is described as: every path, by requests that are made from the description."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest

from memwal_ops.supervisor.actions import Actions
from memwal_ops.supervisor.http.access import TokenFile
from memwal_ops.supervisor.http.server import HttpServer
from memwal_ops.supervisor.observe.status import status_of
from tests.support.fakes import Stage
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    import schemathesis

TOKEN = "t" * 32
OPERATIONS = 24  # all but that of the description itself


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("api")
    (folder / "tokens").write_text(TOKEN)
    (folder / "tokens").chmod(0o600)
    stage, ended = Stage(folder, "tables: [{uri: /a}, {uri: /b}]\n"), threading.Event()
    for number in range(5):
        stage.due("a")
        stage.turn()
        stage.answer("a", outcome="failed" if number % 2 else "succeeded", message="no" if number % 2 else None)
        stage.turn(3600)

    def turn() -> None:
        while not ended.is_set():
            stage.scheduler.step(0.02)

    loop = threading.Thread(target=turn, daemon=True)
    loop.start()

    def status() -> dict[str, object]:
        tables, pools = status_of(stage.scheduler)
        service = {
            "version": "1", "pid": 1, "instance": "i", "holder": "h", "started": "2026", "ready": True,
            "stopping": False, "leases": True, "paused": None, "state_dir": "/s", "state_error": None,
            "config": {"file": "/c", "loaded": "2026", "error": None},
            "discovery_faults": [], "discovery_pending": [], "delivery_faults": [],
            "budget": None, "fleet": None, "events": None,
        }  # fmt: skip
        return {"service": service, "pools": pools, "tables": tables}

    server = HttpServer(
        "127.0.0.1", 0, alive=lambda: (True, "ok"), ready=lambda: (True, "ready"), metrics=lambda: [b"m 1\n"],
        status=status, runs=stage.history.runs, run=stage.history.run, actions=Actions(stage.scheduler),
        tokens=TokenFile(str(folder / "tokens")),
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("memwal_ops.supervisor.http.access._MAX_FAILED", 1_000_000)  # wrong tokens are tried, too
        yield f"http://127.0.0.1:{server.port}"
    ended.set()
    loop.join(PATIENCE)
    server.close()


def schema_of(base: str) -> schemathesis.BaseSchema:
    import schemathesis  # seconds, which each process of the tests would need to collect them

    return schemathesis.openapi.from_url(f"{base}/api/v1/openapi.json")


def operations(base: str) -> list[schemathesis.APIOperation]:
    return [found.ok() for found in schema_of(base).get_all_operations()]


@pytest.mark.parametrize("examples", [2, pytest.param(30, marks=pytest.mark.long)])
def test_every_path_answers_as_described(base: str, examples: int) -> None:
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    found = operations(base)
    assert len(found) == OPERATIONS
    refused: set[int] = set()
    for operation in found:

        @hypothesis.settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=[*hypothesis.HealthCheck],
        )
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            response = case.call(headers={"Authorization": f"Bearer {TOKEN}"} if case.method == "POST" else {})
            refused.add(response.status_code)
            # No schema says that a pause must end in the future.
            past = [positive_data_acceptance] if case.path.endswith("/pause") else []
            case.validate_response(response, excluded_checks=past)

        ask()
    assert {200, 404, 409} <= refused


def test_known_tables_and_jobs_can_be_acted_on(base: str) -> None:
    schema = schema_of(base)
    for path, fields, status in (
        ("/api/v1/tables/{name}/jobs/{job}/pause", {"for": "2h"}, 200),
        ("/api/v1/tables/{name}/jobs/{job}/resume", {}, 200),
        ("/api/v1/tables/{name}/jobs/{job}/run", {}, 202),
        ("/api/v1/tables/{name}/pause", {"until": "2999-01-01T00:00:00Z"}, 400),
    ):
        case = schema[path]["POST"].Case(path_parameters={"name": "b", "job": "merge"}, body=fields)
        response = case.call_and_validate(headers={"Authorization": f"Bearer {TOKEN}"})
        assert response.status_code == status, response.text


def test_runs_by_page(base: str) -> None:
    def get(query: str) -> dict[str, object]:
        with urllib.request.urlopen(f"{base}/api/v1/runs?table=a&{query}", timeout=PATIENCE) as response:
            found: dict[str, object] = json.load(response)
        return found

    whole = get("limit=1000")["runs"]
    assert isinstance(whole, list)
    assert len(whole) >= 5
    pages, before = [], ""
    while True:
        page = get(f"limit=2{before}")
        pages += page["runs"]  # type: ignore[operator]  # a list
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert pages == whole
    assert get("limit=2&page=2")["runs"] == whole[2:4]
    assert {one["outcome"] for one in get("outcome=failed")["runs"]} == {"failed"}  # type: ignore[attr-defined]
    number = whole[0]["id"]
    with urllib.request.urlopen(f"{base}/api/v1/runs/{number}", timeout=PATIENCE) as response:
        assert json.load(response) == {**whole[0], "log": []}


def test_the_description_is_a_valid_document(base: str) -> None:
    schema = schema_of(base)
    schema.validate()
    assert schema.raw_schema["openapi"].startswith("3.1")
