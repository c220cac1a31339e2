"""What a region's writers promised: one line before each operation, one after its acknowledgement.

The lines are enough to make every row again: rows are a function of (seed, region, number of the
operation, blocks that it updates). So writers, readers and the judge need to share nothing but this
file, and a writer may be killed between any two instructions.

An operation's number is ``incarnation << 16 | count``: each process that claims the region is a new
incarnation, so that numbers rise with the log, and a writer that stalled and wakes again cannot take
a number of the one that replaced it. A put has a *block* of keys of its own, by its number:

* slot 0, the birth row: never touched again, so that it tells for ever whether the put landed;
* slot 1, the grave row: at most one delete takes it, which tells the same of that delete;
* all others: updated, deleted and put back by later operations, at random.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from tests.support.tables.schemas import PRIMARY_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

SLOTS = 1 << 11
_COUNTS = 16
_REGION = 44
BIRTH, GRAVE = 0, 1
_FREE = 2

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY),
        pa.field("seq", pa.int64()),
        pa.field("ord", pa.int32()),
        pa.field("check", pa.int64()),
    ]
)
KEYS = pa.schema([SCHEMA.field("id")])


def region_id(region: int) -> str:
    """The id of the region of that number."""
    return str(uuid.UUID(int=0x50A << 100 | region + 1, version=4))


def region_of(ids: Numbers) -> Numbers:
    """The number of the region that writes each key."""
    return ids >> _REGION


def number(incarnation: int, count: int) -> int:
    """The number of an operation."""
    return incarnation << _COUNTS | count


def keys(region: int, block: int, slots: Numbers) -> Numbers:
    """The keys of a block."""
    return (np.int64(region) << _REGION) | (np.int64(block) * SLOTS + slots)


def checksum(ids: Numbers, seq: Numbers, order: Numbers) -> Numbers:
    """Of a row, so that no value of one row can stand in another."""
    with np.errstate(over="ignore"):
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= seq.astype(np.uint64) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(29)
        mixed *= order.astype(np.uint64) * np.uint64(2) + np.uint64(0xD6E8FEB86659FD93)
    return mixed.astype(np.int64)


@dataclass(frozen=True)
class Operation:
    """A put (``rows`` of them) or a delete; ``blocks`` are the older puts whose keys it takes."""

    seq: int
    kind: str
    rows: int
    blocks: tuple[int, ...]

    def keys(self, seed: int, region: int) -> Numbers:
        """The keys in their order; one may stand there twice."""
        rng = np.random.default_rng([seed, region, self.seq])
        if self.kind == "delete":
            own = [keys(region, self.blocks[0], np.array([GRAVE]))]
            wanted = self.rows - 1
        else:
            fresh = self.rows if not self.blocks else self.rows // 2
            own = [keys(region, self.seq, np.arange(fresh))]
            wanted = self.rows - fresh
        share = -(-wanted // max(1, len(self.blocks)))
        for block in self.blocks:
            own.append(keys(region, block, rng.integers(_FREE, SLOTS, share)))
        return np.concatenate(own)[: self.rows]

    def table(self, seed: int, region: int) -> pa.Table:
        """What the writer hands to pylance."""
        ids = self.keys(seed, region)
        if self.kind == "delete":
            return pa.table({"id": np.unique(ids)}, schema=KEYS)
        order = np.arange(len(ids), dtype=np.int64)
        seq = np.full(len(ids), self.seq, np.int64)
        columns = {"id": ids, "seq": seq, "ord": order.astype(np.int32), "check": checksum(ids, seq, order)}
        return pa.table(columns, schema=SCHEMA)


@dataclass
class Ledger:
    """The lines of one region."""

    path: Path
    tried: dict[int, Operation] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, folder: str, region: int) -> Ledger:
        """As it stands now."""
        ledger = cls(Path(folder) / f"ledger-{region}.jsonl")
        if ledger.path.exists():
            # A line that was cut in the middle says nothing: its operation was not begun, or not acknowledged.
            for line in ledger.path.read_text().split("\n")[:-1]:
                ledger._take(json.loads(line))
        return ledger

    def _take(self, line: dict[str, object]) -> None:
        if "acknowledged" in line:
            self.acknowledged.add(int(line["acknowledged"]))  # type: ignore[call-overload]
        else:
            one = Operation(line["seq"], line["kind"], line["rows"], tuple(line["blocks"]))  # type: ignore[arg-type]
            self.tried[one.seq] = one

    def begin(self, operation: Operation) -> None:
        """Before the first byte of it leaves the process."""
        self._append(vars(operation))
        self.tried[operation.seq] = operation

    def acknowledge(self, operation: Operation) -> None:
        """After pylance's call came back."""
        self._append({"acknowledged": operation.seq})
        self.acknowledged.add(operation.seq)

    def _append(self, line: dict[str, object]) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(handle, f"{json.dumps(line)}\n".encode())
            os.fsync(handle)
        finally:
            os.close(handle)

    def rows(self) -> int:
        """Rows of all acknowledged puts."""
        return sum(self.tried[seq].rows for seq in self.acknowledged if self.tried[seq].kind == "put")

    def operations(self) -> list[Operation]:
        """All that were tried, in the order of the log."""
        return [self.tried[seq] for seq in sorted(self.tried)]


