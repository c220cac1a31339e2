"""Leases of a job on a table, so that two supervisors do not do the same work twice.

A lease is a sequence of numbered records (:class:`NumberedRecords`), so that it works on every store;
only the newest one counts, and it is never deleted. Taking, renewing, releasing and breaking each add a number.

* The **token** of a lease is the number under which it was taken: it only rises, and no two holders ever
  have the same one.
* **Ages are measured by the store's clock**: a lease ends ``ttl`` after its newest object was written. The local
  clock of a holder is never used.
* **Older numbers are pruned.** This is safe because a process reads back after each write whether its number is the
  newest, and does not have the lease if it is not. A stalled holder may find its next number free again, because it
  was written by others and pruned; but a number is pruned only while a higher one exists, and the highest is never
  pruned. So a process that writes into such a gap sees a higher number.

Correctness does not depend on leases. Two concurrent holders cost duplicate work, and nothing else: what is published
is decided by one put-if-absent of the next version (:mod:`memwal_ops.formats.lance.commit.commit`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from memwal_ops import errors
from memwal_ops.storage import api
from memwal_ops.storage.clock import store_clock
from memwal_ops.storage.records import decode_record, encode_record

_DIGITS = 20
_NAME = re.compile(rf"([0-9]{{{_DIGITS}}})\.([a-z]+)")
_RECORD = "json"


@dataclass(frozen=True, slots=True)
class NumberedRecords:
    """Numbered records of one folder.

    Put-if-absent decides who writes a number, on every store. A number is never written twice as long as the highest
    one is never deleted: a writer that fills a gap below it sees that its number is not the highest.

    ``called``: what a record is, for messages: ``hold``.
    """

    store: api.Store
    folder: str
    called: str

    def written(self, files: Iterable[api.ObjectMeta] | None = None) -> dict[int, datetime]:
        """When each record was written, by the store's clock, ascending by number; see :meth:`listed`."""
        return self.listed(files)[_RECORD]

    def listed(self, files: Iterable[api.ObjectMeta] | None = None) -> dict[str, dict[int, datetime]]:
        """As :meth:`written`, for the files of each suffix: ``json`` is always a key.

        ``files``: those of the folder, as just listed; None: they are listed now.
        """
        moments: dict[str, dict[int, datetime]] = {_RECORD: {}}
        for meta in sorted(self.store.list(self.folder) if files is None else files, key=lambda meta: meta.path):
            name = _NAME.fullmatch(meta.path.removeprefix(f"{self.folder}/"))
            if name is not None:
                moments.setdefault(name[2], {})[int(name[1])] = meta.last_modified
        return moments

    def read(self, number: int) -> Any:
        """The document of a record.

        Raises:
            ObjectNotFoundError: it was deleted.
            UnsupportedFeatureError: a later release wrote it.
            ValueError: it is no JSON document.
        """
        return decode_record(self.store.get(self.path(number)), self.path(number))

    def put_if_absent(self, number: int, document: Mapping[str, object]) -> bool:
        """Write a record under a number; return whether the number was free.

        Raises ``StorageError``: the store failed, or no number is left.
        """
        if number >= 10**_DIGITS:
            raise errors.StorageError(
                f"No number is left for another {self.called} in {self.folder}.",
                remedy="Inspect the file with the highest number; if memwal-ops did not write it, delete it while no "
                "supervisor runs.",
            )
        return self.store.put_if_absent(self.path(number), encode_record(document))

    def delete_records(self, numbers: Iterable[int], *suffixes: str) -> None:
        """Delete records, and the files beside them that have one of the suffixes."""
        paths = [self.path(number, suffix) for number in numbers for suffix in (*suffixes, _RECORD)]
        if paths:
            self.store.delete_many(paths)

    def unreadable(self, number: int, error: Exception, remedy: str) -> errors.StorageError:
        """The error for a record that is not what this release writes."""
        return errors.StorageError(f"{self.path(number)} is not a readable {self.called} ({error}).", remedy=remedy)

    def path(self, number: int, suffix: str = _RECORD) -> str:
        """Path of a number's file, relative to the table."""
        return f"{self.folder}/{number:0{_DIGITS}d}.{suffix}"


def printable(text: str) -> str:
    """The text as it can be printed: JSON can contain lone surrogates."""
    return text.encode(errors="replace").decode()


