"""Steps that run a job, checked by what it promises."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa

from memwal_ops import open_table
from memwal_ops.core.candidates import Verdict
from memwal_ops.errors import CommitConflictError, LeaseLostError
from memwal_ops.formats.lance.jobs import expire, merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.retention.schema_history import SAME_COLUMNS
from tests.campaigns.sim.driver import JOBS, PASSING, Driver, Job
from tests.campaigns.sim.witness import State
from tests.campaigns.sim.writers import RegionTable, ShardTable
from tests.support.gc_options import IMMEDIATE, PATIENT
from tests.support.tables import wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table


class JobSteps(Driver):
    """The jobs, on the table as it is now or was a while ago."""

    def _telling(self, versions: list[int]) -> set[int]:
        """Those that were the newest when the oldest rows that wait in generations were logged or flushed, or since.

        The same for each version that may be restored, up to it.
        """
        files = Files(self.uri)
        found = self._telling_of(versions, wire.progress(files))
        for kept in self._protected() & set(versions):
            found |= self._telling_of([one for one in versions if one <= kept], wire.progress(files, kept))
        return found

    def _telling_of(self, versions: list[int], merged: dict[str, int]) -> set[int]:
        files, flushed = Files(self.uri), []
        for region in wire.regions(files):
            waiting = wire.region_manifest(files, region).generations
            first = min((number for number in waiting if number > merged.get(region, 0)), default=None)
            paths = Path(self.uri, "_mem_wal", region, waiting.get(first, ""), "_versions").glob("*.manifest")
            # An index makes a second version, without entries all of whose rows are superseded.
            for path in sorted(paths, key=lambda one: wire.timestamp(one.read_bytes()))[-1:]:
                data, stored = path.read_bytes(), path.stat().st_mtime_ns
                entry = re.search(rb"[01]{64}\.lance", data)  # the first one of the log to which it refers
                put = Path(self.uri, "_mem_wal", region, "wal", entry[0].decode()) if entry else path
                logged = put.stat().st_mtime_ns if put.exists() else stored
                flushed.append(min(stored, wire.timestamp(data), logged))
        if not flushed:
            return set()
        names = wire.manifest_names(files)
        written = {number: Path(self.uri, names[number]).stat().st_mtime_ns for number in versions}
        return {one for one, following in pairwise(versions) if written[following] > min(flushed)}

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
                return (
                    expire.apply(table, expire.ExpireOptions(age, rng.choice([1, 1, 2, 4]), allow_unsafe=True)).decision
                    == "expired"
                )
            case "gc":
                return self._collect(table, self._gc_options()).decision in {"deleted", "drained"}

    def _collect(self, table: Table, options: gc.GcOptions) -> gc.GcReport:
        report = gc.apply(table, replace(options, limit=1 << 20))
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
        options = expire.ExpireOptions(timedelta(0), keep, allow_unsafe=True)
        if self.rng.random() < 0.3:
            assert expire.plan(open_table(self.uri), options).newest == before[-1]
        wanted = set(before[-keep:]) | self._protected() & set(before) | self._telling(before)
        expire.apply(open_table(self.uri), options)
        assert set(self._versions()) == wanted, f"versions {self._versions()} stand, not {sorted(wanted)}"
        return self._versions() != before

    def _gc(self) -> bool:
        options = self._gc_options()
        if self.beside or self.rng.random() < 0.6:
            return self._collect(open_table(self.uri), options).decision in {"deleted", "drained"}
        before = self.witness.scan()
        planned = gc.plan(open_table(self.uri), replace(options, limit=1 << 20))
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

    def _merge_all(self, made: RegionTable | ShardTable) -> None:
        """Merge what waits. A field whose names no version explains any more is put right, as the refusal says."""
        while (report := merge.apply(open_table(made.uri), merge.MergeOptions())).decision == "blocked":
            fault = report.blocked[0]
            assert fault.error.reason == "schema_projection", fault.to_json()
            if "Cannot match the columns" in str(fault.error):
                # No column was ever added again under the name of another.
                dataset = lance.dataset(made.uri)
                dataset.update_config({SAME_COLUMNS: str(dataset.version)})
                continue
            # Also after a restore that reverted a merge: its versions may have expired while it was merged.
            assert made.columns.traits or self.witness.restored, fault.to_json()
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
