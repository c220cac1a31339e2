"""The objects of holds and of announced expiries, one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops.core import holds as module
from memwal_ops.core.holds import (
    EXPIRIES_FOLDER,
    HOLDS_FOLDER,
    Hold,
    announced_expiry,
    holds,
    holds_in_force,
    release_hold,
    take_hold,
)
from memwal_ops.errors import (
    InvalidUsageError,
    MemwalOpsError,
    StorageError,
    UnsupportedFeatureError,
    VersionGoneError,
)
from tests.unit.core.memory import MINUTE, START, MemoryStore

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A table with versions 3 and 4; of version 3 a file is missing."""
    monkeypatch.setattr(module, "store_time", lambda one: one.now)
    monkeypatch.setattr(module.getpass, "getuser", lambda: "user")
    monkeypatch.setattr(module.socket, "gethostname", lambda: "host")
    made = SimpleNamespace(store=MemoryStore(), location=SimpleNamespace(uri="memory://t"), versions={3, 4, 5})
    made.jobs = {"gc": SimpleNamespace(deletes=True)}
    made.has_revision = lambda version: version in made.versions
    made.format = SimpleNamespace(missing_of=lambda table, version: "data/1.lance" if version == 3 else None)
    return made


def path_of(number: int, folder: str = HOLDS_FOLDER, suffix: str = ".json") -> str:
    return f"{folder}/{number:020d}{suffix}"


def write(table: Any, number: int, folder: str = HOLDS_FOLDER, **changed: Any) -> str:
    """An object as others write it."""
    content = {"versions": [4], "ttl_seconds": 3600, "by": "others@host", "note": "", **changed}
    table.store.write(path_of(number, folder), json.dumps(content).encode())
    return path_of(number, folder)


def test_a_hold(table: Any) -> None:
    hold = take_hold(table, 4, 2 * HOUR, note="training")
    assert hold == Hold(1, (4,), START + MINUTE + 2 * HOUR, "user@host", "training", released=False)
    assert json.loads(table.store.data[path_of(1)]) == {
        "format": 1,
        "versions": [4],
        "ttl_seconds": 7200.0,
        "by": "user@host",
        "note": "training",
    }
    assert hold.to_json() == {
        "id": 1,
        "version": 4,
        "until": "2026-11-21T14:01:00+00:00",
        "by": "user@host",
        "note": "training",
        "released": False,
    }
    assert replace(hold, versions=()).to_json()["version"] is None
    assert take_hold(table, 5, HOUR).number == 2
    assert [one.versions for one in holds(table)] == [(4,), (5,)]
    assert [*table.store.data] == [path_of(1), path_of(2)]


def test_how_long_a_hold_is_in_force(table: Any) -> None:
    hold = take_hold(table, 4, HOUR)
    for when, standing in ((hold.until - MINUTE, (hold,)), (hold.until, ()), (hold.until + MINUTE, ())):
        assert holds_in_force(table.store, when) == standing


@pytest.mark.parametrize(("ttl", "given"), [(timedelta(), "0s"), (-HOUR, "-1h")])
def test_a_hold_of_no_time(table: Any, ttl: timedelta, given: str) -> None:
    with pytest.raises(InvalidUsageError, match=f"A hold must last longer than 0s, not {given}; give for example"):
        take_hold(table, 4, ttl)
    assert table.store.data == {}


def test_the_longest_hold(table: Any) -> None:
    with pytest.raises(InvalidUsageError, match="A hold lasts at most 3650 days; tag the version"):
        take_hold(table, 4, 3650 * DAY + timedelta(seconds=1))
    assert take_hold(table, 4, 3650 * DAY).until == START + MINUTE + 3650 * DAY
    assert take_hold(table, 4, timedelta(microseconds=1)).number == 2


def test_no_hold_on_a_version_that_is_not_there(table: Any) -> None:
    with pytest.raises(VersionGoneError, match=r"memory://t has no version 6\."):
        take_hold(table, 6, HOUR)
    with pytest.raises(VersionGoneError, match=r"Version 3 of memory://t is listed, but data/1\.lance is missing"):
        take_hold(table, 3, HOUR)
    assert table.store.data == {}


def test_no_hold_on_a_version_that_is_being_expired(table: Any) -> None:
    write(table, 7, EXPIRIES_FOLDER, versions=[2, 3, 4])
    with pytest.raises(VersionGoneError, match=r"Version 4 is being expired by others@host right now\."):
        take_hold(table, 4, HOUR)
    assert [hold.released for hold in holds(table)] == [True]
    assert table.store.puts == [path_of(1, suffix=".released")]
    assert not take_hold(table, 5, HOUR).released
    table.store.now += HOUR
    assert not take_hold(table, 4, HOUR).released, "the announcement of a dead process ends"


@pytest.mark.parametrize(
    ("changed", "error"), [({"format": 2}, UnsupportedFeatureError), ({"versions": "all"}, StorageError)]
)
def test_no_hold_is_left_where_an_expiry_cannot_be_read(
    table: Any, changed: dict[str, Any], error: type[MemwalOpsError]
) -> None:
    write(table, 7, EXPIRIES_FOLDER, **changed)
    with pytest.raises(error):
        take_hold(table, 4, 3650 * DAY)
    assert [hold.released for hold in holds(table)] == [True]


def test_a_version_that_goes_while_its_hold_is_written(table: Any) -> None:
    table.store.before_put = lambda: table.versions.discard(4)
    with pytest.raises(VersionGoneError, match="has no version 4"):
        take_hold(table, 4, HOUR)
    assert holds_in_force(table.store, table.store.now) == ()


