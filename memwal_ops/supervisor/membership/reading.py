"""Read what the other members say of themselves (:class:`Reading`): who lives, who has a table, what all use.

A member lives as long as the number of its newest record changes. That is measured by this process's own monotonic
clock: no time that another machine wrote is compared. A member writes ``BEATS`` records within a heartbeat and is dead
when no new one was read for ``_DEAD_AFTER`` heartbeats, so that its tables are taken over within two.

Membership saves work, and nothing else: two members that both take a table poll it twice, and the leases and the
conditional writes of its jobs decide what is published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

from memwal_ops.core.fleet_budget import Others
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.errors import RetryPolicy
from memwal_ops.storage.objects import open_store
from memwal_ops.supervisor.config.model import FleetConfig
from memwal_ops.supervisor.membership.records import MemberListing, MemberRecord, MemberRecords, Use, others_of, use_of

BEATS = 3
_DEAD_AFTER = 1.5
_FORGOTTEN_AFTER = 20
_MAX_GAP = 2.5 / BEATS


@dataclass(frozen=True, slots=True)
class Seen:
    """A member as last read. The number of its newest record, and when that was first read, in monotonic seconds.

    ``proven``: a record of it was written since this member began to read. It is taken for living before, too.
    """

    number: int
    since: float
    living: bool = True
    proven: bool = True


@dataclass(frozen=True, slots=True)
class FleetView:
    """What one member knows of a fleet.

    Attributes:
        heartbeat: of the fleet, in seconds.
        seen: the members by name, without this one.
        read: when the last reading ended, in monotonic seconds; None: there was none.
    """

    heartbeat: float
    seen: Mapping[str, Seen] = field(default_factory=dict)
    read: float | None = None

    @property
    def living(self) -> frozenset[str]:
        """Return the names of the others that live."""
        return frozenset(name for name, one in self.seen.items() if one.living)

    @property
    def settled(self) -> bool:
        """Return whether it is known of each other member whether it lives.

        A member announces itself only then. Timeline of the gap that this prevents: b is dead; c joins, and takes b
        for living; a, which knows better, leaves to c all tables of which c is the owner; those of which c takes b
        for the owner have none.
        """
        return all(one.proven or not one.living for one in self.seen.values())

    @property
    def forgotten(self) -> frozenset[str]:
        """Return the names of those that are dead for so long that their records can be deleted."""
        limit = _FORGOTTEN_AFTER * self.heartbeat
        return frozenset(
            name
            for name, one in self.seen.items()
            if not one.living and self.read is not None and self.read - one.since > limit
        )

    def without(self, name: str) -> FleetView:
        """Return the view without a member."""
        return replace(self, seen={other: one for other, one in self.seen.items() if other != name})

    def after(self, newest: Mapping[str, int], began: float, ended: float) -> FleetView:
        """Return the view after a reading that began and ended at these times, in monotonic seconds.

        Only a reading whose own record was written just before may be given: while this member cannot write, the
        others may not be able to either, and must not be taken for dead. After a time without readings no member is
        dead yet, for the same reason: the others may not have written since. One reading may fail before that: with
        more, a member that missed a write on each side of a short outage would be dead (membership.pml, bug 6).

        ``newest``: the number of the newest record of each other member that has one.
        """
        gap = self.read is not None and began - self.read > _MAX_GAP * self.heartbeat
        seen = {}
        for name, number in newest.items():
            known = self.seen.get(name)
            if known is None or known.number != number:
                seen[name] = Seen(number, ended, proven=self.read is not None)
            elif gap and known.living:
                seen[name] = replace(known, since=ended)
            else:
                seen[name] = replace(known, living=known.living and began - known.since < _DEAD_AFTER * self.heartbeat)
        return FleetView(self.heartbeat, seen, ended)


def owner(table: str, members: Iterable[str]) -> str:
    """Return the member that has a table, by rendezvous hashing: the one of the highest hash with its URI.

    A member that joins or leaves moves its own tables alone: of n members, one in n.
    """
    return max(members, key=lambda name: (_weight(table, name), name))


def _weight(table: str, member: str) -> bytes:
    return blake2b(f"{member}\0{table}".encode(errors="surrogateescape"), digest_size=8).digest()


_DEADLINE = 10.0
_READ_EVERY = BEATS - 1
"""So many records of another member: of what it uses, what came within one heartbeat is not known at most."""


class Read(NamedTuple):
    """What was read of another member. The number of the record, what it says, and what it uses."""

    number: int
    document: MemberRecord | None = None
    use: Use | None = None


class Reading:
    """What one member has read of the others. It is called on the thread of the member alone.

    ``instance``: of this member's state folder. ``heartbeat``: of the fleet, in seconds.

    Attributes:
        per: of this member's budget.
    """

    def __init__(self, records: MemberRecords, instance: str, heartbeat: float) -> None:
        self._records, self._instance, self._heartbeat = records, instance, heartbeat
        self.per = float("inf")
        self._last, self._blind = float("inf"), float("-inf")
        self._known: Mapping[str, Read] = {}
        self._ended: dict[tuple[str, int], Use | None] = {}
        self._over: list[tuple[str, int]] = []

    def read(self, listed: MemberListing, now: float) -> Mapping[str, Read]:
        """What the members that are listed say; each is read less often than it writes. ``now``: of this clock."""
        if now - self._last > self._heartbeat:
            # The others may not have been able to write, either: what is there now is as old.
            self._blind = now + self._heartbeat
        self._last = now
        self._known = {name: self._read(name, listed, now) for name in listed.newest}
        return self._known

    def forget(self, names: Iterable[str], listed: MemberListing) -> None:
        """Delete the records of members; what they used is kept."""
        for name in names:
            if (document := self._known[name].document) is not None:
                self._records.end(name, listed.newest[name], document, listed.age(name))
            self._records.delete(name)

    def others(self, listed: MemberListing, living: int, now: float) -> Others | None:
        """What all others use, and those that ended; None: for a heartbeat after a time without readings."""
        self._ended = {
            key: self._ended[key] if key in self._ended else self._read_ended(key, listed, now) for key in listed.ended
        }
        self._over = [key for key, use in self._ended.items() if use is not None and self._is_over(use, now)]
        uses = [*(one.use for one in self._known.values()), *self._ended.values()]
        return None if now < self._blind else others_of(uses, self._instance, living, now + self._heartbeat)

    def sweep(self) -> None:
        """Delete what is kept of members that ended, once nothing of it is charged, or it is in a history again."""
        for key in self._over:
            self._records.delete_ended(*key)

    def _is_over(self, use: Use, now: float) -> bool:
        return use.instance == self._instance or all(one.ends <= now for one in use.charges)

    def _read(self, name: str, listed: MemberListing, now: float) -> Read:
        number, known = listed.newest[name], self._known.get(name)
        if known is not None and known.number <= number < known.number + _READ_EVERY:
            return known
        document = self._records.read(name, number)
        if document is None:
            return Read(number)
        written = listed.written[name]
        use = use_of(document.instance, document.budget, written, listed.now, now, self.per)
        return Read(number, document, use)

    def _read_ended(self, key: tuple[str, int], listed: MemberListing, now: float) -> Use | None:
        found = self._records.read_ended(*key)
        return None if found is None else use_of(*found, listed.ended[key], listed.now, now, self.per)


def read_others(fleet: FleetConfig, instance: str, now: float, per: float) -> Others:
    """What the members of a fleet use, but for one, as they last wrote; writes nothing.

    Raises ``MemwalOpsError``: the store of the fleet cannot be read.
    """
    store = open_store(resolve(fleet.uri, fleet.storage_options), retry=RetryPolicy(deadline=_DEADLINE))
    records = MemberRecords(store, fleet.name)
    reading, listed = Reading(records, instance, fleet.heartbeat.total_seconds()), records.listed()
    reading.per = per
    known = reading.read(listed, now)
    living = sum(one.document is not None and one.document.instance != instance for one in known.values())
    others = reading.others(listed, living, now)
    assert others is not None  # noqa: S101 - it is the first reading
    return others
