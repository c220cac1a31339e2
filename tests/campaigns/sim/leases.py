"""Leases that lie: jobs run as a supervisor's workers run them, under leases on which nothing may rest.

Two supervisors share a table. A job of one of them may hold its lease rightly; it may have none; it may
believe in one that another has taken; a clock that is an hour fast takes what is held, one that is an
hour slow leaves what has ended; an operator breaks one in the middle of the work. Whoever finds out that its
lease is lost stops wherever it is, in the middle of a run: nothing may be lost by that, and nothing done twice.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING
from unittest import mock

from memwal_ops import open_table
from memwal_ops.core import leases
from memwal_ops.core.anchors import LeaseGuard
from memwal_ops.errors import InvalidUsageError, LeaseLostError
from memwal_ops.storage.clock import store_clock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Store

# How often a job runs under a lease at all, and how its lease lies then.
_SUPERVISED = 0.5
_LIES = ("none", "believed", "fast clock", "fast clock", "slow clock", "broken", "broken")
# At one of its first questions a lease is broken: how many they are depends on the job.
_BROKEN_BY = 6
_HOLDERS = tuple(leases.Holder(name, f"supervisor {name}") for name in ("a", "b"))
#: So often is a lease given back; else its holder is dead, and it stands for longer than any history.
_GIVEN_BACK = 0.7
LOST = "a lease that was lost"
KEPT_AWAY = "a lease that kept others away"
TWO_HOLDERS = "two holders at once"


class Leases:
    """The leases of one table, drawn from a die of their own: histories without them stay as they are.

    Attributes:
        rng: what becomes of the next job.
        effects: how often what a lease can do was done.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"leases of {seed}")
        self.effects: Counter[str] = Counter()
        self._working: list[str] = []

    @contextmanager
    def under(self, job: str, table: Table) -> Iterator[Table | None]:
        """The table as the job sees it under its lease, or None where it is kept away by another's.

        Raises:
            LeaseLostError: by the job: it found out.
        """
        if self.rng.random() >= _SUPERVISED:
            yield table
            return
        lie, holder = self.rng.choice(_LIES), self.rng.choice(_HOLDERS)
        plain = open_table(table.location.uri).store
        with _clock(lie):
            lease, _ = leases.acquire(plain, job, holder)
        if lease is None and lie != "believed":
            self.effects[KEPT_AWAY] += 1
            yield None
            return
        self.effects[TWO_HOLDERS] += job in self._working
        asked = count(1)
        breaks = self.rng.randint(1, _BROKEN_BY) if lie == "broken" else 0

        def check() -> None:
            if next(asked) == breaks:
                with suppress(InvalidUsageError):  # it is over already
                    leases.break_lease(plain, job, "an operator")
            if lie != "believed" and lease is not None:
                leases.check(plain, lease)

        self._working.append(job)
        try:
            yield table.with_guard(LeaseGuard(check))
        except LeaseLostError:
            self.effects[LOST] += 1
            raise
        finally:
            self._working.remove(job)
        if lease is not None and self.rng.random() < _GIVEN_BACK:
            leases.release(plain, lease, "succeeded")


@contextmanager
def _clock(lie: str) -> Iterator[None]:
    hours = {"fast clock": 1, "slow clock": -1}.get(lie, 0)

    def told(store: Store) -> datetime:
        return store_clock(store) + timedelta(hours=hours)

    with mock.patch.object(leases, "store_clock", told):
        yield