def test_released(table: Any) -> None:
    first, second = take_hold(table, 4, HOUR), take_hold(table, 4, HOUR)
    for _ in range(2):
        assert release_hold(table, second.number) == replace(second, released=True)
    assert table.store.puts == [path_of(2, suffix=".released")]
    assert table.store.data[path_of(2, suffix=".released")] == b"{}"
    assert holds(table) == (first, replace(second, released=True))
    assert holds_in_force(table.store, table.store.now) == (first,)
    with pytest.raises(InvalidUsageError, match=r"There is no hold 3\.") as raised:
        release_hold(table, 3)
    assert raised.value.remedy == "memwal-ops hold URI --list shows all."


@pytest.mark.parametrize("error", [None, RuntimeError("killed")])
def test_an_announced_expiry(table: Any, error: Exception | None) -> None:
    try:
        with announced_expiry(table.store, {5, 3}):
            assert json.loads(table.store.data[path_of(1, EXPIRIES_FOLDER)]) == {
                "format": 1,
                "versions": [3, 5],
                "ttl_seconds": 86400.0,
                "by": "user@host",
                "note": "",
            }
            if error is not None:
                raise error
    except RuntimeError as raised:
        assert raised is error
    assert table.store.data == {}
    assert table.store.deleted == [path_of(1, EXPIRIES_FOLDER)]


def test_an_announcement_that_cannot_be_deleted_ends_by_itself(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Any) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(table.store, "delete_many", failing)
    with announced_expiry(table.store, {5}):
        pass
    assert len(table.store.data) == 1


@pytest.mark.parametrize(("others", "done"), [(99, True), (100, False)])
def test_numbers_that_others_write_first(table: Any, others: int, done: bool) -> None:
    write(table, 4)
    write(table, 2)
    numbers = iter(range(5, others + 5))
    table.store.before_put = lambda: write(table, number) if (number := next(numbers, None)) is not None else None
    if done:
        assert take_hold(table, 4, HOUR).number == others + 5
    else:
        text = f"Cannot write an entry to {HOLDS_FOLDER}: 100 consecutive conflicts"
        with pytest.raises(StorageError, match=text):
            take_hold(table, 4, HOUR)


def test_the_numbers_are_used_up(table: Any) -> None:
    write(table, 10**20 - 2)
    assert take_hold(table, 4, HOUR).number == 10**20 - 1
    with pytest.raises(StorageError, match=f"No number is left for another hold in {HOLDS_FOLDER}") as raised:
        take_hold(table, 4, HOUR)
    assert raised.value.remedy is not None
    assert raised.value.remedy.startswith(
        "Inspect the file with the highest number; if memwal-ops did not write it, delete it"
    )


@pytest.mark.parametrize(("age", "gone"), [(25 * HOUR, False), (25 * HOUR + timedelta(seconds=1), True)])
def test_what_ended_long_ago_is_forgotten(table: Any, age: timedelta, gone: bool) -> None:
    """A day after its end, with the mark of its release; the one that is just added stays."""
    write(table, 1)
    write(table, 2, ttl_seconds=7200)
    table.store.write(path_of(1, suffix=".released"), b"{}")
    table.store.now = table.store.times[path_of(1)] + age - MINUTE
    assert take_hold(table, 4, HOUR).number == 3
    assert table.store.deleted == ([path_of(1, suffix=".released"), path_of(1)] if gone else [])
    assert [hold.number for hold in holds(table)] == ([2, 3] if gone else [1, 2, 3])


def test_other_files_and_files_that_go_are_no_holds(table: Any) -> None:
    for name in ("note.txt", "1.json", f"{1:020d}.json.tmp", f"x{1:020d}.json"):
        table.store.write(f"{HOLDS_FOLDER}/{name}", b"?")
    gone, kept = write(table, 3), write(table, 5)

    def expired(path: str) -> None:
        if path == gone:
            table.store.data.pop(gone, None)

    table.store.before_get = expired
    assert [path_of(hold.number) for hold in holds(table)] == [kept]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.pop("versions"),
        lambda one: one.pop("ttl_seconds"),
        lambda one: one.pop("by"),
        lambda one: one.pop("note"),
        lambda one: one.update(versions=4),
        lambda one: one.update(versions={"4": 1}),
        lambda one: one.update(versions=[True]),
        lambda one: one.update(versions=[4, 0]),
        lambda one: one.update(versions=[2**64]),
        lambda one: one.update(versions=["4"]),
        lambda one: one.update(ttl_seconds="long"),
        lambda one: one.update(ttl_seconds=1e300),
    ],
)
def test_what_is_no_hold_may_hold_anything(table: Any, change: Callable[[dict[str, Any]], Any]) -> None:
    content = {"versions": [1, 2**64 - 1], "ttl_seconds": 3600, "by": "\ud800x", "note": 5}
    table.store.write(path_of(1), json.dumps(content).encode())
    [hold] = holds(table)
    assert (hold.versions, hold.by, hold.note) == ((1, 2**64 - 1), "?x", "5")
    change(content)
    table.store.write(path_of(1), json.dumps(content).encode())
    with pytest.raises(StorageError, match=rf"^{path_of(1)} is not a readable hold \(.+\)\.") as raised:
        holds_in_force(table.store, START)
    assert raised.value.remedy == "Inspect the file; delete it if it is not one of your holds."


@pytest.mark.parametrize("error", [KeyError("no such user"), OSError("no such user")])
def test_a_user_without_a_name(table: Any, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def getuser() -> str:
        raise error

    monkeypatch.setattr(module.getpass, "getuser", getuser)
    assert take_hold(table, 4, HOUR).by == "unknown@host"
