"""Leases: "I do this job on this table until then", so that two supervisors do not do the same work twice.

A lease is a row of numbered objects, written by put-if-absent, so that it works on every store; the
newest one counts, and is never deleted. Taking, renewing, releasing and breaking each add a number.

* The **token** of a lease is the number under which it was taken: it only rises, and no two holders ever
  have the same one.
* **Ages are told by the store's clock**: a lease ends ``ttl`` after its newest object was written. Nobody's
  own clock is asked, however wrong it is.
* **Older numbers are pruned**, and this is why that is safe: whoever wrote a number looks afterwards
  whether it is the newest, and has nothing if it is not. A stalled holder may find its next number free
  again, because it was written by others and pruned; but a number is pruned only while a higher one
  stands, and the highest is never pruned. So whoever wrote into a hole sees a higher number.

Correctness never rests on any of this. Two holders at once cost work, and nothing else: what is published
is decided by one put-if-not-exists of the next version (:mod:`memwal_ops.core.commit`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidUsageError, LeaseLostError, ObjectNotFoundError, StorageError
from memwal_ops.storage.clock import store_clock

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store

LEASES_FOLDER = "_mem_wal_ops/leases"
DEFAULT_TTL = timedelta(minutes=5)
_DIGITS = 20
_NAME = re.compile(rf"[0-9]{{{_DIGITS}}}\.json")
_JOB = re.compile(r"[a-z][a-z0-9_]{0,39}")
_KEPT = 16
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds: ``instance`` tells supervisors apart, also over restarts; ``name`` is for people."""

    instance: str
    name: str


@dataclass(frozen=True, slots=True)
class LastRun:
    """What the job's last run came to, when it ended by the store's clock, and whose it was."""

    outcome: str
    finished: datetime
    instance: str


@dataclass(frozen=True, slots=True)
class Lease:
    """The newest object of a lease.

    Attributes:
        job: whose lease.
        number: its own number.
        token: the number under which it was taken.
        holder: who took it.
        acquired: when, by the store's clock.
        written: when this object was written, by the store's clock.
        ttl: it ends that long after ``written``.
        ended: why it is over before its time: released or broken; None while it counts.
        last: the last run of the job that anybody told of: every number carries it on.
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
        """When it ends by itself, by the store's clock."""
        return self.written + self.ttl

    def stands(self, now: datetime) -> bool:
        """Whether it keeps others away at ``now``, by the store's clock."""
        return self.ended is None and now < self.expires

    def to_json(self) -> dict[str, object]:
        """The entry of ``lease list --json``."""
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


def read_lease(store: Store, job: str) -> Lease | None:
    """The newest object of a job's lease, or None where nobody ever took one.

    Raises:
        StorageError: the store failed, or what stands there is no lease.
    """
    for _ in range(_ATTEMPTS):
        newest = _newest(store, job)
        if newest is None:
            return None
        number, written = newest
        try:
            return _decode(job, number, written, store.get(_path(job, number)))
        except ObjectNotFoundError:
            continue  # pruned: there is a newer one
    raise StorageError(f"The lease of {job} changes faster than it can be read.")


def list_leases(store: Store) -> tuple[Lease, ...]:
    """The newest object of every job's lease, by job."""
    names = sorted({meta.path.split("/")[2] for meta in store.list(LEASES_FOLDER) if meta.path.count("/") > 2})  # noqa: PLR2004 - folder, leases, job, file
    found = (read_lease(store, name) for name in names if _JOB.fullmatch(name))
    return tuple(lease for lease in found if lease is not None)


def acquire(store: Store, job: str, holder: Holder, ttl: timedelta = DEFAULT_TTL) -> tuple[Lease | None, Lease | None]:
    """Take a lease that is free, has ended, or is this supervisor's own from before a restart.

    Returns:
        The lease, or None where another holds it; and the newest object before it, which says who holds it
        or what the last holder's run came to.

    Raises:
        StorageError: the store failed.
    """
    before = read_lease(store, job)
    others = before is not None and before.holder.instance != holder.instance and before.ended is None
    # The clock costs three requests, and only a lease that was not given back needs it.
    if before is not None and others and before.stands(store_clock(store)):
        return None, before
    number = 1 if before is None else before.number + 1
    last = None if before is None else before.last
    lease = _write(store, job, number, _document(number, holder, None, ttl, None, last))
    if lease is not None:
        _prune(store, job, lease.number)
    return lease, before


def renew(store: Store, lease: Lease) -> Lease:
    """The same lease, for another ``ttl`` from now.

    Raises:
        LeaseLostError: another holder has it, or somebody broke it.
        StorageError: the store failed; the lease goes on until it ends.
    """
    document = _document(lease.token, lease.holder, lease.acquired, lease.ttl, None, lease.last)
    renewed = _write(store, lease.job, lease.number + 1, document)
    if renewed is not None:
        _prune(store, lease.job, renewed.number)
        return renewed
    newest = read_lease(store, lease.job)
    if newest is None or not _is(newest, lease):
        raise lost(lease, newest)
    return newest  # our own write, whose answer was lost


def release(store: Store, lease: Lease, outcome: str | None = None) -> None:
    """Mark it as over, and say what the run came to.

    Does nothing where it is another's by now, or is gone with its table: nothing of that must come back.
    """
    if _newest(store, lease.job) is None:
        return
    document = _document(lease.token, lease.holder, lease.acquired, lease.ttl, "released", outcome or lease.last)
    number = lease.number
    for _ in range(_ATTEMPTS):
        number += 1
        if _put(store, lease.job, number, document):
            return
        newest = read_lease(store, lease.job)
        if newest is None or not _is(newest, lease):
            return
        number = newest.number


