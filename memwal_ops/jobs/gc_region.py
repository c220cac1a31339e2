"""What may go of one region: generations, WAL entries, manifest history, orphans.

The region manifest's versions are the region's clock. A reader holds on to the version that it has
read, for at most ``reader_grace``; so the *settled* version, the newest that was published that long
ago, is the oldest that anybody may still follow. What neither it nor any later version needs, no
reader is going to open. That one rule gives the waiting time of drained generations, of WAL entries
behind a flush, and of the manifest versions themselves, and no other state has to be kept anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from memwal_ops.core.backlog import foreign_progress
from memwal_ops.core.fence_posts import Claim, EpochRun, FencePosts, epoch_runs, unsettled_epochs
from memwal_ops.core.layout import Layout, region_folder
from memwal_ops.core.region_contents import RegionContents, read_region_contents
from memwal_ops.core.regions import NoRegionManifestError, RegionManifestGoneError
from memwal_ops.core.wal import read_writer_epoch, wal_entry_path
from memwal_ops.core.wal_references import wal_references
from memwal_ops.errors import (
    InvalidFormatError,
    ObjectNotFoundError,
    RegionManifestCorruptError,
    RegionManifestGapError,
)
from memwal_ops.format.names import is_staged_name, parse_generation_dir, parse_wal_entry_name
from memwal_ops.jobs.collectables import Gate, Item, Kind, Verdict, unknown
from memwal_ops.units import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.core.region_contents import DirectoryContents
    from memwal_ops.format.region_manifest import FlushedGeneration, RegionManifest
    from memwal_ops.jobs.gc_rules import Rules

_LOOKS = 3
_ONLY_COPY = ": the log may be the only copy of its rows"
_STRAY = "this is nothing that a region has; it was left alone"


@dataclass(slots=True)
class _History:
    """What the region manifest's versions that still stand say.

    Attributes:
        listed: per directory the last version that lists it.
        claims: per writer epoch its first version.
        broken: the last version that stands and does not decode; 0: none. It may list anything.
    """

    listed: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    claims: dict[int, RegionManifest] = field(default_factory=dict)


@dataclass
class RegionView:
    """One region as of one listing.

    Attributes:
        rules: what is not the region's own.
        contents: the listing.
        newest: the newest manifest, read after the listing.
        settled: the newest manifest that is older than every reader; None: all are younger.
        standing: generation directories that must be counted as needed although they may go: a
            deletion of them failed.
    """

    rules: Rules
    contents: RegionContents
    newest: RegionManifest
    settled: RegionManifest | None
    standing: set[str] = field(default_factory=set)
    _history: _History | None = None
    _posts: FencePosts | None = None
    _references: dict[str, frozenset[int] | None] = field(default_factory=dict)
    _pointers: Mapping[int, str] | None = field(default=None, init=False)

    @property
    def region_id(self) -> UUID:
        """The region."""
        return self.contents.region_id

    @cached_property
    def folder(self) -> str:
        """Its folder below the table's root."""
        return region_folder(self.region_id)

    # A region may list many thousands of generations: they are looked up, not searched.

    @cached_property
    def _listed_at(self) -> Mapping[str, FlushedGeneration]:
        """Per directory the generation that the newest manifest lists there; of two the one that is needed longer."""
        return {one.path: one for one in sorted(self.newest.flushed_generations, key=lambda one: one.generation)}

    @cached_property
    def _listed_numbers(self) -> frozenset[int]:
        return frozenset(one.generation for one in self.newest.flushed_generations)

    def items(self) -> Iterator[Item]:
        """Everything in the region, streamed: what deletes first comes first."""
        yield from self.directories()
        yield from self.wal_entries()
        yield from self.manifests()
        yield from self.strays()

    def strays(self) -> Iterator[Item]:
        """What is nothing that a region has, or not yet."""
        for path in sorted(self.contents.strays):
            yield self._stray(path)

    def _stray(self, path: str) -> Item:
        state = self.contents.strays[path]
        if not is_staged_name(path.rsplit("/", 1)[-1]):
            return unknown(path, state.bytes, _STRAY, region_id=self.region_id)
        # Whoever wakes and finds it gone cannot give it its name, and says so: nothing was acknowledged.
        gates = (
            Gate(met=True, text="a writer wrote it under a name of its own, and ended before it published it"),
            self.rules.older("a write may be under way: written", state.modified, self.rules.options.orphan_min_age),
        )
        return Item(Kind.LEFTOVER, path, self.region_id, None, state.bytes, 1, gates)

    def again(self, item: Item) -> Item | None:
        """A directory, a log entry or a leftover, judged anew; None where it does not stand any more."""
        if item.kind is Kind.LEFTOVER:
            return self._stray(item.path)
        name = item.path.rsplit("/", 1)[-1]
        if item.kind is Kind.WAL_ENTRY:
            entry = parse_wal_entry_name(name)
            return None if entry is None else self._entry_again(self.contents.wal.up_to(entry.entry_id) - 1)
        state = self.contents.directories[name]
        listed = self._listed_at.get(name)
        return self._unlisted(name, state) if listed is None else self._listed(listed, state)

    def with_rules(self, rules: Rules) -> RegionView:
        """The same listing under the rules of now, with the region manifest of now.

        Raises:
            RegionManifestCorruptError: it cannot be read any more.
        """
        newest = rules.table.region(self.region_id).latest_from(self.newest.version)
        return replace(self, rules=rules, newest=newest)

    # -- generations and what looks like them

    def directories(self) -> Iterator[Item]:
        """The listed generations, drained ones, orphans, and directories of unknown names."""
        for name, state in sorted(self.contents.directories.items()):
            listed = self._listed_at.get(name)
            yield self._unlisted(name, state) if listed is None else self._listed(listed, state)

    def drainable(self) -> tuple[int, ...]:
        """Listed generations that nobody needs, so that the manifest may drop them; also such without files."""
        return tuple(
            one.generation
            for one in self.newest.flushed_generations
            if not self.rules.base_points_into_mem_wal
            and all(gate.met for gate in self.rules.nobody_needs(self.region_id, one.generation))
        )

    def _listed(self, flushed: FlushedGeneration, state: DirectoryContents) -> Item:
        gates = self._base_gate() + self.rules.nobody_needs(self.region_id, flushed.generation)
        grace = self.rules.options.reader_grace
        drain = all(gate.met for gate in gates)
        if drain and not grace:
            gates += (Gate(met=True, text="the region manifest drops it first"),)
        elif drain:
            gates += (
                Gate(
                    met=False,
                    text=f"listed by region manifest version {self.newest.version}: gc --apply takes it off the list, "
                    f"and deletes it --reader-grace later",
                ),
            )
        return self._directory_item(Kind.GENERATION, flushed.path, flushed.generation, state, gates, drain=drain)

    def _unlisted(self, name: str, state: DirectoryContents) -> Item:
        parsed = parse_generation_dir(name)
        if parsed is None:
            why = "its name is not that of a generation, and no region manifest lists it"
            return unknown(f"{self.folder}/{name}", state.bytes, why, region_id=self.region_id, objects=state.objects)
        generation = parsed.generation
        dropped_by = self._dropped_by(name)
        if dropped_by is not None:
            gates = self._base_gate() + self.rules.nobody_needs(self.region_id, generation)
            dropped = self.contents.manifests.get(dropped_by)
            what = f"taken off the list by region manifest version {dropped_by}"
            if dropped is None:
                gates += (Gate(met=False, text=f"{what} a moment ago"),)
            else:
                gates += (self.rules.older(what, dropped.modified, self.rules.options.reader_grace),)
            return self._directory_item(Kind.GENERATION, name, generation, state, gates)
        age = self.rules.options.orphan_min_age
        gates = (
            *self._base_gate(),
            self._never_listed(),
            self._not_a_lost_one(generation),
            self.rules.older("a flush may be under way: last written", state.youngest, age),
        )
        return self._directory_item(Kind.ORPHAN, name, generation, state, gates)

    def _never_listed(self) -> Gate:
        broken = self.history().broken
        if broken:
            return Gate(met=False, text=f"region manifest version {broken} cannot be read, and may list it")
        return Gate(met=True, text="listed by no region manifest version that stands")

    def _not_a_lost_one(self, generation: int) -> Gate:
        """An unlisted directory of an older generation was tried again under another name, or drained long ago."""
        if generation >= self.newest.current_generation:
            return Gate(met=True, text="its flush was never published, and its rows are in the log still")
        if generation in self._listed_numbers:
            return Gate(met=True, text="the generation was published from another directory")
        failed = [gate for gate in self.rules.nobody_needs(self.region_id, generation) if not gate.met]
        if failed:
            return Gate(
                met=False,
                text=f"generation {generation} is listed nowhere, and " + "; ".join(gate.text for gate in failed),
            )
        return Gate(met=True, text="its generation is merged, and nobody needs it")

    def _dropped_by(self, name: str) -> int | None:
        """The manifest version that took a directory off the list; None: no version that stands lists it."""
        last = self.history().listed.get(name)
        return None if last is None else max(last, self.history().broken) + 1

    def _base_gate(self) -> tuple[Gate, ...]:
        if self.rules.base_points_into_mem_wal:
            return (Gate(met=False, text="a base version that may be opened has files below _mem_wal/"),)
        return ()

    def _directory_item(
        self,
        kind: Kind,
        name: str,
        generation: int,
        state: DirectoryContents,
        gates: tuple[Gate, ...],
        *,
        drain: bool = False,
    ) -> Item:
        path = f"{self.folder}/{name}"
        return Item(kind, path, self.region_id, generation, state.bytes, state.objects, gates, drain)

    # -- the write-ahead log

    def wal_entries(self) -> Iterator[Item]:
        """The WAL entries, ascending (S0-185, S0-190, S0-209)."""
        ids = self.contents.wal.ids
        flushed = self._replayed(self.newest)
        settled = self._settled_entry()
        candidates = self.contents.wal.up_to(min(flushed, settled))
        held = self._log_is_needed if candidates else None
        if held is None and candidates:
            references = self._referenced()
            for number, run in enumerate(self.fence_posts().runs):
                for at in range(run.start, min(run.end, candidates)):
                    yield self._entry(at, (self._unreferenced(ids[at], references), self._no_post(number, at)))
        elif held is not None:
            for at in range(candidates):
                yield self._entry(at, (held,))
        replayed = Gate(met=False, text=f"not flushed: a writer replays from {flushed + 1} on")
        young = Gate(met=False, text=f"flushed less than --reader-grace ({self._grace}) ago")
        for at in range(candidates, len(ids)):
            yield self._entry(at, (replayed if ids[at] > flushed else young,))

    def _entry_again(self, at: int) -> Item:
        if self.contents.wal.ids[at] > min(self._replayed(self.newest), self._settled_entry()):
            return self._entry(at, (Gate(met=False, text="its place in the log is needed again"),))
        if self._log_is_needed is not None:
            return self._entry(at, (self._log_is_needed,))
        run = bisect_right(self.fence_posts().runs, at, key=lambda run: run.start) - 1
        if self._pointers is None:
            self._pointers = self._referenced()
        unreferenced = self._unreferenced(self.contents.wal.ids[at], self._pointers)
        return self._entry(at, (unreferenced, self._no_post(run, at)))

    def fence_posts(self) -> FencePosts:
        """What keeps fenced writers from being believed; read once."""
        if self._posts is None:
            wal, options = self.contents.wal, self.rules.options
            runs = epoch_runs(wal.ids, self._epoch_of)
            unsettled = unsettled_epochs(
                runs,
                self.newest.writer_epoch,
                lambda at: self.rules.now - wal.state(at).modified >= options.fence_retention,
                sentinels=self.rules.table.layout is Layout.SHARD,
            )
            claims = {epoch: claim for epoch in unsettled if (claim := self._claim(epoch, runs)) is not None}
            hint = self.newest.wal_id_last_seen or 0
            self._posts = FencePosts(wal.ids, runs, lambda at: wal.state(at).modified, claims, hint)
        return self._posts

    def prepare(self) -> RegionView:
        """Read what the items will ask for, so that many regions can be read at once."""
        if not self.contents.directories.keys() <= self._listed_at.keys():
            self.history()
        if self.contents.wal.up_to(min(self._replayed(self.newest), self._settled_entry())):
            self.fence_posts()
            if self.rules.table.layout is Layout.REGION:
                for name in self.contents.directories:
                    self._references_of(name)
        return self

    def _entry(self, at: int, gates: tuple[Gate, ...]) -> Item:
        entry_id = self.contents.wal.ids[at]
        path = wal_entry_path(self.region_id, entry_id, self.rules.table.layout)
        size = self.contents.wal.size(at)
        return Item(Kind.WAL_ENTRY, path, self.region_id, None, size, 1, (*self._flushed_gates, *gates))

    @cached_property
    def _flushed_gates(self) -> tuple[Gate, ...]:
        """What is said of every log entry."""
        return (Gate(met=True, text=f"flushed: replay starts at {self._replayed(self.newest) + 1}"), *self._base_gate())

    @staticmethod
    def _replayed(manifest: RegionManifest) -> int:
        return manifest.replay_after_wal_id or 0

    @property
    def _grace(self) -> str:
        return duration_text(self.rules.options.reader_grace)

    def _settled_entry(self) -> int:
        """Up to where no reader replays the log any more."""
        return 0 if self.settled is None else self._replayed(self.settled)

    @cached_property
    def _log_is_needed(self) -> Gate | None:
        """Where a generation is lost, its rows may be left in the log alone: then no entry goes."""
        merged = self.rules.table.index.merged_generations.get(self.region_id, 0)
        listed = {one.generation: one.path for one in self.newest.flushed_generations}
        for generation in range(merged + 1, self.newest.current_generation):
            if generation not in listed:
                return Gate(met=False, text=f"generation {generation} is neither merged nor listed{_ONLY_COPY}")
            if listed[generation] not in self.contents.directories:
                return Gate(met=False, text=f"generation {generation} is not there{_ONLY_COPY}")
        return None

    def _referenced(self) -> Mapping[int, str]:
        """Per WAL entry a generation that stands and points into it; entry -1: one that nobody can read."""
        if self.rules.table.layout is not Layout.REGION:
            return {}
        found: dict[int, str] = {}
        for item in self.directories():
            name = item.path.rsplit("/", 1)[-1]
            if item.verdict is Verdict.DELETE and name not in self.standing:
                continue
            references = self._references_of(name)
            if references is None:
                # A flush that was never published has its rows in the log behind replay_after, which no one deletes.
                if item.kind is Kind.GENERATION and name in self._listed_at:
                    found[-1] = name
            else:
                found |= dict.fromkeys(references, name)
        return found

    def _references_of(self, name: str) -> frozenset[int] | None:
        if name not in self._references:
            try:
                self._references[name] = wal_references(self.rules.table.store, f"{self.folder}/{name}")
            except (InvalidFormatError, ObjectNotFoundError):
                self._references[name] = None
        return self._references[name]

    def _unreferenced(self, entry_id: int, references: Mapping[int, str]) -> Gate:
        by = references.get(entry_id)
        if by is not None:
            return Gate(met=False, text=f"generation {by} has its rows in it")
        if -1 in references:
            return Gate(met=False, text=f"generation {references[-1]} cannot be read, and may have its rows in it")
        if self.rules.table.layout is not Layout.REGION:
            return Gate(met=True, text="generations have files of their own")
        return Gate(met=True, text="no generation that stands has rows in it")

    def _no_post(self, run: int, at: int) -> Gate:
        """Whether an entry may go without a fenced writer being believed; see :mod:`memwal_ops.core.fence_posts`."""
        post = self.fence_posts().post(run, at)
        if post is None:
            return Gate(met=True, text="no writer that was fenced may go on here: no fence post")
        if post.since is None:
            return Gate(met=False, text=post.what)
        return self.rules.older(post.what, post.since, self.rules.options.fence_retention)

    def _epoch_of(self, entry_id: int) -> int | None:
        try:
            return read_writer_epoch(self.rules.table, self.region_id, entry_id)
        except (InvalidFormatError, ObjectNotFoundError):
            return None

    def _claim(self, epoch: int, runs: Sequence[EpochRun]) -> Claim | None:
        """What is known of a claim; None where nobody ever made it."""
        history = self.history()
        first = history.claims.get(epoch)
        oldest = min(history.claims.values(), key=lambda one: one.version, default=None)
        latest = self.rules.now
        if oldest is not None and oldest.version in self.contents.manifests and epoch <= oldest.writer_epoch:
            latest = self.contents.manifests[oldest.version].modified
        elif oldest is not None and not history.broken:
            if first is None and epoch < max(history.claims):
                return None
            if first is not None and first.version in self.contents.manifests:
                return self._known_claim(first)
        if not history.broken and first is not None and first.version == 1:
            return self._known_claim(first)
        # The manifest is collected, or cannot be read: the claim was made before any later epoch wrote.
        later = [self.contents.wal.state(run.start).modified for run in runs if (run.epoch or 0) > epoch]
        return Claim(0, min([latest, *later]))

    def _known_claim(self, made_by: RegionManifest) -> Claim:
        seen, replayed = made_by.wal_id_last_seen or 0, self._replayed(made_by)
        return Claim(min(seen, replayed) if seen else replayed, self.contents.manifests[made_by.version].modified)

    # -- the manifest's own history

    def manifests(self) -> Iterator[Item]:
        """The region manifest's versions, ascending (S0-186)."""
        keep = self.rules.options.manifest_retention
        settled = 0 if self.settled is None else self.settled.version
        for version, state in sorted(self.contents.manifests.items()):
            newer = self.newest.version - version
            if newer < keep:
                gates = [Gate(met=False, text=f"one of the newest {keep} versions")]
            else:
                gates = [Gate(met=True, text=f"{newer} newer versions stand, {keep} are kept")]
            if version >= settled:
                text = f"a reader that began less than --reader-grace ({self._grace}) ago may follow it"
                gates.append(Gate(met=False, text=text))
            else:
                gates.append(Gate(met=True, text="version_hint.json points past it, or is made to first"))
            path = self.rules.table.region(self.region_id).path(version)
            yield Item(Kind.REGION_MANIFEST, path, self.region_id, None, state.bytes, 1, tuple(gates))

    def history(self) -> _History:
        """What the versions that stand say; all of them are read, once."""
        if self._history is None:
            found = _History()
            manifests = self.rules.table.region(self.region_id)
            for version in sorted(self.contents.manifests):
                try:
                    manifest = self.newest if version == self.newest.version else manifests.read(version)
                except RegionManifestGoneError:
                    continue  # collected by somebody else meanwhile
                except RegionManifestCorruptError:
                    found.broken = version
                    continue
                if manifest.writer_epoch not in found.claims:  # kept for long, and its list is not asked for
                    found.claims[manifest.writer_epoch] = replace(manifest, flushed_generations=(), source=b"")
                found.listed |= dict.fromkeys((one.path for one in manifest.flushed_generations), version)
            self._history = found
        return self._history


