"""Reader holds: keep a revision of a table readable until a given time. For every format.

A hold is a numbered record (:mod:`memwal_ops.core.leases`), so that it works on every store. An expiry of
revisions writes an announcement in the same way and reads the holds only after that; taking a hold reads
the announcements only after the hold is written. So at least one of the two sees the other, without a lock.
"""

from __future__ import annotations

import getpass
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from memwal_ops import errors
from memwal_ops.core import leases
from memwal_ops.core.protocols import Table
from memwal_ops.storage.api import Store
from memwal_ops.storage.clock import store_time
from memwal_ops.text import duration_text

HOLDS_FOLDER = "_mem_wal_ops/holds"
EXPIRIES_FOLDER = "_mem_wal_ops/expiries"
_RELEASED = "released"
"""The suffix of the empty file beside a hold that was ended before its time."""
_MAX_VERSION = 2**64 - 1
_ATTEMPTS = 100
_MAX_TTL = timedelta(days=3650)
# How long an announcement counts if its process was killed, or was suspended and resumes: no clean-up takes longer
# between its listing and its deletions.
_ANNOUNCEMENT_TTL = timedelta(days=1)
# Ended entries stay for a while, so that a list can show them.
_ENDED_KEPT_FOR = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Hold:
    """A hold, or an announcement that revisions are about to be expired.

    Attributes:
        number: its name.
        versions: the revisions that it holds or announces.
        until: its end: aware, UTC, by the store's clock.
        released: whether it was ended before ``until``.
    """

    number: int
    versions: tuple[int, ...]
    until: datetime
    by: str
    note: str
    released: bool

    def in_force(self, now: datetime) -> bool:
        """Whether it is in force at ``now``."""
        return not self.released and now < self.until

    def to_json(self) -> dict[str, object]:
        """The hold as an entry of ``hold --json``."""
        return {
            "id": self.number,
            "version": self.versions[0] if self.versions else None,
            "until": self.until.isoformat(timespec="seconds"),
            "by": self.by,
            "note": self.note,
            "released": self.released,
        }


def take_hold(table: Table, version: int, ttl: timedelta, *, note: str = "") -> Hold:
    """Keep a revision, and every file that it needs, for ``ttl`` from now.

    Raises:
        InvalidUsageError: the time is not above zero, or longer than ten years; or no job of the table's format deletes
            anything, so that only other programs do, which know no holds.
        VersionGoneError: the revision does not exist, lacks files, or is being expired at this moment.
        StorageError: the store failed; there is no hold, or one that ends by itself.
    """
    if ttl <= timedelta(0):
        raise errors.InvalidUsageError(
            f"A hold must last longer than 0s, not {duration_text(ttl)}; give for example --ttl 2h."
        )
    if ttl > _MAX_TTL:
        raise errors.InvalidUsageError(
            f"A hold lasts at most {_MAX_TTL.days} days; tag the version to keep it forever."
        )
    if not any(spec.deletes for spec in table.jobs.values()):
        raise errors.InvalidUsageError(
            f"A hold on {table.location.address} keeps nothing: no job of the format {table.format.name} deletes.",
            remedy="Keep the version by the means of the program that expires versions, such as a tag.",
        )
    _check_exists(table, version)
    missing = table.format.missing_of(table, version)
    if missing is not None:
        raise errors.VersionGoneError(
            f"Version {version} of {table.location.uri} is listed, but {missing} is missing or damaged: it cannot be "
            "read."
        )
    hold = _add(table.store, HOLDS_FOLDER, (version,), ttl, note)
    try:
        now = store_time(table.store)
        expiries = _entries(table.store, EXPIRIES_FOLDER)
        expiry = next((entry for entry in expiries if version in entry.versions and entry.in_force(now)), None)
        if expiry is not None:
            raise errors.VersionGoneError(f"Version {version} is being expired by {expiry.by} right now.")
        _check_exists(table, version)
    except errors.MemwalOpsError:
        with suppress(errors.MemwalOpsError):  # gone, and the table with it; or the store fails, and it ends by itself
            release_hold(table, hold.number)
        raise
    return hold


