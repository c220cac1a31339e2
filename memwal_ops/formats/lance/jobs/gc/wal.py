"""Candidates of gc among the entries of a region's write-ahead log (S0-185, S0-190, S0-209).

An entry is deletable if no writer and no reader replays it any more, no remaining generation has its rows in it, and it
is not a fence post: without that, a fenced writer that resumes could acknowledge a write.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING

from memwal_ops.core.candidates import Gate, Verdict
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.generations.wal import read_writer_epoch, wal_entry_path, wal_references
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, LanceCandidate
from memwal_ops.formats.lance.wire.names import parse_wal_entry_name
from memwal_ops.storage.api import LinkError
from memwal_ops.text import duration_text

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    from memwal_ops.formats.lance.jobs.gc.region import RegionView
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest


_NEWEST_EPOCHS_KEPT = 2
# One claim every 26 seconds for thirty days; a damaged manifest may have any number.
_MAX_EPOCHS = 100_000
_NO_END = 1 << 64


@dataclass(frozen=True, slots=True)
class EpochRun:
    """Consecutive entries of one epoch, as indexes in the log: ``start`` to before ``end``.

    ``epoch`` is None for an entry that cannot be read: it may be the first of any epoch.
    """

    epoch: int | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a region. Its writer searches entries after ``start``; it was made at ``made`` or before."""

    start: int
    made: datetime


@dataclass(frozen=True, slots=True)
class Post:
    """Why an entry must be kept. For ``fence_retention`` from ``since`` on; None: always."""

    what: str
    since: datetime | None


def epoch_runs(ids: array[int], epoch_of: Callable[[int], int | None]) -> tuple[EpochRun, ...]:
    """The runs of a log, by bisection: epochs rise along it (S0-044) except for late writers, so few entries are read.

    ``ids``: the existing entries, ascending. ``epoch_of``: reads the epoch of one entry; None if it cannot be read.
    """
    if not ids:
        return ()
    known: dict[int, int | None] = {}

    def epoch(at: int) -> int | None:
        if at not in known:
            known[at] = epoch_of(ids[at])
        return known[at]

    starts = [0]
    spans = [(0, len(ids) - 1)]
    while spans:
        low, high = spans.pop()
        if low == high or (epoch(low) is not None and epoch(low) == epoch(high)):
            continue
        if high - low == 1:
            starts.append(high)
            continue
        middle = (low + high) // 2
        spans += [(low, middle), (middle, high)]
    starts.sort()
    return tuple(EpochRun(epoch(start), start, end) for start, end in zip(starts, [*starts[1:], len(ids)], strict=True))


def unsettled_epochs(
    runs: Sequence[EpochRun], newest_epoch: int, long_ago: Callable[[int], bool], *, sentinels: bool
) -> tuple[int, ...]:
    """Epochs whose writers may still have to search for the end of the log, ascending.

    Args:
        runs: the runs of the log.
        newest_epoch: of the region's newest manifest.
        long_ago: whether the entry at an index is older than the longest stall of a writer; older epochs are older.
        sentinels: whether writers put an empty entry before they search.
    """
    dead = max((run.epoch for run in runs if run.epoch is not None and long_ago(run.start)), default=0)
    settled = {run.epoch for run in runs if not sentinels or run.end - run.start > 1}
    first = max(dead, newest_epoch - _MAX_EPOCHS) + 1
    return tuple(epoch for epoch in range(first, newest_epoch + 1) if epoch not in settled)


