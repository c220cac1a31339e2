"""Histories of one table with a collector in between, and a witness of what must hold after each step.

The witness does not believe any job: it looks at the files, decodes manifests by itself
(tests.tables.wire), and compares rows with the model. What it read once it reads again only when a
file under it is gone or another: nothing else can change what a reader sees.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
from lance.file import LanceFileReader
from pyarrow import ipc

from memwal_ops import open_table
from memwal_ops.core.holds import release_hold, take_hold
from memwal_ops.errors import CommitConflictError, StorageError, UnsupportedFeatureError, VersionGoneError
from memwal_ops.jobs import catchup, compact, expire, gc, merge, snapshot
from memwal_ops.jobs.collectables import Verdict
from tests.crash.dying_store import DyingStore, Killed
from tests.crash.test_interleavings import Overtaken
from tests.tables import wire
from tests.tables.files import Files
from tests.tables.model import assert_same
from tests.tables.reading import _generation_rows, read_base, read_spec
from tests.tables.region_layout import RegionLayout
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.core.table import Table
    from tests.tables.model import Row, Rows

IMMEDIATE = gc.GcOptions(
    reader_grace=timedelta(0), orphan_min_age=timedelta(0), manifest_retention=2, allow_unsafe=True
)
#: What a test calls an hour's quarter: so much older everything gets by the step "later".
PASSING = timedelta(minutes=20)
PATIENT = gc.GcOptions(
    reader_grace=timedelta(minutes=15), orphan_min_age=timedelta(minutes=15), manifest_retention=2, allow_unsafe=True
)
HINT = "version_hint.json"

# -- the two layouts, with more than one writer


class RegionTable(RegionLayout):
    """The specification's layout with a writer that may be fenced, or killed in a flush."""

    #: Per region the positions at which a fenced writer goes on when it wakes.
    stalled: dict[str, list[int]]
    _dying = False

    def claim(self, region: str) -> None:
        """Another writer takes the region over, and with it what the log holds."""
        state = self._states[region]
        self.stalled.setdefault(region, []).append(state.last_entry + 1)
        state.epoch += 1
        self._publish(region)

    def die_in_flush(self, region: str) -> None:
        """A flush ends before it is published: the directory stands, its rows are in the log still."""
        state = self._states[region]
        kept = replace(state, generations=dict(state.generations), pending=list(state.pending))
        self._dying = True
        self.flush_generation(region)
        self._dying = False
        self._states[region] = kept

    def wake(self, region: str) -> bool:
        """Whether a fenced writer's next entry would be taken, although a later epoch wrote at its position."""
        written = {int(entry) for entry in self.written.get(region, ())}
        folder = f"{self.uri}/_mem_wal/{region}/wal"
        return any(
            at in written and not os.path.exists(f"{folder}/{wire.bit_reversed(at)}.lance")
            for at in self.stalled.get(region, ())
        )

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.stalled, self.written = {}, {}

    def _append(self, region: str, rows: pa.Table) -> int:
        generation = super()._append(region, rows)
        self.written.setdefault(region, set()).add(self._states[region].last_entry)
        return generation

    def _publish(self, region: str) -> None:
        """As a writer must: on top of the newest manifest, from which a collector may have dropped generations."""
        if self._dying:
            return
        state = self._states[region]
        if state.version:
            newest = wire.region_manifest(Files(self.uri), region)
            made = state.current_generation - 1
            state.version = newest.version
            state.generations = {
                number: path
                for number, path in state.generations.items()
                if number in newest.generations or (number == made and newest.current_generation <= made)
            }
        super()._publish(region)