def release_hold(table: Table, number: int) -> Hold:
    """End a hold before its time. Idempotent. Raises ``InvalidUsageError``: there is no such hold."""
    hold = next((hold for hold in holds(table) if hold.number == number), None)
    if hold is None:
        raise errors.InvalidUsageError(f"There is no hold {number}.", remedy="memwal-ops hold URI --list shows all.")
    if not hold.released:
        table.store.put(_records(table.store, HOLDS_FOLDER).path(number, _RELEASED), b"{}")
    return replace(hold, released=True)


def holds(table: Table) -> tuple[Hold, ...]:
    """All holds, including those that ended within the last day, ascending by number."""
    return _entries(table.store, HOLDS_FOLDER)


def holds_in_force(store: Store, now: datetime) -> tuple[Hold, ...]:
    """The holds in force at ``now``; one listing, and one request for each entry."""
    return tuple(hold for hold in _entries(store, HOLDS_FOLDER) if hold.in_force(now))


@contextmanager
def announced_expiry(store: Store, versions: Collection[int]) -> Iterator[None]:
    """Announce the expiry of these versions while the block runs. Holds are to be read inside the block."""
    announcement = _add(store, EXPIRIES_FOLDER, tuple(sorted(versions)), _ANNOUNCEMENT_TTL, "")
    try:
        yield
    finally:
        with suppress(errors.StorageError):  # it ends by itself
            _records(store, EXPIRIES_FOLDER).delete_records([announcement.number])


def _check_exists(table: Table, version: int) -> None:
    if not table.has_revision(version):
        raise errors.VersionGoneError(f"{table.location.uri} has no version {version}.")


def _add(store: Store, folder: str, versions: tuple[int, ...], ttl: timedelta, note: str) -> Hold:
    document = {"versions": list(versions), "ttl_seconds": ttl.total_seconds(), "by": user_at_host(), "note": note}
    records = _records(store, folder)
    entries = _entries(store, folder)
    number = max((entry.number for entry in entries), default=0)
    for _ in range(_ATTEMPTS):
        number += 1
        if records.put_if_absent(number, document):
            _sweep(store, folder, entries)
            for entry in _entries(store, folder):
                if entry.number == number:
                    return entry
            raise errors.TableReplacedError(
                f"{records.path(number)} was deleted right after it was written: the table was removed or replaced.",
                remedy="Open the table again, and take a new hold.",
            )
    raise errors.StorageError(
        f"Cannot write an entry to {folder}: {_ATTEMPTS} consecutive conflicts with other processes.",
        remedy="Run the command again.",
    )


def _sweep(store: Store, folder: str, entries: Collection[Hold]) -> None:
    """Delete entries that ended more than a day ago. The newest number always stays, so that no number is reused."""
    now = store_time(store)
    _records(store, folder).delete_records(
        (entry.number for entry in entries if now > entry.until + _ENDED_KEPT_FOR), _RELEASED
    )


def _entries(store: Store, folder: str) -> tuple[Hold, ...]:
    records = _records(store, folder)
    listed = records.listed()
    entries = []
    for number, written in listed["json"].items():
        try:
            document = records.read(number)
            entries.append(
                Hold(
                    number,
                    _versions(document["versions"]),
                    written + timedelta(seconds=float(document["ttl_seconds"])),
                    leases.printable(str(document["by"])),
                    leases.printable(str(document["note"])),
                    number in listed.get(_RELEASED, ()),
                )
            )
        except errors.ObjectNotFoundError:
            continue
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            # It may hold a revision: a deletion must not continue as if there were no hold.
            remedy = "Inspect the file; delete it if it is not one of your holds."
            raise records.unreadable(number, error, remedy) from error
    return tuple(entries)


def _versions(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(version) is int and 0 < version <= _MAX_VERSION for version in value
    ):
        raise ValueError("its versions are not a list of version numbers")
    return tuple(value)


def _records(store: Store, folder: str) -> leases.NumberedRecords:
    return leases.NumberedRecords(store, folder, "hold")


def user_at_host() -> str:
    """The user of this process and its host, for display; a user without a name is ``unknown``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
