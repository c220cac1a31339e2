"""Acquire, renew and release the lease of a namespace: one compactor at a time, with a rising fencing token.

See S4-039 to S4-048. A lease saves work; its token is put into the manifest before anything is read (:func:`claim`).
From then on every commit with an older token fails, however long its owner stalled: memwal-ops requires the manifest's
token to equal its own, Zeppelin requires it not to be above its own. A lease is never deleted: a new one would start
at token 1.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from memwal_ops import errors
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.namespace import FencedError, Namespace, retried
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI
from memwal_ops.formats.zeppelin.wire.manifest import Manifest, timestamp
from memwal_ops.log import get_logger

LEASE = "lease.json"
MAX_TOKEN = 2**64 - 1
_HOLDER = {WIKI: "holder", NATIVE: "holder_id"}


@dataclass(frozen=True)
class LeaseRecord:
    """A stored lease: times are by its holder's clock."""

    holder: str
    token: int
    acquired: datetime
    expires: datetime


def encode_lease(lease: LeaseRecord, dialect: str) -> bytes:
    """The bytes of ``lease.json``."""
    document = {
        _HOLDER[dialect]: lease.holder,
        "fencing_token": lease.token,
        "acquired_at": timestamp(lease.acquired),
        "expires_at": timestamp(lease.expires),
    }
    return json.dumps(document, indent=2).encode()


