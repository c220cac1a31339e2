"""What the history keeps of figures over time: it survives a restart, and stays small."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from memwal_ops.supervisor.state.history import History
from memwal_ops.supervisor.state.samples import Sampler

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.fakes import Stage

NOW = datetime(2026, 11, 26, 8, 0, tzinfo=UTC)


def test_a_table_is_sampled_when_it_changes(stage: Stage) -> None:
    sampler, states = Sampler(stage.clock.monotonic), stage.scheduler.tables.values()
    assert sampler.take(states) == []  # nothing is polled yet
    stage.see("a", generations=3, oldest_age=5.0)
    (first,) = sampler.take(states)
    assert (first[0], first[2]) == ("a", {"backlog": 3.0, "age": 5.0})
    stage.turn(30)
    stage.see("a", generations=4, oldest_age=35.0)
    assert sampler.take(states) == []  # too soon
    stage.turn(31)
    assert [one[2]["backlog"] for one in sampler.take(states)] == [4.0]
    stage.turn(3600)
    stage.see("a", generations=4, oldest_age=3700.0)
    assert sampler.take(states) == []  # it only aged
    stage.see("a", generations=9, oldest_age=3700.0)
    samples = sampler.take(states)
    # The old value once more: else the chart would show a slow rise.
    assert [one[2]["backlog"] for one in samples] == [4.0, 9.0]
    assert samples[1][1] - samples[0][1] == 60
    stage.turn(7 * 3600)
    assert len(sampler.take(states)) == 1


def test_samples_survive_and_are_thinned(tmp_path: Path) -> None:
    path = str(tmp_path / "history.sqlite")
    history = History.open(path)
    minutes = 3 * 24 * 60
    begin = NOW - timedelta(minutes=minutes)
    history.add_samples(
        [
            (name, int((begin + timedelta(minutes=minute)).timestamp()), {"backlog": float(minute)})
            for minute in range(minutes)
            for name in ("a", "half\udcff")
        ]
    )
    history.add_samples([])
    assert len(history.samples("a", begin)) == minutes
    history.close()
    history = History.open(path)
    for hours in range(24, -1, -1):
        history.thin_samples(NOW - timedelta(hours=hours), timedelta(days=30))
    kept = history.samples("a", begin)
    day_ago = int((NOW - timedelta(days=1)).timestamp())
    assert sum(at > day_ago for at, _ in kept) == 24 * 60 - 1
    old = [at for at, _ in kept if at < day_ago]
    assert len(old) == 48
    assert len({at // 3600 for at in old}) == len(old)
    assert [at for at, _ in kept] == sorted(at for at, _ in kept)
    history.thin_samples(NOW, timedelta(hours=1))
    assert all(at >= (NOW - timedelta(hours=1)).timestamp() for at, _ in history.samples("a", begin))
    history.close()


def test_what_expire_leaves_for_later_is_read_once(tmp_path: Path) -> None:
    history = History.open(str(tmp_path / "history.sqlite"))
    later = {"bytes": 5, "by": "2026-12-01T00:00:00+00:00"}

    def expire(report: object, outcome: str = "succeeded", job: str = "expire") -> int:
        number = history.begin(table="a", uri="/a", job=job, supervisor="s", why="schedule", plan={}, now=NOW)
        history.finish(number, NOW, outcome, report=report)
        return number

    first = expire({"later": later})
    expire({"later": later}, "failed")
    expire({"later": later}, job="gc")
    assert history.deletable_later(0) == [(first, "a", later)]
    assert history.deletable_later(first) == []
    last = expire({"later": None})
    expire(None)
    assert history.deletable_later(first)[0] == (last, "a", {})
    assert (history.run(first) or {})["report"] == {"later": later}
    assert history.run(99) is None
    history.close()
