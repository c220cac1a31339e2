"""Candidates of gc among the entries of a region's write-ahead log (S0-185, S0-190, S0-209).

An entry is deletable if no writer and no reader replays it any more, no remaining generation has its rows in it, and
it is not a fence post: without that, a fenced writer that resumes could acknowledge a write.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING

from memwal_ops.core.candidates import Gate, Verdict
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.generations.wal import read_writer_epoch, wal_entry_path, wal_references
from memwal_ops.formats.lance.jobs.gc.evidence import Kind, LanceCandidate
from memwal_ops.formats.lance.regions.fence_posts import Claim, EpochRun, FencePosts, epoch_runs, unsettled_epochs
from memwal_ops.formats.lance.wire.names import parse_wal_entry_name
from memwal_ops.storage.api import LinkError
from memwal_ops.text import duration_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.formats.lance.jobs.gc.region import RegionView
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_ONLY_COPY = ": the log may be the only copy of its rows"


class WalView:
    """A region with its write-ahead log. The region has no reference to its log: a cycle would keep both in memory."""

    def __init__(self, view: RegionView) -> None:
        """Keep the region; nothing is read."""
        self.view = view
        self._posts: FencePosts | None = None
        self._references: dict[str, frozenset[int] | None] = {}
        self._pointers: Mapping[int, str] | None = None

    def under(self, view: RegionView) -> WalView:
        """The same log with a newer view of its region; entries that were read are not read again."""
        newer = type(self)(view)
        newer._posts, newer._references = self._posts, self._references  # noqa: SLF001 - its own class
        return newer

    def entries(self) -> Iterator[LanceCandidate]:
        """The WAL entries, ascending (S0-185, S0-190, S0-209)."""
        ids = self.view.contents.wal.ids
        flushed = self._replay_after(self.view.newest)
        settled = self._settled()
        needed = self._log_is_needed if settled else None
        if needed is None and settled:
            references = self._referenced()
            for number, run in enumerate(self.fence_posts().runs):
                for at in range(run.start, min(run.end, settled)):
                    yield self._entry(at, (self._unreferenced(ids[at], references), self._no_post(number, at)))
        elif needed is not None:
            for at in range(settled):
                yield self._entry(at, (needed,))
        replayed = Gate(met=False, text=f"not flushed: a writer replays from {flushed + 1} on")
        young = Gate(met=False, text=f"flushed less than --reader-grace ({self._grace}) ago")
        for at in range(settled, len(ids)):
            yield self._entry(at, (replayed if ids[at] > flushed else young,))

    def revalidate(self, candidate: LanceCandidate) -> LanceCandidate | None:
        """An entry that was listed, with its gates checked again; None if its name is not that of an entry."""
        entry = parse_wal_entry_name(candidate.name)
        if entry is None:
            return None
        at = self.view.contents.wal.up_to(entry.entry_id) - 1
        if at >= self._settled():
            return self._entry(at, (Gate(met=False, text="its place in the log is needed again"),))
        if self._log_is_needed is not None:
            return self._entry(at, (self._log_is_needed,))
        run = bisect_right(self.fence_posts().runs, at, key=lambda run: run.start) - 1
        if self._pointers is None:
            self._pointers = self._referenced()
        unreferenced = self._unreferenced(self.view.contents.wal.ids[at], self._pointers)
        return self._entry(at, (unreferenced, self._no_post(run, at)))

    def fence_posts(self) -> FencePosts:
        """The entries that fenced writers must find; read once."""
        if self._posts is None:
            wal, options = self.view.contents.wal, self.view.evidence.options
            runs = epoch_runs(wal.ids, self._epoch_of)
            unsettled = unsettled_epochs(
                runs,
                self.view.newest.writer_epoch,
                lambda at: self.view.evidence.now - wal.state(at).modified >= options.fence_retention,
                sentinels=self.view.layout.claims_with_entry,
            )
            claims = {epoch: claim for epoch in unsettled if (claim := self._claim(epoch, runs)) is not None}
            hint = self.view.newest.wal_id_last_seen or 0
            self._posts = FencePosts(wal.ids, runs, lambda at: wal.state(at).modified, claims, hint)
        return self._posts

    def prepare(self) -> WalView:
        """Read what the region's candidates depend on, so that many regions can be read concurrently."""
        self.view.prepare()
        if self._settled():
            self.fence_posts()
            if self.view.layout.generations_in_log:
                for name in self.view.contents.directories:
                    self._references_of(name)
        return self

    def _entry(self, at: int, gates: tuple[Gate, ...]) -> LanceCandidate:
        entry_id = self.view.contents.wal.ids[at]
        path = wal_entry_path(self.view.region_id, entry_id, self.view.layout)
        size = self.view.contents.wal.size(at)
        gates = (*self._flushed_gates, *gates)
        return LanceCandidate(Kind.WAL_ENTRY, path, size, 1, gates, region_id=self.view.region_id)

    @cached_property
    def _flushed_gates(self) -> tuple[Gate, ...]:
        """The gates that all log entries share."""
        flushed = Gate(met=True, text=f"flushed: replay starts at {self._replay_after(self.view.newest) + 1}")
        return (flushed, *self.view.base_gates())

    @staticmethod
    def _replay_after(manifest: RegionManifest) -> int:
        return manifest.replay_after_wal_id or 0

    @property
    def _grace(self) -> str:
        return duration_text(self.view.evidence.options.reader_grace)

    def _settled(self) -> int:
        """How many of the entries neither a writer nor a reader replays any more."""
        settled = 0 if self.view.settled is None else self._replay_after(self.view.settled)
        return self.view.contents.wal.up_to(min(self._replay_after(self.view.newest), settled))

    @cached_property
    def _log_is_needed(self) -> Gate | None:
        """The gate that keeps all entries if a generation is lost: the log may be the only copy of its rows."""
        merged = self.view.evidence.table.index.merged_generations.get(self.view.region_id, 0)
        listed = {flushed.generation: flushed.path for flushed in self.view.newest.flushed_generations}
        for generation in range(merged + 1, self.view.newest.current_generation):
            if generation not in listed:
                return Gate(met=False, text=f"generation {generation} is neither merged nor listed{_ONLY_COPY}")
            if listed[generation] not in self.view.contents.directories:
                return Gate(met=False, text=f"generation {generation} is missing{_ONLY_COPY}")
        return None

    def _referenced(self) -> Mapping[int, str]:
        """Per WAL entry a remaining generation that refers to it; entry -1: one that cannot be read."""
        if not self.view.layout.generations_in_log:
            return {}
        by_entry: dict[int, str] = {}
        for candidate in self.view.directories():
            name = candidate.name
            if candidate.verdict is Verdict.DELETE and name not in self.view.undeleted:
                continue
            references = self._references_of(name)
            if references is None:
                # A flush that was never published has its rows in the log behind replay_after, which is kept.
                if candidate.kind is Kind.GENERATION and name in self.view.listed_at:
                    by_entry[-1] = name
            else:
                by_entry |= dict.fromkeys(references, name)
        return by_entry

    def _references_of(self, name: str) -> frozenset[int] | None:
        if name not in self._references:
            try:
                self._references[name] = wal_references(self.view.evidence.table.store, f"{self.view.folder}/{name}")
            except (InvalidFormatError, ObjectNotFoundError, LinkError):
                self._references[name] = None
        return self._references[name]

    def _unreferenced(self, entry_id: int, references: Mapping[int, str]) -> Gate:
        by = references.get(entry_id)
        if by is not None:
            return Gate(met=False, text=f"generation {by} has its rows in it")
        if -1 in references:
            return Gate(met=False, text=f"generation {references[-1]} cannot be read, and may have its rows in it")
        if not self.view.layout.generations_in_log:
            return Gate(met=True, text="generations have files of their own")
        return Gate(met=True, text="no remaining generation has rows in it")

    def _no_post(self, run: int, at: int) -> Gate:
        """The gate that keeps a fence post; see ``memwal.fence_posts``."""
        post = self.fence_posts().post(run, at)
        if post is None:
            return Gate(met=True, text="not a fence post: no fenced writer may write here")
        if post.since is None:
            return Gate(met=False, text=post.what)
        return self.view.evidence.age_gate(post.what, post.since, self.view.evidence.options.fence_retention)

    def _epoch_of(self, entry_id: int) -> int | None:
        try:
            return read_writer_epoch(self.view.evidence.table, self.view.region_id, entry_id)
        except (InvalidFormatError, ObjectNotFoundError, LinkError):
            return None

    def _claim(self, epoch: int, runs: Sequence[EpochRun]) -> Claim | None:
        """The lower bound of a claim's position, and the latest time at which it was made; None: it was never made."""
        history = self.view.history()
        first = history.claims.get(epoch)
        oldest = min(history.claims.values(), key=lambda claim: claim.version, default=None)
        latest = self.view.evidence.now
        if oldest is not None and oldest.version in self.view.contents.manifests and epoch <= oldest.writer_epoch:
            latest = self.view.contents.manifests[oldest.version].modified
        elif oldest is not None and not history.broken:
            if first is None and epoch < max(history.claims):
                return None
            if first is not None and first.version in self.view.contents.manifests:
                return self._known_claim(first)
        if not history.broken and first is not None and first.version == 1:
            return self._known_claim(first)
        # The manifest was deleted, or cannot be read: the claim was made before any later epoch wrote.
        later = [self.view.contents.wal.state(run.start).modified for run in runs if (run.epoch or 0) > epoch]
        return Claim(0, min([latest, *later]))

    def _known_claim(self, made_by: RegionManifest) -> Claim:
        seen, replayed = made_by.wal_id_last_seen or 0, self._replay_after(made_by)
        return Claim(min(seen, replayed) if seen else replayed, self.view.contents.manifests[made_by.version].modified)
