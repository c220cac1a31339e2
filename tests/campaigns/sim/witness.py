"""A witness that checks everything after each step, independently of the jobs.

It looks at the files, decodes manifests by itself (tests.support.tables.wire), and compares rows with the
model. What it read once it reads again only where a file under it is another: a version, a
generation and a log entry are immutable, and the files that each names are held to their size and
time. So a look costs one walk over the files, and the reading of what is new.
"""

from __future__ import annotations

import copy
import json
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import lance
from lance.file import LanceFileReader
from pyarrow import ipc

from memwal_ops.errors import SchemaProjectionError, UnsupportedFeatureError
from memwal_ops.memwal import read
from tests.campaigns.sim.seen import (
    HINT,
    LATER_RELEASE,
    SeenGeneration,
    SeenRegion,
    SeenVersion,
    files_of,
    indexes_of,
    job_of,
    progress_of,
)
from tests.campaigns.sim.writers import RegionTable
from tests.support.tables import wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import _generation_rows, read_lsm, rows_by_key
from tests.support.tables.schemas import TOMBSTONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tests.campaigns.sim.writers import ShardTable
    from tests.support.tables.model import Key, Row, Rows


State = tuple[int, int]
_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# What each job may delete; any other missing file was still needed.
_MAY_GO = {
    "gc": re.compile(r"_mem_wal/.*|_indices/[^/]+/index\.lance|_versions/d.*|_transactions/.*|_mem_wal_ops/.*"),
    "expire": re.compile(r"(?!_mem_wal/|_refs/).*"),
    "unbranch": re.compile(r"_refs/.*|tree/.*"),
    "untag": re.compile(r"_refs/.*"),
    "any": re.compile(r"_versions/d.*|_versions/[^-]+-.*|_transactions/.*|_mem_wal_ops/.*|_indices/.*"),
}
_MAY_CHANGE = re.compile(r".*(version_hint|latest_version_hint)\.json|_refs/.*")
# What a table consists of.
_KNOWN = re.compile(
    rf"(?:tree/[^/]+/)?(?:_versions/(?:d?\d+\.manifest|\d+\.manifest-{_UUID}|latest_version_hint\.json)|_transactions/[^/]+\.txn)"
    rf"|data/[^/]+\.lance|_deletions/[^/]+\.(?:arrow|bin)|_indices/{_UUID}/.+|_refs/.+|_mem_wal_ops/.+"
    rf"|_mem_wal/{_UUID}/(?:manifest/(?:[01]{{64}}\.binpb|{HINT})|wal/[01]{{64}}\.(?:lance|arrow)|[0-9a-f]{{8}}_gen_\d+/.+)"
)

# How the product says that no version is left that would tell whether two columns are the same.
_UNDECIDED = ("Cannot match the columns", "the versions that would distinguish a rename")