class ShardTable(Workload):
    """pylance's own writer; fenced ones are kept, to be woken later."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, **options)
        self.stalled: dict[str, list[Any]] = {}

    def claim(self, region: str) -> None:
        """A second writer opens the region while the first one is open still, and holds unflushed rows or not."""
        first = self.writer(region)
        del self._writers[region]
        self.writer(region)
        self.stalled.setdefault(region, []).append(first)

    def die_in_flush(self, region: str) -> None:
        """A generation's files, of which the region manifest never heard."""
        manifest = wire.region_manifest(Files(self.uri), region) if self._known(region) else None
        number = 1 if manifest is None else manifest.current_generation
        if manifest is None:
            return
        folder = f"{self.uri}/_mem_wal/{region}/{self.rng.getrandbits(32):08x}_gen_{number}"
        lance.write_dataset(pa.table({"id": pa.array([1], pa.int64())}), folder)

    def wake(self, region: str) -> bool:
        """Whether a fenced writer is believed; it goes on trying where a later one wrote something."""
        for writer in self.stalled.get(region, ()):
            rows = lance.dataset(self.uri).to_table().slice(0, 1)
            try:
                writer.put(rows)
            except OSError as error:
                assert "fenced" in str(error), error
            else:
                return True
        return False

    def bury(self) -> None:
        """Let go of the fenced writers; those that hold rows say that they were fenced."""
        for writer in (one for several in self.stalled.values() for one in several):
            with contextlib.suppress(OSError):
                writer.close()
        self.stalled = {}

    def _known(self, region: str) -> bool:
        return os.path.isdir(f"{self.uri}/_mem_wal/{region}/manifest")


# -- what the witness knows


@dataclass
class _Version:
    """A version as it read when it was first seen."""

    progress: dict[str, int]
    rows: Rows
    snapshot: str | None
    has_mem_wal: bool


@dataclass
class _Generation:
    """A generation as it was when it was first listed."""

    files: frozenset[str]
    rows: list[tuple[bool, Row]]


@dataclass
class _Region:
    """Everything that a region's log and manifest ever showed."""

    entries: dict[int, int | None] = field(default_factory=dict)  # id: writer epoch
    manifest: wire.RegionManifest | None = None

    @property
    def posts(self) -> dict[int, int]:
        """Per epoch its first entry."""
        found: dict[int, int] = {}
        for entry, epoch in sorted(self.entries.items()):
            if epoch is not None:
                found.setdefault(epoch, entry)
        return found


State = tuple[int, int]
# What may vanish by whose hand; anything else is a file that somebody needed.
_MAY_GO = {
    "gc": re.compile(r"_mem_wal/.*|_indices/[^/]+/index\.lance|_versions/d.*|_transactions/.*|_mem_wal_ops/.*"),
    "expire": re.compile(r"(?!_mem_wal/|_refs/).*"),
    "unbranch": re.compile(r"_refs/.*|tree/.*"),
    "untag": re.compile(r"_refs/.*"),
    "any": re.compile(r"_versions/d.*|_transactions/.*|_mem_wal_ops/.*|_indices/.*"),
}
_MAY_CHANGE = re.compile(r".*(version_hint|latest_version_hint)\.json|_refs/.*")


