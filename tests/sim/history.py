"""Histories with what the collector's own do not ask: damage, slow flushes, what indexes claim, who let go of what.

Built on tests.crash.gc_history, whose witness looks at everything after each step. A history is
its seed: the same seed gives the same steps, and the trail is printed where one fails.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from memwal_ops import open_table
from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.catchup_claims import covered_generations
from memwal_ops.jobs import gc, merge
from tests.crash.gc_history import PATIENT, History, RegionTable
from tests.tables import wire
from tests.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.core.table import Table

# Steps of our own, and those that bring the cycle round: what is held by versions goes only behind an expiry.
_EXTRA = {"lose_generation": 0.07, "slow_flush": 0.07, "expire": 0.1, "gc": 0.1}


class SimHistory(History):
    """One long history. What it holds each step to, beside the witness: see the methods."""

    steps = (10, 40)

    def step(self) -> None:
        """One step of any kind, then every invariant."""
        dice = self.rng.random()
        for kind, share in _EXTRA.items():
            if dice < share:
                self._do(kind)
                self.witness.look(self.kinds)
                self.kinds.clear()
                break
            dice -= share
        else:
            super().step()
        self._check_claims(open_table(self.uri))

    # -- more steps

    def _lose_generation(self) -> None:
        """A generation's directory is away for as long as a merge runs; the merge must not pass it."""
        files = Files(self.uri)
        progress = wire.progress(files)
        for region in wire.regions(files):
            waiting = {
                number: path
                for number, path in wire.region_manifest(files, region).generations.items()
                if number > progress.get(region, 0)
            }
            if not waiting:
                continue
            number = self.rng.choice(sorted(waiting))
            folder = f"{self.uri}/_mem_wal/{region}/{waiting[number]}"
            shutil.move(folder, f"{self.uri}-away")
            try:
                report = merge.apply(open_table(self.uri), merge.MergeOptions())
            finally:
                shutil.move(f"{self.uri}-away", folder)
            assert report.decision == "blocked"
            assert wire.progress(Files(self.uri)).get(region, 0) < number, "a merge passed a generation that was away"
            return

    def _slow_flush(self) -> None:
        """A collector runs while a writer has written a generation's files and did not publish them yet."""
        if not isinstance(self.made, RegionTable):
            return
        region = self.rng.choice(self.made.regions)
        self.made._dying = True
        try:
            folder = self.made.flush_generation(region)
        finally:
            self.made._dying = False
        before = set(Files(self.uri).listing(folder))
        gc.apply(open_table(self.uri), PATIENT)
        assert before <= set(Files(self.uri).listing(folder)), "the files of a flush under way are gone"
        self.made._publish(region)
        self.kinds.add("gc")

    # -- more invariants

    def _check_claims(self, table: Table) -> None:
        """``index_catchup`` claims nothing that the fragments do not bear out, where only our jobs write it."""
        for name, index in base_indexes(table).items():
            said = table.index.index_catchup.get(name)
            if said is None or not coverage(index.covered, table.manifest).uncovered_rows:
                continue
            merged = table.index.merged_generations
            assert {region: said.get(region, 0) for region in merged} != dict(merged) or not merged, (
                f"index {name} lacks rows and is said to cover all of {merged}"
            )

    def _gc(self) -> None:
        """A collector lets go of nothing that an index still needs, or that is not merged."""
        files = Files(self.uri)
        before = {region: wire.region_manifest(files, region).generations for region in wire.regions(files)}
        super()._gc()
        table = open_table(self.uri)
        covered = covered_generations(table)
        for region_id in table.regions.region_ids:
            left = wire.region_manifest(files, str(region_id)).generations
            for number in before.get(str(region_id), {}).keys() - left.keys():
                assert number <= table.index.merged_generations.get(region_id, 0)
                for name, reached in covered.items():
                    assert number <= reached.get(region_id, 0), f"index {name} still needs generation {number}"


def run_histories(seeds: Iterable[int], folder: str) -> int:
    """Run them one after the other; how many."""
    ran = 0
    for seed in seeds:
        history = SimHistory(seed, folder)
        history.run()
        shutil.rmtree(history.uri)
        ran += 1
    return ran


def main() -> None:
    """``SEED=7 python -m tests.sim.history``: one history again, step by step."""
    import tempfile

    seed = int(os.environ["SEED"])
    with tempfile.TemporaryDirectory() as folder:
        history = SimHistory(seed, folder)
        try:
            history.run()
        finally:
            print("\n".join(f"{number:3d} {step}" for number, step in enumerate(history.trail, 1)))  # noqa: T201
    print(f"seed {seed}: all invariants held")  # noqa: T201


if __name__ == "__main__":
    main()
