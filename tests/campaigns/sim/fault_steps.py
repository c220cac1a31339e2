"""Steps in which a job meets a fault: files away, a crash, others in between."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace

from memwal_ops import open_table
from memwal_ops.errors import CommitConflictError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.jobs import merge
from tests.campaigns.sim.driver import CALLS, Job
from tests.campaigns.sim.job_steps import JobSteps
from tests.support.dying_store import DyingStore, Killed
from tests.support.overtaken import Overtaken
from tests.support.tables import wire
from tests.support.tables.files import Files

#: Jobs that others may come in between. Not expiry: beside commits, its own warning says why.
OVERTAKEN: tuple[Job, ...] = ("gc", "gc", "merge", "merge", "catchup", "catchup", "snapshot", "snapshot", "compact")
# While one job is in the middle: what another may do. No expiry beside commits (its own warning says why).
_BESIDE_OTHERS = ("write", "flush", "claim", "merge", "catchup", "snapshot", "compact", "tag", "hold", "gc",
                  "create_index", "add_column", "restore", "owner")  # fmt: skip
_BESIDE_GC = (*_BESIDE_OTHERS, "untag", "branch", "release", "expire", "drop_column")
# What a table's day looks like: a busy neighbour lands one thing after the other.
_BUSY = ("write", "flush", "merge")
_DEEPEST = 3
# So many of them that write, that others may come in front of.
MOST_WRITES = 5


class FaultSteps(JobSteps):
    """Jobs that are cut short or overtaken."""

    def _lose_generation(self) -> bool:
        """A generation's directory is away for as long as a merge runs; the merge must not pass it."""
        files = Files(self.uri)
        progress = wire.progress(files)
        for region in wire.regions(files):
            listed = wire.region_manifest(files, region).generations
            waiting = {number: path for number, path in listed.items() if number > progress.get(region, 0)}
            if not waiting:
                continue
            number = self.rng.choice(sorted(waiting))
            folder = f"{self.uri}/_mem_wal/{region}/{waiting[number]}"
            shutil.move(folder, f"{self.uri}-away")
            try:
                report = merge.apply(open_table(self.uri), merge.MergeOptions())
            finally:
                shutil.move(f"{self.uri}-away", folder)
            assert report.decision == "blocked", f"a merge says {report.decision}, although a generation is away"
            assert wire.progress(Files(self.uri)).get(region, 0) < number, "a merge passed a generation that was away"
            return True
        return False

    def _crash(self, job: Job | None = None, at: int | None = None, *, after: bool | None = None) -> bool:
        """A job dies at a storage call: before it reached the store, or after it was carried out there."""
        kind = job or self._likely("merge", "merge", "snapshot", "catchup", "expire", "gc", "gc", "compact")
        at = at or self.rng.randint(1, CALLS[kind])
        after = self.rng.random() < 0.5 if after is None else after
        self._say(f"{kind} {'after' if after else 'before'} call {at}")
        self.kinds.add(kind)
        table = self._table()
        try:
            self._job(kind, replace(table, store=DyingStore(table.store, at, after=after)))
        except Killed:
            self.announced |= kind == "expire"
            return True
        except (StorageError, UnsupportedFeatureError):
            return True  # it died while pylance was asking for the commit, which makes an error of its own of it
        return False

    def _overtaken(self, job: Job | None = None, at: int | None = None, *, writes: bool | None = None) -> bool:
        """A job is in the middle of its work, and others do all of theirs; they may be overtaken in turn."""
        kind = job or self._likely(*OVERTAKEN)
        writes = self.rng.random() < 0.5 if writes is None else writes
        # Rather early than late: what others do before a job has decided everything is what it must notice.
        at = at or self.rng.randint(1, MOST_WRITES if writes else self.rng.randint(1, CALLS[kind]))
        self._say(f"{kind} from {'write' if writes else 'call'} {at}")
        self.kinds.add(kind)
        ran = []

        def others() -> None:
            ran.append(kind)
            self.beside.append(kind)
            choices = _BESIDE_GC if {*self.beside} == {"gc"} else _BESIDE_OTHERS
            chosen = _BUSY if self.rng.random() < 0.5 else self.rng.choices(choices, k=self.rng.randint(1, 3))
            for one in chosen:
                self.do(one)
            if len(self.beside) < _DEEPEST and self.rng.random() < 0.3:
                self.do("overtaken")
            self.beside.pop()

        table = self._table()
        with suppress(CommitConflictError):
            self._job(kind, replace(table, store=Overtaken(table.store, at, others, writes=writes)))
        return bool(ran)