def look_at_region(rules: Rules, region_id: UUID) -> RegionView:
    """List a region, then read its newest manifest, then the one that is old enough for all readers.

    Requests: the hint, a listing (one per 1,000 objects), a HEAD, one or two manifests.

    Raises:
        RegionManifestGapError: a version is missing between two others: what the region needs is unknown.
        RegionManifestCorruptError: a manifest does not decode, or there is none.
    """
    for attempt in range(_LOOKS):
        try:
            return _look(rules, region_id)
        except (RegionManifestGapError, RegionManifestGoneError):
            # A listing is no snapshot: other collectors delete the oldest versions while it runs.
            if attempt == _LOOKS - 1:
                raise
    raise AssertionError  # pragma: no cover - the loop returns or raises


def _look(rules: Rules, region_id: UUID) -> RegionView:
    manifests = rules.table.region(region_id)
    # Before the listing: a version that is published between the two is then never one that the listing lacks.
    hint = manifests.hint() or 0
    contents = read_region_contents(rules.table.store, region_id, rules.table.layout)
    versions = sorted(contents.manifests)
    if not versions:
        raise NoRegionManifestError(f"Region {region_id} has no manifest.")
    if versions[-1] - versions[0] + 1 != len(versions):
        missing = next(version for version in range(versions[0], versions[-1]) if version not in contents.manifests)
        raise RegionManifestGapError(
            f"Region {region_id}: manifest version {missing} is missing, although version {versions[-1]} stands."
        )
    newest = manifests.latest_from(versions[-1])
    merged = rules.table.index.merged_generations.get(region_id, 0)
    if merged >= newest.current_generation:
        raise foreign_progress(newest, merged)
    if hint > newest.version:
        raise RegionManifestGapError(
            f"Region {region_id}: manifest version {hint} is missing, although the region's hint names it."
        )
    limit = rules.now - rules.options.reader_grace
    old_enough = [version for version in versions if contents.manifests[version].modified <= limit]
    settled = None
    if not rules.options.reader_grace:
        settled = newest
    elif old_enough:
        settled = newest if old_enough[-1] == newest.version else manifests.read(old_enough[-1])
    return RegionView(rules, contents, newest, settled)
