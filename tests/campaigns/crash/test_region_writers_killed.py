"""Writers of regions that are killed in a loop and replaced, beside merge and gc: every acknowledged row is there.

A minute by default; ``WRITER_SECONDS=600`` is ten. Half of the time the successor opens the region while the one before
still writes, which is then fenced, and killed a moment later.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

import lance
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.memwal import RegionWriter, create_mem_wal, read
from tests.campaigns.crash.region_writer_process import GRACE_SECONDS, rows
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

SECONDS = float(os.environ.get("WRITER_SECONDS", "60"))
SEED = env_number("WRITER_SEED", 1 + CAMPAIGN_SEED)
REGIONS = 2
# Of a gc that would take what a reader, a flush or a stalled writer of this test still needs, there is no guarantee.
GC: dict[str, object] = {
    "reader_grace": f"{GRACE_SECONDS}s", "orphan_min_age": "60s", "fence_retention": "60s", "manifest_retention": 3,
    "drain_after": "0s", "allow_unsafe": True,
}  # fmt: skip


@dataclass
class Home:
    """One region, its ledgers, and the processes that write into it."""

    uri: str
    folder: Path
    first_key: int
    region: UUID = field(default_factory=uuid4)
    incarnation: int = 0
    alive: list[subprocess.Popen[bytes]] = field(default_factory=list)
    kills: int = 0

    def ledger(self, incarnation: int) -> Path:
        return self.folder / f"{self.region}-{incarnation}.ledger"

    def start(self) -> None:
        self.incarnation += 1
        given = (self.uri, self.region, self.incarnation, self.first_key, self.ledger(self.incarnation))
        command = [sys.executable, "-m", "tests.campaigns.crash.region_writer_process", *map(str, given)]
        with self.ledger(self.incarnation).with_suffix(".err").open("wb") as errors:
            self.alive.append(subprocess.Popen(command, stderr=errors, env={**os.environ, "RUST_LOG": "off"}))

    def kill_oldest(self) -> None:
        process = self.alive.pop(0)
        if process.poll() is None:
            process.kill()
            self.kills += 1
        first = self.incarnation - len(self.alive)
        told = self.ledger(first).with_suffix(".err").read_text()
        assert process.wait(600) in {0, -9}, f"it failed by itself: {told}"


@dataclass
class Promises:
    """What the writers were told, and what they were about to do."""

    acknowledged: dict[int, int] = field(default_factory=dict)
    """The last acknowledged stamp of each key."""
    possible: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Per key the stamps that it may have: the last acknowledged one, and those that were tried since."""
    deletes: set[tuple[int, int]] = field(default_factory=set)
    """Keys and stamps that deleted them."""

    def add(self, ledger: Path) -> None:
        pending: list[tuple[int, int]] = []
        for line in ledger.read_text().splitlines(keepends=True) if ledger.exists() else ():
            if not line.endswith("\n"):
                return  # cut off by the kill
            what, stamp, *key = line.split()
            if what == "ack":
                for one, stamped in pending:
                    self.acknowledged[one] = stamped
                    self.possible[one] = {stamped}
                pending = []
                continue
            pending.append((int(key[0]), int(stamp)))
            self.possible[int(key[0])].add(int(stamp))
            if what == "gone":
                self.deletes.add((int(key[0]), int(stamp)))

    def judge(self, found: dict[int, dict[str, object]]) -> None:
        """Compare what is read with all of it."""
        for key, stamps in self.possible.items():
            row = found.get(key)
            if row is not None:
                assert row["text"] == f"{key}/{row['stamp']}"
                assert row["stamp"] in stamps, f"key {key} has {row['stamp']}, and none of {sorted(stamps)}"
                assert (key, row["stamp"]) not in self.deletes, f"key {key} was deleted"
            elif key in self.acknowledged:
                assert {(key, one) for one in stamps} & self.deletes, f"key {key} is lost: {sorted(stamps)}"
        assert found.keys() <= {-1, *self.possible}


def enough(homes: list[Home]) -> bool:
    """Whether several writers were killed, and two came as far as to an acknowledgement."""
    acknowledging = [
        one for home in homes for one in home.folder.glob(f"{home.region}-*.ledger") if "ack" in one.read_text()
    ]
    return sum(home.kills for home in homes) > 2 and len(acknowledging) > 1


def by_key(table: pa.Table) -> dict[int, dict[str, object]]:
    found = {row["id"]: row for row in table.to_pylist()}
    assert len(found) == table.num_rows, "a key is there twice"
    return found


@pytest.mark.req("S0-116", "S0-122", "S0-152", "S0-154", "S0-161", "S0-207", "S0-208")
@pytest.mark.long
@pytest.mark.timeout(2 * SECONDS + 1800)
def test_every_acknowledged_row_is_there(tmp_path: Path) -> None:
    rng, uri = random.Random(SEED), str(tmp_path / "t.lance")
    lance.write_dataset(rows({-1: 0}), uri)
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    create_mem_wal(uri)
    homes = [Home(uri, tmp_path, number * 10**10) for number in range(REGIONS)]
    decisions: set[str] = set()
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end or not enough(homes):
            home = rng.choice(homes)
            if home.alive and (len(home.alive) > 1 or rng.random() < 0.5):
                home.kill_oldest()
            home.start()
            time.sleep(rng.random() * 4)
            decisions.add(run_job(uri, "merge").decision)
            if rng.random() < 0.5:
                decisions.add(run_job(uri, "gc", apply=True, **GC).decision)
    finally:
        for home in homes:
            while home.alive:
                home.kill_oldest()
    promises = Promises()
    for home in homes:
        for incarnation in range(1, home.incarnation + 1):
            promises.add(home.ledger(incarnation))
    assert len(promises.acknowledged) > 30
    assert "merged" in decisions
    promises.judge(by_key(read(uri).scan().to_table()))
    for home in homes:
        RegionWriter(uri, home.region).close()
    promises.judge(by_key(read(uri).scan().to_table()))
    run_job(uri, "merge")
    promises.judge(by_key(lance.dataset(uri).to_table()))
    assert open_table(uri).summary().backlog["generations"] == 0
    run_job(uri, "gc", apply=True, **GC)
    promises.judge(by_key(read(uri).scan().to_table()))
