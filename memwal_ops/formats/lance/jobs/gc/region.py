"""Candidates of gc in one region: generations, orphans, manifest versions, strays.

All waiting times are derived from the publication times of the region manifest's versions. A reader uses the version
that it has read for at most ``reader_grace``; so the *settled* version, the newest that was published that long ago, is
the oldest that a reader may still use. Objects that neither it nor any later version needs are opened by no reader.
This rule gives the waiting time of drained generations, of flushed WAL entries, and of the manifest versions
themselves; no other state has to be stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from memwal_ops.core.candidates import Gate
from memwal_ops.errors import MemwalOpsError, RegionManifestCorruptError, RegionManifestGapError
from memwal_ops.formats.lance.files.datasets import STORE_ERRORS
from memwal_ops.formats.lance.files.version_files import is_shared
from memwal_ops.formats.lance.generations import generation_files
from memwal_ops.formats.lance.generations.backlog import RegionBacklog
from memwal_ops.formats.lance.generations.generation import generation_ref, open_generation
from memwal_ops.formats.lance.generations.region_identity import check_identity
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, GcEvidence, LanceCandidate, unrecognized
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError, RegionManifestGoneError
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.formats.lance.wire import names
from memwal_ops.text import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.layouts import Layout
    from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration, RegionManifest

_ATTEMPTS = 3
_STRAY = "not a part of a region; it is kept"


@dataclass(slots=True)
class _History:
    """The content of the region manifest's versions that still exist.

    Attributes:
        listed: per directory the last version that lists it.
        claims: per writer epoch its first version.
        broken: the last version that does not decode; 0: none. It may list anything.
        read_to: the last version that was read.
    """

    listed: dict[str, int] = field(default_factory=dict)
    broken: int = 0
    claims: dict[int, RegionManifest] = field(default_factory=dict)
    read_to: int = 0


@dataclass
class RegionView:
    """One region as of one listing.

    ``evidence``: inputs that do not belong to the region. ``contents``: the listing. ``newest``: the newest manifest,
    read after the listing. ``settled``: the newest manifest that is older than every reader; None: all are younger.
    ``undeleted``: deletable generation directories that count as needed, since their deletion failed.
    """

    evidence: GcEvidence
    contents: generation_files.RegionContents
    newest: RegionManifest
    settled: RegionManifest | None
    undeleted: set[str] = field(default_factory=set)
    _history: _History | None = None
    _damages: dict[int, MemwalOpsError | None] = field(default_factory=dict)

    @property
    def region_id(self) -> UUID:
        """The region."""
        return self.contents.region_id

    @property
    def layout(self) -> Layout:
        """The region's, which after a migration may not be the table's."""
        return self.evidence.table.layout_of(self.region_id)

    @cached_property
    def folder(self) -> str:
        """Path of its folder below the table's root."""
        return names.region_folder(self.region_id)

    # A region may list many thousands of generations: use look-ups, not searches.

    @cached_property
    def listed_at(self) -> Mapping[str, FlushedGeneration]:
        """Per directory the generation that the newest manifest lists there; of two the later: it is needed longer."""
        ascending = sorted(self.newest.flushed_generations, key=lambda flushed: flushed.generation)
        return {flushed.path: flushed for flushed in ascending}

    @cached_property
    def _listed_numbers(self) -> frozenset[int]:
        return frozenset(flushed.generation for flushed in self.newest.flushed_generations)

    @property
    def merged(self) -> int:
        """The last generation that the base table has."""
        return self.evidence.table.index.merged_generations.get(self.region_id, 0)

    @property
    def unlisted(self) -> int | None:
        """The first generation that is neither merged nor listed; None: there is none."""
        numbers = range(self.merged + 1, self.newest.current_generation)
        return next((number for number in numbers if number not in self._listed_numbers), None)

    def damage(self, generation: int) -> MemwalOpsError | None:
        """Why a listed, unmerged generation cannot be read, or None. Looked at once in a run, as verify does.

        Where generations are in the log, it is by the manifest alone: each file that it names keeps its entry.
        """
        if generation not in self._damages:
            table, backlog = self.evidence.table, RegionBacklog(self.newest, self.merged, ())
            footers = not self.layout.generations_in_log
            damages: dict[int, MemwalOpsError | None] = {}
            damages |= generation_files.look_at_generations(table, backlog, footers=footers).damaged
            for flushed in self.newest.unmerged(self.merged):
                if damages.setdefault(flushed.generation, None) is None and footers:
                    try:
                        open_generation(table, generation_ref(self.region_id, flushed), SchemaHistory.of(table))
                    except STORE_ERRORS:
                        raise
                    except MemwalOpsError as error:
                        damages[flushed.generation] = error
            self._damages.update(damages)
        return self._damages.get(generation)

    def prepare(self) -> None:
        """Read what the candidates depend on, so that many regions can be read concurrently."""
        if not self.contents.directories.keys() <= self.listed_at.keys():
            self.history()

    def strays(self) -> Iterator[LanceCandidate]:
        """Strays, and leftovers of writes that were not published."""
        for path in sorted(self.contents.strays):
            yield self._stray(path)

    def _stray(self, path: str) -> LanceCandidate:
        state = self.contents.strays[path]
        if not names.is_staged_name(path.rsplit("/", 1)[-1]):
            return unrecognized(path, state.bytes, _STRAY, region_id=self.region_id)
        # A writer that resumes and finds it deleted cannot rename it, and fails: nothing was acknowledged.
        gates = (
            Gate(met=True, text="a writer wrote it under a temporary name, and ended before it published it"),
            self.evidence.unfinished_gate(state.modified, "a write may be in progress: written"),
        )
        return LanceCandidate(CandidateKind.LEFTOVER, path, state.bytes, 1, gates, region_id=self.region_id)

    def revalidate(self, candidate: LanceCandidate) -> LanceCandidate | None:
        """A candidate other than a log entry, with its gates checked again; None if it does not exist any more."""
        if candidate.kind is CandidateKind.LEFTOVER:
            return self._stray(candidate.path)
        name = candidate.name
        if candidate.kind is CandidateKind.REGION_MANIFEST:
            version = names.parse_region_manifest_name(name)
            return None if version is None else self._manifest(version)
        state = self.contents.directories[name]
        listed = self.listed_at.get(name)
        return self._unlisted(name, state) if listed is None else self._listed(listed, state)

    def with_evidence(self, evidence: GcEvidence) -> RegionView:
        """The same listing with current evidence and the current region manifest.

        If there is no newer one, it is not read again: its anchor is checked before each deletion.

        Raises:
            RegionManifestCorruptError: it cannot be read any more.
        """
        newest = evidence.table.region(self.region_id).latest_from(self.newest.version, self.newest)
        return replace(self, evidence=evidence, newest=newest)

    # -- generations, orphans, and directories with other names

    def directories(self) -> Iterator[LanceCandidate]:
        """Listed generations, drained ones, orphans, and directories with unrecognized names."""
        for name, state in sorted(self.contents.directories.items()):
            listed = self.listed_at.get(name)
            yield self._unlisted(name, state) if listed is None else self._listed(listed, state)

    def drainable(self) -> tuple[int, ...]:
        """Listed generations that are no longer needed, which the manifest may drop; also those without files."""
        return tuple(
            flushed.generation
            for flushed in self.newest.flushed_generations
            if not self.base_gates()
            and all(gate.met for gate in self.evidence.drain_gates(self.region_id, flushed.generation))
        )

    def _listed(self, flushed: FlushedGeneration, state: generation_files.DirectoryContents) -> LanceCandidate:
        gates = self.base_gates() + self.evidence.drain_gates(self.region_id, flushed.generation)
        grace = self.evidence.options.reader_grace
        drain = all(gate.met for gate in gates)
        if drain and not grace:
            gates += (Gate(met=True, text="the region manifest drops it first"),)
        elif drain:
            text = f"listed by region manifest version {self.newest.version}: gc --apply removes it from the list, and "
            gates += (Gate(met=False, text=f"{text}deletes it --reader-grace later"),)
        path, generation = f"{self.folder}/{flushed.path}", flushed.generation
        return LanceCandidate(
            CandidateKind.GENERATION, path, state.bytes, state.objects, gates, drain, self.region_id, generation
        )

    def _unlisted(self, name: str, state: generation_files.DirectoryContents) -> LanceCandidate:
        parsed, path = names.parse_generation_dir(name), f"{self.folder}/{name}"
        if parsed is None:
            why = "its name is not that of a generation, and no region manifest lists it"
            return unrecognized(path, state.bytes, why, region_id=self.region_id, objects=state.objects)
        generation = parsed.generation
        dropped_by = self._dropped_by(name)
        if dropped_by is not None:
            kind = CandidateKind.GENERATION
            gates = self.base_gates() + self.evidence.generation_gates(self.region_id, generation)
            dropped = self.contents.manifests.get(dropped_by)
            event = f"removed from the list by region manifest version {dropped_by}"
            if dropped is None:
                gates += (Gate(met=False, text=f"{event}, just now"),)
            else:
                gates += (self.evidence.age_gate(event, dropped.modified, self.evidence.options.reader_grace),)
        else:
            kind = CandidateKind.ORPHAN
            unfinished = self.evidence.unfinished_gate(state.youngest, "a flush may be in progress: last written")
            never_listed = Gate(met=True, text="not listed by any existing region manifest version")
            if broken := self.history().broken:
                why = f"region manifest version {broken} cannot be read, and may list it"
                never_listed = Gate(met=False, text=why)
            gates = (*self.base_gates(), never_listed, self._not_lost(generation), unfinished)
        region_id = self.region_id
        return LanceCandidate(kind, path, state.bytes, state.objects, gates, region_id=region_id, generation=generation)

    def _not_lost(self, generation: int) -> Gate:
        """The gate that an unlisted directory's rows are also in the log, in another directory, or in the base."""
        if generation >= self.newest.current_generation:
            return Gate(met=True, text="its flush was never published, and its rows are still in the log")
        if generation in self._listed_numbers:
            if generation > self.merged and (why := self.damage(generation)) is not None:
                return Gate(met=False, text=f"the generation that was published in its place is damaged: {why}")
            return Gate(met=True, text="the generation was published from another directory")
        failed = [gate for gate in self.evidence.generation_gates(self.region_id, generation) if not gate.met]
        if failed:
            unmet = "; ".join(gate.text for gate in failed)
            return Gate(met=False, text=f"generation {generation} is not listed, and {unmet}")
        return Gate(met=True, text="its generation is merged, and no longer needed")

    def _dropped_by(self, name: str) -> int | None:
        """The manifest version that removed a directory from the list; None: no existing version lists it."""
        last = self.history().listed.get(name)
        return None if last is None else max(last, self.history().broken) + 1

    def base_gates(self) -> tuple[Gate, ...]:
        """Empty, or one unmet gate for all candidates, since what is there may be needed."""
        if self.evidence.retention.points_into_mem_wal:
            return (Gate(met=False, text="a base version that may be opened has files below _mem_wal/"),)
        if self._overwritten:
            return (Gate(met=False, text=f"it has newer rows than the base table: of {self._overwritten} keys"),)
        return ()

    @cached_property
    def _overwritten(self) -> int:
        """Keys of which another program put older rows over newer ones, which only the log or a generation has."""
        if not is_shared(self.evidence.table.manifest):
            return 0
        from memwal_ops.formats.lance.jobs.drained import overwritten  # noqa: PLC0415 - where another program merges

        return sum(map(len, overwritten(self.evidence.table, [self.newest]).values()))

    # -- the manifest's own history

    def manifests(self) -> Iterator[LanceCandidate]:
        """The region manifest's versions, ascending (S0-186)."""
        for version in sorted(self.contents.manifests):
            yield self._manifest(version)

    def _manifest(self, version: int) -> LanceCandidate:
        keep = self.evidence.options.manifest_retention
        settled = 0 if self.settled is None else self.settled.version
        newer = self.newest.version - version
        kept = f"one of the newest {keep} versions"
        gates = [Gate(newer >= keep, kept if newer < keep else f"{newer} newer versions exist, {keep} are kept")]
        if version >= settled:
            grace = duration_text(self.evidence.options.reader_grace)
            text = f"a reader that began less than --reader-grace ({grace}) ago may follow it"
            gates.append(Gate(met=False, text=text))
        else:
            gates.append(Gate(met=True, text="version_hint.json names a later version, or is advanced first"))
        if self.unlisted is not None or self._overwritten:
            gates.append(Gate(met=False, text="it may show what another program merged, and dropped"))
        path = self.evidence.table.region(self.region_id).path(version)
        size = self.contents.manifests[version].bytes
        return LanceCandidate(CandidateKind.REGION_MANIFEST, path, size, 1, tuple(gates), region_id=self.region_id)

    def history(self) -> _History:
        """The content of all existing versions, also those since the listing; each is read once."""
        history = self._history = self._history or _History()
        if history.read_to < self.newest.version:
            # Including those since the listing. Timeline of the loss otherwise: a slow flush is published and drained
            # meanwhile, no version that was read lists it, and it is deleted as an orphan at once, while readers use
            # the version in between.
            newer = range(max(self.contents.manifests, default=self.newest.version) + 1, self.newest.version + 1)
            for version in [*sorted(self.contents.manifests), *newer]:
                if version > history.read_to:
                    self._read_into(history, version)
            history.read_to = self.newest.version
        return history

    def _read_into(self, history: _History, version: int) -> None:
        try:
            newest = version == self.newest.version
            manifest = self.newest if newest else self.evidence.table.region(self.region_id).read(version)
        except RegionManifestGoneError:
            return  # deleted by another collector meanwhile
        except RegionManifestCorruptError:
            history.broken = version
            return
        if manifest.writer_epoch not in history.claims:  # kept in memory without its list, which is not used
            history.claims[manifest.writer_epoch] = replace(manifest, flushed_generations=(), source=b"")
        history.listed |= dict.fromkeys((flushed.path for flushed in manifest.flushed_generations), version)


