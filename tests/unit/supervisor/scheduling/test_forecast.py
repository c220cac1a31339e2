"""A forecast is what the service then does: its starts are those of a scheduler that goes on from the same state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest

from memwal_ops.supervisor.observe.status import status_of
from memwal_ops.supervisor.scheduling.forecast import Forecast, forecast
from memwal_ops.supervisor.scheduling.timers import Timers
from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.state.pauses import FLEET, Pause, Pauses
from memwal_ops.supervisor.workers.protocol import PollRequest, Result
from tests.support.fakes import START, Stage, vars_of

HOUR = timedelta(hours=1)
SEEDS = range(12)
JOBS = ("merge", "compact", "expire")
CLEARED = {
    "merge": ("generations", "bytes", "rows"),
    "compact": ("due_fragments", "urgent_fragments", "fragments"),
    "expire": ("versions",),
}


class Least(Random):
    """No jitter."""

    def random(self) -> float:
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        del b
        return a


def used(seconds: float) -> dict[str, Any]:
    requests = {"get": 10, "put": 0, "list": 0, "delete": 0}
    return {"store": "s3", "requests": requests, "bytes_read": 0, "bytes_written": 0, "cpu_seconds": seconds}


class World:
    """A service with tables of figures: runs take 20 seconds, fail if they failed before, and do all that is due."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = dice = Random(seed)
        names = "abcdef"[: dice.randint(2, 6)]
        jobs = []
        for job in ("merge", "compact", "expire"):
            window = dice.choice(["", "", f", windows: ['12:{dice.randint(10, 50)}-15:00']"])
            own = dice.choice(["", "", ", budget: {time: 60s, per: 1h}"])
            jobs.append(f"{job}: {{schedule: {dice.choice([3, 7, 11, 20, 90])}m{window}{own}}}")
        jobs += [f"{job}: {{enabled: false}}" for job in ("catchup", "snapshot", "gc", "verify")]
        jobs[0] = jobs[0].replace("{schedule", "{when: generations >= 8, schedule")
        limited = dice.choice(["", f"budget: {{cpu: {dice.choice([100, 300, 900])}s, per: 1h}}\n"])
        objective = ", objectives: {max_fragments: 5}"
        tables = ", ".join(f"{{uri: /{name}{dice.choice(['', objective])}}}" for name in names)
        backoff = "backoff: {failures: 2, first: 4m, longest: 20m}\n"
        text = f"{limited}{backoff}defaults: {{idle_poll: 2m, jobs: {{{', '.join(jobs)}}}}}\ntables: [{tables}]\n"
        self.path = folder / "history.sqlite"
        self.bad = {(name, job) for name in names for job in JOBS if dice.random() < 0.2}
        history = History.open(str(self.path))
        for name in names:
            for job in JOBS:
                for outcome in ("succeeded", "failed") if (name, job) in self.bad else ("succeeded",):
                    began = START - timedelta(minutes=dice.randint(*((70, 300) if outcome == "succeeded" else (1, 60))))
                    run = {"table": name, "uri": f"/{name}", "job": job, "supervisor": "us", "why": "schedule"}
                    number = history.begin(**run, plan={}, now=began)  # type: ignore[arg-type]  # its arguments
                    history.finish(number, began + timedelta(seconds=20), outcome, used=used(20.0))
        history.close()
        self.stage = Stage(folder, text, leases=False)
        self.stage.scheduler.random = Least()
        self.figures = {
            name: {
                "generations": float(dice.choice([0, 3, 9])), "bytes": 1.0, "rows": 5.0,
                "due_fragments": float(dice.choice([0, 4])), "urgent_fragments": 0.0,
                "fragments": float(dice.choice([3, 30])), "versions": float(dice.choice([1, 40])),
            }
            for name in names
        }  # fmt: skip
        self.versions = dict.fromkeys(names, 1)
        self.busy: list[tuple[datetime, Any, Any]] = []
        self.taken = 0
        self.starts: list[tuple[datetime, str, str]] = []
        self.timers = Timers(self.stage.scheduler, HOUR, Least())
        self.timers.start()
        self.timers.sync()

    def go(self, seconds: int) -> None:
        for _ in range(seconds):
            self.stage.clock.seconds += 1
            self.timers.fire()
            now = self.stage.clock.now()
            for when, worker, request in [*self.busy]:
                if when <= now:
                    self.busy.remove((when, worker, request))
                    self.end(worker, request)
            self.settle()

    def settle(self) -> None:
        scheduler = self.stage.scheduler
        while True:
            scheduler.step(0.0)
            given = self.stage.pools.given[self.taken :]
            if not given:
                return
            self.taken += len(given)
            for worker, request in given:
                name = request.uri[1:]
                if isinstance(request, PollRequest):
                    print_ = str(self.versions[name])
                    same = bool(request.fingerprint) and request.fingerprint == print_
                    given_print = None if request.fingerprint is None else print_
                    figures = {} if same else dict(self.figures[name])
                    answer = Result(
                        request.id, "succeeded", figures=figures, version=self.versions[name],
                        fingerprint=given_print, unchanged=same, applies=JOBS,
                    )  # fmt: skip
                    scheduler.on_message(worker, vars_of(answer))
                else:
                    now = self.stage.clock.now()
                    self.starts.append((now, name, request.job))
                    scheduler.on_message(worker, {"type": "began", "id": request.id})
                    self.busy.append((now + timedelta(seconds=20), worker, request))

    def end(self, worker: Any, request: Any) -> None:
        name, job = request.uri[1:], request.job
        if (name, job) in self.bad:
            answer = Result(request.id, "failed", exit_code=24, reason="x", message="x", used=used(20.0))
        else:
            due = [figure for figure in CLEARED[job] if self.figures[name][figure]]
            acts = request.apply and bool(due)
            if acts:
                self.figures[name] |= dict.fromkeys(due, 0.0)
                self.versions[name] += 1
            versions, achieved = ((self.versions[name],), {"fragments": 1.0}) if acts else ((), {})
            answer = Result(request.id, "succeeded", used=used(20.0), versions=versions, achieved=achieved)
        self.stage.scheduler.on_message(worker, vars_of(answer))

    def forecast(self) -> Forecast:
        """By what the service shows, as it is read from its address."""
        tables, pools = status_of(self.stage.scheduler, self.timers)
        documents: list[Mapping[str, Any]] = json.loads(json.dumps([*tables]))
        pauses = Pauses()
        pauses._known = dict(self.stage.scheduler.pauses._known)
        history = History.open_to_read(str(self.path))
        owed = {name: pool["credit"] for name, pool in pools.items()}
        settings, now = self.stage.settings, self.stage.clock.now()
        found = Stage.tables(settings)
        try:
            return forecast(settings, found, documents, pauses, history, now, HOUR, owed=owed)
        finally:
            history.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_forecast_of_an_hour_is_what_then_starts(tmp_path: Path, seed: int) -> None:
    """For random schedules, triggers, windows, budgets, failures and pauses, after the service ran for a while."""
    world = World(tmp_path, seed)
    world.go(world.dice.randint(400, 1500))
    now, pauses = world.stage.clock.now(), world.stage.scheduler.pauses
    for scope in [(), *((name,) for name in world.figures), *((name, "compact") for name in world.figures)]:
        if world.dice.random() < (0.05 if scope == FLEET else 0.15):
            until = world.dice.choice([None, now + timedelta(minutes=world.dice.randint(3, 40))])
            pauses.set(scope, Pause(until, "", "anna", now))
    world.stage.scheduler.touch()
    world.go(1)
    now = world.stage.clock.now()
    running = {(request.uri[1:], request.job) for _, _, request in world.busy}
    planned = world.forecast()
    world.starts.clear()
    world.go(3600)
    expected = [((at - now).total_seconds(), name, job) for at, name, job in world.starts]
    starts = [
        ((one.at - now).total_seconds(), one.table, one.job) for one in planned.starts if one.why != "it is running"
    ]
    assert {(one.table, one.job) for one in planned.starts if one.why == "it is running"} == running
    assert [(name, job) for _, name, job in sorted(starts)] == [(name, job) for _, name, job in sorted(expected)]
    for (planned_at, *_), (at, *_) in zip(sorted(starts), sorted(expected), strict=True):
        assert abs(planned_at - at) <= 2.0
