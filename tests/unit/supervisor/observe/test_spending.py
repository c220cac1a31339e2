"""What the runs of the last week cost: each is counted once, when it has ended, at the prices in effect."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from memwal_ops.supervisor.config.model import PricesConfig
from memwal_ops.supervisor.observe import spending
from memwal_ops.supervisor.observe.spending import WEEK, Spending, ledger_document
from memwal_ops.supervisor.state.history import History


def used(puts: int) -> dict[str, object]:
    return {"store": "s3", "requests": {"get": 0, "put": puts, "list": 0, "delete": 0}, "cpu_seconds": 1.0}


class Runs:
    """A history, and runs in it."""

    def __init__(self, folder: Path) -> None:
        self.history = History.open(str(folder / "history.sqlite"))

    def begin(self, table: str, ago: timedelta) -> int:
        began = datetime.now(UTC) - ago
        return self.history.begin(table=table, uri=f"/{table}", job="merge", supervisor="s", why="", plan={}, now=began)

    def finish(self, number: int, ago: timedelta, puts: int | None) -> None:
        ended = datetime.now(UTC) - ago
        self.history.finish(number, ended, "succeeded", used=None if puts is None else used(puts))

    def ran(self, table: str, ago: timedelta, puts: int | None) -> None:
        self.finish(self.begin(table, ago + timedelta(seconds=1)), ago, puts)


def test_each_run_counts_once_when_it_has_ended(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.ran("old", timedelta(days=9), 1000)
    runs.ran("a", timedelta(days=6), 1000)
    long = runs.begin("b", timedelta(days=2))
    runs.ran("a", timedelta(days=1), 1000)
    runs.ran("unmeasured", timedelta(days=1), None)
    found = Spending(runs.history, PricesConfig)
    assert found.week() == {}
    found.read()
    found.read()
    assert found.week() == {"a": pytest.approx(0.01)}
    runs.finish(long, timedelta(hours=1), 3000)
    now = datetime.now(UTC)
    began = now - timedelta(days=3)
    runs.history.add(uri="/a", job="gc", started=began, finished=now, outcome="succeeded", used=used(1000))
    found.read()
    assert found.week() == {"a": pytest.approx(0.015), "b": pytest.approx(0.015)}


def test_other_prices_count_for_the_whole_week(tmp_path: Path) -> None:
    runs, configured = Runs(tmp_path), [PricesConfig()]
    runs.ran("a", timedelta(days=6), 1000)
    found = Spending(runs.history, lambda: configured[0])
    found.read()
    configured[0] = PricesConfig.model_validate({"currency": "EUR", "s3": {"put": 1.0}})
    found.read()
    assert (found.week(), found.currency) == ({"a": pytest.approx(1.0)}, "EUR")


def test_it_agrees_with_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of beginnings, ends and reads, a few runs at a time."""
    monkeypatch.setattr(spending, "_CHUNK", 3)
    rng, runs, open_runs = random.Random(7), Runs(tmp_path), list[int]()
    found = Spending(runs.history, PricesConfig)
    for _ in range(200):
        match rng.randrange(3):
            case 0:
                open_runs.append(runs.begin(rng.choice("abc"), timedelta(hours=rng.randrange(1, 140))))
            case 1 if open_runs:
                runs.finish(open_runs.pop(rng.randrange(len(open_runs))), timedelta(0), rng.randrange(5))
            case _:
                found.read()
    found.read()
    since, prices = datetime.now(UTC) - WEEK, PricesConfig()
    document = ledger_document(runs.history.ledger(since), prices.by_store(), "USD", "table", since)
    assert found.week() == {one["table"]: pytest.approx(one["money"]) for one in document["groups"]}
    whole, total = document["total"], found.total()
    assert {name: total[name] for name in ("runs", "failed", "requests")} == {
        name: whole[name] for name in ("runs", "failed", "requests")
    }
    assert total["money"] == pytest.approx(whole["money"], abs=1e-5)


def test_the_ledger_of_a_table_is_read_at_most_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(tmp_path)
    runs.ran("a", timedelta(days=6), 1000)
    runs.ran("a", timedelta(hours=2), 1000)
    runs.ran("b", timedelta(hours=2), 1000)
    found = Spending(runs.history, PricesConfig)
    document, spent = found.of("a", timedelta(days=1))
    assert (document["total"]["runs"], document["total"]["money"]) == (2, pytest.approx(0.01))
    assert [run["money"] for run in spent] == [pytest.approx(0.005)]
    runs.ran("a", timedelta(hours=1), 1000)
    assert found.of("a", timedelta(days=1))[0] is document
    monkeypatch.setattr(spending, "_VALID_SECONDS", 0.0)
    assert found.of("a", timedelta(days=1))[0]["total"]["runs"] == 3