@dataclass(frozen=True)
class FencePosts:
    """The fence posts of one log.

    A writer detects that it was fenced when its put-if-absent finds its position taken; docs/protocol.md has the
    timeline of the loss if positions are freed.

    So an entry is kept as long as a writer may have its position as the next one. How a writer gets a
    position, and which entries are kept for it:

    * it wrote the previous entry: the entry at its position is of another epoch, and the first of a *run* of that
      epoch's entries. The first entry of each run is kept.
    * it found entries of older epochs at its position, and continued at the position after them. They were written by
      writers that claimed before it, and searched for the end of the log only after it had written: runs
      of an older epoch behind one of a newer epoch. They are kept as a whole.
    * it claimed the region, and wrote nothing yet. It may search for the end of the log at any time, from
      the ``replay_after`` of its own claim on, and stop at any missing entry. All entries from
      there on are kept: those that existed when it claimed, and those written since.
    * it is pylance's, which writes an empty entry when it claims, before it searches: until it wrote a
      second one, all entries between its claim's ``replay_after`` and its first are kept.

    The runs are found by bisection, which misses runs of an older epoch between two of the same
    newer one. Epochs that are missed are treated as if they wrote nothing.

    How long: ``fence_retention``. A run's first entry is kept until the *next* run is that old: as long as it exists,
    the next one is recognized as the start of a run. For a writer that searched late, the time counts from its claim.

    For future writers: the last entry of the log is always kept, because pylance uses the highest
    name as the end of the log and puts its empty entry after it; at too low a position, that entry would not fence
    any writer. All entries after ``wal_id_last_seen`` are kept as well: other writers search for the end from there.

    ``ids``: the existing entries, ascending. ``runs``: the runs of these entries. ``written``: when the entry at an
    index was written, by the store's clock, like the claims. ``claims``: of the unsettled epochs, ascending. ``hint``:
    ``wal_id_last_seen`` of the newest manifest; 0: none.
    """

    ids: Sequence[int]
    runs: Sequence[EpochRun]
    written: Callable[[int], datetime]
    claims: Mapping[int, Claim]
    hint: int = 0
    _always: frozenset[int | None] = field(init=False)
    _late: frozenset[int] = field(init=False)
    _silent: _Spans = field(init=False)
    _looking: _Spans = field(init=False)

    def __post_init__(self) -> None:
        """Compute the spans in which entries must be kept."""
        epochs = {run.epoch for run in self.runs if run.epoch is not None}
        first = {run.epoch: self.ids[run.start] for run in reversed(self.runs)}
        highest = accumulate((run.epoch or 0 for run in self.runs), max)
        late = (run.start for run, high in zip(self.runs, highest, strict=True) if (run.epoch or high) < high)
        silent = ((epoch, claim, _NO_END) for epoch, claim in self.claims.items() if epoch not in first)
        looking = ((epoch, claim, first[epoch]) for epoch, claim in self.claims.items() if epoch in first)
        object.__setattr__(self, "_always", frozenset({*sorted(epochs)[-_NEWEST_EPOCHS_KEPT:], None}))
        object.__setattr__(self, "_late", frozenset(late))
        object.__setattr__(self, "_silent", _Spans(silent))
        object.__setattr__(self, "_looking", _Spans(looking))

    def post(self, run_at: int, at: int) -> Post | None:
        """Why the entry at index ``at``, in the run with index ``run_at``, must be kept; None: it need not be.

        If there are several reasons, the one that lasts longest.
        """
        posts = list(self._posts(run_at, at))
        return max(posts, key=lambda post: inf if post.since is None else post.since.timestamp(), default=None)

    def _posts(self, run_at: int, at: int) -> Iterable[Post]:
        run, entry_id = self.runs[run_at], self.ids[at]
        if at == len(self.ids) - 1:
            yield Post("fence post: the last entry, after which the next writer continues", None)
        if 0 < self.hint < entry_id:
            yield Post(f"fence post: a writer searches for the end of the log after entry {self.hint}", None)
        if at == run.start and run.epoch in self._always:
            who = "of an unknown epoch" if run.epoch is None else f"of writer epoch {run.epoch}, one of the newest two"
            yield Post(f"fence post: the first entry {who}", None)
        elif at == run.start:
            what = f"fence post: the first entry of writer epoch {run.epoch}; the next epoch's was written"
            yield Post(what, self.written(self.runs[run_at + 1].start) if run_at + 1 < len(self.runs) else None)
        elif run.start in self._late:
            yield Post(f"fence post: writer epoch {run.epoch} wrote this after a newer epoch's entry", self.written(at))
        silent = self._silent.over(entry_id)
        if silent is not None:
            what = f"fence post: writer epoch {silent[1]} may write here, no entry of it was found; claimed"
            yield Post(what, silent[0])
        looking = self._looking.over(entry_id)
        if looking is not None:
            what = f"fence post: writer epoch {looking[1]} may still have to read this, it wrote one entry; claimed"
            yield Post(what, looking[0])


class _Spans:
    """The positions that writers may have next. After the start of their claims, before an end."""

    def __init__(self, claims: Iterable[tuple[int, Claim, int]]) -> None:
        ordered = sorted(claims, key=lambda claim: (claim[1].start, claim[0]))
        self._starts = [claim.start for _, claim, _ in ordered]
        # A later claim neither starts nor ends earlier: of those that start before, the last one ends last.
        self._ends = list(accumulate((end for _, _, end in ordered), max))
        self._youngest = list(accumulate(((claim.made, epoch) for epoch, claim, _ in ordered), max))

    def over(self, entry_id: int) -> tuple[datetime, int] | None:
        """The youngest claim whose writer may have an entry's position next: its time and epoch; else None."""
        at = bisect_left(self._starts, entry_id) - 1
        return self._youngest[at] if at >= 0 and entry_id < self._ends[at] else None


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
        grace = duration_text(self.view.evidence.options.reader_grace)
        young = Gate(met=False, text=f"flushed less than --reader-grace ({grace}) ago")
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
        return LanceCandidate(CandidateKind.WAL_ENTRY, path, size, 1, gates, region_id=self.view.region_id)

    @cached_property
    def _flushed_gates(self) -> tuple[Gate, ...]:
        """The gates that all log entries share."""
        flushed = Gate(met=True, text=f"flushed: replay starts at {self._replay_after(self.view.newest) + 1}")
        return (flushed, *self.view.base_gates())

    @staticmethod
    def _replay_after(manifest: RegionManifest) -> int:
        return manifest.replay_after_wal_id or 0

    def _settled(self) -> int:
        """How many of the entries neither a writer nor a reader replays any more."""
        settled = 0 if self.view.settled is None else self._replay_after(self.view.settled)
        return self.view.contents.wal.up_to(min(self._replay_after(self.view.newest), settled))

    @cached_property
    def _log_is_needed(self) -> Gate | None:
        """The gate that keeps all entries if a generation is lost: the log may be the only copy of its rows."""
        if (unlisted := self.view.unlisted) is not None:
            return Gate(met=False, text=f"generation {unlisted} is neither merged nor listed{_ONLY_COPY}")
        for flushed in self.view.newest.unmerged(self.view.merged):
            if flushed.path not in self.view.contents.directories:
                return Gate(met=False, text=f"generation {flushed.generation} is missing{_ONLY_COPY}")
            if (why := self.view.damage(flushed.generation)) is not None:
                return Gate(met=False, text=f"generation {flushed.generation} is damaged{_ONLY_COPY} ({why})")
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
                if candidate.kind is CandidateKind.GENERATION and name in self.view.listed_at:
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
