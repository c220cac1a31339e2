"""Decide which members of a fleet live, and which of them has a table: pure functions of what was read.

A member lives as long as the number of its newest record changes. That is measured by this process's own monotonic
clock: no time that another machine wrote is compared. A member writes ``BEATS`` records within a heartbeat and is dead
when no new one was read for ``_DEAD_AFTER`` heartbeats, so that its tables are taken over within two.

Membership saves work, and nothing else: two members that both take a table poll it twice, and the leases and the
conditional writes of its jobs decide what is published.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
class View:
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

    def without(self, name: str) -> View:
        """Return the view without a member."""
        return replace(self, seen={other: one for other, one in self.seen.items() if other != name})

    def after(self, newest: Mapping[str, int], began: float, ended: float) -> View:
        """Return the view after a reading that began and ended at these times, in monotonic seconds.

        Only a reading whose own record was written just before may be given: while this member cannot write, the
        others may not be able to either, and must not be taken for dead. After a time without readings no member is
        dead yet, for the same reason: the others may not have written since. One reading may fail before that: with
        more, a member that missed a write on each side of a short outage would be dead (membership.pml, bug 6).

        Args:
            newest: the number of the newest record of each other member that has one.
            began: when the request was sent.
            ended: when its response was there.
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
        return View(self.heartbeat, seen, ended)


def owner(table: str, members: Iterable[str]) -> str:
    """Return the member that has a table, by rendezvous hashing: the one of the highest hash with its URI.

    A member that joins or leaves moves its own tables alone: of n members, one in n.
    """
    return max(members, key=lambda name: (_weight(table, name), name))


def _weight(table: str, member: str) -> bytes:
    return blake2b(f"{member}\0{table}".encode(errors="surrogateescape"), digest_size=8).digest()
