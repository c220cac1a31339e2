"""Everything that may happen to a table, one method each; both the seeded histories and the machine draw on it.

A step says whether it had an effect: a flush of nothing has none. All that a step chooses it takes
from ``rng``, so that whoever drives decides.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections import Counter
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import lance
import pyarrow as pa

from memwal_ops import open_table
from memwal_ops.core.holds import holds, release_hold, take_hold
from memwal_ops.errors import (
    CommitConflictError,
    LeaseLostError,
    StorageError,
    UnsupportedFeatureError,
    VersionGoneError,
)
from memwal_ops.jobs import catchup, compact, expire, gc, merge, snapshot
from memwal_ops.jobs.collectables import Verdict
from tests.crash.dying_store import DyingStore, Killed
from tests.crash.overtaken import Overtaken
from tests.sim.leases import Leases
from tests.sim.witness import HINT, LATER_RELEASE, State, Witness
from tests.sim.writers import RegionTable, ShardTable
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.core.table import Table

IMMEDIATE = gc.GcOptions(
    reader_grace=timedelta(0), orphan_min_age=timedelta(0), manifest_retention=2, allow_unsafe=True
)
#: What a test calls an hour's quarter: so much older everything gets by the step "later".
PASSING = timedelta(minutes=20)
PATIENT = gc.GcOptions(
    reader_grace=timedelta(minutes=15), orphan_min_age=timedelta(minutes=15), manifest_retention=2, allow_unsafe=True
)

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
#: Jobs that others may come in between. Not expiry: beside commits, its own warning says why.
OVERTAKEN: tuple[Job, ...] = ("gc", "gc", "merge", "merge", "catchup", "catchup", "snapshot", "snapshot", "compact")
# While one job is in the middle: what another may do. No expiry beside commits (its own warning says why).
_BESIDE_OTHERS = ("write", "flush", "claim", "merge", "catchup", "snapshot", "compact", "tag", "hold", "gc",
                  "create_index", "add_column", "restore", "owner")  # fmt: skip
_BESIDE_GC = (*_BESIDE_OTHERS, "untag", "branch", "release", "expire", "drop_column")
# What a table's day looks like: a busy neighbour lands one thing after the other.
_BUSY = ("write", "flush", "merge")
_DEEPEST = 3
# So much may wait in memory before a writer is expected to flush.
_ENOUGH = 60
# No more columns than that, and no more versions that are kept: with all kept nothing is ever collected.
_MANY = 5
# So many storage calls a job makes at most on these tables, more or less.
CALLS: dict[Job, int] = {"merge": 40, "catchup": 40, "snapshot": 24, "compact": 30, "expire": 40, "gc": 70}

# So many of them that write, that others may come in front of.
MOST_WRITES = 5


def make_table(uri: str, seed: int) -> RegionTable | ShardTable:
    """The table of a seed: its layout, regions, index, row ids."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "regions": rng.choice([1, 2]),
        "base_rows": 12,
        "with_btree": bool(seed % 4 < 2),
        "stable_row_ids": bool(seed % 8 < 4),
    }
    # A MemTable ends by a flush alone, so that a history does not hang on the moment of one in the background.
    made = RegionTable(seed, **options) if seed % 2 else ShardTable(seed, max_memtable_rows=5000, **options)
    made.create(uri)
    if seed % 3 == 0:
        name, manifest = wire.newest_manifest(Files(uri))
        details = wire.encode([*wire.decode(wire.mem_wal_details(manifest)), LATER_RELEASE])
        Files(uri).put(name, wire.build_manifest(wire.with_details(manifest, details)))
    return made