class Sheet:
    """The rows of one region by key, as arrays: 0 where a key does not stand, else its row's ``seq`` and ``ord``."""

    def __init__(self, region: int, blocks: Iterable[int]) -> None:
        self.region = region
        self.blocks = np.array(sorted(blocks), dtype=np.int64)
        self.seq = np.zeros(len(self.blocks) * SLOTS, np.int64)
        self.ord = np.zeros(len(self.blocks) * SLOTS, np.int64)

    def places(self, ids: Numbers) -> Numbers:
        """Where keys stand; KeyError for those that no operation could have made."""
        inner = ids & ((1 << _REGION) - 1)
        block = inner // SLOTS
        at = np.searchsorted(self.blocks, block)
        known = at < len(self.blocks)
        known[known] = self.blocks[at[known]] == block[known]
        if not known.all():
            raise KeyError(f"region {self.region} has keys that nobody ever wrote: {ids[~known][:5].tolist()}")
        return at * SLOTS + inner % SLOTS

    def put(self, ids: Numbers, seq: Numbers, order: Numbers) -> None:
        """Rows in their order; the last of a key wins."""
        at = self.places(ids)
        self.seq[at], self.ord[at] = seq, order

    def delete(self, ids: Numbers) -> None:
        """Deletes of keys, there or not."""
        self.put(ids, np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64))

    def replay(self, operations: Iterable[Operation], seed: int) -> Sheet:
        """The same keys after these operations."""
        for one in operations:
            ids = one.keys(seed, self.region)
            if one.kind == "delete":
                self.delete(ids)
            else:
                self.put(ids, np.full(len(ids), one.seq), np.arange(len(ids)))
        return self

    def at(self, block: int, slot: int) -> int:
        """The ``seq`` that stands at one key."""
        return int(self.seq[np.searchsorted(self.blocks, block) * SLOTS + slot])

    def differences(self, other: Sheet) -> list[str]:
        """Where two sheets of the same blocks are not equal, in words."""
        at = np.flatnonzero((self.seq != other.seq) | (self.ord != other.ord))
        return [
            f"key {int(keys(self.region, int(self.blocks[one // SLOTS]), np.int64(one % SLOTS)))}: "
            f"(seq {self.seq[one]}, ord {self.ord[one]}) instead of (seq {other.seq[one]}, ord {other.ord[one]})"
            for one in at.tolist()
        ]


def new_blocks(operations: Iterable[Operation]) -> Iterator[int]:
    """The blocks that these made."""
    return (one.seq for one in operations if one.kind == "put")


def judge(sheet: Sheet, ledger: Ledger, seed: int, *, whole: bool) -> int:
    """Whether rows that a reader read are the state after a prefix of the log; the last operation of that prefix.

    Args:
        sheet: what was read.
        ledger: read after that.
        seed: of the run.
        whole: the prefix must be all that was acknowledged.

    Raises:
        AssertionError: something acknowledged is lost, or something else stands.
    """
    operations = ledger.operations()
    # Only the first row shows whether an unacknowledged put was stored; for deletes, the tombstone.
    landed = {one.seq for one in operations if one.kind == "put" and sheet.at(one.seq, BIRTH)}
    landed |= {
        one.seq
        for one in operations
        if one.kind == "delete" and one.blocks[0] in landed and not sheet.at(one.blocks[0], GRAVE)
    }
    last = max(ledger.acknowledged if whole else landed, default=0)
    lost = sorted(seq for seq in ledger.acknowledged if seq <= last and seq not in landed)
    where = f"region {sheet.region} up to operation {last}"
    assert not lost, f"{where}: {len(lost)} acknowledged operations are lost, e.g. {lost[:5]}"
    wanted = Sheet(sheet.region, sheet.blocks.tolist()).replay([ledger.tried[seq] for seq in sorted(landed)], seed)
    wrong = sheet.differences(wanted)
    assert not wrong, f"{where}: {len(wrong)} keys are wrong, e.g. " + "; ".join(wrong[:5])
    return max(landed, default=0)


def choose(
    ledger: Ledger, seq: int, rng: np.random.Generator, sizes: Sequence[int], *, deletes: bool = True
) -> Operation:
    """The next operation of a writer."""
    puts = [one.seq for one in ledger.tried.values() if one.kind == "put"]
    buried = {one.blocks[0] for one in ledger.tried.values() if one.kind == "delete"}
    # Of its own puts only: one that was stalled does not know what the one that replaced it has deleted.
    own = [block for block in puts if block >> _COUNTS == seq >> _COUNTS]
    graves = [block for block in own if block in ledger.acknowledged and block not in buried]
    some = rng.choice(puts, min(len(puts), int(rng.integers(1, 5))), replace=False) if puts else ()
    older = [int(block) for block in some]
    if deletes and graves and rng.random() < 0.2:
        grave = graves[int(rng.integers(len(graves)))]
        return Operation(seq, "delete", int(rng.integers(2, 200)), (grave, *older))
    return Operation(seq, "put", int(rng.integers(*sizes)), tuple(older))
