"""The gc job of tables with the legacy MemWAL index: trim what is merged, then collect its logs.

A trim removes from the index those MERGED MemWALs that every user index has caught up with, by Lance's own rule. They
are recorded beside the table before the commit, since the index does not have the paths of their logs afterwards. A log
is deleted when no version that may be opened lists its MemWAL as unmerged: a reader of such a version replays it.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core import collector
from memwal_ops.core.candidates import Gate, GcDecision, KindText
from memwal_ops.core.collector import Collector, Stage
from memwal_ops.core.context import RunContext
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote
from memwal_ops.formats.lance.files.version_files import decode_manifests, list_manifests, list_manifests_of_others
from memwal_ops.formats.lance.jobs.gc.evidence import LanceCandidate
from memwal_ops.formats.lance.jobs.gc.job import GcReport
from memwal_ops.formats.lance.legacy import adoption, states
from memwal_ops.formats.lance.legacy.index import find_emptied, mem_wals_of, publish
from memwal_ops.formats.lance.options import GcOptions, RetentionOptions
from memwal_ops.formats.lance.retention.damage import names_damage, require_complete
from memwal_ops.formats.lance.retention.identity import table_anchor
from memwal_ops.formats.lance.wire.legacy_index import MemWal, State, decode_mem_wals, encode_mem_wals
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry, is_legacy
from memwal_ops.storage.clock import store_time
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from memwal_ops.core.anchors import Anchor
    from memwal_ops.formats.lance.table import Table

_LOG = "wal_root"
_RECORD = "trim_record"
_ELSEWHERE = ", where gc deletes nothing: remove it yourself"
_TRIMMED = f"{adoption.LEGACY_FOLDER}/trimmed"
# Folders of Lance and of memwal-ops: a log is never in one of them, even if an index has such a path.
_NOT_LOGS = frozenset(
    {"_versions", "data", "_indices", "_deletions", "_transactions", "_refs", "tree", "_mem_wal", "_mem_wal_ops"}
)


class LegacyGcReport(GcReport):
    """Report of a gc run of a legacy table."""

    kinds = {_LOG: KindText("logs of merged MemWALs", ("log file", "log files")), _RECORD: KindText("records of trims")}  # noqa: RUF012 - as the base class has it
    drains = ("MemWAL", "MemWALs")


@dataclass
class _View:
    """The inputs of a collection: versions and records of trims."""

    table: Table
    now: datetime
    options: RetentionOptions
    unmerged_in: Mapping[str, str]
    trimmed: Mapping[str, MemWal]
    emptied: bool

    @classmethod
    def read(cls, table: Table, options: RetentionOptions, now: datetime) -> _View:
        emptied = not table.log.exists and find_emptied(table) is not None
        return cls(table, now, options, _unmerged_logs(table), trimmed(table), emptied)

    def trimmable(self) -> tuple[MemWal, ...]:
        """The MemWALs that a trim removes: all that Lance's rule removes, except the last MemWAL of the table.

        Details without a MemWAL are those of the current layouts: the table would be opened as one that has regions.
        """
        if self.table.log.exists or self.emptied:
            return ()
        mem_wals = mem_wals_of(self.table)
        removed = states.trim(mem_wals, states.covered_version(self.table.manifest.indexes)).removed
        return removed if len(removed) < len(mem_wals) else tuple(sorted(removed, key=lambda mem_wal: mem_wal.id)[:-1])


def _unmerged_logs(table: Table) -> dict[str, str]:
    """Per log the first version that lists its MemWAL as unmerged, and may be opened: main, branches, detached."""
    logs: dict[str, str] = {}
    own, others = list_manifests(table.store), list_manifests_of_others(table.branch)
    for store, paths in ((table.store, own), (table.branch.root, others)):
        for path in paths:
            try:
                entries = [find_memwal_entry(version.indexes) for version in decode_manifests(path, store.get(path))]
            except ObjectNotFoundError:
                continue  # expired meanwhile
            for entry in entries:
                for mem_wal in decode_mem_wals(entry.index_details.value) if entry and is_legacy(entry) else ():
                    if mem_wal.state is not State.MERGED:
                        logs.setdefault(log_path(table, mem_wal.wal_location), path)
    return logs


def trimmed(table: Table) -> dict[str, MemWal]:
    """What earlier runs trimmed, by the path of its record. Raises ``InvalidFormatError``: a record cannot be read."""
    records = {}
    for meta in table.store.list(_TRIMMED):
        try:
            document = decode_record(table.store.get(meta.path), meta.path)
            (records[meta.path],) = decode_mem_wals(base64.b64decode(document["mem_wal"], validate=True))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidFormatError(f"{meta.path} is not a readable record of trimmed MemWALs: {error}") from error
    return records


def log_path(table: Table, location: str) -> str:
    """A log's path relative to the table's root if it is below it; else unchanged."""
    relative = location.removeprefix(f"{table.location.uri}/").removeprefix(f"file://{table.location.uri}/")
    return posixpath.normpath(relative) if "://" not in relative else relative.rstrip("/")


class _Logs(Collector[LanceCandidate]):
    """The logs of MemWALs that are, or will be, trimmed."""

    def __init__(self, view: _View, anchors: Sequence[Anchor] = (), note: CommitNote | None = None) -> None:
        self.view, self.store, self._anchors, self._note = view, view.table.store, anchors, note
        # A record outlives the run that writes it: killed after the trim, the next run finds the log by it.
        self._recorded = frozenset(view.trimmed)
        self._complete = False

    @property
    def anchors(self) -> Sequence[Anchor]:
        """The table's."""
        return self._anchors

    def _renew(self) -> None:
        if not self._complete:
            require_complete(self.view.table)
            self._complete = True
        for anchor in self._anchors:
            anchor.check(self.store)
        table = self.view.table.newest()
        self.view = _View.read(table, self.view.options, self.view.now)
        self._anchors = (table_anchor(table),)

    def drain(self) -> int:
        """Trim: first record what is trimmed, then publish. After a commit conflict, the next run does it."""
        assert self._note is not None  # noqa: S101 - apply gives it
        self._renew()
        table = self.view.table
        chosen = self.view.trimmable()
        if not chosen:
            return 0
        for mem_wal in chosen:
            if not any(map(is_below, self._left(mem_wal))):
                continue
            name = hashlib.blake2b(f"{mem_wal.id.generation} {mem_wal.id.region}".encode(), digest_size=16).hexdigest()
            document = {
                "region": mem_wal.id.region,
                "generation": mem_wal.id.generation,
                "wal_location": mem_wal.wal_location,
                "mem_wal": base64.b64encode(encode_mem_wals([mem_wal])).decode(),
            }
            self.store.put_if_absent(f"{_TRIMMED}/{name}.json", encode_record(document))
        try:
            publish(table, states.Change(removed=chosen), self._note)
        except CommitLostError:
            return 0
        self._renew()
        return len(chosen)

    def stages(self) -> Iterator[Stage[LanceCandidate]]:
        """The files of each log; then the records of logs that are deleted."""
        yield Stage(self._files())
        yield Stage(self._finished())

    def revalidate(self, batch: Sequence[LanceCandidate]) -> Iterator[LanceCandidate]:
        """List the candidates again, with their gates."""
        self._renew()
        wanted = {candidate.path for candidate in batch}
        candidates = self._files() if batch[0].kind == _LOG else self._finished()
        return (candidate for candidate in candidates if candidate.path in wanted)

    def _files(self) -> Iterator[LanceCandidate]:
        listed = {mem_wal.id for mem_wal in self._listed()}
        trimmed = {mem_wal.id: mem_wal for mem_wal in self.view.trimmed.values() if mem_wal.id not in listed}
        for mem_wal in [*trimmed.values(), *self._listed()]:
            place = log_path(self.view.table, mem_wal.wal_location)
            if mem_wal.state is not State.MERGED or not is_below(place):
                continue
            gates = self._gates(mem_wal, place, is_trimmed=mem_wal.id in trimmed)
            for meta in self.store.list(place):
                yield LanceCandidate(_LOG, meta.path, meta.size, 1, gates, generation=mem_wal.id.generation)

    def _left(self, one: MemWal) -> Iterator[str]:
        """Where something is left of a log, or of its MemTable, which erase finds by the record; or may be, outside."""
        for location, is_log in ((one.wal_location, True), (one.mem_table_location, False)):
            place = log_path(self.view.table, location)
            if next(iter(self.store.list(place)), None) is not None if is_below(place) else is_log:
                yield place

    def _listed(self) -> tuple[MemWal, ...]:
        return () if self.view.table.log.exists else mem_wals_of(self.view.table)

    def _gates(self, one: MemWal, place: str, *, is_trimmed: bool) -> tuple[Gate, ...]:
        gates = [Gate(met=True, text=f"{one.id} is merged since version {one.last_updated_dataset_version}")]
        if self.view.emptied:
            gates.append(Gate(met=False, text="a state commit dropped the table's rows (memwal-ops merge --restore)"))
        if is_trimmed:
            gates.append(Gate(met=True, text="trimmed: the index does not list it any more"))
        else:
            planned = self._note is None and one in self.view.trimmable()
            gates.append(Gate(met=planned or self._is_last(one), text=self._why_listed(one)))
        user = self.view.unmerged_in.get(place)
        unread = "no version that may be opened lists it as unmerged"
        read = f"{user} lists it as unmerged, and its readers replay it"
        gates.append(Gate(met=user is None, text=unread if user is None else read))
        others = [where for each in self._listed() if each.id != one.id for where in self._places(each)]
        near = [other for other in others if f"{other}/".startswith(f"{place}/") or f"{place}/".startswith(f"{other}/")]
        if near:
            gates.append(Gate(met=False, text=f"another MemWAL has its log or its MemTable at {near[0]}"))
        return tuple(gates)

    def _places(self, one: MemWal) -> Iterator[str]:
        yield log_path(self.view.table, one.wal_location)
        if one.state is not State.MERGED:
            yield log_path(self.view.table, one.mem_table_location)

    def _is_last(self, one: MemWal) -> bool:
        """Whether only its place in the index stays: nothing reads its log any more."""
        trimmable = states.is_trimmable(one, states.covered_version(self.view.table.manifest.indexes))
        return trimmable and not self.view.emptied and one not in self.view.trimmable()

    def _why_listed(self, one: MemWal) -> str:
        covered = states.covered_version(self.view.table.manifest.indexes)
        if one in self.view.trimmable():
            return "the index lists it, and --apply trims it first"
        if states.is_trimmable(one, covered):
            return "the index lists it as its last MemWAL, which marks it as a legacy one; nothing reads its log"
        seen = f"an index of the table has seen version {covered} only"
        return f"the index lists it: {seen}, and it was merged in {one.last_updated_dataset_version}"

    def _finished(self) -> Iterator[LanceCandidate]:
        listed = {mem_wal.id for mem_wal in self._listed()}
        for path, mem_wal in self.view.trimmed.items():
            left, own = [*self._left(mem_wal)], log_path(self.view.table, mem_wal.wal_location)
            where = ", ".join(at if at == own and is_below(at) else f"{at}{_ELSEWHERE}" for at in left)
            if path not in self._recorded:
                if self._note is not None and not left and mem_wal.id not in listed:
                    self.view.table.discard([path])  # this run's own
                continue
            gone = mem_wal.id not in listed
            gates = (
                Gate(met=gone, text="trimmed" if gone else "the index lists it"),
                Gate(met=not left, text=f"files of it are at {where}" if left else "its log is gone"),
            )
            if (meta := self.store.head(path)) is not None:
                yield LanceCandidate(_RECORD, path, meta.size, 1, gates, generation=mem_wal.id.generation)