class Steps:
    """One table, what is known of it, and what may be done to it."""

    def __init__(self, made: RegionTable | ShardTable, rng: random.Random) -> None:
        self.made, self.rng = made, rng
        self.uri = made.uri
        self.witness = Witness(made)
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
        return [kind for kind in WEIGHTS if self.may(kind)]

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

    # -- writers and readers

    def _write(self) -> bool:
        before = len(self.made.model.log)
        self.made.step()
        return len(self.made.model.log) > before

    def _delete(self) -> bool:
        at = self.rng.randrange(len(self.made.regions))
        numbers = self.made._some(self.made._live[at], 6)
        if numbers:
            self.made.delete(numbers)
        return bool(numbers)

    def _flush(self) -> bool:
        region = self.rng.choice(self.made.regions)
        before = self._generations(region)
        self.made.flush(region)
        return self._generations(region) > before

    def _burst(self) -> bool:
        """Writers are fast for a while, and nobody merges: generations pile up."""
        before = len(self.made.model.log)
        for _ in range(self.rng.randint(2, 4)):
            self.made.step()
            self.made.flush(self.rng.choice(self.made.regions))
        return len(self.made.model.log) > before

    def _generations(self, region: str) -> int:
        if not os.path.isdir(f"{self.uri}/_mem_wal/{region}/manifest"):
            return 0
        return wire.region_manifest(Files(self.uri), region).current_generation

    def _claim(self) -> bool:
        self.made.claim(self.rng.choice(self.made.regions))
        return True

    def _die_in_flush(self) -> bool:
        before = len(self.witness.scan())
        self.made.die_in_flush(self.rng.choice(self.made.regions))
        return len(self.witness.scan()) > before

    def _slow_flush(self) -> bool:
        """A collector runs while a writer has written a generation's files and did not publish them yet."""
        if not isinstance(self.made, RegionTable):
            return False
        region = self.rng.choice(self.made.regions)
        folder = self.made.flush_slowly(region)
        before = set(Files(self.uri).listing(folder))
        self.kinds.add("gc")
        gc.apply(open_table(self.uri), PATIENT)
        assert before <= set(Files(self.uri).listing(folder)), "the files of a flush under way are gone"
        self.made.end_of_flush(region)
        return True

    def _wake(self) -> bool:
        region = self.rng.choice(self.made.regions)
        assert not self.made.wake(region), "a fenced writer was believed"
        return bool(self.made.stalled.get(region))

    def _reader(self) -> bool:
        if self.beside:
            return False
        self.look()
        return self.witness.promise()

    def _read_version(self) -> bool:
        """Somebody opens an old version, or a branch, and reads all of it."""
        branch, number = self.rng.choice(sorted(self.witness.versions))
        assert_same(self.witness.read(branch, number), self.witness.versions[branch, number].rows)
        return bool(branch) or number < max(self._versions())

    def _later(self) -> bool:
        if self.beside:
            return False
        seconds = PASSING.total_seconds()
        for path in self.witness.scan():
            full = f"{self.uri}/{path}"
            state = os.stat(full)
            os.utime(full, ns=(state.st_atime_ns, state.st_mtime_ns - int(seconds * 1e9)))
        self.witness.forget_times()
        self.witness.promised = frozenset()
        return True

    # -- what keeps versions

    def _versions(self) -> list[int]:
        return sorted(wire.manifest_names(Files(self.uri)))

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}-{self._names}"

    def _tag(self) -> bool:
        name = self._name("tag")
        self.tags[name] = self.rng.choice(self._versions())
        lance.dataset(self.uri).tags.create(name, self.tags[name])
        return True

    def _untag(self) -> bool:
        if not self.tags:
            return False
        name = self.rng.choice(sorted(self.tags))
        lance.dataset(self.uri).tags.delete(name)
        del self.tags[name]
        return True

    def _branch(self) -> bool:
        name = self._name("branch")
        self.branches[name] = self.rng.choice(self._versions())
        lance.dataset(self.uri).create_branch(name, self.branches[name])
        return True

    def _unbranch(self) -> bool:
        if not self.branches:
            return False
        name = self.rng.choice(sorted(self.branches))
        lance.dataset(self.uri).branches.delete(name)
        del self.branches[name]
        return True

    def _hold(self) -> bool:
        version = self.rng.choice(self._versions())
        try:
            hold = take_hold(open_table(self.uri), version, timedelta(days=3))
        except VersionGoneError:
            assert self.announced
            return False
        self.holds[hold.number] = version
        return True

    def _release(self) -> bool:
        if not self.holds:
            return False
        number = self.rng.choice(sorted(self.holds))
        release_hold(open_table(self.uri), number)
        del self.holds[number]
        return True

    def _protected(self) -> set[int]:
        return {*self.tags.values(), *self.branches.values(), *self.holds.values()}

    # -- what a table's owner does

    def _restore(self) -> bool:
        """An old version is the newest again: with its rows, columns, indexes, and its progress, which falls."""
        with_mem_wal = [
            number
            for number, path in wire.manifest_names(Files(self.uri)).items()
            if wire.mem_wal_entry(wire.parse_manifest(Files(self.uri).get(path))) is not None
        ]
        version = self.rng.choice(sorted(with_mem_wal))
        before = wire.progress(Files(self.uri))
        dataset = lance.dataset(self.uri, version=version)
        dataset.restore()
        newest = lance.dataset(self.uri)
        self.witness.restored.add(newest.version)
        self._say(f"version {version} as {newest.version}")
        if self.made.columns.changed:
            self.made.evolve(newest)
        return wire.progress(Files(self.uri)) != before

    def _owner(self) -> bool:
        """pylance's own maintenance."""
        dataset = lance.dataset(self.uri)
        before = dataset.version
        if self.rng.random() < 0.5:
            dataset.optimize.compact_files()
        else:
            dataset.optimize.optimize_indices()
        return lance.dataset(self.uri).version > before

    def _evolve(self, change: Callable[[lance.LanceDataset], object]) -> bool:
        self.made.columns.names.setdefault(0, tuple(self.made.base_schema.names))
        dataset = lance.dataset(self.uri)
        change(dataset)
        self.made.evolve(lance.dataset(self.uri))
        return True

    def _add_column(self) -> bool:
        if self.witness.restored:
            # A restored version's next field takes a number that rows of the log may have under another type.
            self.made.flush()
        kind = self.rng.choice([pa.int32(), pa.string(), pa.float32()])
        return self._evolve(lambda dataset: dataset.add_columns(pa.field(self._name("more").replace("-", "_"), kind)))

    def _payload(self) -> list[str]:
        return [name for name in lance.dataset(self.uri).schema.names if name not in self.made.model.keys]

    def _drop_column(self) -> bool:
        names = self._payload()
        if len(names) < 2:
            return False
        # A writer that is replaced leaves its log by the names of its time: nothing of it is left to be read then.
        self.made.flush()
        return self._evolve(lambda dataset: dataset.drop_columns([self.rng.choice(names)]))

    def _rename_column(self) -> bool:
        names = self._payload()
        if not names:
            return False
        self.made.flush()
        old, new = self.rng.choice(names), self._name("other").replace("-", "_")
        self.made.columns.traits[new] = self.made.columns.trait(old)
        return self._evolve(lambda dataset: dataset.alter_columns({"path": old, "name": new}))

    def _create_index(self) -> bool:
        """A new one, or one in the place of another."""
        dataset = lance.dataset(self.uri)
        name = self.rng.choice(dataset.schema.names)
        dataset.create_scalar_index(name, "BTREE", name=f"{self.made.columns.trait(name)}_idx", replace=True)
        return True

    def _drop_index(self) -> bool:
        dataset = lance.dataset(self.uri)
        names = sorted(one.name for one in dataset.describe_indices() if not one.name.startswith("__"))
        if names:
            dataset.drop_index(self.rng.choice(names))
        return bool(names)

    # -- jobs

    def _table(self) -> Table:
        return open_table(self.uri)

    def _job(self, kind: Job, table: Table) -> bool:
        """Run one, perhaps under a lease; whether it changed anything. One that loses its lease stops there."""
        with suppress(LeaseLostError), self.leases.under(kind, table) as guarded:
            return guarded is not None and self._unleased(kind, guarded)
        self._say("and lost its lease")
        self.announced |= kind == "expire"
        return False

    def _unleased(self, kind: Job, table: Table) -> bool:
        rng = self.rng
        match kind:
            case "merge":
                options = merge.MergeOptions(max_generations=rng.choice([1, 2, None, None]))
                return bool(merge.apply(table, options).passes)
            case "snapshot":
                return snapshot.apply(table, snapshot.SnapshotOptions(rng.choice([0, 0, 100]))).decision == "built"
            case "catchup":
                few = rng.choice([0, 0, 10])
                report = catchup.apply(table, catchup.CatchupOptions((), few, max_segments=rng.choice([1, 8])))
                assert report.decision != "incomplete", report.to_json()
                return report.decision == "caught_up"
            case "compact":
                return compact.apply(table, compact.CompactOptions(rng.choice([20, 1 << 20]))).decision == "compacted"
            case "expire":
                age = timedelta(0) if not self.beside else rng.choice([timedelta(0), PASSING / 2])
                return expire.apply(table, expire.ExpireOptions(age, rng.choice([1, 1, 2, 4]))).decision == "expired"
            case "gc":
                return self._collect(table, self._gc_options()).decision in {"deleted", "drained"}

    def _collect(self, table: Table, options: gc.GcOptions) -> gc.GcReport:
        report = gc.apply(table, options, limit=1 << 20)
        assert not report.failed, report.failed
        assert not report.faults, report.faults
        return report

    def _gc_options(self) -> gc.GcOptions:
        options = self.rng.choice([IMMEDIATE, IMMEDIATE, PATIENT]) if {*self.beside} <= {"gc"} else PATIENT
        if options is IMMEDIATE:
            self.witness.promised = frozenset()
        return replace(
            options,
            max_deletes=self.rng.choice([None, None, self.rng.randint(1, 12)]),
            manifest_retention=self.rng.choice([2, 2, 3, 5]),
        )

    def _plain(self, kind: Job, table: Table) -> bool:
        try:
            return self._job(kind, table)
        except CommitConflictError:
            assert self.beside
            return False

    def _merge(self) -> bool:
        return self._plain("merge", self._table())

    def _catchup(self) -> bool:
        return self._plain("catchup", self._table())

    def _snapshot(self) -> bool:
        return self._plain("snapshot", self._table())

    def _compact(self) -> bool:
        return self._plain("compact", self._table())

    def _expire(self) -> bool:
        keep = self.rng.choice([1, 1, 2, 4])
        before = self._versions()
        options = expire.ExpireOptions(timedelta(0), keep)
        if self.rng.random() < 0.3:
            assert expire.plan(open_table(self.uri), options).newest == before[-1]
        expire.apply(open_table(self.uri), options)
        wanted = set(before[-keep:]) | self._protected() & set(before)
        assert set(self._versions()) == wanted, f"versions {self._versions()} stand, not {sorted(wanted)}"
        return self._versions() != before

    def _gc(self) -> bool:
        options = self._gc_options()
        if self.beside or self.rng.random() < 0.6:
            return self._collect(open_table(self.uri), options).decision in {"deleted", "drained"}
        before = self.witness.scan()
        planned = gc.plan(open_table(self.uri), options, limit=1 << 20)
        assert self.witness.scan() == before, "a plan changed something"
        report = self._collect(open_table(self.uri), options)
        if options.max_deletes is None:
            self._check_plan(planned, before)
        return report.decision in {"deleted", "drained"}

    def _check_plan(self, planned: gc.GcReport, before: dict[str, State]) -> None:
        """What was planned is what went; but the drain adds a manifest version, and so frees an older one.

        A real writer flushes when it likes: if it did in between, more may go than was planned. And what it writes
        under a name of its own may be there for a moment only: while the plan was made, and not before.
        """
        after = self.witness.scan()
        named = {item.path for item in planned.items[Verdict.DELETE] if "/manifest/" not in item.path}
        named = {path for path in named if path in before or any(one.startswith(f"{path}/") for one in before)}
        gone = {path for path in before.keys() - after.keys() if "/manifest/" not in path}
        went = {path if path in named else "/".join(path.split("/")[:3]) for path in gone}
        went = {path for path in went if path in named or "_mem_wal_ops" not in path}
        assert named <= went, f"planned, and stands: {sorted(named - went)}"
        drained = {str(item.region_id) for item in planned.items[Verdict.DELETE] if item.drain}
        manifests = Counter(path.split("/")[1] for path in after.keys() - before.keys() if path.endswith(".binpb"))
        if all(count <= (region in drained) for region, count in manifests.items()):
            assert went <= named, f"gone, and not planned: {sorted(went - named)}"

    def _maintain(self) -> bool:
        """The whole round, in its order: what an old version needs goes only behind all of it."""
        before = self.effects.total()
        for kind in JOBS:
            self.do(kind)
        return self.effects.total() > before

    def _open(self) -> bool:
        """Somebody opens the table, perhaps plans on it, and goes to lunch."""
        self.opened = open_table(self.uri)
        if self.rng.random() < 0.5:
            gc.plan(self.opened, IMMEDIATE)
        return True

    def _job_of_before(self) -> bool:
        """... and goes on with it when others have been there: an older plan is applied."""
        table, self.opened = self.opened, None
        if table is None:
            return False
        kind = self._likely(*JOBS, "gc", "gc")
        self._say(f"{kind} opened at version {table.version}")
        self.kinds.add(kind)
        return table.version < self._versions()[-1] and self._job(kind, table)

    # -- trouble

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
        kind = job or self._likely(
            "gc", "gc", "merge", "merge", "catchup", "catchup", "snapshot", "snapshot", "compact"
        )
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

    # -- elsewhere

    def _copy(self) -> bool:
        """The table is copied, file by file. What a region layout's copy holds lies in the original: README."""
        if not isinstance(self.made, ShardTable) or self.twin is not None:
            return False
        self.made.flush()
        self.look()
        shutil.copytree(self.uri, f"{self.uri}-copy", ignore=shutil.ignore_patterns("*.tmp.*", "*#*"))
        made = copy(self.made)
        made.uri, made.columns = f"{self.uri}-copy", self.made.columns.copy()
        self.twin = Witness(made)
        self.twin.restored = set(self.witness.restored)
        self.twin.look(())
        return True

    def _job_on_copy(self) -> bool:
        if self.twin is None:
            return False
        kind = self.rng.choice(JOBS)
        self._say(kind)
        with self._on_the_copy():
            done = self._job(kind, open_table(self.twin.uri))
        self.twin.look({kind})
        return done

    @contextmanager
    def _on_the_copy(self) -> Iterator[None]:
        """Whatever is chosen for a job is for the copy; promises to readers of the original stand."""
        promised = self.witness.promised
        try:
            yield
        finally:
            self.witness.promised = promised

    def _end_of_copy(self) -> None:
        """When the original is merged and collected, the copy still has everything."""
        assert self.twin is not None
        uri = self.twin.uri
        dataset = lance.dataset(uri)
        for tag in dataset.tags.list():
            dataset.tags.delete(tag)
        for branch in dataset.branches.list():
            dataset.branches.delete(branch)
        for hold in holds(open_table(uri)):
            release_hold(open_table(uri), hold.number)
        self._merge_all(self.twin.made)
        catchup.apply(open_table(uri), catchup.CatchupOptions())
        expire.apply(open_table(uri), expire.ExpireOptions(timedelta(0), 1))
        # What a killed commit left needs generations too, until it is collected itself.
        while self._collect(open_table(uri), IMMEDIATE).decision != "nothing_to_delete":
            pass
        self.twin.look({"merge", "catchup", "expire", "gc", "untag", "unbranch"})
        assert not self.twin.generations, "the copy keeps generations that nobody needs"
        shutil.rmtree(uri)

    # -- the end

    def end(self, *, posts: bool, go_on: bool) -> None:
        """Take away all that keeps anything; then nothing is left but what the options say, and it still works."""
        self.trail.append("end")
        while self.tags:
            self._untag()
        while self.branches:
            self._unbranch()
        while self.holds:
            self._release()
        self.made.flush()
        if isinstance(self.made, ShardTable):
            for region in self.made.regions:
                assert not self.made.wake(region)
            self.made.bury()
        self._merge_all(self.made)
        catchup.apply(open_table(self.uri), catchup.CatchupOptions())
        self._check_claims()
        expire.apply(open_table(self.uri), expire.ExpireOptions(timedelta(0), 1))
        options = IMMEDIATE if posts else replace(IMMEDIATE, fence_retention=timedelta(0))
        self.witness.posts_stay = posts
        self.witness.promised = frozenset()
        # The drain of the first run makes a manifest version, which frees an older one for the second.
        for _ in range(3):
            before = self.witness.scan()
            last = gc.apply(open_table(self.uri), options)
            if last.decision == "nothing_to_delete":
                break
        assert last.decision == "nothing_to_delete", last.to_json()
        assert self.witness.scan() == before, "a run that found nothing changed something"
        self.witness.look({"gc", "expire", "untag", "unbranch"})
        self._check_left(posts=posts)
        if self.twin is not None:
            self._end_of_copy()
        if go_on:
            self._go_on()

    def _merge_all(self, made: RegionTable | ShardTable) -> None:
        """Merge what waits. A field whose names no version explains any more is put right, as the refusal says."""
        while (report := merge.apply(open_table(made.uri), merge.MergeOptions())).decision == "blocked":
            fault = report.blocked[0]
            assert fault.error.reason == "schema_projection", fault.to_json()
            assert made.columns.traits, fault.to_json()
            path = wire.region_manifest(Files(made.uri), str(fault.region_id)).generations[fault.generation or 0]
            theirs = lance.dataset(f"{made.uri}/_mem_wal/{fault.region_id}/{path}").schema.names
            mine = {made.columns.trait(name): name for name in lance.dataset(made.uri).schema.names}
            renamed = [(mine[made.columns.trait(name)], name) for name in theirs if made.columns.trait(name) in mine]
            renamed = [(now, then) for now, then in renamed if now != then]
            for now, then in renamed:
                lance.dataset(made.uri).alter_columns({"path": now, "name": then})
                made.evolve(lance.dataset(made.uri))
            if not renamed:
                self._give_a_field_of_its_own(made, str(fault.error))

    def _give_a_field_of_its_own(self, made: RegionTable | ShardTable, said: str) -> None:
        """A restore brought a column back, under the field of one that was added meanwhile and is gone."""
        found = re.search(r"is '(\w+)' now", said)
        assert found is not None, said
        dataset = lance.dataset(made.uri)
        dataset.add_columns(pa.field("copy", dataset.schema.field(found[1]).type))
        lance.dataset(made.uri).update({"copy": found[1]})
        lance.dataset(made.uri).drop_columns([found[1]])
        lance.dataset(made.uri).alter_columns({"path": "copy", "name": found[1]})
        made.evolve(lance.dataset(made.uri))

    def _check_claims(self) -> None:
        """After a catch-up that nobody disturbed, every index covers all, and says so."""
        table = open_table(self.uri)
        merged = dict(table.index.merged_generations)
        if any(merged.values()):
            claims = {name: dict(claim) for name, claim in table.index.index_catchup.items()}
            names = {one.name for one in lance.dataset(self.uri).describe_indices()} - {wire.MEM_WAL_INDEX}
            assert claims == dict.fromkeys(names, merged)

    def _check_left(self, *, posts: bool) -> None:
        witness = self.witness
        ((_, newest),) = witness.versions.items()
        left = {path for path in witness.files if path.startswith("_mem_wal/")}
        must: set[str] = set()
        may: set[str] = set()
        for region, seen in witness.regions.items():
            assert seen.manifest is not None
            assert not seen.manifest.generations, f"{seen.manifest.generations} of {region} stay: {self._held()}"
            log, guards = witness.end_of_log(region, posts=posts)
            version, folder = seen.manifest.version, f"_mem_wal/{region}/manifest"
            must |= log | {f"{folder}/{HINT}"}
            must |= {f"{folder}/{wire.bit_reversed(one)}.binpb" for one in (version, version - 1) if one}
            may |= guards
        assert must <= left, f"gone: {sorted(must - left)}"
        assert left <= must | may, f"left behind: {sorted(left - must - may)}"
        external = {path for path in witness.files if re.fullmatch(r"_indices/[^/]+/index\.lance", path)}
        assert external == {newest.snapshot} - {None}
        assert not [path for path in witness.files if path.startswith("_versions/d")]
        # Files that no version ever named are left by whoever was killed, or lost a race; pylance's clean-up
        # takes them when they are a week old.
        held = {path for path in witness.files if path in witness.named}
        assert held == newest.files, f"of versions that are gone: {sorted(held - newest.files)}"
        wanted = self.made.columns.seen(self.made.expected(), max(number for _, number in witness.versions))
        assert_same(newest.rows, wanted)

    def _held(self) -> list[str]:
        report = gc.plan(open_table(self.uri), IMMEDIATE)
        return [f"{item.path}: {item.why}" for item in report.items[Verdict.HELD] if item.generation]

    def _go_on(self) -> None:
        """Writers, mergers and queries by the index find nothing missing."""
        self.made.step(2)
        self.made.flush()
        self._merge_all(self.made)
        self.witness.look({"merge"})
        dataset = lance.dataset(self.uri)
        rows = read_base(self.uri)
        newest = max(number for _, number in self.witness.versions)
        assert rows.keys() == self.made.columns.seen(self.made.expected(), newest).keys()
        for (key,) in list(rows)[:2]:
            assert dataset.count_rows(f"id = {key}") == 1
