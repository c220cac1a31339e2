"""One cell of the matrix: a job, a point, a fault; then everything that must hold, and the job again to its end."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memwal_ops import open_table
from memwal_ops.core.holds import holds
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from tests.campaigns.faults.jobs import JOBS, OTHERS
from tests.campaigns.faults.plan import Fault, Plan, Point, described
from tests.campaigns.faults.points import is_indifferent, kind_of
from tests.campaigns.faults.tables import LAYOUTS, START, Prepared, prepare, scan
from tests.campaigns.traces.protocol import Protocol
from tests.campaigns.traces.recorder import recording
from tests.support.dying_store import Killed
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import rows_by_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.table import Table
    from tests.campaigns.faults.jobs import Job
    from tests.campaigns.faults.tables import Layout
    from tests.campaigns.sim.witness import Witness

#: By this name all others run, one after the other, while the job is delayed.
DELAY = "delay"
# What a job may leave that was hit: no reader sees it, and pylance's clean-up, gc or the next compaction takes it.
_LEFT_WHEN_HIT = {
    "data file", "deletion vector", "index", "snapshot", "detached manifest", "staged version", "transaction",
}  # fmt: skip
# A snapshot that was superseded waits for gc; one may be the file of a version that expired.
_LEFT_BY_DESIGN = {"snapshot", "transaction"}
_REBUILDS = {"catchup", "migrate-codebook", "compact", "pylance-compaction", DELAY}
# What stands below _mem_wal_ops/, where pylance never looks.
_BUSINESS = {"holds", "expiries", "expired", "clock", "probe", "leases", "quarantine"}
# To lose a race is no reason to give up.
_GIVEN_UP = {"incomplete", "blocked"}
# pylance builds an index before it sees that others changed it, and leaves what it built to its own clean-up.
_BUILDERS = {"catchup", "migrate-codebook"}
# pylance cleans up after commits that lost a race, ours leaves it that where it works through pylance's.
_COMPACTIONS = {"compact", "pylance-compaction", DELAY}


@dataclass(frozen=True, slots=True)
class Cell:
    """Where it is in the matrix; ``other`` for Fault.BESIDE."""

    job: str
    layout: Layout
    point: int
    fault: Fault
    other: str = ""

    def __str__(self) -> str:
        other = f" --other {self.other}" if self.other else ""
        where = f"--point {self.point} --fault {self.fault}{other} --layout {self.layout}"
        return f"python -m tests.campaigns.faults {self.job} {where}"


@dataclass
class Matrix:
    """The tables of one process, and what was learned of each job on them."""

    folder: str
    cells: int = 0
    _prepared: dict[tuple[Layout, str], Prepared] = field(default_factory=dict)
    _trails: dict[tuple[Layout, str], list[Point]] = field(default_factory=dict)
    _wanted: dict[tuple[Layout, str], set[str]] = field(default_factory=dict)
    _keys: dict[tuple[Layout, str], set[tuple[str, int]]] = field(default_factory=dict)

    def prepared(self, job: Job, layout: Layout) -> Prepared:
        """The table on which a job has work to do; jobs without a preparation of their own share one."""
        key = (layout, job.name if job.prepare is not None else f"{job.regions} regions")
        if key not in self._prepared:
            folder = f"{self.folder}/{key[1]}"
            self._prepared[key] = prepare(layout, folder, regions=job.regions, more=job.prepare)
        return self._prepared[key]

    def trail(self, job: Job, layout: Layout) -> list[Point]:
        """The points of a run that nothing happens to; fails where it writes anything between them."""
        key = (layout, job.name)
        if key not in self._trails:
            prepared = self.prepared(job, layout)
            witness = prepared.restore()
            plan = Plan(scan=lambda: scan(prepared.uri))
            plan.run(job.run, prepared.uri)
            witness.look(job.takes)
            job.finish(prepared)
            witness.look(job.takes)
            self._wanted[key] = _names(prepared)
            self._trails[key] = described(plan.trail)
            assert job.name == "probe" or all(point.kind != "probe" for point in plan.trail)
        return self._trails[key]

    def hits(self, job: Job) -> Iterator[Cell]:
        """Every point with every fault that differs there."""
        for layout, number, point in self._points(job):
            for fault in point.faults if job.is_beside or point.effect else ():
                if self._chosen(job, layout, point, list(Fault).index(fault)):
                    yield Cell(job.name, layout, number, fault)

    def meetings(self, job: Job, other: str) -> Iterator[Cell]:
        """Every point with another job, where it makes a difference that it runs before the call and not after it.

        Where no change is near, or where the two never look at the same, the others take turns. All at once, in
        a delay, they run only where something is about to be done.
        """
        deletes = other == DELAY or (other in JOBS and JOBS[other].takes)
        for layout, number, point in self._points(job):
            if point.nested or (is_indifferent(point.name) and not deletes):
                continue
            if other == DELAY:
                meets = point.effect
            else:
                meets = point.near and not self._are_strangers(job, other, layout)
                meets = meets or number % len(OTHERS) == list(OTHERS).index(other)
            if meets and self._chosen(job, layout, point, [*OTHERS, DELAY].index(other)):
                yield Cell(job.name, layout, number, Fault.BESIDE, other)

    def _are_strangers(self, job: Job, other: str, layout: Layout) -> bool:
        """Whether all that the other changes is its own business, which the job never asks for."""
        if other not in JOBS:
            return False
        changed = {point.kind for point in self.trail(JOBS[other], layout) if point.effect}
        return changed <= _BUSINESS and changed.isdisjoint(point.kind for point in self.trail(job, layout))

    def _points(self, job: Job) -> Iterator[tuple[Layout, int, Point]]:
        for layout in LAYOUTS:
            for number, point in enumerate(self.trail(job, layout), 1):
                if not point.inner:
                    yield layout, number, point

    def _chosen(self, job: Job, layout: Layout, point: Point, salt: int) -> bool:
        """Whether a cell is run in this layout: what both have is run in one of them, now here, now there."""
        other = LAYOUTS[1 - LAYOUTS.index(layout)]
        if (other, job.name) not in self._keys:
            self._keys[other, job.name] = {one.key for one in self.trail(job, other) if not one.inner}
        if point.key not in self._keys[other, job.name]:
            return True
        return (zlib.crc32(point.name.encode()) + point.occurrence + salt) % 2 == LAYOUTS.index(layout)

    def run(self, cell: Cell) -> Plan:
        """One cell; an AssertionError says which it was."""
        job = JOBS[cell.job]
        self.trail(job, cell.layout)
        self.cells += 1
        try:
            return _Run(self.prepared(job, cell.layout), job, cell, self._wanted[cell.layout, job.name]).run()
        except BaseException as error:
            error.add_note(str(cell))
            raise

    def forget(self) -> None:
        """Let go of what others made of the tables: it was made by a product that was not itself."""
        for prepared in self._prepared.values():
            prepared.forget()

    def verify(self) -> None:
        """Fail where a cell damaged what the others begin with."""
        for prepared in self._prepared.values():
            prepared.verify()


@dataclass
class _Run:
    """One cell under way."""

    prepared: Prepared
    job: Job
    cell: Cell
    wanted: set[str]
    takes: set[str] = field(default_factory=set)
    witness: Witness = field(init=False)

    def run(self) -> Plan:
        self.witness = self.prepared.restore()
        with recording(self.prepared.uri, Protocol().accept):
            return self._run()

    def _run(self) -> Plan:
        cell, prepared = self.cell, self.prepared
        self.takes |= self.job.takes
        plan = Plan(cell.point, cell.fault, self._others)
        try:
            report = plan.run(self.job.run, prepared.uri)
            plan.outcome = getattr(report, "decision", "done")
        except Killed:
            plan.outcome = "killed"
            assert cell.fault in {Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.TOLD_BEFORE, Fault.TOLD_AFTER}
        except MemwalOpsError as error:
            plan.outcome = f"{type(error).__name__}: {error}"
            refused = isinstance(error, self.job.refuses)
            assert cell.fault is not Fault.BESIDE or refused, plan.outcome
        assert cell.fault is not Fault.BESIDE or plan.outcome not in _GIVEN_UP, plan.outcome
        assert plan.struck, f"there were only {len(plan.trail)} points"
        self.witness.look(self.takes)
        self._check_claims(open_table(prepared.uri))
        self.job.finish(prepared)
        self.witness.look(self.takes)
        table = open_table(prepared.uri)
        self._check_claims(table)
        self._check_queries(table)
        self._check_files()
        return plan

    def _others(self) -> None:
        """Run the others in the middle, or put their outcome there where it is known."""
        names = [one for one in OTHERS if one != self.job.name] if self.cell.other == DELAY else [self.cell.other]
        self.takes |= {kind for name in names if name in JOBS for kind in JOBS[name].takes}
        prepared, moment = self.prepared, f"after {self.cell.other} beside {self.job.name}"
        if self.cell.other != DELAY:
            moment = f"after {self.cell.other}"
        at_start = prepared.is_at_start()
        if at_start and moment in prepared.moments:
            self.witness = prepared.restore(moment)
            return
        for name in names:
            OTHERS[name](prepared)
        if at_start:
            self.witness.look(self.takes)
            prepared.keep(moment, self.witness)

    def _check_claims(self, table: Table) -> None:
        """What the catch-up says of an index is true, and what a hold names stands."""
        merged = table.index.merged_generations
        for name, index in base_indexes(table).items():
            claim = table.index.index_catchup.get(name, {})
            assert all(generation <= merged.get(region, 0) for region, generation in claim.items()), name
            if claim and claim == merged and any(merged.values()):
                assert coverage(index.covered, table.manifest).complete, f"{name} claims too much"
        hit = self.job.name == "hold" and self.cell.fault is not Fault.BESIDE
        standing = {version for branch, version in self.witness.versions if not branch}
        for hold in holds(table):
            assert hit or hold.released or standing.issuperset(hold.versions), f"{hold} keeps nothing"

    def _check_queries(self, table: Table) -> None:
        """Queries by an index answer as the model."""
        progress = {str(region): one for region, one in table.index.merged_generations.items()}
        wanted = self.prepared.made.expected(progress)
        found = rows_by_key(table.dataset.to_table(filter="id > -100"), ["id"])
        assert_same(found, wanted, seed="by the index on id")
        if not _REBUILDS & {self.job.name, self.cell.other}:
            return
        near = {"column": "vec", "q": [0.0] * 8, "k": 1000, "nprobes": 100}
        ids = table.dataset.to_table(columns=["id", "_distance"], nearest=near)["id"].to_pylist()
        assert sorted(ids) == sorted(key for (key,), row in wanted.items() if row["vec"] is not None)

    def _check_files(self) -> None:
        """What stands is named by a version, or may be left."""
        if self.job.exact and self.cell.fault is not Fault.BESIDE:
            differing = _names(self.prepared) ^ self.wanted
            # gc publishes a region manifest before it deletes orphan files: a run that was hit makes one more or fewer.
            fences = {path for path in differing if self.job.name.startswith("gc") and _REGION_MANIFEST.fullmatch(path)}
            assert differing == fences
            assert len(fences) <= 1
        hit = self.cell.fault is not Fault.BESIDE
        allowed = _LEFT_WHEN_HIT if hit or _COMPACTIONS & {self.job.name, self.cell.other} else _LEFT_BY_DESIGN
        if self.job.name in _BUILDERS:
            allowed = allowed | {"index"}
        new = self.witness.files.keys() - self.prepared.moments[START].files.keys()
        named = _named(self.prepared, self.witness)
        left = defaultdict(list)
        for path in new - named:
            left[kind_of(path)].append(path)
        assert not left["other"], left["other"]
        for kind in sorted(_LEFT_WHEN_HIT):
            assert kind in allowed or not left[kind], f"left behind: {left[kind]}"
        # A merge has two: what pylance built, and with the progress, which pylance opens before it is published.
        assert len(left["detached manifest"]) <= 2
        assert len(left["staged version"]) <= 1
        for kind in ("probe", "clock", "expiries"):
            assert hit or not left[kind], f"left behind: {left[kind]}"


def _names(prepared: Prepared) -> set[str]:
    """All files but those that jobs write for themselves, and leave when they are hit."""
    return {path for path in scan(prepared.uri) if not path.startswith("_mem_wal_ops/")}


_REGION_MANIFEST = re.compile(r"_mem_wal/[^/]+/manifest/[01]{64}\.binpb")
_REFERENCES: dict[tuple[str, int, int], frozenset[str]] = {}


def _named(prepared: Prepared, witness: Witness) -> set[str]:
    """Every file that a version of the table names; of an index all that stands in its folder."""
    found: set[str] = set()
    for path in witness.files:
        if re.fullmatch(r"_versions/\d{20}\.manifest", path):
            key = (path, *witness.files[path])
            if key not in _REFERENCES:
                _REFERENCES[key] = frozenset(_references(Files(prepared.uri).get(path)))
            found |= {path} | _REFERENCES[key]
    return found | {path for path in witness.files if "/".join(path.split("/")[:2]) in found}


def _references(data: bytes) -> Iterator[str]:
    manifest = wire.parse_manifest(data)
    yield f"_transactions/{bytes(wire.get(manifest.fields, 12, b'')).decode()}"  # type: ignore[arg-type]
    for fragment in wire.sub(manifest.fields, 2):
        for file in wire.sub(fragment, 2):
            yield f"data/{bytes(wire.get(file, 1, b'')).decode()}"  # type: ignore[arg-type]
        for deletion in wire.sub(fragment, 3):
            suffix = "bin" if wire.get(deletion, 1) else "arrow"
            yield f"_deletions/{wire.get(fragment, 1)}-{wire.get(deletion, 2)}-{wire.get(deletion, 3)}.{suffix}"
    for entry in wire.sub(wire.decode(manifest.index or b""), 1):
        yield f"_indices/{wire.uuid_of(entry, 1)}"
