"""Find what of the logs and MemTables of legacy MemWALs holds rows that must be gone, and why it is still there."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from memwal_ops.core.candidates import Verdict
from memwal_ops.core.erasure import Holder
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.jobs.erase.found import CLEAN, LogSurvey
from memwal_ops.formats.lance.jobs.erase.survey import Surveyor
from memwal_ops.formats.lance.jobs.legacy import gc
from memwal_ops.formats.lance.legacy.index import mem_wals_of
from memwal_ops.formats.lance.legacy.replay import entry_of, entry_rows
from memwal_ops.formats.lance.wire.legacy_index import State, decode_mem_wals
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry, is_legacy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime
    from uuid import UUID

    from memwal_ops.formats.lance.jobs.gc.evidence import LanceCandidate
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.legacy_index import MemWal
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import ObjectMeta

OUTSIDE = "log outside of the table"
_IN_MEMORY = "memory:"
_UNMERGED = "lists it as unmerged"


class LegacySurveyor(Surveyor):
    """Surveys a table with the legacy MemWAL index."""

    def _log(self, table: Table) -> LegacyLogs:
        return LegacyLogs(table, self.target, self.gc_options, self.merged).read(self.others(table))


@dataclass
class LegacyLogs(LogSurvey):
    """What of the logs and MemTables holds such rows. Those outside of the table are not read.

    Attributes:
        dirty: objects that may, by path, with the reason.
    """

    dirty: dict[str, str] = field(default_factory=dict)
    _owners: dict[str, MemWal] = field(default_factory=dict)
    _outside: dict[str, MemWal] = field(default_factory=dict)
    _needed: dict[int, str] = field(default_factory=dict)

    def read(self, others: Iterable[tuple[int, VersionManifest | None]]) -> LegacyLogs:
        """Search them; ``others`` are the versions but the newest, which may list a MemWAL as unmerged."""
        for one in [*mem_wals_of(self.table), *gc.trimmed(self.table)]:
            for location, is_log in ((one.wal_location, True), (one.mem_table_location, False)):
                place = gc.log_path(self.table, location)
                if location and not location.startswith(_IN_MEMORY) and place not in self._owners:
                    self._owners[place] = one
                    self._read_place(place, is_log=is_log)
        unmerged = {place: one.id for place, one in self._owners.items() if self._holds(place)}
        for version, shown in others if unmerged else ():
            entry = None if shown is None else find_memwal_entry(shown.indexes)
            for one in decode_mem_wals(entry.index_details.value) if entry is not None and is_legacy(entry) else ():
                if one.state is not State.MERGED and gc.log_path(self.table, one.wal_location) in unmerged:
                    self._needed[version] = f"its readers replay the log of {one.id}"
        return self

    def _holds(self, place: str) -> bool:
        return any(path.startswith(f"{place}/") for path in self.dirty)

    def _read_place(self, place: str, *, is_log: bool) -> None:
        if not gc.is_below(place):
            self._outside[place] = self._owners[place]
            return
        files = list(self.table.store.list(place))
        if not is_log and files:
            why = self.target.once((place, len(files)), partial(self._why_mem_table, place, files))
            self.objects += [(meta, CLEAN if why is None else None) for meta in files]
            self.dirty |= {} if why is None else {f"{place}/": why}
            return
        for meta in files:
            why = self._why_file(meta, partial(self._why_entry, meta))
            self.objects.append((meta, CLEAN if why is None else None))
            self.dirty |= {} if why is None else {meta.path: why}

    def _why_mem_table(self, place: str, files: list[ObjectMeta]) -> str | None:
        if self.target.before is not None:
            old = min(meta.last_modified for meta in files) < self.target.before
            return "it has rows from before that time" if old else None
        return self.target.search(partial(open_dataset, self.table.location, place))

    def _why_entry(self, meta: ObjectMeta) -> str | None:
        if self.target.before is not None:
            return "it is from before that time" if meta.last_modified < self.target.before else None
        if entry_of(meta.path.rpartition("/")[2]) is None:
            return "it is not a log file of Lance or Arrow, and is not searched"
        return self.target.matches(entry_rows(self.table.store.get(meta.path), meta.path))

    def versions(self, reading: Mapping[tuple[UUID, int], list[int]]) -> Mapping[int, str]:
        """See the base class."""
        del reading
        return self._needed

    def holders(self, versions_until: datetime | None) -> Iterator[Holder]:
        """See the base class."""
        for place, one in self._outside.items():
            if self._is_there(place):
                why = f"of {one.id}: it is not read, and no job deletes it: delete it yourself"
                yield Holder(OUTSIDE, place, why, blocks=True)
        candidates = {one.path: one for one in gc.candidates(self.table, self.options)} if self.dirty else {}
        for path, why in self.dirty.items():
            places = (place for place in self._owners if path.startswith(f"{place}/"))
            owner = self._owners[max(places, key=len)]
            yield self._holder(path, why, owner, candidates.get(path), versions_until)

    def _is_there(self, place: str) -> bool:
        try:
            return gc.exists_outside(self.table, place)
        except MemwalOpsError:
            return True

    def _holder(
        self, path: str, why: str, one: MemWal, candidate: LanceCandidate | None, until: datetime | None
    ) -> Holder:
        kind = "MemTable" if path.endswith("/") else "log file"
        if one.state is not State.MERGED:
            if one.state is State.FLUSHED and not self.merged:
                return Holder(kind, path, f"{why}; it is merged first")
            act = "memwal-ops merge reports why" if one.state is State.FLUSHED else f"{one.owner_id!r} must flush it"
            return Holder(kind, path, f"{why}; {one.id} is {one.state.name}: {act}", blocks=True)
        if candidate is None:
            return Holder(kind, path, f"{why}; it is merged, and gc deletes nothing there: delete it", blocks=True)
        if candidate.verdict is Verdict.DELETE:
            return Holder(kind, path, why)
        waits = all(_UNMERGED in gate.text for gate in candidate.gates if not gate.met)
        blocks = self.merged and not waits
        return Holder(kind, path, f"{why}; {candidate.why}", until if waits else None, blocks)
