"""A table of the region layout whose regions several of our own writers claim, write, flush and lose.

A writer's store may fail it at any call: the process is killed before or after it is carried out, an answer is lost, or
others work in between. What must hold for whatever a writer returns or raises is checked here, right behind it; what
is read is checked by the witness.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from memwal_ops import open_table
from memwal_ops.errors import StorageError, StoreUnavailableError, WriterFencedError
from memwal_ops.memwal import RegionWriter, WriterLimits, create_mem_wal
from memwal_ops.storage.wrapper import StoreWrapper
from tests.campaigns.sim.landed import LandedModel, Log, Stored, stored
from tests.campaigns.sim.writers import RegionTable
from tests.support.dying_store import Killed
from tests.support.tables.schemas import key_table, row_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import lance

How = Literal["killed before", "killed after", "answer lost", "unavailable", "others"]
KILLED, FAILED, FENCED = "a writer that was killed", "a writer that the store failed", "a writer that was fenced"
ACKNOWLEDGED = "acknowledged rows"
# So many writers of a region stay around, all but the newest of them fenced, whether they know it or not.
_MOST = 4


@dataclass
class Fault:
    """What happens at one of a writer's next calls of its store."""

    at: int
    how: How
    others: Callable[[], None] | None = None
    happened: bool = False


class FallibleStore(StoreWrapper):
    """A store that fails one call as it is told to; behind a kill all of them."""

    def __init__(self, inner: Any, fault: Fault | None) -> None:
        super().__init__(inner)
        self.fault = fault
        self._dead = False

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        if self._dead:
            raise Killed
        fault = self.fault
        if fault is not None:
            fault.at -= 1
        if fault is None or fault.at > 0:
            return method(*arguments, **named)
        self.fault, fault.happened = None, True
        self._dead = fault.how.startswith("killed")
        if fault.how == "killed before":
            raise Killed
        if fault.how == "unavailable":
            raise StoreUnavailableError(f"{verb} was not carried out")
        if fault.others is not None:
            fault.others()
        result = method(*arguments, **named)
        if fault.how == "killed after":
            raise Killed
        if fault.how == "answer lost":
            raise StoreUnavailableError(f"the answer to {verb} was lost")
        return result


@dataclass
class Write:
    """Rows of one put or delete; ``end`` is the log's when it began."""

    rows: list[Stored]
    end: int


@dataclass
class Held:
    """One writer, and what is known of it.

    Attributes:
        schema: the table's columns when it began.
        busy: it is in the middle of a call: others work meanwhile.
        fenced: it said so, and must never acknowledge anything again.
        waiting: what is written and not durable.
        last: entry and place of the last write that it acknowledged.
    """

    region: str
    writer: RegionWriter
    store: FallibleStore
    schema: pa.Schema
    durable: bool
    busy: bool = False
    fenced: bool = False
    waiting: list[Write] = field(default_factory=list)
    last: tuple[int, int] = (0, -1)