def decode_lease(data: bytes) -> LeaseRecord:
    """A lease of either dialect. Raises ``InvalidFormatError``: it is not a lease."""
    try:
        document = json.loads(data)
        holder = document[_HOLDER[WIKI]] if _HOLDER[WIKI] in document else document[_HOLDER[NATIVE]]
        token = document["fencing_token"]
        times = [_moment(document[name]) for name in ("acquired_at", "expires_at")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise errors.InvalidFormatError(f"It is not a lease: {error!r:.120}.") from error
    if not isinstance(holder, str) or type(token) is not int or not 0 <= token <= MAX_TOKEN:
        raise errors.InvalidFormatError(f"It is not a lease: holder {holder!r:.40}, token {token!r:.40}.")
    return LeaseRecord(holder, token, times[0], times[1])


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


DEFAULT_TTL = timedelta(minutes=5)
_ATTEMPTS = 5
_POLL_SECONDS = 0.1
# A live holder may lose it after two failed renewals in a row: the third is due as it expires.
_RENEWALS_PER_TTL = 3
_RELEASED = timedelta(seconds=1)
_IMPLAUSIBLE = timedelta(days=1)


@dataclass
class HeldLease:
    """A lease that this run holds. ``lost`` once another process has it."""

    token: int
    holder: str
    lost: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Refuse to continue once it is lost. Raises ``FencedError``."""
        if self.lost.is_set():
            raise FencedError(f"The lease with token {self.token} was taken by another compactor.")


@contextmanager
def held_lease(table: Namespace, ttl: timedelta, wait: timedelta = timedelta(0)) -> Iterator[HeldLease]:
    """Hold the namespace's lease during the block; renewed every third of ``ttl``, released by expiry at the end.

    Raises:
        BusyError: another compactor holds it, for longer than ``wait``.
        UnsupportedFeatureError: there is no higher token.
        TableCorruptError: ``lease.json`` cannot be read.
    """
    lease = _acquire(table, ttl, wait)
    stop = threading.Event()
    beats = threading.Thread(target=_heartbeat, args=(table, lease, ttl, stop), daemon=True, name="zeppelin-lease")
    beats.start()
    try:
        yield lease
    finally:
        stop.set()
        beats.join()
        _release(table, lease)


def claim(table: Namespace, lease: HeldLease) -> Namespace:
    """Put the lease's token into the manifest, and return the namespace: a commit must be based on reads after this.

    Timeline with the token put after reading: B (token 6) reads S1 and F1 to F4. A, which stalled past its lease (token
    5), reads F1 to F5 and publishes S2. B puts its token in, and replaces S2 by its own segment: F5 is lost, although
    both checks passed.

    Raises ``FencedError``: the manifest has a later token.
    """

    def put_token(table: Namespace) -> Manifest | None:
        lease.check()
        if table.manifest.token > lease.token:
            raise FencedError(f"The manifest has the token {table.manifest.token}; ours is {lease.token}.")
        return None if table.manifest.token == lease.token else table.manifest.changed(token=lease.token)

    return retried(table, put_token)


def read_lease(table: Namespace) -> tuple[LeaseRecord, str] | None:
    """The stored lease, and its entity tag; None: no lease was ever acquired.

    Raises ``TableCorruptError``: it cannot be read.
    """
    try:
        data, tag = table.store.get_with_tag(LEASE)
    except errors.ObjectNotFoundError:
        return None
    try:
        return decode_lease(data), tag
    except errors.InvalidFormatError as error:
        raise errors.TableCorruptError(
            f"{LEASE} of {table.location.uri} cannot be read: {error}", remedy=remedies.lease(table.manifest.token)
        ) from error


def _acquire(table: Namespace, ttl: timedelta, wait: timedelta) -> HeldLease:
    holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    deadline = time.monotonic() + wait.total_seconds()
    attempts = 0
    while True:
        stored = read_lease(table)
        now = datetime.now(UTC)
        if stored is not None and stored[0].expires > now:
            if time.monotonic() >= deadline:
                left = stored[0].expires - now
                skew = " That is far ahead: the holder's clock, or the local one, is wrong." * (left > _IMPLAUSIBLE)
                raise errors.BusyError(
                    f"{stored[0].holder} compacts {table.location.uri} (token {stored[0].token}); its lease ends in "
                    f"{left.total_seconds():.0f} s.{skew}"
                )
            time.sleep(_POLL_SECONDS)
            continue
        # Also above the manifest's token: after a lease was removed, the next one must not start at 1 again.
        token = 1 + max(table.newest().manifest.token, 0 if stored is None else stored[0].token)
        if token > MAX_TOKEN:
            raise errors.UnsupportedFeatureError(
                f"{table.location.uri} has the fencing token {token - 1}, the highest there is: no compactor can fence "
                "the one that had it.",
                remedy="Migrate the namespace, or create another one: a token that starts again fences nothing.",
            )
        record = LeaseRecord(holder, token, now, now + ttl)
        if _put(table, record, None if stored is None else stored[1]):
            return HeldLease(token, holder)
        attempts += 1
        if attempts >= _ATTEMPTS:
            raise errors.BusyError(f"The lease of {table.location.uri} was taken by others {attempts} times in a row.")


def _put(table: Namespace, record: LeaseRecord, tag: str | None) -> bool:
    data = encode_lease(record, table.manifest.dialect)
    if tag is not None:
        return table.store.compare_and_swap(LEASE, data, tag)
    # "Exists" may be this run's own put, after a lost response.
    return table.store.put_if_absent(LEASE, data) or table.store.get(LEASE) == data


def _heartbeat(table: Namespace, lease: HeldLease, ttl: timedelta, stop: threading.Event) -> None:
    while not stop.wait(ttl.total_seconds() / _RENEWALS_PER_TTL):
        try:
            if not _renew(table, lease, ttl):
                lease.lost.set()
                return
        except errors.MemwalOpsError as error:
            # That does not lose the lease: the next renewal tries again, and the manifest's token is authoritative.
            get_logger(__name__).warning("lease_not_renewed", table=table.location.uri, error=str(error))
        except BaseException:
            lease.lost.set()
            raise


def _renew(table: Namespace, lease: HeldLease, ttl: timedelta) -> bool:
    """Renew it for another ``ttl``, even if expired, unless another process acquired it; returns whether it is held."""
    return any(_expire(table, lease, datetime.now(UTC) + ttl) for _ in range(2))


def _expire(table: Namespace, lease: HeldLease, expires: datetime) -> bool:
    """Set when the lease expires, if it is still ours; returns whether it was set."""
    stored = read_lease(table)
    if stored is None or (stored[0].token, stored[0].holder) != (lease.token, lease.holder):
        return False
    expires = max(stored[0].acquired, expires)
    return _put(table, LeaseRecord(lease.holder, lease.token, stored[0].acquired, expires), stored[1])


def _release(table: Namespace, lease: HeldLease) -> None:
    """Mark it as expired, if it is ours; best effort: it expires anyway (S4-046, S4-048)."""
    try:
        _expire(table, lease, datetime.now(UTC) - _RELEASED)
    except errors.MemwalOpsError as error:
        get_logger(__name__).warning("lease_not_released", table=table.location.uri, error=str(error))
