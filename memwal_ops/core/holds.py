"""Reader holds: "somebody reads version N until then", for as long as they said and no longer.

A hold is a numbered object, written by put-if-absent, so that it works on every store. Who expires
versions announces it the same way and only then looks for holds; who takes a hold looks for
announcements only after the hold stands. So of the two at least one sees the other, without a lock.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.versions import version_path
from memwal_ops.errors import InvalidUsageError, ObjectNotFoundError, StorageError, VersionGoneError
from memwal_ops.format.names import U64_MAX
from memwal_ops.storage.clock import store_time

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from datetime import datetime

    from memwal_ops.core.table import Table
    from memwal_ops.storage.api import Store

HOLDS_FOLDER = "_mem_wal_ops/holds"
EXPIRIES_FOLDER = "_mem_wal_ops/expiries"
_DIGITS = 20
_NAME = re.compile(rf"[0-9]{{{_DIGITS}}}\.json")
_ATTEMPTS = 100
_LONGEST = timedelta(days=3650)
# How long an announcement stands where whoever made it died, or was stopped in the middle and goes on: no
# clean-up lives longer between its look and its deletes.
_ANNOUNCED = timedelta(days=1)
# Ended entries stay for a while, so that a list can show them.
_REMEMBERED = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold, or an announcement that versions are about to go.

    Attributes:
        number: its name.
        versions: the base versions that it is about.
        until: aware, UTC, by the store's clock.
        by: user and host.
        note: why, in the holder's words.
        released: whether it was ended before its time.
    """

    number: int
    versions: tuple[int, ...]
    until: datetime
    by: str
    note: str
    released: bool

    def stands(self, now: datetime) -> bool:
        """Whether it still counts."""
        return not self.released and now < self.until

    def to_json(self) -> dict[str, object]:
        """The entry of ``hold --json``."""
        return {
            "id": self.number,
            "version": self.versions[0] if self.versions else None,
            "until": self.until.isoformat(timespec="seconds"),
            "by": self.by,
            "note": self.note,
            "released": self.released,
        }


def take_hold(table: Table, version: int, ttl: timedelta, *, note: str = "") -> Hold:
    """Keep a base version, and all generations that it needs, for ``ttl`` from now.

    Raises:
        InvalidUsageError: the time is not above zero, or longer than ten years.
        VersionGoneError: the version does not exist, or is being expired at this moment.
        StorageError: the store failed; no hold stands, or one that ends by itself.
    """
    if ttl <= timedelta(0):
        raise InvalidUsageError(f"A hold must last longer than {ttl}; give for example --ttl 2h.")
    if ttl > _LONGEST:
        raise InvalidUsageError(f"A hold lasts at most {_LONGEST.days} days; tag the version to keep it for ever.")
    _check_stands(table, version)
    hold = _add(table.store, HOLDS_FOLDER, (version,), ttl, note)
    now = store_time(table.store)
    expiries = _entries(table.store, EXPIRIES_FOLDER)
    threat = next((one for one in expiries if version in one.versions and one.stands(now)), None)
    try:
        if threat is not None:
            raise VersionGoneError(f"Version {version} is being expired by {threat.by} right now.")
        _check_stands(table, version)
    except VersionGoneError:
        release_hold(table, hold.number)
        raise
    return hold


def release_hold(table: Table, number: int) -> Hold:
    """End a hold before its time; ending an ended one does nothing.

    Raises:
        InvalidUsageError: there is no such hold.
    """
    found = next((one for one in holds(table) if one.number == number), None)
    if found is None:
        raise InvalidUsageError(f"There is no hold {number}.", remedy="memwal-ops hold URI --list shows all.")
    if not found.released:
        _release(table.store, HOLDS_FOLDER, number)
    return replace(found, released=True)


def holds(table: Table) -> tuple[Hold, ...]:
    """All holds, ended ones of the last day included, ascending by number."""
    return _entries(table.store, HOLDS_FOLDER)


def standing_holds(store: Store, now: datetime) -> tuple[Hold, ...]:
    """The holds that count at ``now``; one listing, and one request for each entry."""
    return tuple(one for one in _entries(store, HOLDS_FOLDER) if one.stands(now))


@contextmanager
def announced_expiry(store: Store, versions: Collection[int]) -> Iterator[None]:
    """Say that these versions are about to go, while the block runs. Look for holds inside of it."""
    announcement = _add(store, EXPIRIES_FOLDER, tuple(sorted(versions)), _ANNOUNCED, "")
    try:
        yield
    finally:
        with suppress(StorageError):  # it ends by itself
            store.delete_many([_path(EXPIRIES_FOLDER, announcement.number)])


def _check_stands(table: Table, version: int) -> None:
    if table.store.head(version_path(version, table.naming)) is None:
        raise VersionGoneError(f"{table.location.uri} has no version {version}.")


def _add(store: Store, folder: str, versions: tuple[int, ...], ttl: timedelta, note: str) -> Hold:
    document = {
        "versions": list(versions),
        "ttl_seconds": ttl.total_seconds(),
        "by": f"{_user()}@{socket.gethostname()}",
        "note": note,
    }
    entries = _entries(store, folder)
    number = max((one.number for one in entries), default=0)
    for _ in range(_ATTEMPTS):
        number += 1
        if number >= 10**_DIGITS:
            raise StorageError(f"The numbers in {folder} are used up.", remedy="Delete the file of the highest number.")
        if store.put_if_absent(_path(folder, number), json.dumps(document).encode()):
            _sweep(store, folder, entries)
            return next(one for one in _entries(store, folder) if one.number == number)
    raise StorageError(f"Lost {_ATTEMPTS} races in a row for the next number in {folder}.")


def _sweep(store: Store, folder: str, entries: Collection[Hold]) -> None:
    """Forget what ended long ago. Best effort; the newest number always stays, so that none is given twice."""
    now = store_time(store)
    ended = [one.number for one in entries if now > one.until + _REMEMBERED]
    if ended:
        store.delete_many([_path(folder, number, released=released) for number in ended for released in (True, False)])


def _entries(store: Store, folder: str) -> tuple[Hold, ...]:
    listed = {meta.path: meta for meta in store.list(folder)}
    found = []
    for path, meta in sorted(listed.items()):
        name = path.rsplit("/", 1)[-1]
        if _NAME.fullmatch(name) is None:
            continue
        number = int(name[:_DIGITS])
        try:
            document = json.loads(store.get(path))
            found.append(
                Hold(
                    number,
                    _versions(document["versions"]),
                    meta.last_modified + timedelta(seconds=float(document["ttl_seconds"])),
                    _text(document["by"]),
                    _text(document["note"]),
                    _path(folder, number, released=True) in listed,
                )
            )
        except ObjectNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            # Somebody's promise that cannot be read: whoever deletes must not go on as if it were none.
            raise StorageError(
                f"{path} is no readable hold ({error}).", remedy="Look at it; delete it if it is none of yours."
            ) from error
    return tuple(found)


def _versions(told: object) -> tuple[int, ...]:
    if not isinstance(told, list) or not all(type(version) is int and 0 < version <= U64_MAX for version in told):
        raise ValueError("its versions are no list of version numbers")
    return tuple(told)


def _text(told: object) -> str:
    """What can be printed of it: JSON can spell characters that there are not."""
    return str(told).encode(errors="replace").decode()


def _release(store: Store, folder: str, number: int) -> None:
    store.put(_path(folder, number, released=True), b"{}")


def _path(folder: str, number: int, *, released: bool = False) -> str:
    return f"{folder}/{number:0{_DIGITS}d}{'.released' if released else '.json'}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
