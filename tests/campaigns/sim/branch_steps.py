"""Steps on branches of a table, beside all that may happen to main; and the history that takes them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import lance

from memwal_ops import open_table
from memwal_ops.errors import CommitConflictError, StorageError, UnsupportedFeatureError
from tests.campaigns.sim.driver import CALLS, JOBS, WEIGHTS
from tests.campaigns.sim.history import History
from tests.campaigns.sim.steps import Steps, make_table
from tests.campaigns.sim.witness import Witness
from tests.support.dying_store import DyingStore, Killed
from tests.support.overtaken import Overtaken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pyarrow as pa

    from tests.support.tables.model import Key, Rows

# A copy of the table would have the branches, too.
_WITHOUT = ("copy", "job_on_copy")
# While a job on a branch is in the middle: what others do to main.
_BESIDE = ("write", "flush", "merge", "catchup", "compact", "gc", "tag", "expire", "owner")
BRANCH_WEIGHTS = {
    **{kind: weight for kind, weight in WEIGHTS.items() if kind not in _WITHOUT},
    "branch": 6, "write_on_branch": 12, "tag_on_branch": 5, "job_on_branch": 16, "crash_on_branch": 5,
    "overtaken_on_branch": 6,
}  # fmt: skip
BRANCH_STEPS = tuple(kind for kind in BRANCH_WEIGHTS if kind.endswith("on_branch"))
_FOLDER = r"tree/[^/]+/"


class BranchWitness(Witness):
    """Also knows what was written to branches. A job on a branch takes nothing outside of it."""

    may_go: ClassVar = {**Witness.may_go, **dict.fromkeys(BRANCH_STEPS, re.compile(rf"{_FOLDER}(?!_refs/).*"))}
    known = re.compile(
        rf"{Witness.known.pattern}|{_FOLDER}(?:data/[^/]+\.lance|_deletions/[^/]+\.(?:arrow|bin)|_indices/.+|_mem_wal_ops/.+"
        r"|_versions/d?\d+\.manifest(?:-[0-9a-f-]{36})?)"
    )

    def __init__(self, made: Any) -> None:
        super().__init__(made)
        #: Per branch the version that it left.
        self.left: dict[str, int] = {}
        #: Per branch the versions that were written to it, with all rows.
        self.written: dict[str, dict[int, Rows]] = {}

    def newest_of(self, branch: str) -> int:
        return max(number for name, number in self.versions if name == branch)

    def _wanted(self, branch: str, number: int, progress: Mapping[str, int]) -> Rows:
        writes = {version: rows for version, rows in self.written.get(branch, {}).items() if version <= number}
        if writes:
            return writes[max(writes)]
        return super()._wanted(branch, self._left_at(branch, number), progress)

    def _left_at(self, branch: str, number: int) -> int:
        return self.left.get(branch, number) if branch else number

    def _leads_to_the_newest(self, key: tuple[str, int]) -> bool:
        branch, number = key
        return number <= self._left_at(branch, number) and super()._leads_to_the_newest(key)


class BranchSteps(Steps):
    """Writers and jobs on branches."""

    weights = BRANCH_WEIGHTS
    witness_type = BranchWitness
    witness: BranchWitness

    def __init__(self, made: Any, rng: Any) -> None:
        super().__init__(made, rng)
        #: Per branch the rows that were deleted there, to be written again.
        self.deleted: dict[str, list[tuple[Key, pa.Table]]] = {}
        #: Per tag of a branch what it names.
        self.tagged: dict[str, tuple[str, int]] = {}
        self.do("branch")

    def look(self) -> None:
        super().look()
        lost = {*self.tagged.values()} - self.witness.versions.keys()
        assert not lost, f"versions {lost} of branches are gone, and have tags: {self.tagged}"

    def may(self, kind: str) -> bool:
        return bool(self.branches) if kind in BRANCH_STEPS else super().may(kind)

    def _branch(self) -> bool:
        """A branch of a version with MemWAL: the jobs of these steps are those of such tables."""
        versions = [number for (name, number), seen in self.witness.versions.items() if not name and seen.has_mem_wal]
        standing = sorted({*versions} & {*self._versions()})
        if not standing:
            return False
        name = self._name("branch")
        self.branches[name] = self.witness.left[name] = self.rng.choice(standing)
        self.deleted[name] = []
        lance.dataset(self.uri).create_branch(name, self.branches[name])
        return True

    def _unbranch(self) -> bool:
        """Lance deletes no branch that has a tag."""
        dataset = lance.dataset(self.uri)
        for tag in self.tagged:
            dataset.tags.delete(tag)
        self.tagged.clear()
        return super()._unbranch()

    def _tag_on_branch(self) -> bool:
        if not self.branches:
            return False
        branch = self.rng.choice(sorted(self.branches))
        seen = sorted(number for name, number in self.witness.versions if name == branch)
        names = {number: f"{self.uri}/tree/{branch}/_versions/{2**64 - 1 - number:020}.manifest" for number in seen}
        standing = [number for number in seen if os.path.exists(names[number])]
        if not standing:
            return False
        number = self.rng.choice(standing)
        tag = self._name("tag")
        lance.dataset(self.uri).tags.create(tag, (branch, number))
        self.tagged[tag] = (branch, number)
        return True

    def _write_on_branch(self) -> bool:
        """A row is deleted, or one of those is written again."""
        if not self.branches:
            return False
        name = self.rng.choice(sorted(self.branches))
        uri = f"{self.uri}/tree/{name}"
        rows = self._rows_of(name)
        if self.deleted[name] and self.rng.random() < 0.5:
            key, table = self.deleted[name].pop()
            lance.write_dataset(table, uri, mode="append")
            (row,) = self.made.columns.by_trait(table.to_pylist())
            rows[key] = row
        elif rows:
            key = self.rng.choice(sorted(rows))
            condition = " AND ".join(
                f"{column} = {value!r}" for column, value in zip(self.made.model.keys, key, strict=True)
            )
            dataset = lance.dataset(uri)
            self.deleted[name].append((key, dataset.to_table(filter=condition)))
            dataset.delete(condition)
            del rows[key]
        else:
            return False
        self._say(f"{name} {key}")
        self.witness.written.setdefault(name, {})[lance.dataset(uri).version] = rows
        return True

    def _rows_of(self, name: str) -> Rows:
        """The rows of a branch, as of the last write that is known."""
        writes = self.witness.written.get(name)
        if writes:
            return dict(writes[max(writes)])
        return dict(self.witness.read(name, lance.dataset(f"{self.uri}/tree/{name}").version))

    def _on_branch(self, store: Callable[[Any], Any] = lambda store: store) -> bool:
        """A job on a branch, beside whatever jobs are in the middle on main."""
        if not self.branches:
            return False
        name, kind = self.rng.choice(sorted(self.branches)), self.rng.choice(JOBS)
        self._say(f"{kind} on {name}")
        table: Any = open_table(self.uri, branch=name)
        with self._on_the_copy(), suppress(CommitConflictError):
            return self._job(kind, replace(table, store=store(table.store)))
        return False

    def _job_on_branch(self) -> bool:
        return self._on_branch()

    def _crash_on_branch(self) -> bool:
        most, after = self.rng.randint(1, max(CALLS.values())), self.rng.random() < 0.5
        at = 1 + most**2 // 200  # most jobs on a branch have little to do
        self._say(f"{'after' if after else 'before'} call {at}")
        try:
            self._on_branch(lambda store: DyingStore(store, at, after=after))
        except (Killed, StorageError, UnsupportedFeatureError):
            return True
        return False

    def _overtaken_on_branch(self) -> bool:
        """While a job on a branch is in the middle, main is written to, merged, compacted and collected."""
        ran = []

        def others() -> None:
            self.beside.append("gc")
            for kind in self.rng.choices(_BESIDE, k=self.rng.randint(1, 3)):
                ran.append(kind)
                self.do(kind)
            self.beside.pop()

        at = self.rng.randint(1, 10)
        self._on_branch(lambda store: Overtaken(store, at, others, writes=self.rng.random() < 0.5))
        return bool(ran)


class BranchHistory(History):
    """One long history of a table with branches that are written to."""

    again = "SEED={} python -m tests.campaigns.sim.branch_steps"

    def make_steps(self, uri: str) -> Steps:
        return BranchSteps(make_table(uri, self.seed), self.rng)


def main() -> None:
    """One history again."""
    seed = int(os.environ["SEED"])
    effects: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        history = BranchHistory(seed, folder)
        effects += history.run()
        for number, step in enumerate(history.steps.trail, 1):
            sys.stdout.write(f"{number:3d} {step}\n")
    sys.stdout.write(f"seed {seed}: all invariants held; {dict(effects)}\n")


if __name__ == "__main__":
    main()
