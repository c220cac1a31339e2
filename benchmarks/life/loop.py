"""The loop of a process that maintains one table: a line of JSON in for each round, one out.

Imports nothing but the standard library: the process of LanceDB has an environment of its own.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Calendar:
    """How long ago a day of the month was, of which each takes a few seconds.

    Attributes:
        a_day: rounds of a day.
        began: when each round began, in seconds.
    """

    a_day: int
    began: list[float] = field(default_factory=list)

    @property
    def hours(self) -> float:
        """Hours since the month began."""
        return len(self.began) * 24 / self.a_day

    @property
    def day_ends(self) -> bool:
        """Whether this is the last round of a day."""
        return len(self.began) % self.a_day == 0

    def age(self, days: float) -> timedelta:
        """How old something of so many days ago is; a day more than everything if that is before the month."""
        back = round(days * self.a_day)
        if back >= len(self.began):
            return timedelta(days=1)
        return timedelta(seconds=time.time() - self.began[-1 - back])


def serve(prepare: Callable[[str, dict[str, str], Calendar], Callable[[], object]]) -> None:
    """Maintain the table of the command line after each line that comes in.

    What comes out has the processor seconds of the round, the most memory so far in MiB, and what was done.
    """
    uri, options, a_day = sys.argv[-3], json.loads(sys.argv[-2]), int(sys.argv[-1])
    calendar = Calendar(a_day)
    maintain = prepare(uri, options, calendar)
    _reset_peak()
    for _ in sys.stdin:
        calendar.began.append(time.time())
        before = _cpu()
        did = maintain()
        print(json.dumps({"cpu": _cpu() - before, "peak": _peak(), "did": did}), flush=True)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