LEASES_FOLDER = "_mem_wal_ops/leases"
BY_HAND = "by hand"
"""The instance in the record of a run that held no lease (:func:`record_by_hand`)."""
DEFAULT_TTL = timedelta(minutes=5)
_JOB = re.compile(r"[a-z][a-z0-9_]{0,39}")
_KEPT = 16
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a lease: ``instance`` identifies a supervisor across restarts; ``name`` is for display."""

    instance: str
    name: str


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last run of a job. Its outcome, its end by the store's clock, and the instance that ran it."""

    outcome: str
    finished: datetime
    instance: str

    @classmethod
    def from_json(cls, document: Mapping[str, str]) -> LastRun:
        """The reverse of :meth:`to_json`."""
        return cls(document["outcome"], datetime.fromisoformat(document["finished"]), document["instance"])

    def to_json(self) -> dict[str, str]:
        """The run as a message of a worker has it."""
        return {"outcome": self.outcome, "finished": self.finished.isoformat(), "instance": self.instance}


@dataclass(frozen=True, slots=True)
class Lease:
    """The newest object of a lease.

    Attributes:
        token: the number under which the lease was taken.
        acquired: when it was taken, by the store's clock.
        written: when this object was written, by the store's clock.
        ttl: the lease expires that long after ``written``.
        ended: why it ended before it expired: released or broken; None while it is in force.
        last: the last recorded run of the job; every later number repeats it.
    """

    job: str
    number: int
    token: int
    holder: Holder
    acquired: datetime
    written: datetime
    ttl: timedelta
    ended: str | None = None
    last: LastRun | None = None

    @property
    def expires(self) -> datetime:
        """When it expires, by the store's clock."""
        return self.written + self.ttl

    def in_force(self, now: datetime) -> bool:
        """Whether it is in force at ``now``, by the store's clock."""
        return self.ended is None and now < self.expires

    def to_json(self) -> dict[str, object]:
        """The lease as an entry of ``lease list --json``."""
        return {
            "job": self.job,
            "holder": self.holder.name,
            "instance": self.holder.instance,
            "token": self.token,
            "acquired": self.acquired.isoformat(timespec="seconds"),
            "renewed": self.written.isoformat(timespec="seconds"),
            "expires": self.expires.isoformat(timespec="seconds"),
            "ended": self.ended,
            "last_run": None
            if self.last is None
            else {
                "outcome": self.last.outcome,
                "finished": self.last.finished.isoformat(timespec="seconds"),
                "instance": self.last.instance,
            },
        }


def read_lease(store: api.Store, job: str, files: Iterable[api.ObjectMeta] | None = None) -> Lease | None:
    """The newest object of a job's lease; None if the lease was never taken.

    ``files``: those of its lease, by :func:`lease_files`; None: they are listed now.

    Raises:
        StorageError: the store failed, or the object is not a lease.
        UnsupportedFeatureError: a later release wrote it.
    """
    for _ in range(_ATTEMPTS):
        newest = _newest(store, job, files)
        if newest is None:
            return None
        (number, written), files = newest, None
        try:
            return _decode(_records(store, job), job, number, written)
        except errors.ObjectNotFoundError:
            continue  # pruned: there is a newer one
    raise errors.StorageError(f"The lease of {job} changes faster than it can be read.")


def list_leases(store: api.Store) -> tuple[Lease, ...]:
    """The newest object of every job's lease, by job."""
    leases = (read_lease(store, job, files) for job, files in lease_files(store).items())
    return tuple(lease for lease in leases if lease is not None)


def lease_files(store: api.Store) -> dict[str, list[api.ObjectMeta]]:
    """The files of each job's lease, by job in order; one listing."""
    files: dict[str, list[api.ObjectMeta]] = {}
    for meta in store.list(LEASES_FOLDER):
        job, _, file = meta.path.removeprefix(f"{LEASES_FOLDER}/").partition("/")
        if file and _JOB.fullmatch(job):
            files.setdefault(job, []).append(meta)
    return dict(sorted(files.items()))


def acquire(
    store: api.Store, job: str, holder: Holder, ttl: timedelta = DEFAULT_TTL
) -> tuple[Lease | None, Lease | None]:
    """Take a lease that is free, has ended, or is this supervisor's own from before a restart.

    Returns:
        The lease, or None if another supervisor holds it; and the newest object before it, with the holder
        and the outcome of the last run.
    """
    before = read_lease(store, job)
    others = before is not None and before.holder.instance != holder.instance and before.ended is None
    # The clock costs three requests, and only a lease that was not released needs it.
    if before is not None and others and before.in_force(store_clock(store)):
        return None, before
    number = 1 if before is None else before.number + 1
    last = None if before is None else before.last
    document = _document(number, holder, None, ttl, None, last)
    try:
        lease = _write(store, job, number, document)
    except api.DiskFullError:
        if not free_space(store):
            raise
        lease = _write(store, job, number, document)
    if lease is not None:
        _prune(store, job, lease.number)
    return lease, before