class WriterTable(RegionTable):
    """Tables that ``RegionWriter`` writes."""

    model: LandedModel

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.model = LandedModel(self.model.keys, self.columns)
        self.held: dict[str, list[Held]] = {region: [] for region in self.regions}
        #: What happens to the next writer that begins.
        self.fault: Fault | None = None
        #: How often a writer's call ended how.
        self.outcomes: Counter[str] = Counter()
        self._epochs: set[tuple[str, int]] = set()
        self._tried: dict[tuple[str, int], set[Stored]] = defaultdict(set)

    def _initialize(self, dataset: lance.LanceDataset) -> None:
        create_mem_wal(self.uri)

    def look(self) -> None:
        """See what stands in the logs by now: nothing that nobody tried to write."""
        self.model.look(self.uri)
        for region, log in self.model.logs.items():
            if log.end:
                landed = log.entries[log.end]
                strange = [row for row in landed.rows if row not in self._tried[region, landed.epoch]]
                assert not strange, (
                    f"entry {log.end} of {region}: no writer of epoch {landed.epoch} wrote {strange[:3]}"
                )
        self.stalled = {region: [one for one in held[:-1] if not one.busy] for region, held in self.held.items()}

    def log(self, region: str) -> Log:
        """What stands in a region's log."""
        return self.model.logs.get(region, Log())

    # -- what a history does

    def put(self, numbers: Sequence[int]) -> None:
        self._write(numbers, deletes=False)

    def delete(self, numbers: Sequence[int]) -> None:
        self._write(numbers, deletes=True)

    def claim(self, region: str) -> Held | None:
        """Another writer takes the region over; the ones before it stay. None where it did not live to see it."""
        table, schema, fault = open_table(self.uri), self.base_schema, self.fault
        self.fault = None
        others = fault is not None and fault.how == "others"
        store = FallibleStore(table.store, fault)
        durable = self.rng.random() < 0.7
        rows = self.rng.choice([20, 1_000_000])  # with few, a put that comes too soon flushes first
        limits = WriterLimits(wal_puts=self.rng.choice([2, 5]), wal_interval=timedelta(days=1), memtable_rows=rows)
        before = self.log(region).epoch
        try:
            writer = RegionWriter(replace(table, store=store), region, durable=durable, limits=limits)
        except Killed:
            self.outcomes[KILLED] += 1
            return None
        except StorageError:
            assert fault is not None
            self.outcomes[FAILED] += 1
            return None
        except WriterFencedError:
            self.outcomes[FENCED] += 1
            assert others, "a writer that nobody came in front of was fenced in its claim"
            return None
        finally:
            store.fault = None
            self.look()
        assert (region, writer.epoch) not in self._epochs, f"two writers of {region} have epoch {writer.epoch}"
        assert writer.epoch > before
        self._epochs.add((region, writer.epoch))
        held = Held(region, writer, store, schema, durable)
        if not others:
            self._check_recovered(held)
        self.held[region] = [*self.held[region], held][-_MOST:]
        self.look()
        return held

    def flush(self, region: str | None = None) -> None:
        for one in self.regions if region is None else [region]:
            held = self.newest(one) if self.held[one] or self.log(one).unflushed() else None
            if held is not None:
                self.flush_by(held)

    def wake(self, region: str) -> bool:
        """Writers that were fenced, and perhaps do not know it, write; what they return is judged as any other's."""
        for held in list(self.stalled.get(region, ())):
            self.write_by(held)
        return False

    def die_in_flush(self, region: str) -> None:
        held = self.newest(region)
        if held is not None:
            held.store.fault = Fault(self.rng.randint(1, 12), self.rng.choice(["killed before", "killed after"]))
            self.flush_by(held)
            held.store.fault = None

    def evolve(self, dataset: lance.LanceDataset) -> None:
        """Writers are begun again when the columns change: what they had not made durable is lost."""
        super().evolve(dataset)
        self.bury()

    def bury(self) -> None:
        """Let go of all writers."""
        self.held = {region: [] for region in self.regions}
        self.stalled = {}

    # -- one writer

    def newest(self, region: str) -> Held | None:
        """The region's writer; another one, where that is fenced or in the middle of something."""
        held = self.held[region]
        if held and not held[-1].busy and not held[-1].fenced:
            return held[-1]
        return self.claim(region)

    def one_of(self, region: str) -> Held | None:
        """Mostly the region's writer, now and then one of those before it."""
        older = self.stalled.get(region)
        return self.rng.choice(older) if older and self.rng.random() < 0.2 else self.newest(region)

    def write_by(self, held: Held) -> None:
        """A writer puts or deletes some rows of its region."""
        at = self.regions.index(held.region)
        numbers = self._some(self._live[at], 6) + [self._fresh(at) for _ in range(self.rng.randint(1, 4))]
        numbers += self.rng.choices(numbers, k=self.rng.randint(0, 2))
        self._write(numbers, deletes=self.rng.random() < 0.25, held=held)

    def flush_by(self, held: Held) -> None:
        """A generation of all that is written; what waited is durable then."""
        fenced = self.log(held.region).epoch > held.writer.epoch
        if self._call(held, held.writer.flush):
            assert not fenced, f"a writer of epoch {held.writer.epoch} flushed, and {held.region} has another one"
            self._acknowledge(held)

    def flush_log_by(self, held: Held) -> None:
        """What waits becomes durable."""
        waits = bool(held.waiting)
        fenced = self._is_written_by_a_later_one(held)
        if self._call(held, held.writer.flush_log):
            assert not waits or not fenced, f"a fenced writer of {held.region} brought rows to the log"
            self._acknowledge(held)

    def work_in_background(self, held: Held) -> None:
        """What a writer's thread does now and then; it reports nothing."""
        self._call(held, held.writer._work_once, may_be_fenced=True)

    def end(self, held: Held) -> None:
        """A writer ends as it should, and flushes; one that knows that it is fenced has nothing to flush."""
        knew, fenced = held.fenced, self.log(held.region).epoch > held.writer.epoch
        if self._call(held, held.writer.close, may_be_fenced=True) and not knew:
            assert not fenced, f"a writer of epoch {held.writer.epoch} flushed, and {held.region} has another one"
            self._acknowledge(held)
        self._let_go(held)

    # -- what must hold

    def _write(self, numbers: Sequence[int], *, deletes: bool, held: Held | None = None) -> None:
        region = self._one_region(numbers)
        held = held or self.one_of(region)
        if held is None:
            return
        self._stamp += 1
        if deletes:
            rows = key_table(held.schema, self.key, numbers)
        else:
            rows = row_table(held.schema, self.key, numbers, self.rng, self._stamp)
        wanted = [stored(row, self.model.keys, deleted=deletes) for row in rows.to_pylist()]
        self._tried[region, held.writer.epoch].update(wanted)
        write = Write(wanted, self.log(region).end)
        held.waiting.append(write)
        fenced = self._is_written_by_a_later_one(held)
        if not self._call(held, lambda: (held.writer.delete if deletes else held.writer.put)(rows)):
            # It may be there; nobody promised it.
            held.waiting = [one for one in held.waiting if one is not write]
        elif held.durable:
            assert not fenced, f"a writer of epoch {held.writer.epoch} wrote behind a later one of {region}"
            self._acknowledge(held)
        at = self.regions.index(region)
        for number in numbers:
            (self._dead if deletes else self._live)[at][number] = None
            (self._live if deletes else self._dead)[at].pop(number, None)

    def _call(self, held: Held, call: Callable[[], object], *, may_be_fenced: bool = False) -> bool:
        """Whether it returned; what a writer raises instead is judged, and one that died is not seen again."""
        held.busy = True
        may_fail = held.store.fault is not None
        try:
            call()
        except Killed:
            self.outcomes[KILLED] += 1
            self._let_go(held)
            return False
        except StorageError:
            self.outcomes[FAILED] += 1
            assert may_fail
            return False
        except WriterFencedError:
            self.outcomes[FENCED] += 1
            self.look()
            assert self.log(held.region).epoch > held.writer.epoch, "it was fenced, and nobody claimed its region"
            held.fenced = True
            held.waiting.clear()
            return False
        finally:
            held.busy = False
            self.look()
        assert may_be_fenced or not held.fenced, f"a fenced writer of {held.region} went on"
        return True

    def _acknowledge(self, held: Held) -> None:
        """What waited is durable: it stands in the log, in the order in which it was written."""
        log = self.log(held.region)
        for write in held.waiting:
            found = _place(log, write, held.last)
            assert found is not None, (
                f"{held.region}: {len(write.rows)} rows were acknowledged, and are not in the log behind {held.last}"
            )
            held.last = found
            self.outcomes[ACKNOWLEDGED] += len(write.rows)
        held.waiting.clear()

    def _check_recovered(self, held: Held) -> None:
        """A writer that begins has in memory what the log has behind the last flush."""
        found = [
            self._by_trait(stored({k: v for k, v in row.items() if k != "_tombstone"}, self.model.keys,
                                  deleted=row["_tombstone"]))
            for part in held.writer.unflushed()
            for row in part.to_pylist()
        ]  # fmt: skip
        wanted = [self._by_trait(row) for row in self.log(held.region).unflushed()]
        assert found == wanted, f"a writer of {held.region} recovered {len(found)} rows, and the log has {len(wanted)}"

    def _by_trait(self, row: Stored) -> Stored:
        return row[0], tuple((self.columns.trait(name), value) for name, value in row[1])

    def _is_written_by_a_later_one(self, held: Held) -> bool:
        log = self.log(held.region)
        return bool(log.entries) and log.entries[log.end].epoch > held.writer.epoch

    def _let_go(self, held: Held) -> None:
        self.held[held.region] = [one for one in self.held[held.region] if one is not held]


def _place(log: Log, write: Write, behind: tuple[int, int]) -> tuple[int, int] | None:
    """Entry and place of a write's rows behind that of another; None: they are nowhere."""
    size = len(write.rows)
    for entry in sorted(one for one in log.entries if one > write.end):
        rows = log.entries[entry].rows
        for at in range(len(rows) - size + 1):
            if (entry, at) > behind and rows[at : at + size] == write.rows:
                return entry, at
    return None
