"""The way of one step: it is taken, told, and followed by a look at everything.

A step says whether it had an effect: a flush of nothing has none. All that a step chooses it takes
from ``rng``, so that the driver decides.
"""

from __future__ import annotations

import random
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from memwal_ops import open_table
from tests.campaigns.sim.leases import Leases
from tests.campaigns.sim.witness import Witness
from tests.campaigns.sim.writers import RegionTable, ShardTable
from tests.support.tables import wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.lance.table import Table

#: How often each step is taken.
WEIGHTS = {
    "write": 8, "delete": 2, "flush": 6, "burst": 5, "claim": 2, "wake": 2, "die_in_flush": 1, "slow_flush": 2,
    "merge": 5, "catchup": 4, "snapshot": 3, "compact": 3, "expire": 5, "gc": 7, "maintain": 5, "owner": 1,
    "tag": 2, "untag": 1, "branch": 2, "unbranch": 1, "hold": 2, "release": 1, "restore": 3,
    "add_column": 1, "drop_column": 1, "rename_column": 1, "create_index": 2, "drop_index": 1,
    "open": 2, "job_of_before": 6, "read_version": 1, "reader": 4, "later": 3, "copy": 2, "job_on_copy": 4,
    "crash": 7, "overtaken": 7, "lose_generation": 4,
}  # fmt: skip
Job = Literal["merge", "catchup", "snapshot", "compact", "expire", "gc"]
JOBS: tuple[Job, ...] = ("merge", "catchup", "snapshot", "compact", "expire", "gc")
# So many storage calls a job makes at most on these tables, more or less.
CALLS: dict[Job, int] = {"merge": 40, "catchup": 40, "snapshot": 24, "compact": 30, "expire": 40, "gc": 70}
#: What a test calls an hour's quarter: so much older everything gets by the step "later".
PASSING = timedelta(minutes=20)
# So much may wait in memory before a writer is expected to flush.
_ENOUGH = 60
# No more columns than that, and no more versions that are kept: with all kept nothing is ever collected.
_MANY = 5


class Driver:
    """One table, what is known of it, and which step it takes next."""

    weights = WEIGHTS
    witness_type = Witness

    def __init__(self, made: RegionTable | ShardTable, rng: random.Random) -> None:
        self.made, self.rng = made, rng
        self.uri = made.uri
        self.witness = self.witness_type(made)
        self.witness.look(())
        self.tags: dict[str, int] = {}
        self.branches: dict[str, int] = {}
        self.holds: dict[int, int] = {}
        # Expiries that were killed announce their versions for a day.
        self.announced = False
        # Somebody's handle, opened a while ago, and perhaps a plan made on it.
        self.opened: Table | None = None
        self.twin: Witness | None = None
        self.trail: list[str] = []
        self.kinds: set[str] = set()
        #: How often each step had an effect.
        self.effects: Counter[str] = Counter()
        # The jobs that are in the middle: grace is what protects what they are about to read.
        self.beside: list[str] = []
        self.leases = Leases(made.seed)
        self._names = 0

    def take(self, kind: str, **arguments: Any) -> None:
        """One step, and a look at everything."""
        self.do(kind, **arguments)
        self.look()

    def look(self) -> None:
        self.witness.look(self.kinds)
        self.kinds.clear()
        lost = self._protected() - {number for branch, number in self.witness.versions if not branch}
        assert not lost, f"versions {lost} are gone: tags {self.tags}, branches {self.branches}, holds {self.holds}"

    def do(self, kind: str, **arguments: Any) -> None:
        self.trail.append("  " * len(self.beside) + kind)
        self.kinds.add(kind)
        if getattr(self, f"_{kind}")(**arguments):
            self.effects[kind] += 1

    def possible(self) -> list[str]:
        """The steps that should have an effect now, as far as the witness knows; the others are idle turns."""
        return [kind for kind in self.weights if self.may(kind)]

    def may(self, kind: str) -> bool:
        witness = self.witness
        main = [number for branch, number in witness.versions if not branch]
        newest = witness.versions["", max(main)]
        match kind:
            case "flush":
                return self._unflushed() > 0
            case "write" | "delete" | "burst":
                return self._unflushed() < _ENOUGH
            case "merge" | "lose_generation" | "reader":
                return self._waiting(newest.progress)
            case "catchup":
                said = [newest.claims.get(name) for name in newest.indexes]
                return any(newest.progress.values()) and any(one != newest.progress for one in said)
            case "compact":
                return len({*newest.fragments.values()}) > 1
            case "expire":
                return len({*main} - self._protected()) > 1
            case "gc":
                return any("_gen_" in path for path in witness.files)
            case "restore":
                return any(
                    one.has_mem_wal and one.progress != newest.progress
                    for key, one in witness.versions.items()
                    if not key[0]
                )
            case "read_version":
                return len(witness.versions) > 1
            case "drop_index":
                return bool(newest.indexes)
            case "untag" | "unbranch" | "release":
                return bool({"untag": self.tags, "unbranch": self.branches, "release": self.holds}[kind])
            case "tag" | "branch" | "hold":
                return len(self.tags) + len(self.branches) + len(self.holds) < _MANY
            case "add_column":
                return len(self.made.base_schema) < _MANY
            case "wake":
                return any(self.made.stalled.values())
            case "job_of_before":
                return self.opened is not None and self.opened.version < max(main)
            case "copy":
                return isinstance(self.made, ShardTable) and self.twin is None and len(witness.generations) > 0
            case "job_on_copy":
                return self.twin is not None
            case "slow_flush":
                return isinstance(self.made, RegionTable)
            case _:
                return True

    def _waiting(self, progress: Mapping[str, int]) -> bool:
        return any(int(path.rsplit("_", 1)[-1]) > progress.get(region, 0) for region, path in self.witness.generations)

    def _unflushed(self) -> int:
        """Operations that no generation holds."""
        flushed = self.witness._flushed()
        found = 0
        for operation in reversed(self.made.model.log):
            if operation.generation <= flushed.get(operation.region, 0):
                break
            found += 1
        return found

    def _likely(self, *kinds: Job) -> Job:
        """One of these jobs, if possible one that has something to do."""
        return self.rng.choice([kind for kind in kinds if self.may(kind)] or kinds)

    def close(self) -> None:
        if isinstance(self.made, ShardTable):
            self.made.bury()
            self.made.close()

    def _say(self, more: str) -> None:
        self.trail[-1] += f" {more}"

    def _versions(self) -> list[int]:
        return sorted(wire.manifest_names(Files(self.uri)))

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._names}"

    def _protected(self) -> set[int]:
        return {*self.tags.values(), *self.branches.values(), *self.holds.values()}

    def _table(self) -> Table:
        return open_table(self.uri)