def break_lease(store: Store, job: str, by: str) -> Lease:
    """End a lease that another holds: it finds out when it renews, or before its next commit.

    Raises:
        InvalidUsageError: there is none that counts.
    """
    for _ in range(_ATTEMPTS):
        standing = read_lease(store, job)
        if standing is None or standing.ended is not None:
            raise InvalidUsageError(
                f"Nobody holds the lease of {job}.", remedy="memwal-ops lease list URI shows all leases."
            )
        token = standing.number + 1
        why = f"broken by {by}"
        document = _document(token, standing.holder, standing.acquired, standing.ttl, why, standing.last)
        if _put(store, job, token, document):
            broken = read_lease(store, job)
            assert broken is not None  # noqa: S101 - the newest is never deleted
            return broken
    raise StorageError(f"Lost {_ATTEMPTS} races in a row for the lease of {job}.")


def check(store: Store, lease: Lease) -> None:
    """Make sure that a lease is still its holder's; one listing, and one request if it was renewed.

    Raises:
        LeaseLostError: it is not.
        StorageError: the store failed.
    """
    newest = _newest(store, lease.job)
    if newest is not None and newest[0] == lease.number:
        return
    standing = read_lease(store, lease.job)
    if standing is None or not _is(standing, lease):
        raise lost(lease, standing)


def lost(lease: Lease, newest: Lease | None) -> LeaseLostError:
    """The error of whoever lost it."""
    if newest is None:
        return LeaseLostError(f"The lease of {lease.job} (token {lease.token}) is gone.")
    why = newest.ended if newest.ended is not None else f"held by {newest.holder.name} with token {newest.token}"
    return LeaseLostError(f"The lease of {lease.job} (token {lease.token}) was lost: {why}.")


def _is(newest: Lease, lease: Lease) -> bool:
    return newest.token == lease.token and newest.holder.instance == lease.holder.instance and newest.ended is None


def _write(store: Store, job: str, number: int, document: dict[str, object]) -> Lease | None:
    """Put a number; None unless it is then the newest, and ours."""
    if not _put(store, job, number, document):
        return None
    newest = read_lease(store, job)
    if newest is None or newest.number != number:
        return None
    ours = newest.token == document["token"] and newest.holder.instance == document["instance"]
    return newest if ours else None


def _put(store: Store, job: str, number: int, document: dict[str, object]) -> bool:
    if number >= 10**_DIGITS:
        raise StorageError(f"The numbers of the lease of {job} are used up.")
    return store.put_if_absent(_path(job, number), json.dumps(document).encode())


def _document(
    token: int,
    holder: Holder,
    acquired: datetime | None,
    ttl: timedelta,
    ended: str | None,
    last: LastRun | str | None,
) -> dict[str, object]:
    """What an object says. Times that are this object's own are left out: the store says when it was written."""
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


def _decode(job: str, number: int, written: datetime, data: bytes) -> Lease:
    path = _path(job, number)
    try:
        document = json.loads(data)
        return Lease(
            job=job,
            number=number,
            token=_whole(document["token"], number),
            holder=Holder(_text(document["instance"]), _text(document["holder"])),
            acquired=_moment(document["acquired"], written),
            written=written,
            ttl=timedelta(seconds=float(document["ttl_seconds"])),
            ended=None if document["ended"] is None else _text(document["ended"]),
            last=None
            if document["outcome"] is None
            else LastRun(
                _text(document["outcome"]), _moment(document["finished"], written), _text(document["finished_by"])
            ),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StorageError(
            f"{path} is no readable lease ({error}).",
            remedy="Look at it; if it is none of memwal-ops, delete it while no supervisor runs.",
        ) from error


def _newest(store: Store, job: str) -> tuple[int, datetime] | None:
    found = (
        (int(name[:_DIGITS]), meta.last_modified)
        for meta in store.list(f"{LEASES_FOLDER}/{job}")
        if _NAME.fullmatch(name := meta.path.rsplit("/", 1)[-1]) is not None
    )
    return max(found, default=None)


def _prune(store: Store, job: str, newest: int) -> None:
    """Forget old numbers, best effort; the newest ones always stay."""
    if newest % _KEPT:
        return
    names = (meta.path for meta in store.list(f"{LEASES_FOLDER}/{job}"))
    numbered = (path for path in names if _NAME.fullmatch(path.rsplit("/", 1)[-1]) is not None)
    store.delete_many([path for path in numbered if int(path.rsplit("/", 1)[-1][:_DIGITS]) <= newest - _KEPT])


def _moment(told: object, written: datetime) -> datetime:
    return written if told is None else datetime.fromisoformat(_text(told)).astimezone(UTC)


def _whole(told: object, number: int) -> int:
    if type(told) is not int or not 0 < told <= number:
        raise ValueError(f"its token is {told!r}")
    return told


def _text(told: object) -> str:
    if not isinstance(told, str):
        raise TypeError(f"{told!r} is no text")
    return told.encode(errors="replace").decode()


def _path(job: str, number: int) -> str:
    if _JOB.fullmatch(job) is None:
        raise InvalidUsageError(f"{job!r} is no name of a job.")
    return f"{LEASES_FOLDER}/{job}/{number:0{_DIGITS}d}.json"
