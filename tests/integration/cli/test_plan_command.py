"""The plan of a fleet: what runs first, at what cost, and why the rest does not; nothing is changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import lance
import pyarrow as pa
import pytest

from memwal_ops.supervisor.state.history import History
from tests.support.run_cli import contents, run_here

JOBS = "jobs: {verify: {enabled: false}, expire: {apply: true}}"


def made(folder: Path, name: str, fragments: int) -> str:
    uri = str(folder / f"{name}.lance")
    for _ in range(fragments):
        lance.write_dataset(pa.table({"id": range(100)}), uri, mode="append")
    return uri


@pytest.fixture
def config(tmp_path: Path) -> str:
    uris = {name: made(tmp_path, name, count) for name, count in (("few", 9), ("many", 40), ("kept", 3))}
    file = tmp_path / "config.yaml"
    tables = "\n".join(
        f"- {{uri: {uri}, {'objectives: {max_fragments: 2}, ' if name == 'kept' else ''}{JOBS}}}"
        for name, uri in uris.items()
    )
    file.write_text(f"history: {{path: {tmp_path}/history.sqlite}}\nhttp: {{enabled: false}}\ntables:\n{tables}\n")
    return str(file)


def test_what_saves_most_runs_first(config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = contents(str(tmp_path))
    found = run_here(capfd, "plan", "--config", config, "--json").document
    assert contents(str(tmp_path)) == before
    order = [one["table"] for one in found["runs"] if one["job"] == "compact"]
    assert order.index("many") < order.index("few"), found["runs"]
    assert all(one["cost"] is None for one in found["runs"]), "no run is known"
    text = " ".join(run_here(capfd, "plan", "--config", config).out.split())
    assert "at a cost that is not known" in text
    assert "many merge: it does not apply to this table." in text
    assert {one["job"] for one in found["runs"]}.isdisjoint({"merge", "snapshot"}), "of tables with a log"


def test_a_missed_objective_comes_before_any_saving(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = run_here(capfd, "plan", "--config", config, "--json").document
    jobs = {(one["table"], one["job"]): one for one in [*found["runs"], *found["undone"]]}
    missed = jobs["kept", "compact"]["worth"]["missed"]
    assert missed == {"objective": "max_fragments", "figure": 3, "limit": 2}
    assert jobs["many", "compact"]["worth"]["missed"] is None


def test_the_cost_is_that_of_past_runs(config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    history = History.open(f"{tmp_path}/history.sqlite")
    now = datetime.now(UTC)
    requests = {"get": 90, "put": 10, "list": 0, "delete": 0}
    used = {"store": "s3", "requests": requests, "bytes_read": 5, "bytes_written": 5, "cpu_seconds": 1.0, "work": 4000}
    uri = str(tmp_path / "many.lance")
    number = history.begin(
        table="many", uri=uri, job="compact", supervisor="s", why="schedule", plan={}, now=now - timedelta(days=2)
    )
    history.finish(number, now - timedelta(days=2), "succeeded", used=used, achieved={"fragments": 3})
    history.close()
    found = run_here(capfd, "plan", "--config", config, "--json").document
    (run,) = [one for one in found["runs"] if (one["table"], one["job"]) == ("many", "compact")]
    assert run["cost"]["requests"] == requests
    assert found["total"]["requests"] >= 100
    told = " ".join(run_here(capfd, "plan", "--config", config, "--explain", "many").out.split())
    assert "many compact runs at " in told
    assert "A run costs about 100 requests" in told
    assert "few compact" not in told


def test_an_unknown_table_is_refused(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    ran = run_here(capfd, "plan", "--config", config, "--explain", "none")
    assert ran.code == 2
    assert "The tables of" in ran.err


def test_what_the_budget_does_not_allow_stays_undone(
    config: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    history = History.open(f"{tmp_path}/history.sqlite")
    began = datetime.now(UTC) - timedelta(hours=2)
    number = history.begin(table="x", uri="/x", job="merge", supervisor="s", why="schedule", plan={}, now=began)
    used = {"store": "s3", "requests": {}, "bytes_read": 0, "bytes_written": 0, "cpu_seconds": 950.0}
    history.finish(number, began, "succeeded", used=used)
    history.close()
    file, text = Path(config), Path(config).read_text()
    file.write_text(f"budget: {{cpu: 1000s, per: 30d}}\n{text}")
    found = run_here(capfd, "plan", "--config", config, "--json").document
    undone = {(one["table"], one["job"]): one["why"] for one in found["undone"]}
    assert undone["many", "compact"].startswith("over_budget: cpu is used up until ")
    (deferred,) = [one for one in found["undone"] if (one["table"], one["job"]) == ("many", "compact")]
    assert (deferred["waiting_for"], deferred["limit"]) == ("over_budget", "cpu")
    assert deferred["frees"] > found["until"]
    assert found["budget"]["used_up"] == "cpu"
    assert found["budget"]["frees"] > found["until"]
    assert ("kept", "compact") not in undone, "a missed objective may use the rest"
    told = " ".join(run_here(capfd, "plan", "--config", config).out.split())
    assert "many compact: over_budget: cpu is used up until " in told
    file.write_text(f"budget: {{cpu: 1000s, per: 3h}}\n{text}")
    (later,) = [
        one
        for one in run_here(capfd, "plan", "--config", config, "--json").document["runs"]
        if (one["table"], one["job"]) == ("many", "compact")
    ]
    wait = datetime.fromisoformat(later["at"]) - datetime.now(UTC)
    assert timedelta(minutes=50) < wait < timedelta(minutes=70), "when the run is three hours ago"
    file.write_text(f"budget: {{cpu: 1000s, per: 30d, shadow: true}}\n{text}")
    found = run_here(capfd, "plan", "--config", config, "--json").document
    assert not any("over_budget" in one["why"] for one in found["undone"])


def test_runs_by_schedule_are_those_that_the_budget_allows(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    file, text = Path(config), Path(config).read_text()
    text = text.replace("expire: {apply: true}", "expire: {enabled: false}, compact: {schedule: 1h}")

    def runs(budget: str) -> int:
        file.write_text(f"budget: {budget}\n{text}")
        found = run_here(capfd, "plan", "--config", config, "--json", "--for", "10h").document
        return sum(one["runs"] for one in found["runs"] if one["job"] == "compact")

    assert 30 <= runs("{cpu: 1000s}") <= 33, "three tables in each of ten hours, and those that are due at once"
    assert 9 <= runs("{cpu: 10s}") <= 10, "each is expected to use a second, and a part is kept for objectives"
