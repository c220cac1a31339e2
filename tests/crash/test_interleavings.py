"""1,000 interleavings of merge, snapshot and catch-up commits: one works in the middle of another.

Deterministic: a job runs on a store that, at a chosen call, first lets another job run to its end
(and within that one perhaps a third), before the call goes through. So each job is overtaken at
every kind of moment, by every other, without a thread.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import lance
import pytest

from memwal_ops import open_table
from memwal_ops.core.base_indexes import base_indexes, coverage
from memwal_ops.core.snapshots import read_snapshot
from memwal_ops.errors import CommitConflictError
from memwal_ops.jobs import catchup, merge, snapshot
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import read_base, read_lsm
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SEEDS = 20
INTERLEAVINGS = 50
DEEPEST = 3
OF_A_LATER_RELEASE = b"kept"


class Overtaken:
    """A store that lets others work before its n-th call.

    Not where pylance itself is waiting for the call (the transactions, while it commits), and not on
    the threads that read regions: there it waits for the next call.
    """

    def __init__(self, store: Any, at: int, others: Callable[[], None]) -> None:
        self._store = store
        self._left = at
        self._others: Callable[[], None] | None = others

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            waits = threading.current_thread() is not threading.main_thread() or "_transactions" in str(arguments[:1])
            if self._left <= 0 and not waits and self._others is not None:
                others, self._others = self._others, None
                others()
            return found(*arguments, **named)

        return call


class Cast:
    """The jobs, on one table; each may be overtaken by another, at most three deep."""

    def __init__(self, made: Workload, rng: random.Random) -> None:
        self.made, self.rng = made, rng
        self.landed = dict.fromkeys(("merge", "snapshot", "catchup", "owner"), 0)

    def run(self, depth: int = 1) -> None:
        kind = self.rng.choices(["merge", "snapshot", "catchup", "write", "owner"], [4, 4, 4, 3, 1])[0]
        if kind == "write":
            self.made.step(2)
            self.made.flush(self.rng.choice(self.made.regions))
            return
        table = open_table(self.made.uri)
        if depth < DEEPEST and self.rng.random() < 0.9:
            calls = self.rng.randint(1, 40)
            table = replace(table, store=Overtaken(table.store, calls, lambda: self.run(depth + 1)))
        before = table.version
        try:
            self._job(kind, table)
        except CommitConflictError:
            return
        self.landed[kind] += open_table(self.made.uri).version > before

    def _job(self, kind: str, table: Any) -> None:
        if kind == "merge":
            merge.apply(table, merge.MergeOptions(max_generations=self.rng.choice([1, 2, None])))
        elif kind == "snapshot":
            snapshot.apply(table, snapshot.SnapshotOptions(self.rng.choice([0, 100])))
        elif kind == "catchup":
            names = self.rng.choice([(), ("id_idx",), ("val_idx",)])
            few = self.rng.choice([0, 10])
            catchup.apply(table, catchup.CatchupOptions(names, few, max_segments=self.rng.choice([1, 8])))
        else:
            self.made_by_owner()

    def made_by_owner(self) -> None:
        dataset = lance.dataset(self.made.uri)
        if self.rng.random() < 0.5:
            dataset.optimize.compact_files()
        else:
            dataset.optimize.optimize_indices()


class Witness:
    """Looks at every version once, and at the rows of the newest."""

    def __init__(self, made: Workload) -> None:
        self.made = made
        self.seen = lance.dataset(made.uri).version - 1
        self.progress: dict[str, int] = {}
        self.configuration: list[wire.Field] = []

    def look(self, where: str) -> None:
        files = Files(self.made.uri)
        names = wire.manifest_names(files)
        for version in sorted(names):
            if version <= self.seen:
                continue
            manifest = wire.parse_manifest(files.get(names[version]))
            fields = wire.decode(wire.mem_wal_details(manifest))
            progress = {wire.uuid_of(one, 1): int(wire.get(one, 2)) for one in wire.sub(fields, 9)}
            assert all(progress.get(region, 0) >= merged for region, merged in self.progress.items()), (where, version)
            # pylance's own commits of indexes lose what pylance does not know; ours never.
            ours = b"memwal-ops.job" in (manifest.transaction or b"")
            configuration = [one for one in fields if one.number in {7, 8, 11, 12, 1001}]
            assert not self.configuration or not ours or configuration == self.configuration, (where, version)
            self.progress, self.configuration, self.seen = progress, configuration, version
        assert_same(read_base(self.made.uri), self.made.expected(self.progress), seed=where)
        self._check_claims(where)

    def _check_claims(self, where: str) -> None:
        table = open_table(self.made.uri)
        merged = table.index.merged_generations
        for name, index in base_indexes(table).items():
            claim = table.index.index_catchup.get(name, {})
            assert all(generation <= merged.get(region, 0) for region, generation in claim.items()), where
            if claim and claim == merged and any(merged.values()):
                assert coverage(index.covered, table.manifest).complete, (where, name)


@pytest.mark.req("S0-067", "S0-166", "S0-176", "S0-182")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_in_any_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    made = Workload(seed, regions=2, base_rows=60, max_memtable_rows=60, stable_row_ids=bool(seed % 2))
    made.create(str(tmp_path / "t.lance"))
    lance.dataset(made.uri).create_scalar_index("val", "BTREE")
    name, manifest = wire.newest_manifest(Files(made.uri))
    details = wire.encode([*wire.decode(wire.mem_wal_details(manifest)), (1001, OF_A_LATER_RELEASE)])
    Files(made.uri).put(name, wire.build_manifest(wire.with_details(manifest, details)))
    cast, witness = Cast(made, rng), Witness(made)
    for number in range(INTERLEAVINGS):
        cast.run()
        witness.look(f"seed {seed}, interleaving {number}")
    assert min(cast.landed[kind] for kind in ("merge", "snapshot", "catchup")) > 0, cast.landed
    made.close()
    merge.apply(open_table(made.uri), merge.MergeOptions())
    catchup.apply(open_table(made.uri), catchup.CatchupOptions())
    snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions())
    witness.look(f"seed {seed}, the end")
    assert_same(read_base(made.uri), made.expected())
    assert_same(read_lsm(made.uri), made.expected())
    table = open_table(made.uri)
    assert {name: dict(claim) for name, claim in table.index.index_catchup.items()} == {
        name: dict(table.index.merged_generations) for name in ("id_idx", "val_idx")
    }
    found = read_snapshot(table)
    assert found is not None
    assert {row.region_id for row in found.regions} == {UUID(region) for region in made.regions}
    assert not [path for path in Files(made.uri).listing("_versions") if "/d" in path]