class Witness:
    """Looks at all of a table after each step."""

    def __init__(self, made: RegionTable | ShardTable) -> None:
        self.made = made
        self.uri = made.uri
        self.files: dict[str, State] = {}
        self.regions: dict[str, _Region] = {}
        self.versions: dict[tuple[str, int], _Version] = {}  # "" is main
        self.generations: dict[tuple[str, str], _Generation] = {}
        # What a reader may open that has read its manifests a moment ago.
        self.promised: frozenset[str] = frozenset()
        # The posts of stalled writers are promised as well, unless the collector was told otherwise.
        self.posts_stay = True

    def scan(self) -> dict[str, State]:
        """Every file with its size and time; not those that pylance's writer gives their name in a moment."""
        found: dict[str, State] = {}
        folders = [self.uri]
        while folders:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir():
                        folders.append(entry.path)
                    elif ".tmp." not in entry.name and "#" not in entry.name:
                        state = entry.stat()
                        found[entry.path[len(self.uri) + 1 :]] = (state.st_size, state.st_mtime_ns)
        return found

    def fork(self) -> Witness:
        """Another one that knows the same."""
        other = copy.copy(self)
        other.regions = {region: replace(seen, entries=dict(seen.entries)) for region, seen in self.regions.items()}
        other.versions, other.generations = dict(self.versions), dict(self.generations)
        return other

    def forget_times(self) -> None:
        """All files got older by the test's own doing."""
        self.files = self.scan()

    def look(self, kinds: Iterable[str]) -> None:
        """Compare everything with what it was before, and with the model."""
        now = self.scan()
        gone = self.files.keys() - now.keys()
        changed = {path for path, state in self.files.items() if path in now and now[path] != state}
        kinds = {"any", *kinds}
        allowed = [_MAY_GO[kind] for kind in kinds if kind in _MAY_GO]
        taken = sorted(path for path in gone if not any(one.fullmatch(path) for one in allowed))
        assert not taken, f"{kinds} took {taken}"
        rewritten = sorted(path for path in changed if not _MAY_CHANGE.fullmatch(path))
        assert not rewritten, f"{kinds} rewrote {rewritten}"
        self.files = now
        self._look_at_regions()
        fresh = self._look_at_versions(gone)
        self._look_at_generations(gone)
        self._travel()
        if gone or fresh:
            assert_same(read_spec(self.uri), self.made.expected(self._flushed()))
        missing = self.promised - now.keys()
        assert not missing, f"a reader that began a moment ago does not find {sorted(missing)}"

    def promise(self) -> None:
        """A reader begins: what it has to find, as long as no time passes."""
        found = set()
        newest = self.versions[max(key for key in self.versions if not key[0])]
        for region, seen in self.regions.items():
            if seen.manifest is None:
                continue
            for number, path in seen.manifest.generations.items():
                if number > newest.progress.get(region, 0):
                    found |= self.generations[region, path].files
            found |= {self._entry(region, one) for one in seen.entries if one > seen.manifest.replay_after}
            found.add(f"_mem_wal/{region}/manifest/{wire.bit_reversed(seen.manifest.version)}.binpb")
        self.promised = frozenset(found)

    def end_of_log(self, region: str, *, posts: bool) -> tuple[set[str], set[str]]:
        """The log entries that must be left when all else is collected, and those that may be."""
        seen = self.regions[region]
        assert seen.manifest is not None
        first = seen.posts
        epochs = sorted(first) if posts else sorted(first)[-2:]
        must = {one for one in seen.entries if one > seen.manifest.replay_after} | {first[one] for one in epochs}
        must |= {max(seen.entries, default=0)} - {0}
        # Which other entries a stalled writer may go on at is proven in test_gc_fencing.py.
        may = set(seen.entries) if posts else must
        return {self._entry(region, one) for one in must}, {self._entry(region, one) for one in may}

    # -- parts

    def _entry(self, region: str, number: int) -> str:
        suffix = "lance" if isinstance(self.made, RegionTable) else "arrow"
        return f"_mem_wal/{region}/wal/{wire.bit_reversed(number)}.{suffix}"

    def _look_at_regions(self) -> None:
        logs: dict[str, set[int]] = {}
        manifests: dict[str, list[int]] = {}
        for path in self.files:
            parts = path.split("/")
            if parts[0] == "_mem_wal" and parts[2] == "wal":
                logs.setdefault(parts[1], set()).add(wire.from_bit_reversed(parts[3]))
            elif parts[0] == "_mem_wal" and parts[2] == "manifest" and parts[3] != HINT:
                manifests.setdefault(parts[1], []).append(wire.from_bit_reversed(parts[3]))
        for region, versions in manifests.items():
            seen = self.regions.setdefault(region, _Region())
            log = logs.get(region, set())
            versions.sort()
            assert versions[-1] - versions[0] + 1 == len(versions), f"gap in region manifests: {versions}"
            if versions[0] > 1:
                with open(f"{self.uri}/_mem_wal/{region}/manifest/{HINT}", encoding="utf-8") as hint:
                    assert json.load(hint)["version"] in versions
            before = seen.manifest
            if before is None or before.version != versions[-1]:
                seen.manifest = wire.region_manifest(Files(self.uri), region)
                assert before is None or seen.manifest.version > before.version
                assert before is None or seen.manifest.epoch >= before.epoch
                assert before is None or seen.manifest.replay_after >= before.replay_after
            assert seen.manifest is not None
            end = max(seen.entries, default=0)
            for entry in sorted(log - seen.entries.keys()):
                # pylance finds the end of a log by listing it: without the last entry its fences stand too low.
                assert entry > end, f"{region}: entry {entry} was written where {end} had been the last"
                seen.entries[entry] = self._epoch_of(region, entry)
            assert not seen.entries or max(seen.entries) in log, (
                f"{region}: the last entry {end} is gone: {sorted(log)}"
            )
            replayed = seen.manifest.replay_after
            needed = {entry for entry in seen.entries if entry > replayed}
            assert needed <= log, f"{region} lacks WAL entries {sorted(needed - log)} above {replayed}"
            assert len(needed) == max(needed, default=replayed) - replayed, f"gap in the log: {sorted(needed)}"
            if self.posts_stay:
                assert set(seen.posts.values()) <= log, f"{region} lacks fence posts: {seen.posts}, {sorted(log)}"
        assert self.regions.keys() == manifests.keys(), "a region is gone"

    def _epoch_of(self, region: str, entry: int) -> int | None:
        path = f"{self.uri}/{self._entry(region, entry)}"
        if path.endswith(".lance"):
            metadata = LanceFileReader(path).metadata().schema.metadata
        else:
            with open(path, "rb") as file:
                metadata = ipc.open_stream(file).schema.metadata
        return int(metadata[b"writer_epoch"])

    def _look_at_versions(self, gone: set[str]) -> bool:
        """Read the new versions, and those whose files may have been touched; whether there are new ones."""
        listed = dict(self._listed())
        for key in self.versions.keys() - listed.keys():
            del self.versions[key]
        touched = any(path.startswith(("data/", "_deletions/", "_versions/0", "_versions/1", "tree/")) for path in gone)
        fresh = sorted(listed.keys() - self.versions.keys())
        for key, path in listed.items():
            branch, number = key
            known = self.versions.get(key)
            if known is None:
                fields = wire.parse_manifest(Files(self.uri).get(path))
                entry = wire.mem_wal_entry(fields)
                progress, file = {}, None
                if entry is not None:
                    details = wire.decode(wire.mem_wal_details(fields))
                    progress = {wire.uuid_of(one, 1): int(wire.get(one, 2)) for one in wire.sub(details, 9)}
                    file = f"_indices/{wire.uuid_of(entry, 1)}/index.lance"
                rows = read_base(f"{self.uri}/tree/{branch}" if branch else self.uri, version=number)
                assert_same(rows, self.made.expected(progress), seed=f"version {key}")
                self.versions[key] = _Version(progress, rows, file if file in self.files else None, entry is not None)
            elif touched:
                rows = read_base(f"{self.uri}/tree/{branch}" if branch else self.uri, version=number)
                assert_same(rows, known.rows, seed=f"version {key}, read again")
        lost = {one.snapshot for one in self.versions.values()} - {None} - self.files.keys()
        assert not lost, f"snapshots of versions that stand are gone: {lost}"
        return bool(fresh)

    def _listed(self) -> Iterator[tuple[tuple[str, int], str]]:
        for path in self.files:
            found = re.fullmatch(r"(?:tree/([^/]+)/)?_versions/(\d{20})\.manifest", path)
            if found is not None:
                yield (found[1] or "", 2**64 - 1 - int(found[2])), path

    def _look_at_generations(self, gone: set[str]) -> None:
        standing = set()
        for region, seen in self.regions.items():
            assert seen.manifest is not None
            for path in seen.manifest.generations.values():
                key = (region, path)
                standing.add(key)
                folder = f"_mem_wal/{region}/{path}"
                known = self.generations.get(key)
                if known is None:
                    files = frozenset(
                        {one for one in self.files if one.startswith(f"{folder}/")} | self._pointed(folder)
                    )
                    known = self.generations[key] = _Generation(files, self._rows_of(folder))
                lost = known.files - self.files.keys()
                assert not lost, f"generation {path} of {region} is listed and lacks {sorted(lost)}"
        for key in self.generations.keys() - standing:
            del self.generations[key]

    def _pointed(self, folder: str) -> set[str]:
        """The log entries in which a generation of the region layout has its rows."""
        if not isinstance(self.made, RegionTable):
            return set()
        region = folder.split("/")[1]
        fragments = lance.dataset(f"{self.uri}/{folder}").get_fragments()
        return {f"_mem_wal/{region}/wal/{file.path}" for one in fragments for file in one.metadata.files}

    def _rows_of(self, folder: str) -> list[tuple[bool, Row]]:
        names = {one.id(): one.name() for one in lance.dataset(self.uri).lance_schema.fields()}
        return _generation_rows(f"{self.uri}/{folder}", None, names)

    def _flushed(self) -> dict[str, int]:
        return {
            region: seen.manifest.current_generation - 1
            for region, seen in self.regions.items()
            if seen.manifest is not None
        }

    def _travel(self) -> None:
        """Whoever opens any version, and follows the region manifests of now, reads the newest rows."""
        wanted = self.made.expected(self._flushed())
        keys = self.made.model.keys
        for key, version in self.versions.items():
            if not version.has_mem_wal:
                continue  # older than MemWAL: nobody looks for generations there
            rows = dict(version.rows)
            for region, seen in self.regions.items():
                assert seen.manifest is not None
                for number, path in sorted(seen.manifest.generations.items()):
                    if number <= version.progress.get(region, 0):
                        continue
                    for deleted, row in self.generations[region, path].rows:
                        one = tuple(row[name] for name in keys)
                        if deleted:
                            rows.pop(one, None)
                        else:
                            rows[one] = row
            assert_same(rows, wanted, seed=f"at version {key}, with the generations above {version.progress}")


