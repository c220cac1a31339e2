"""Seeded histories: a history is its seed, and the same seed gives the same steps.

``SEED=7 python -m tests.campaigns.sim.history`` runs one again, step by step.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from typing import TYPE_CHECKING

from tests.campaigns.sim.steps import Steps, make_table
from tests.campaigns.traces.protocol import Protocol
from tests.campaigns.traces.recorder import recording
from tests.support.calm import calm

if TYPE_CHECKING:
    from collections.abc import Iterable

# Fewest and most steps; more histories are short than long, as most of what goes wrong takes few steps.
STEPS = (8, 40)
# A turn that should be idle is taken all the same now and then: jobs must do nothing well.
_IDLE = 0.1
# In so many histories a backup is restored beneath a collector, on a copy of the table.
_RESTORED = 0.3


class History:
    """One long history."""

    again = "make replay SEED={}"

    def __init__(self, seed: int, folder: str) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        self.steps = self.make_steps(f"{folder}/{seed}.lance")

    def make_steps(self, uri: str) -> Steps:
        """The table of the seed, and the steps that it may take."""
        return Steps(make_table(uri, self.seed), self.rng)

    def run(self) -> Counter[str]:
        """All steps, then the end; how often each had an effect."""
        with calm(), recording(self.steps.uri, Protocol().accept):
            return self._run()

    def _run(self) -> Counter[str]:
        try:
            steps = self.rng.randint(STEPS[0], self.rng.randint(*STEPS))
            beside = random.Random(f"{self.seed} beside")
            restored_at = beside.randrange(steps) if beside.random() < _RESTORED else None
            for number in range(steps):
                if number == restored_at:
                    self.steps.restored_under_gc(beside)
                weights = self.steps.weights
                kinds = list(weights) if self.rng.random() < _IDLE else self.steps.possible()
                self.steps.take(self.rng.choices(kinds, [weights[kind] for kind in kinds])[0])
            self.steps.end(posts=bool(self.rng.randrange(2)), go_on=self.seed % 3 == 0)
        except BaseException as error:
            trail = "\n".join(f"{number:3d} {step}" for number, step in enumerate(self.steps.trail, 1))
            error.add_note(f"seed {self.seed}; again by: {self.again.format(self.seed)}\n{trail}")
            raise
        finally:
            self.steps.close()
        return self.steps.effects + self.steps.leases.effects


def run_histories(seeds: Iterable[int], folder: str, kind: type[History] = History) -> Counter[str]:
    """Run them one after the other; how often each step had an effect, and under "histories" how many there were."""
    effects: Counter[str] = Counter()
    for seed in seeds:
        place = f"{folder}/{seed}"
        effects += kind(seed, place).run()
        effects["histories"] += 1
        shutil.rmtree(place)
    return effects


def main() -> None:
    """One history again."""
    seed = int(os.environ["SEED"])
    with tempfile.TemporaryDirectory() as folder:
        history = History(seed, folder)
        history.run()
        for number, step in enumerate(history.steps.trail, 1):
            sys.stdout.write(f"{number:3d} {step}\n")
    sys.stdout.write(f"seed {seed}: all invariants held\n")


if __name__ == "__main__":
    main()
