"""Reader holds: they end by themselves, and of a hold and an expiry at least one sees the other."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import open_table
from memwal_ops.core.holds import (
    EXPIRIES_FOLDER,
    HOLDS_FOLDER,
    announced_expiry,
    holds,
    holds_in_force,
    release_hold,
    take_hold,
)
from memwal_ops.errors import InvalidUsageError, StorageError, TableReplacedError, VersionGoneError
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.jobs import expire
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.retention.live_versions import LiveVersions
from tests.support.stores import beside
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table

HOUR = timedelta(hours=1)
NOW = expire.ExpireOptions(timedelta(0), allow_unsafe=True)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    uri, options = str(tmp_path / "t.lance"), None
    if request.param == "s3":
        bucket, options = request.getfixturevalue("bucket")
        uri = f"{bucket}/t.lance"
    Workload(1, regions=1, base_rows=10).create(uri, options)
    return open_table(uri, options)


@pytest.fixture
def local(tmp_path: Path) -> Table:
    Workload(1, regions=1, base_rows=10).create(str(tmp_path / "t.lance"))
    return open_table(tmp_path / "t.lance")


def standing(table: Table, when: datetime | None = None) -> list[int]:
    return [hold.number for hold in holds_in_force(table.store, when or datetime.now(UTC))]


def age(table: Table, seconds: float, folder: str = HOLDS_FOLDER) -> None:
    at = time.time() - seconds
    for path in Path(table.location.uri, folder).iterdir():
        os.utime(path, (at, at))


def test_a_hold_is_in_force_until_it_ends(table: Table) -> None:
    before = datetime.now(UTC)
    hold = take_hold(table, 2, HOUR, note="a long report")
    assert (hold.number, hold.versions, hold.note, hold.released) == (1, (2,), "a long report", False)
    assert abs(hold.until - before - HOUR) < timedelta(minutes=1)
    assert "@" in hold.by
    assert holds(table) == (hold,)
    assert standing(table, hold.until - timedelta(seconds=1)) == [1]
    assert standing(table, hold.until) == []
    retention = LiveVersions()
    retention.refresh(table, datetime.now(UTC))
    assert retention.protected()[2].startswith("hold 1 of ")
    retention.refresh(table, hold.until)
    assert 2 not in retention.protected()


def test_release(table: Table) -> None:
    first, second = (take_hold(table, 2, HOUR) for _ in range(2))
    assert (first.number, second.number) == (1, 2)
    done = release_hold(table, 1)
    assert (done.number, done.released) == (1, True)
    assert release_hold(table, 1) == done
    assert standing(table) == [2]
    assert [one.released for one in holds(table)] == [True, False]
    with pytest.raises(InvalidUsageError, match="no hold 3"):
        release_hold(table, 3)


@pytest.mark.parametrize("ttl", [timedelta(0), -HOUR])
def test_a_hold_of_no_time(local: Table, ttl: timedelta) -> None:
    with pytest.raises(InvalidUsageError):
        take_hold(local, 2, ttl)
    assert holds(local) == ()


def test_a_hold_longer_than_the_calendar_is_harmless(local: Table) -> None:
    """Refused, or taken for a representable time; a later gc must be able to read it."""
    try:
        take_hold(local, 2, timedelta(days=99_999_999))
    except InvalidUsageError:
        assert holds(local) == ()
    else:
        assert standing(local) == [1]
    assert gc.plan(local, gc.GcOptions()).regions == 0


def test_no_hold_on_what_is_gone(table: Table) -> None:
    with pytest.raises(VersionGoneError) as raised:
        take_hold(table, 99, HOUR)
    assert raised.value.exit_code == 26
    assert holds(table) == ()


def test_a_version_that_is_expired_while_its_hold_is_written(local: Table) -> None:
    expire_it = beside("put_if_absent", "", lambda: local.store.delete_many([version_path(2, local.naming)]))
    with pytest.raises(VersionGoneError):
        take_hold(replace(local, store=expire_it(local.store)), 2, HOUR)
    assert standing(local) == []


def test_a_hold_while_the_version_is_being_expired(table: Table) -> None:
    """The expiry was first: a hold on the version is refused, and none is left afterwards."""
    with announced_expiry(table.store, [1, 2]):
        with pytest.raises(VersionGoneError, match="being expired"):
            take_hold(table, 2, HOUR)
        assert take_hold(table, 3, HOUR).versions == (3,)
        assert [one.versions for one in holds_in_force(table.store, datetime.now(UTC))] == [(3,)]
    assert take_hold(table, 2, HOUR).versions == (2,)
    assert [*table.store.list(EXPIRIES_FOLDER)] == []


def test_an_expiry_that_announces_after_the_hold_sees_it(local: Table) -> None:
    """The hold lands right before the announcement, after the expiry had chosen its versions."""
    taken: list[Any] = []
    hold = beside("put_if_absent", EXPIRIES_FOLDER, lambda: taken.append(take_hold(local, 2, HOUR).versions))
    report = expire.apply(replace(local, store=hold(local.store)), NOW)
    assert taken == [(2,)]
    assert 2 not in report.versions
    assert {one.version: one.because for one in report.kept}[2].startswith("hold 1 of ")
    local.dataset.checkout_version(2).to_table()
    with pytest.raises((OSError, ValueError)):
        local.dataset.checkout_version(1)


def test_an_announcement_of_a_dead_process_ends_by_itself(local: Table) -> None:
    with pytest.raises(KeyboardInterrupt), announced_expiry(local.store, [2]):
        raise KeyboardInterrupt
    assert take_hold(local, 2, HOUR).versions == (2,)
    context = announced_expiry(local.store, [2])
    context.__enter__()
    with pytest.raises(VersionGoneError):
        take_hold(local, 2, HOUR)
    age(local, 24 * 3600 + 1, EXPIRIES_FOLDER)
    assert take_hold(local, 2, HOUR).versions == (2,)


def test_ended_holds_are_forgotten_and_no_number_is_given_twice(local: Table) -> None:
    for _ in range(3):
        take_hold(local, 2, HOUR)
    release_hold(local, 2)
    age(local, 3 * 3600)
    assert (standing(local), len(holds(local))) == ([], 3)
    age(local, 26 * 3600)
    assert take_hold(local, 2, HOUR).number == 4
    assert [one.number for one in holds(local)] == [4]
    age(local, 26 * 3600)
    assert take_hold(local, 2, HOUR).number == 5


def test_many_at_once(local: Table) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: take_hold(local, 2, HOUR), range(16)))
    assert {one.number for one in taken} == set(standing(local))
    assert len({one.number for one in taken}) == 16


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"versions": ["x"], "ttl_seconds": 1}'])
def test_a_hold_that_cannot_be_read_stops_deletions(local: Table, data: bytes) -> None:
    path = f"{HOLDS_FOLDER}/{7:020d}.json"
    local.store.put(path, data)
    for act in (
        lambda: gc.apply(local, gc.GcOptions()),
        lambda: expire.apply(local, NOW),
        lambda: holds_in_force(local.store, datetime.now(UTC)),
    ):
        with pytest.raises(StorageError, match="not a readable hold"):
            act()
    local.store.delete_many([path])
    assert standing(local) == []


def test_other_files_in_the_folder_are_no_holds(local: Table) -> None:
    for name in ("readme.json", "1.json", f"{1:020d}.json.tmp", f"{1:021d}.json"):
        local.store.put(f"{HOLDS_FOLDER}/{name}", b"x")
    assert standing(local) == []
    assert take_hold(local, 2, HOUR).number == 1


@pytest.mark.parametrize(("verb", "part"), [("head", "clock"), ("list", "holds"), ("list", "expiries")])
def test_a_table_that_is_removed_beside_a_hold_or_an_expiry(local: Table, verb: str, part: str) -> None:
    """Told as what it is."""
    gone = beside(verb, part, lambda: shutil.rmtree(local.location.uri))
    table = replace(local, store=gone(local.store))
    with pytest.raises((TableReplacedError, VersionGoneError)):
        take_hold(table, table.version, HOUR)