def renew(store: api.Store, lease: Lease) -> Lease:
    """Renew a lease for another ``ttl`` from now.

    Raises:
        LeaseLostError: another supervisor holds it, or it was broken.
        StorageError: the store failed; the lease is in force until it expires.
    """
    document = _document(lease.token, lease.holder, lease.acquired, lease.ttl, None, lease.last)
    renewed = _write(store, lease.job, lease.number + 1, document)
    if renewed is not None:
        _prune(store, lease.job, renewed.number)
        return renewed
    newest = read_lease(store, lease.job)
    if newest is None or not _same_lease(newest, lease):
        raise lease_lost(lease, newest)
    return newest  # the holder's own write, whose response was lost


def release(store: api.Store, lease: Lease, outcome: str | None = None) -> None:
    """End a lease, and record the outcome of the run.

    Does nothing if another supervisor holds it by now, or if it was removed with its table: no object of a removed
    table must come back.
    """
    if _newest(store, lease.job) is None:
        return
    document = _document(lease.token, lease.holder, lease.acquired, lease.ttl, "released", outcome or lease.last)
    number = lease.number
    for _ in range(_ATTEMPTS):
        number += 1
        if _records(store, lease.job).put_if_absent(number, document):
            return
        newest = read_lease(store, lease.job)
        if newest is None or not _same_lease(newest, lease):
            return
        number = newest.number


def record_by_hand(store: api.Store, job: str, outcome: str) -> None:
    """Record a run that held no lease, so that supervisors in backoff learn that the job succeeds again.

    Best effort, and only where supervisors maintain the table: nothing is written if the lease was never taken, or is
    held now. A supervisor never takes it for its own run, whose options may be others.
    """
    with suppress(errors.MemwalOpsError):
        newest = read_lease(store, job)
        if newest is None or newest.ended is None:
            return
        document = _document(newest.token, newest.holder, newest.acquired, newest.ttl, newest.ended, outcome)
        if _records(store, job).put_if_absent(newest.number + 1, {**document, "finished_by": BY_HAND}):
            _prune(store, job, newest.number + 1)


def delete_if_table_removed(store: api.Store) -> bool:
    """Delete all leases if the folder has nothing else: its table was removed, and leases alone look like a table.

    Timeline: a lease is acquired or renewed while the table's objects are being deleted, after they were listed.
    """
    paths = []
    for meta in store.list():
        if not meta.path.startswith(f"{LEASES_FOLDER}/"):
            return False
        paths.append(meta.path)
    store.delete_many(paths)
    return bool(paths)


def break_lease(store: api.Store, job: str, by: str) -> Lease:
    """End a lease that another supervisor holds: it notices when it renews, or before its next commit.

    Raises ``InvalidUsageError``: the lease is not held.
    """
    for _ in range(_ATTEMPTS):
        current = read_lease(store, job)
        if current is None or current.ended is not None:
            raise errors.InvalidUsageError(
                f"The lease of {job} is not held.", remedy="memwal-ops lease list URI shows all leases."
            )
        token = current.number + 1
        why = f"broken by {by}"
        document = _document(token, current.holder, current.acquired, current.ttl, why, current.last)
        if _records(store, job).put_if_absent(token, document):
            broken = read_lease(store, job)
            assert broken is not None  # noqa: S101 - the newest is never deleted
            return broken
    raise _conflicts_error(job)


def _conflicts_error(job: str) -> errors.StorageError:
    return errors.StorageError(
        f"Cannot write the lease of {job}: {_ATTEMPTS} consecutive conflicts with other processes.",
        remedy="Run the command again.",
    )


def end_expired(store: api.Store, job: str) -> Lease | None:
    """Release a lease that expired, so that it is not listed as held any more; None if there is none to release.

    A holder that resumes finds the lease lost, as if another supervisor had taken it.
    """
    for _ in range(_ATTEMPTS):
        current = read_lease(store, job)
        if current is None or current.ended is not None or current.in_force(store_clock(store)):
            return None
        number, why = current.number + 1, "released: it had expired"
        document = _document(number, current.holder, current.acquired, current.ttl, why, current.last)
        if _records(store, job).put_if_absent(number, document):
            return read_lease(store, job)
    raise _conflicts_error(job)