def read_region_view(evidence: GcEvidence, region_id: UUID) -> RegionView:
    """List a region, then read its newest manifest, then its settled one.

    Requests: the hint, a listing (one per 1,000 objects), a HEAD, one or two manifests.

    Raises:
        RegionManifestGapError: a version is missing between two others, so that what the region needs is not known.
        RegionManifestCorruptError: a manifest does not decode, or the region has no manifest.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return _read_region_view(evidence, region_id)
        except (RegionManifestGapError, RegionManifestGoneError):
            # A listing is not a snapshot: other collectors delete the oldest versions while it runs.
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError  # pragma: no cover - the loop returns or raises


def _read_region_view(evidence: GcEvidence, region_id: UUID) -> RegionView:
    manifests = evidence.table.region(region_id)
    # Before the listing: a version that is published between the two is then never one that the listing lacks.
    hint = manifests.hint() or 0
    contents = generation_files.read_region_contents(
        evidence.table.store, region_id, evidence.table.layout_of(region_id)
    )
    versions = sorted(contents.manifests)
    if not versions:
        raise NoRegionManifestError(f"Region {region_id} has no manifest.")
    if versions[-1] - versions[0] + 1 != len(versions):
        missing = next(version for version in range(versions[0], versions[-1]) if version not in contents.manifests)
        raise RegionManifestGapError(
            f"Region {region_id}: manifest version {missing} is missing, although version {versions[-1]} exists."
        )
    newest = manifests.latest_from(versions[-1])
    check_identity(evidence.table, newest)
    if hint > newest.version:
        raise RegionManifestGapError(
            f"Region {region_id}: manifest version {hint} is missing, although the region's hint names it."
        )
    limit = evidence.now - evidence.options.reader_grace
    old_enough = [version for version in versions if contents.manifests[version].modified <= limit]
    settled = None
    if not evidence.options.reader_grace:
        settled = newest
    elif old_enough:
        settled = newest if old_enough[-1] == newest.version else manifests.read(old_enough[-1])
    return RegionView(evidence, contents, newest, settled)
