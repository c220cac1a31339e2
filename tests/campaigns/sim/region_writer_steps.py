"""Steps of our own writers, beside all that may happen to a table; and the history that takes them."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

from memwal_ops import open_table
from memwal_ops.formats.lance.log.background import Background
from tests.campaigns.sim.driver import WEIGHTS
from tests.campaigns.sim.fault_steps import _BESIDE_OTHERS
from tests.campaigns.sim.history import History
from tests.campaigns.sim.region_writers import Fault, Held, How, WriterTable
from tests.campaigns.sim.steps import Steps
from tests.campaigns.sim.witness import Witness
from tests.support.gc_options import PATIENT
from tests.support.tables.model import assert_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.support.tables.model import Rows

# So many calls of its store a writer makes for each of these, more or less: a put of an entry is a single one.
_CALLS = {"claim": 14, "write": 2, "flush": 16, "flush_log": 1}
_BESIDE = (*_BESIDE_OTHERS, "wake", "claim", "claim", "write", "write", "flush", "flush", "expire", "crash_writer")
# A copy of this layout has its log in the original; a folder of a region is removed in another test.
_WITHOUT = ("copy", "job_on_copy")
WRITER_WEIGHTS = {
    **{kind: weight for kind, weight in WEIGHTS.items() if kind not in _WITHOUT},
    "claim": 5, "wake": 5, "crash_writer": 12, "overtaken_writer": 14, "failing_writer": 10, "log": 4, "background": 4,
    "end_writer": 3,
}  # fmt: skip


class WriterWitness(Witness):
    """Also reads what is in the logs: by the product's reader, and by hand."""

    made: WriterTable

    def look(self, kinds: Iterable[str]) -> None:
        self.made.look()
        super().look(kinds)
        self._read_strongly()

    def _read_strongly(self) -> None:
        number = self._newest_number()
        ends = {region: (log.end, log.version) for region, log in self.made.model.logs.items()}
        if self._scanned == (number, ends):
            return
        self._scanned = (number, ends)
        columns = self.made.columns
        wanted = columns.seen(self.made.expected(), number)
        assert_same(self._by_hand(number), wanted, seed="the log, read by hand")
        flushed = columns.seen(self.made.expected(self._flushed()), number)
        for consistency, rows in (("strong", wanted), ("manifests", flushed)):
            self._read_by_product(consistency, number, rows)

    def _scan_by_readers(self) -> None:
        """See :meth:`_read_strongly`."""

    def _by_hand(self, number: int) -> Rows:
        """Base, the generations above its progress, and the entries behind the last flush, from the files."""
        rows = self._with_generations(self.versions["", number])
        for log in self.made.model.logs.values():
            for deleted, stored in log.unflushed():
                (row,) = self.made.columns.by_trait([dict(stored)])
                key = self.made.model.key_of(row)
                if deleted:
                    rows.pop(key, None)
                else:
                    rows[key] = row
        return self.made.columns.seen(rows, number)


class RegionWriterSteps(Steps):
    """Every step of a history, and those in which writers fail, are overtaken, or are killed."""

    weights = WRITER_WEIGHTS
    witness_type = WriterWitness
    made: WriterTable

    def do(self, kind: str, **arguments: Any) -> None:
        self.made.look()  # before a collector takes anything of it
        super().do(kind, **arguments)
        self.made.look()

    def may(self, kind: str) -> bool:
        held = any(self.made.held.values())
        return held if kind in {"log", "background", "end_writer", "slow_flush"} else super().may(kind)

    def end(self, *, posts: bool, go_on: bool) -> None:
        for region, log in list(self.made.model.logs.items()):
            if not log.entries:  # whoever claimed it first may have died before it wrote the hint
                self.made.claim(region)
        self.made.bury()
        super().end(posts=posts, go_on=go_on)
        self.effects += self.made.outcomes

    def _slow_flush(self) -> bool:
        """A collector runs while a writer makes a generation and did not publish it yet."""

        def collect() -> None:
            self.kinds.add("gc")
            self._collect(open_table(self.uri), PATIENT)

        held = self.made.newest(self.rng.choice(self.made.regions))
        return held is not None and self._faulty(held, "flush", Fault(self.rng.randint(3, 12), "others", collect))

    def _crash_writer(self) -> bool:
        """A writer dies at a call of its store, before or after it was carried out there."""
        return self._any("killed before", "killed after")

    def _failing_writer(self) -> bool:
        """The store fails a writer once, and it goes on: of what it was about nobody knows whether it was done."""
        return self._any("answer lost", "answer lost", "unavailable")

    def _overtaken_writer(self) -> bool:
        """A writer is in the middle of something, and others do all of theirs."""
        if len(self.beside) > 2:
            return False

        def others() -> None:
            self.beside.append("writer")
            for one in self.rng.choices(_BESIDE, k=self.rng.randint(1, 3)):
                self.do(one)
            if self.rng.random() < 0.3:
                self.do("overtaken_writer")
            self.beside.pop()

        return self._any("others", others=others)

    def _log(self) -> bool:
        """What waits is brought to the log."""
        held = self._held()
        self.made.flush_log_by(held)
        return not held.durable

    def _background(self) -> bool:
        before = self.made.log((held := self._held()).region).version
        self.made.work_in_background(held)
        return self.made.log(held.region).version > before

    def _end_writer(self) -> bool:
        self.made.end(self._held())
        return True

    def _held(self) -> Held:
        idle = [one for held in self.made.held.values() for one in held if not one.busy]
        return self.rng.choice(idle) if idle else self.made.claim(self.rng.choice(self.made.regions))  # type: ignore[return-value]

    def _any(self, *how: How, others: Callable[[], None] | None = None) -> bool:
        """One thing that a writer does meets a fault; whether it came to it."""
        what = self.rng.choices([*_CALLS], [2, 5, 5, 1])[0]
        fault = Fault(self.rng.randint(1, _CALLS[what]), self.rng.choice(how), others)
        self._say(f"{what}: {fault.how} at call {fault.at}")
        region = self.rng.choice(self.made.regions)
        if what == "claim":
            self.made.fault = fault
            self.made.claim(region)
            return fault.happened
        held = self.made.one_of(region)
        return held is not None and self._faulty(held, what, fault)

    def _faulty(self, held: Held, what: str, fault: Fault) -> bool:
        held.store.fault = fault
        getattr(self.made, f"{what}_by")(held)
        held.store.fault = None
        return fault.happened


def make_writer_table(uri: str, seed: int) -> WriterTable:
    """The table of a seed, whose regions have no writer yet."""
    rng = random.Random(seed)
    made = WriterTable(
        seed, regions=rng.choice([1, 2]), base_rows=12, with_btree=bool(seed % 4 < 2), stable_row_ids=bool(seed % 8 < 4)
    )
    made.create(uri)
    return made


class WriterHistory(History):
    """A history of a table that our own writers write."""

    again = "SEED={} python -m tests.campaigns.sim.region_writer_steps"

    def make_steps(self, uri: str) -> Steps:
        return RegionWriterSteps(make_writer_table(uri, self.seed), self.rng)

    def run(self) -> Counter[str]:
        """Without the writers' threads: what they do is a step."""
        with mock.patch.object(Background, "start", lambda _: None):
            return super().run()


def main() -> None:
    """One history again."""
    with tempfile.TemporaryDirectory() as folder:
        history = WriterHistory(int(os.environ["SEED"]), folder)
        history.run()
        for number, step in enumerate(history.steps.trail, 1):
            sys.stdout.write(f"{number:3d} {step}\n")


if __name__ == "__main__":
    main()