def check(store: api.Store, lease: Lease) -> None:
    """Verify that a lease is still held by its holder; one listing, and one request if it was renewed.

    Raises:
        LeaseLostError: it is not.
        StorageError: the store failed.
    """
    newest = _newest(store, lease.job)
    if newest is not None and newest[0] == lease.number:
        return
    current = read_lease(store, lease.job)
    if current is None or not _same_lease(current, lease):
        raise lease_lost(lease, current)


def lease_lost(lease: Lease, newest: Lease | None) -> errors.LeaseLostError:
    """The error for a lease that was lost, with the newest object of the lease as the reason."""
    if newest is None:
        return errors.LeaseLostError(f"The lease of {lease.job} (token {lease.token}) is gone.")
    why = newest.ended if newest.ended is not None else f"held by {newest.holder.name} with token {newest.token}"
    return errors.LeaseLostError(f"The lease of {lease.job} (token {lease.token}) was lost: {why}.")


def _same_lease(newest: Lease, lease: Lease) -> bool:
    return newest.token == lease.token and newest.holder.instance == lease.holder.instance and newest.ended is None


def _write(store: api.Store, job: str, number: int, document: dict[str, object]) -> Lease | None:
    """Put a number; return None unless it is then the newest object, and this holder's."""
    if not _records(store, job).put_if_absent(number, document):
        return None
    newest = read_lease(store, job)
    if newest is None or newest.number != number:
        return None
    own = newest.token == document["token"] and newest.holder.instance == document["instance"]
    return newest if own else None


def _document(
    token: int, holder: Holder, acquired: datetime | None, ttl: timedelta, ended: str | None, last: LastRun | str | None
) -> dict[str, object]:
    """The content of an object. Its own time is left out: the store's modification time is used."""
    return {
        "token": token,
        "instance": holder.instance,
        "holder": holder.name,
        "acquired": None if acquired is None else acquired.isoformat(),
        "ttl_seconds": ttl.total_seconds(),
        "ended": ended,
        "outcome": last.outcome if isinstance(last, LastRun) else last,
        "finished": last.finished.isoformat() if isinstance(last, LastRun) else None,
        "finished_by": last.instance if isinstance(last, LastRun) else holder.instance,
    }


def _decode(records: NumberedRecords, job: str, number: int, written: datetime) -> Lease:
    try:
        document = records.read(number)
        return Lease(
            job=job,
            number=number,
            token=_token(document["token"], number),
            holder=Holder(_text(document["instance"]), _text(document["holder"])),
            acquired=_time(document["acquired"], written),
            written=written,
            ttl=timedelta(seconds=float(document["ttl_seconds"])),
            ended=None if document["ended"] is None else _text(document["ended"]),
            last=None
            if document["outcome"] is None
            else LastRun(
                _text(document["outcome"]), _time(document["finished"], written), _text(document["finished_by"])
            ),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        remedy = "Inspect the file; if memwal-ops did not write it, delete it while no supervisor runs."
        raise records.unreadable(number, error, remedy) from error


def _newest(store: api.Store, job: str, files: Iterable[api.ObjectMeta] | None = None) -> tuple[int, datetime] | None:
    return max(_records(store, job).written(files).items(), default=None)


def _prune(store: api.Store, job: str, newest: int) -> None:
    """Delete old numbers, best effort; the newest ones always stay."""
    if newest % _KEPT == 0:
        records = _records(store, job)
        records.delete_records(number for number in records.written() if number <= newest - _KEPT)


def free_space(store: api.Store) -> int:
    """Delete the superseded numbers of all leases, for a disk that is full; return how many went.

    They are only kept for operators to look at: the newest ones, which decide, always stay.
    """
    freed = 0
    for job, files in lease_files(store).items():
        records = _records(store, job)
        old = sorted(records.written(files))[:-2]
        records.delete_records(old)
        freed += len(old)
    return freed


def _time(value: object, written: datetime) -> datetime:
    return written if value is None else datetime.fromisoformat(_text(value)).astimezone(UTC)


def _token(value: object, number: int) -> int:
    if type(value) is not int or not 0 < value <= number:
        raise ValueError(f"its token is {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return printable(value)


def _records(store: api.Store, job: str) -> NumberedRecords:
    if _JOB.fullmatch(job) is None:
        raise errors.InvalidUsageError(f"{job!r} is not a valid job name.")
    return NumberedRecords(store, f"{LEASES_FOLDER}/{job}", "lease")