class Witness:
    """Looks at all of a table after each step."""

    may_go = _MAY_GO
    known = _KNOWN

    def __init__(self, made: RegionTable | ShardTable) -> None:
        self.made = made
        self.uri = made.uri
        self.files: dict[str, State] = {}
        self.regions: dict[str, SeenRegion] = {}
        self.versions: dict[tuple[str, int], SeenVersion] = {}  # "" is main
        self.generations: dict[tuple[str, str], SeenGeneration] = {}
        # Versions made by a restore: only there progress may fall.
        self.restored: set[int] = set()
        # What a reader may open that has read its manifests a moment ago.
        self.promised: frozenset[str] = frozenset()
        # The posts of stalled writers are promised as well, unless the collector was told otherwise.
        self.posts_stay = True
        # Files that a version named that was seen.
        self.named: set[str] = set()
        # Files that a commit needed which was killed: an expiry beside it keeps them, and nobody knows later of what
        # version they were. They go when they are a week old.
        self.under_way: set[str] = set()
        self._last: tuple[int, dict[str, int]] = (0, {})
        self._configuration: list[wire.Field] | None = None
        self._travelled: dict[tuple[str, int], object] = {}
        self._scanned: object = None

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
        other.named, other.restored = set(self.named), set(self.restored)
        other.under_way = set(self.under_way)
        other._travelled = dict(self._travelled)
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
        allowed = [self.may_go[kind] for kind in kinds if kind in self.may_go]
        taken = sorted(path for path in gone if not any(one.fullmatch(path) for one in allowed))
        assert not taken, f"{kinds} took {taken}"
        rewritten = sorted(path for path in changed if not _MAY_CHANGE.fullmatch(path))
        assert not rewritten, f"{kinds} rewrote {rewritten}"
        strange = sorted(path for path in now.keys() - self.files.keys() if not self.known.fullmatch(path))
        assert not strange, f"{kinds} made {strange}"
        self.files = now
        before = {(region, path) for region, path in self.generations}
        was = self._newest_number()
        self._look_at_regions()
        self._check_versions()
        self._look_at_generations()
        self._look_at_searches(before - self.generations.keys(), was)
        self._travel()
        self._scan_by_readers()
        missing = self.promised - now.keys()
        assert not missing, f"a reader that began a moment ago does not find {sorted(missing)}"

    def promise(self) -> bool:
        """A reader begins: what it has to find, as long as no time passes. Whether there is a generation among it."""
        found = set()
        newest = self.versions["", self._newest_number()]
        any_generation = False
        for region, seen in self.regions.items():
            if seen.manifest is None:
                continue
            for number, path in seen.manifest.generations.items():
                if number > newest.progress.get(region, 0):
                    found |= self.generations[region, path].files
                    any_generation = True
            found |= {self._entry(region, one) for one in seen.entries if one > seen.manifest.replay_after}
            found.add(f"_mem_wal/{region}/manifest/{wire.bit_reversed(seen.manifest.version)}.binpb")
        self.promised = frozenset(found)
        return any_generation

    def read(self, branch: str, number: int) -> Rows:
        """A version's rows, as they read now."""
        return self._read(branch, number)[0]

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

    # -- regions

    def _entry(self, region: str, number: int) -> str:
        suffix = "lance" if isinstance(self.made, RegionTable) else "arrow"
        return f"_mem_wal/{region}/wal/{wire.bit_reversed(number)}.{suffix}"

    def _look_at_regions(self) -> None:
        logs: dict[str, set[int]] = {}
        manifests: dict[str, list[int]] = {}
        for path in self.files:
            if not path.startswith("_mem_wal/"):
                continue
            parts = path.split("/")
            if parts[2] == "wal":
                logs.setdefault(parts[1], set()).add(wire.from_bit_reversed(parts[3]))
            elif parts[2] == "manifest" and parts[3] != HINT:
                manifests.setdefault(parts[1], []).append(wire.from_bit_reversed(parts[3]))
        for region, versions in manifests.items():
            seen = self.regions.setdefault(region, SeenRegion())
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

    # -- versions

    def _newest_number(self) -> int:
        return max((number for branch, number in self.versions if not branch), default=0)

    def _check_versions(self) -> None:
        """Read the new versions; of the others, see that all that they name is there."""
        listed = dict(self._listed())
        for key in self.versions.keys() - listed.keys():
            del self.versions[key]
        for key in sorted(listed.keys() - self.versions.keys()):
            self.versions[key] = self._look_at_version(*key, listed[key])
        for path in self.files:
            if path.startswith("_versions/d"):
                self.under_way |= set(files_of(wire.parse_manifest(Files(self.uri).get(path))))
        for key, version in self.versions.items():
            lost = version.files - self.files.keys()
            assert not lost, f"version {key} names {sorted(lost)}, which are gone"
        lost = {one.snapshot for one in self.versions.values()} - {None} - self.files.keys()
        assert not lost, f"snapshots of versions that stand are gone: {lost}"

    def _look_at_version(self, branch: str, number: int, path: str) -> SeenVersion:
        manifest = wire.parse_manifest(Files(self.uri).get(path))
        entry = wire.mem_wal_entry(manifest)
        progress: dict[str, int] = {}
        claims: dict[str, dict[str, int]] = {}
        file = None
        if entry is not None:
            details = wire.decode(wire.mem_wal_details(manifest))
            progress = progress_of(details)
            claims = {
                bytes(wire.get(one, 1)).decode(): {wire.uuid_of(at, 1): int(wire.get(at, 2)) for at in wire.sub(one, 2)}
                for one in wire.sub(details, 10)
            }
            file = f"_indices/{wire.uuid_of(entry, 1)}/index.lance"
            if not branch:
                self._look_at_succession(number, progress, details, job_of(manifest))
        rows, fragments = self._read(branch, number)
        assert_same(rows, self._wanted(branch, number, progress), seed=f"version {branch} {number}")
        files = frozenset(files_of(manifest, f"tree/{branch}/" if branch else ""))
        self.named |= files
        version = SeenVersion(
            progress, rows, file if file in self.files else None, entry is not None, files, indexes_of(manifest),
            claims, fragments,
        )  # fmt: skip
        if not branch and job_of(manifest) == "catchup":
            self._look_at_claims(number, version)
        if not branch:
            self._query(number, version)
        return version

    def _look_at_succession(
        self, number: int, progress: Mapping[str, int], details: list[wire.Field], job: str | None
    ) -> None:
        """Progress only rises, except by a restore; unknown fields are preserved."""
        before, reached = self._last
        assert number > before, f"version {number} was published behind version {before}"
        if number not in self.restored:
            fallen = {region: (merged, progress.get(region, 0)) for region, merged in reached.items()}
            fallen = {region: pair for region, pair in fallen.items() if pair[1] < pair[0]}
            assert not fallen, f"version {number} took progress back: {fallen}"
        self._last = (number, dict(progress))
        configuration = [one for one in details if one.number in {7, 8, 11, 12, LATER_RELEASE.number} and one.value]
        # pylance's own commits of indexes lose what pylance does not know; ours never do, and may bring it back.
        # Versions that were made and expired between two checks have an unknown author.
        if self._configuration is not None and job is not None and number == before + 1:
            lost = [one for one in self._configuration if one not in configuration]
            assert not lost, f"version {number}, by {job}, lost {lost} of the configuration"
        self._configuration = configuration

    def _read(self, branch: str, number: int) -> tuple[Rows, dict[Key, int]]:
        """The rows by the columns' traits, and per key its fragment."""
        dataset = lance.dataset(f"{self.uri}/tree/{branch}" if branch else self.uri, version=number)
        names = self.made.columns.at(self._left_at(branch, number))
        if names is not None:
            assert tuple(dataset.schema.names) == names, f"version {branch} {number} has columns {dataset.schema.names}"
        table = dataset.scanner(with_row_address=True).to_table()
        addresses = table.column("_rowaddr").to_pylist()
        table = table.drop_columns(["_rowaddr"])
        if self.made.columns.traits:
            table = table.rename_columns([self.made.columns.trait(name) for name in table.schema.names])
        rows = rows_by_key(table, self.made.model.keys)
        return rows, {key: address >> 32 for key, address in zip(rows, addresses, strict=True)}

    def _wanted(self, branch: str, number: int, progress: Mapping[str, int]) -> Rows:
        """The rows that a version must have."""
        del branch
        return self.made.columns.seen(self.made.expected(progress), number)

    def _left_at(self, branch: str, number: int) -> int:
        """The version of main that has the columns of a version."""
        del branch
        return number

    def _leads_to_the_newest(self, key: tuple[str, int]) -> bool:
        """Whether a version and the generations are the newest rows: not one older than MemWAL, where none are read."""
        return self.versions[key].has_mem_wal

    def _look_at_claims(self, number: int, version: SeenVersion) -> None:
        """What a catch-up says of an index is true of every row that the index lacks."""
        before = self.versions.get(("", number - 1))
        for name, covered in version.indexes.items():
            claim = version.claims.get(name)
            if claim is None or (before is not None and before.claims.get(name) == claim):
                continue  # another program's text
            for key, fragment in version.fragments.items():
                if fragment in covered:
                    continue
                region, generation = self._written(key, version.progress)
                assert claim.get(region, 0) < max(generation, 1), (
                    f"version {number}: index {name} is said to cover {claim}, and lacks row {key} "
                    f"of generation {generation} of region {region}"
                )

    def _written(self, key: Key, progress: Mapping[str, int]) -> tuple[str, int]:
        """In which region and generation a key was written last, as of some progress; 0: before there were any."""
        for operation in reversed(self.made.model.log):
            if operation.key == key and operation.generation <= progress.get(operation.region, 0):
                return operation.region, operation.generation
        return "", 0

    def _query(self, number: int, version: SeenVersion) -> None:
        """A query by an index finds what is there."""
        if not version.indexes or not version.rows:
            return
        dataset = lance.dataset(self.uri, version=number)
        names = {self.made.columns.trait(name): name for name in dataset.schema.names}
        for index in version.indexes:
            trait = index.removesuffix("_idx")
            if trait not in names:
                continue  # not named after a column, as those are that others test
            key, row = max(version.rows.items(), key=lambda item: (item[1][trait] is not None, item[0]))
            value = row[trait]
            if not isinstance(value, int | float):
                continue
            same = sum(other[trait] == value for other in version.rows.values())
            found = dataset.count_rows(f"{names[trait]} = {value}")
            assert found == same, f"version {number}: index {index} finds {found} rows for {key}, there are {same}"

    def _listed(self) -> Iterator[tuple[tuple[str, int], str]]:
        for path in self.files:
            if path.endswith(".manifest"):
                found = re.fullmatch(r"(?:tree/([^/]+)/)?_versions/(\d{20})\.manifest", path)
                if found is not None:
                    yield (found[1] or "", 2**64 - 1 - int(found[2])), path

    # -- generations

    def _look_at_generations(self) -> None:
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
                    known = self.generations[key] = SeenGeneration(files, self._rows_of(folder))
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
        path = f"{self.uri}/{folder}"
        fields = lance.dataset(path).lance_schema.fields()
        rows = _generation_rows(path, None, {one.id(): one.name() for one in fields if one.name() != TOMBSTONE})
        traits = self.made.columns.by_trait(row for _, row in rows)
        return [(deleted, row) for (deleted, _), row in zip(rows, traits, strict=True)]

    def _look_at_searches(self, dropped: set[tuple[str, str]], was: int) -> None:
        """A search by an index finds each row in what the index covers, or in a generation that is listed."""
        if not dropped:
            return
        states = [self.versions[key] for key in self.versions if not key[0] and key[1] >= was]
        for region, path in dropped:
            number = int(path.rsplit("_", 1)[-1])
            lacking = [state for state in states if self._lacks(state, region, number)]
            assert not lacking or len(lacking) < len(states), (
                f"generation {number} of {region} was dropped, and an index still lacks rows of it: "
                f"{lacking[-1].indexes}, {lacking[-1].claims}"
            )

    def _lacks(self, version: SeenVersion, region: str, number: int) -> bool:
        return any(
            fragment not in covered and self._written(key, version.progress) == (region, number)
            for covered in version.indexes.values()
            for key, fragment in version.fragments.items()
        )

    def _travel(self) -> None:
        """A reader of any version that uses the current region manifests reads the newest rows."""
        listing = tuple(
            (region, seen.manifest.version) for region, seen in sorted(self.regions.items()) if seen.manifest
        )
        self._travelled = {key: seen for key, seen in self._travelled.items() if key in self.versions}
        wanted: Rows | None = None
        for key, version in self.versions.items():
            if not self._leads_to_the_newest(key) or self._travelled.get(key) == listing:
                continue
            wanted = self.made.expected(self._flushed()) if wanted is None else wanted
            rows = self._with_generations(version)
            seen = self.made.columns.seen(wanted, key[1])
            rows = self.made.columns.seen(rows, key[1])
            assert_same(rows, seen, seed=f"at version {key}, with the generations above {version.progress}")
            self._travelled[key] = listing

    def _with_generations(self, version: SeenVersion) -> Rows:
        keys = self.made.model.keys
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
        return rows

    def _scan_by_readers(self) -> None:
        """The product's reader says the same; pylance's, too: of its own layout, while columns are the first ones."""
        manifests = [(region, seen.manifest and seen.manifest.version) for region, seen in self.regions.items()]
        number = self._newest_number()
        if self._scanned == (number, manifests):
            return
        self._scanned = number, manifests
        wanted = self.made.expected(self._flushed())
        if not isinstance(self.made, RegionTable) and not self.made.columns.changed:
            assert_same(read_lsm(self.uri), wanted, seed="pylance's scan")
        self._read_by_product("manifests", number, self.made.columns.seen(wanted, number))

    def _read_by_product(self, consistency: Any, number: int, wanted: Rows) -> None:
        columns = self.made.columns
        try:
            table = read(self.uri, consistency).scan().to_table()
        except UnsupportedFeatureError as error:  # an entry of before a change of columns has to be flushed
            assert columns.changed, error
            return
        except SchemaProjectionError as error:
            # No version is left that explains a generation's columns, or a step made files older than what is in
            # them: a person has to decide (_merge_all), and nothing wrong is read before.
            assert any(words in str(error) for words in _UNDECIDED), error
            return
        table = table.rename_columns([columns.trait(name) for name in table.schema.names])
        found = columns.seen(rows_by_key(table, self.made.model.keys), number)
        assert_same(found, wanted, seed=f"read({consistency!r})")

    def _flushed(self) -> dict[str, int]:
        return {
            region: seen.manifest.current_generation - 1
            for region, seen in self.regions.items()
            if seen.manifest is not None
        }