# -- the history

_WEIGHTS = {
    "write": 10, "flush": 6, "claim": 2, "wake": 2, "die_in_flush": 1, "merge": 6, "catchup": 3, "snapshot": 3,
    "compact": 2, "tag": 2, "untag": 1, "branch": 2, "unbranch": 1, "hold": 2, "release": 1, "expire": 4, "gc": 6,
    "crash": 5, "overtaken": 3, "later": 2, "reader": 1,
}  # fmt: skip
# While one job is in the middle: what another may do. No expiry beside commits (its own warning says why).
_BESIDE_GC = ("write", "flush", "claim", "merge", "catchup", "snapshot", "compact", "tag", "untag", "branch", "hold",
              "release", "expire", "gc")  # fmt: skip
_BESIDE_OTHERS = ("write", "flush", "claim", "merge", "snapshot", "tag", "hold", "gc")
# So many storage calls a job makes at most on these tables, more or less.
_CALLS = {"merge": 40, "catchup": 20, "snapshot": 24, "compact": 16, "expire": 40, "gc": 70}


class History:
    """One seeded history."""

    #: Fewest and most steps.
    steps = (3, 8)

    def __init__(self, seed: int, folder: str) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        kind = RegionTable if seed % 2 else ShardTable
        self.made: RegionTable | ShardTable = kind(
            seed,
            regions=self.rng.choice([1, 2]),
            base_rows=12,
            with_btree=bool(seed % 4 < 2),
            stable_row_ids=bool(seed % 8 < 4),
        )
        self.made.create(f"{folder}/{seed}.lance")
        self.uri = self.made.uri
        self.witness = Witness(self.made)
        self.witness.look(())
        self.tags: dict[str, int] = {}
        self.branches: dict[str, int] = {}
        self.holds: dict[int, int] = {}
        # Expiries that were killed announce their versions for an hour.
        self.announced = False
        self.trail: list[str] = []
        self.kinds: set[str] = set()
        # Another job is in the middle: grace is what protects it.
        self.beside: str | None = None
        self.counts: dict[str, int] = {}

    def run(self) -> None:
        """All steps, then the end."""
        try:
            for _ in range(self.rng.randint(*self.steps)):
                self.step()
            self.end()
        except BaseException as error:
            error.add_note(f"seed {self.seed}; steps: {'; '.join(self.trail)}")
            raise
        finally:
            if isinstance(self.made, ShardTable):
                self.made.close()

    def step(self) -> None:
        """One step of any kind, and a look at everything."""
        kind = self.rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        self._do(kind)
        self.witness.look(self.kinds)
        self.kinds.clear()
        self._check_protected()

    def _do(self, kind: str) -> None:
        self.trail.append(kind)
        self.kinds.add(kind)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        getattr(self, f"_{kind}")()

    # -- writers and readers

    def _write(self) -> None:
        self.made.step()

    def _flush(self) -> None:
        self.made.flush(self.rng.choice(self.made.regions))

    def _claim(self) -> None:
        self.made.claim(self.rng.choice(self.made.regions))

    def _die_in_flush(self) -> None:
        self.made.die_in_flush(self.rng.choice(self.made.regions))

    def _wake(self) -> None:
        region = self.rng.choice(self.made.regions)
        assert not self.made.wake(region), "a fenced writer was believed"

    def _reader(self) -> None:
        self.witness.promise()

    def _later(self) -> None:
        seconds = PASSING.total_seconds()
        for path in self.witness.scan():
            full = f"{self.uri}/{path}"
            state = os.stat(full)
            os.utime(full, ns=(state.st_atime_ns, state.st_mtime_ns - int(seconds * 1e9)))
        self.witness.forget_times()
        self.witness.promised = frozenset()

    # -- what keeps versions

    def _versions(self) -> list[int]:
        return [int(one["version"]) for one in lance.dataset(self.uri).versions()]

    def _tag(self) -> None:
        name = f"tag-{len(self.trail)}"
        self.tags[name] = self.rng.choice(self._versions())
        lance.dataset(self.uri).tags.create(name, self.tags[name])

    def _untag(self) -> None:
        if self.tags:
            name = self.rng.choice(sorted(self.tags))
            lance.dataset(self.uri).tags.delete(name)
            del self.tags[name]

    def _branch(self) -> None:
        name = f"branch-{len(self.trail)}"
        self.branches[name] = self.rng.choice(self._versions())
        lance.dataset(self.uri).create_branch(name, self.branches[name])

    def _unbranch(self) -> None:
        if self.branches:
            name = self.rng.choice(sorted(self.branches))
            lance.dataset(self.uri).branches.delete(name)
            del self.branches[name]

    def _hold(self) -> None:
        version = self.rng.choice(self._versions())
        try:
            hold = take_hold(open_table(self.uri), version, timedelta(days=3))
        except VersionGoneError:
            assert self.announced
        else:
            self.holds[hold.number] = version

    def _release(self) -> None:
        if self.holds:
            number = self.rng.choice(sorted(self.holds))
            release_hold(open_table(self.uri), number)
            del self.holds[number]

    def _protected(self) -> set[int]:
        return {*self.tags.values(), *self.branches.values(), *self.holds.values()}

    def _check_protected(self) -> None:
        lost = self._protected() - {number for branch, number in self.witness.versions if not branch}
        assert not lost, f"versions {lost} are gone: tags {self.tags}, branches {self.branches}, holds {self.holds}"

    # -- jobs

    def _job(self, kind: str, table: Table) -> None:
        rng = self.rng
        if kind == "merge":
            merge.apply(table, merge.MergeOptions(max_generations=rng.choice([1, 2, None])))
        elif kind == "snapshot":
            snapshot.apply(table, snapshot.SnapshotOptions(rng.choice([0, 0, 100])))
        elif kind == "catchup":
            catchup.apply(table, catchup.CatchupOptions())
        elif kind == "compact":
            compact.apply(table, compact.CompactOptions(rng.choice([20, 1 << 20])))
        elif kind == "expire":
            expire.apply(table, expire.ExpireOptions(rng.choice([timedelta(0), PASSING / 2]), rng.choice([1, 1, 2, 4])))
        else:
            report = gc.apply(table, self._gc_options())
            assert not report.failed
            assert not report.faults

    def _gc_options(self) -> gc.GcOptions:
        options = self.rng.choice([IMMEDIATE, IMMEDIATE, PATIENT]) if self.beside in {None, "gc"} else PATIENT
        if options is IMMEDIATE:
            self.witness.promised = frozenset()
        return replace(
            options,
            max_deletes=self.rng.choice([None, None, self.rng.randint(1, 12)]),
            manifest_retention=self.rng.choice([2, 2, 3, 5]),
        )

    def _merge(self) -> None:
        self._plain("merge")

    def _catchup(self) -> None:
        self._plain("catchup")

    def _snapshot(self) -> None:
        self._plain("snapshot")

    def _compact(self) -> None:
        self._plain("compact")

    def _plain(self, kind: str) -> None:
        try:
            self._job(kind, open_table(self.uri))
        except CommitConflictError:
            assert self.beside is not None

    def _expire(self) -> None:
        keep = self.rng.choice([1, 1, 2, 4])
        before = self._versions()
        if self.rng.random() < 0.3:
            assert expire.plan(open_table(self.uri), expire.ExpireOptions(timedelta(0), keep)).newest == before[-1]
        expire.apply(open_table(self.uri), expire.ExpireOptions(timedelta(0), keep))
        assert set(self._versions()) == set(before[-keep:]) | self._protected() & set(before)

    def _gc(self) -> None:
        options = self._gc_options()
        planned = None
        if self.beside is None and self.rng.random() < 0.4:
            before = self.witness.scan()
            planned = gc.plan(open_table(self.uri), options, limit=1 << 20)
            assert self.witness.scan() == before, "a plan changed something"
        report = gc.apply(open_table(self.uri), options, limit=1 << 20)
        assert not report.failed
        assert not report.faults
        if planned is not None and options.max_deletes is None:
            self._check_plan(planned, before)

    def _check_plan(self, planned: gc.GcReport, before: dict[str, State]) -> None:
        """What was planned is what went; but the drain adds a manifest version, and so frees an older one."""
        named = {item.path for item in planned.items[Verdict.DELETE]}
        gone = before.keys() - self.witness.scan().keys()
        went = {path if path in named else "/".join(path.split("/")[:3]) for path in gone if "/manifest/" not in path}
        assert {path for path in named if "/manifest/" not in path} == {
            one for one in went if "_mem_wal_ops" not in one
        }

    def _crash(self) -> None:
        kind = self.rng.choice(["merge", "snapshot", "catchup", "expire", "gc", "gc"])
        at, after = self.rng.randint(1, _CALLS[kind]), self.rng.random() < 0.5
        self.trail[-1] += f" {kind} {'after' if after else 'before'} call {at}"
        self.kinds.add(kind)
        table = open_table(self.uri)
        try:
            self._job(kind, replace(table, store=DyingStore(table.store, at, after=after)))
        except Killed:
            self.counts["killed"] = self.counts.get("killed", 0) + 1
            self.announced |= kind == "expire"
        except (StorageError, UnsupportedFeatureError):
            pass  # it died while pylance was asking for the commit, which makes an error of its own of it

    def _overtaken(self) -> None:
        kind = self.rng.choice(["gc", "gc", "gc", "merge", "catchup", "snapshot", "compact"])
        at = self.rng.randint(1, _CALLS[kind])
        self.trail[-1] += f" {kind} from call {at}"
        self.kinds.add(kind)

        def others() -> None:
            for _ in range(self.rng.randint(1, 3)):
                self._do(self.rng.choice(_BESIDE_GC if kind == "gc" else _BESIDE_OTHERS))

        self.beside = kind
        table = open_table(self.uri)
        try:
            self._job(kind, replace(table, store=Overtaken(table.store, at, others)))
        except CommitConflictError:
            pass
        finally:
            self.beside = None

    # -- the end

    def end(self) -> None:
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
        merge.apply(open_table(self.uri), merge.MergeOptions())
        catchup.apply(open_table(self.uri), catchup.CatchupOptions())
        expire.apply(open_table(self.uri), expire.ExpireOptions(timedelta(0), 1))
        posts = bool(self.rng.randrange(2))
        options = IMMEDIATE if posts else replace(IMMEDIATE, fence_retention=timedelta(0))
        self.witness.posts_stay = posts
        self.witness.promised = frozenset()
        decisions = [gc.apply(open_table(self.uri), options).decision for _ in range(2)]
        before = self.witness.scan()
        last = gc.apply(open_table(self.uri), options)
        assert last.decision == "nothing_to_delete", (decisions, last.to_json())
        assert self.witness.scan() == before, "a run that found nothing changed something"
        self.witness.look({"gc", "expire", "untag", "unbranch"})
        self._check_left(posts=posts)
        if self.seed % 3 == 0:
            self._go_on()

    def _check_left(self, *, posts: bool) -> None:
        witness = self.witness
        ((_, newest),) = witness.versions.items()
        left = {path for path in witness.files if path.startswith("_mem_wal/")}
        must: set[str] = set()
        may: set[str] = set()
        for region, seen in witness.regions.items():
            assert seen.manifest is not None
            assert not seen.manifest.generations
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
        assert_same(newest.rows, self.made.expected())

    def _go_on(self) -> None:
        """Writers, mergers and queries by the index find nothing missing."""
        self.made.step(2)
        self.made.flush()
        merge.apply(open_table(self.uri), merge.MergeOptions())
        self.witness.look({"merge"})
        dataset = lance.dataset(self.uri)
        rows = read_base(self.uri)
        assert_same(rows, self.made.expected())
        for (key,) in list(rows)[:2]:
            assert dataset.count_rows(f"id = {key}") == 1


def run_history(seed: int, folder: str) -> dict[str, int]:
    """One history, and what happened in it; its table is removed where all was right."""
    history = History(seed, folder)
    history.run()
    shutil.rmtree(history.uri)
    return history.counts


def run_all(seeds: Iterable[int], folder: str, *, on_counts: Callable[[dict[str, int]], None]) -> None:
    """Many, one after the other."""
    for seed in seeds:
        on_counts(run_history(seed, folder))


def collect_for_ever(uri: str, grace: timedelta) -> None:
    """What a process does that is killed at any moment: ``python -m tests.crash.gc_history URI SECONDS``."""
    options = replace(IMMEDIATE, reader_grace=grace, orphan_min_age=2 * grace)
    while True:
        expire.apply(open_table(uri), expire.ExpireOptions(grace, 1))
        report = gc.apply(open_table(uri), options)
        if report.failed or report.faults:
            sys.exit(f"failed: {report.failed}, faults: {report.faults}")


if __name__ == "__main__":
    collect_for_ever(sys.argv[1], timedelta(seconds=float(sys.argv[2])))
