"""Schedules, windows and backoff, by a clock that stands still."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from memwal_ops.supervisor.config.model import BackoffConfig
from memwal_ops.supervisor.scheduling import schedules
from memwal_ops.supervisor.scheduling.due import wait_after
from memwal_ops.supervisor.scheduling.schedules import Schedule, cron_trigger, in_window, parse_window

ZONE = ZoneInfo("UTC")
BERLIN = ZoneInfo("Europe/Berlin")
NONE = timedelta(0)
SATURDAY = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def every(**span: float) -> Schedule:
    return Schedule(timedelta(**span), None, NONE, ZONE)


def test_an_interval_counts_from_the_last_start() -> None:
    schedule = every(hours=1)
    assert schedule.is_due(SATURDAY, None, SATURDAY), "never ran"
    assert not schedule.is_due(SATURDAY, SATURDAY - timedelta(minutes=50), SATURDAY)
    assert schedule.is_due(SATURDAY, SATURDAY - timedelta(minutes=60), SATURDAY)
    assert schedule.is_due(SATURDAY, SATURDAY - timedelta(seconds=3541), SATURDAY), "cron asks a little early"
    assert schedule.due_after(SATURDAY, SATURDAY) == SATURDAY + timedelta(hours=1)


def test_a_cron_line_does_not_run_because_it_never_did() -> None:
    schedule = Schedule(None, "0 3 * * *", NONE, ZONE)
    assert not schedule.is_due(SATURDAY, None, SATURDAY)
    night = SATURDAY.replace(hour=3) + timedelta(days=1)
    assert not schedule.is_due(night - timedelta(seconds=1), None, SATURDAY)
    assert schedule.is_due(night, None, SATURDAY)
    assert not schedule.is_due(night + timedelta(hours=1), night, SATURDAY)
    assert schedule.is_due(night + timedelta(days=2), night, SATURDAY), "missed while nothing ran"
    assert schedule.period(SATURDAY) == timedelta(days=1)


@pytest.mark.parametrize(
    ("line", "zone", "fires"),
    [
        ("0 3 * * 0", ZONE, datetime(2026, 11, 22, 3, tzinfo=UTC)),  # cron's Sunday
        ("0 3 * * 7", ZONE, datetime(2026, 11, 22, 3, tzinfo=UTC)),
        ("0 3 * * 1-5", ZONE, datetime(2026, 11, 23, 3, tzinfo=UTC)),
        ("0 3 * * Mon-Fri", ZONE, datetime(2026, 11, 23, 3, tzinfo=UTC)),
        ("0 3 * * 6-7", ZONE, datetime(2026, 11, 22, 3, tzinfo=UTC)),
        ("0 3 * * fri-mon", ZONE, datetime(2026, 11, 22, 3, tzinfo=UTC)),
        ("0 3 * * */2", ZONE, datetime(2026, 11, 22, 3, tzinfo=UTC)),
        ("*/15 * * * *", ZONE, datetime(2026, 11, 21, 12, 15, tzinfo=UTC)),
        ("30 13 * * *", BERLIN, datetime(2026, 11, 21, 12, 30, tzinfo=UTC)),
        ("0 0 1 Jan *", ZONE, datetime(2027, 1, 1, tzinfo=UTC)),
    ],
)
def test_cron_means_what_cron_means(line: str, zone: ZoneInfo, fires: datetime) -> None:
    now = SATURDAY + timedelta(seconds=1)
    assert cron_trigger(line, zone).get_next_fire_time(None, now) == fires


@pytest.mark.parametrize(
    ("line", "hours"),
    [
        ("30 2 * * *", ["00:30", "01:30"]),  # by UTC: of the 25th, and of the 26th
        ("30 1-3 * * *", ["23:30", "00:30", "02:30"]),
        ("30 * * * *", ["22:30", "23:30", "00:30", "01:30", "02:30"]),
        ("30 */2 * * *", ["22:30", "00:30", "01:30", "03:30"]),
    ],
)
def test_where_clocks_go_back_a_fixed_hour_comes_once(line: str, hours: list[str]) -> None:
    fires, now = [], datetime(2026, 10, 24, 22, 0, tzinfo=UTC)
    trigger = cron_trigger(line, BERLIN)
    for _ in hours:
        at = trigger.get_next_fire_time(None, now)
        assert at is not None
        now = at.astimezone(UTC) + timedelta(seconds=121)
        fires.append(f"{at.astimezone(UTC):%H:%M}")
    assert [hour[:2] for hour in fires] == [hour[:2] for hour in hours]


def test_where_clocks_go_forward_it_runs_an_hour_later() -> None:
    fires = cron_trigger("30 2 * * *", BERLIN).get_next_fire_time(None, datetime(2027, 3, 27, 20, tzinfo=UTC))
    assert fires == datetime(2027, 3, 28, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize("line", ["", "* * * *", "61 * * * *", "* * * * 8", "* * * * x", "*/0 * * * *", "0 3 1 * 1"])
def test_no_cron_line(line: str) -> None:
    with pytest.raises(ValueError, match="cron"):
        cron_trigger(line, ZONE)


@pytest.mark.parametrize(
    ("text", "when", "opened"),
    [
        ("22:00-06:00", "2026-11-21 23:00", True),
        ("22:00-06:00", "2026-11-21 05:59", True),
        ("22:00-06:00", "2026-11-21 06:00", False),
        ("09:00-17:00", "2026-11-21 12:00", True),
        ("Mon-Fri 09:00-17:00", "2026-11-21 12:00", False),
        ("Sat,Sun 00:00-24:00", "2026-11-22 23:59", True),
        ("Fri 22:00-06:00", "2026-11-21 05:00", True),  # it began on Friday
        ("Sat 22:00-06:00", "2026-11-21 05:00", False),
        ("Sun-Mon 00:00-24:00", "2026-11-23 12:00", True),
    ],
)
def test_windows(text: str, when: str, opened: bool) -> None:
    moment = datetime.fromisoformat(f"{when}+00:00")
    assert in_window([parse_window(text)], moment, ZONE) is opened
    assert in_window([], moment, ZONE)


def test_windows_are_local() -> None:
    window = [parse_window("22:00-23:00")]
    assert in_window(window, datetime(2026, 7, 1, 20, 30, tzinfo=UTC), BERLIN)
    assert in_window(window, datetime(2026, 12, 1, 21, 30, tzinfo=UTC), BERLIN)


@pytest.mark.parametrize(
    "text", ["", "22-06", "25:00-26:00", "10:00-10:00", "Mo 10:00-12:00", "Mon 10:61-12:00", "24:00-03:00"]
)
def test_no_window(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a (window|time|day)|empty window"):
        parse_window(text)


def test_backoff_doubles_from_the_third_failure_on() -> None:
    config = BackoffConfig()
    random_ = random.Random(1)
    waits = [wait_after(failures, config, random_) for failures in range(1, 12)]
    assert waits[:2] == [timedelta(minutes=1), timedelta(minutes=2)]
    bases = [timedelta(minutes=10) * 2**n for n in range(6)] + [timedelta(hours=6)] * 3
    for wait, base in zip(waits[2:], bases, strict=True):
        assert base <= wait <= base * 1.2
    assert len({wait / base for wait, base in zip(waits[2:], bases, strict=True)}) == 9, "jitter"
    assert wait_after(10**6, config, random_) <= timedelta(hours=6) * 1.2


def test_one_module_knows_apscheduler() -> None:
    root = Path(schedules.__file__).parents[2]
    users = {str(path.relative_to(root)) for path in root.rglob("*.py") if "apscheduler import" in path.read_text()
             or "from apscheduler" in path.read_text()}  # fmt: skip
    assert users == {"supervisor/scheduling/schedules.py"}