def is_below(place: str) -> bool:
    """Whether the path is below the table and in none of Lance's folders: gc deletes logs only there."""
    first = place.split("/", 1)[0]
    return "://" not in place and not place.startswith("/") and first not in _NOT_LOGS | {"", ".", ".."}


@names_damage
def plan(table: Table, options: GcOptions, context: RunContext | None = None) -> LegacyGcReport:
    """What would be trimmed, and which files of logs are deletable. Reads only."""
    report = LegacyGcReport(applied=False, warnings=options.dangers())
    logs = _Logs(_View.read(table, options, datetime.now(UTC)))
    report.drainable = len(logs.view.trimmable())
    report.versions = table.version
    collector.plan([logs], report, options, context or RunContext())
    if report.decision is GcDecision.PLANNED:
        require_complete(table)
    return report


@names_damage
def apply(table: Table, options: GcOptions, context: RunContext | None = None) -> LegacyGcReport:
    """Trim and delete. Safe to kill, to repeat, and to run concurrently with all other jobs."""
    probe_conditional_writes(table.store)
    report = LegacyGcReport(applied=True, warnings=options.dangers())
    table = table.newest()
    anchor = table_anchor(table)
    logs = _Logs(_View.read(table, options, store_time(table.store)), (anchor,), CommitNote("gc"))
    report.versions = table.version
    return collector.collect([logs], report, options, context or RunContext())


def candidates(table: Table, options: RetentionOptions) -> Iterable[LanceCandidate]:
    """All candidates of a plan."""
    return collector.candidates([_Logs(_View.read(table, options, datetime.now(UTC)))], LegacyGcReport(applied=False))


def backlog(table: Table) -> Mapping[str, float]:
    """MemWALs that are merged, and still listed."""
    return {"merged_generations": sum(mem_wal.state is State.MERGED for mem_wal in mem_wals_of(table))}
