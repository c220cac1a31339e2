"""The erase job of tables with the legacy MemWAL index.

pylance commits nothing to such a table, but writes files: fragments, deletion vectors and index segments. Each step
publishes them as exactly the next version (:mod:`memwal_ops.formats.lance.legacy.index`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
from lance.fragment import write_fragments

from memwal_ops.core.candidates import Verdict
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.erasure import RowHolder
from memwal_ops.errors import MemwalOpsError, NoPrimaryKeyError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, fixed_dictionaries
from memwal_ops.formats.lance.commit.index_build import from_pylance
from memwal_ops.formats.lance.commit.publication import deleted_unless_named
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, dictionary_columns, remove_files, with_values_in_use
from memwal_ops.formats.lance.files.blobs import written_schema
from memwal_ops.formats.lance.files.datasets import lance_errors, lance_options, open_dataset
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, base_indexes
from memwal_ops.formats.lance.indexes.index_arguments import arguments_like
from memwal_ops.formats.lance.jobs.answers_guard import SAMPLE, compare_answers, refuse_worse
from memwal_ops.formats.lance.jobs.erase import job, log, survey
from memwal_ops.formats.lance.jobs.legacy import gc, merge
from memwal_ops.formats.lance.legacy.index import Draft, check_mergeable, draft_of, mem_wals_of, merge_draft, publish
from memwal_ops.formats.lance.legacy.mem_tables import MemTables
from memwal_ops.formats.lance.legacy.replay import entry_of, entry_rows
from memwal_ops.formats.lance.legacy.states import Change
from memwal_ops.formats.lance.options import LegacyOptions, MergeOptions
from memwal_ops.formats.lance.wire.legacy_index import MemWal, State, decode_mem_wals
from memwal_ops.formats.lance.wire.memwal_index import find_memwal_entry, is_legacy
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import datetime
    from uuid import UUID

    import lance

    from memwal_ops.formats.lance.jobs.erase.survey import Survey
    from memwal_ops.formats.lance.jobs.gc.evidence import LanceCandidate
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest
    from memwal_ops.storage.api import ObjectMeta

OUTSIDE = "log outside of the table"
_IN_MEMORY = "memory:"
_UNMERGED = "lists it as unmerged"


class LegacySurveyor(survey.Surveyor):
    """Surveys a table with the legacy MemWAL index."""

    def _log(self, table: Table) -> LegacyLogs:
        return LegacyLogs(table, self.target, self.gc_options, self.merged).read(self.others(table))


@dataclass
class LegacyLogs(log.LogSurvey):
    """What of the logs and MemTables holds such rows. Those outside of the table are not read.

    ``dirty``: objects that may, by path, with the reason.
    """

    dirty: dict[str, str] = field(default_factory=dict)
    _owners: dict[str, MemWal] = field(default_factory=dict)
    _outside: dict[str, MemWal] = field(default_factory=dict)
    _needed: dict[int, str] = field(default_factory=dict)

    def read(self, others: Iterable[tuple[int, VersionManifest | None]]) -> LegacyLogs:
        """Search them; ``others`` are the versions but the newest, which may list a MemWAL as unmerged."""
        for mem_wal in [*mem_wals_of(self.table), *gc.trimmed(self.table).values()]:
            for location, is_log in ((mem_wal.wal_location, True), (mem_wal.mem_table_location, False)):
                place = gc.log_path(self.table, location)
                if location and not location.startswith(_IN_MEMORY) and place not in self._owners:
                    self._owners[place] = mem_wal
                    self._read_place(place, is_log=is_log)
        unmerged = {place: owner.id for place, owner in self._owners.items() if self._holds(place)}
        for version, shown in others if unmerged else ():
            entry = None if shown is None else find_memwal_entry(shown.indexes)
            for mem_wal in decode_mem_wals(entry.index_details.value) if entry is not None and is_legacy(entry) else ():
                if mem_wal.state is not State.MERGED and gc.log_path(self.table, mem_wal.wal_location) in unmerged:
                    self._needed[version] = f"its readers replay the log of {mem_wal.id}"
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
            self.objects += [(meta, log.CLEAN if why is None else None) for meta in files]
            self.dirty |= {} if why is None else {f"{place}/": why}
            return
        for meta in files:
            why = self._why_file(meta, partial(self._why_entry, meta))
            self.objects.append((meta, log.CLEAN if why is None else None))
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

    def holders(self, versions_until: datetime | None) -> Iterator[RowHolder]:
        """See the base class."""
        for place, mem_wal in self._outside.items():
            if self._is_there(place):
                why = f"of {mem_wal.id}: it is not read, and no job deletes it: delete it yourself"
                yield RowHolder(OUTSIDE, place, why, blocks=True)
        candidates = (
            {candidate.path: candidate for candidate in gc.candidates(self.table, self.options)} if self.dirty else {}
        )
        for path, why in self.dirty.items():
            places = (place for place in self._owners if path.startswith(f"{place}/"))
            owner = self._owners[max(places, key=len)]
            yield self._holder(path, why, owner, candidates.get(path), versions_until)

    def _is_there(self, place: str) -> bool:
        try:
            store = open_store(MemTables(self.table, LegacyOptions()).located(place))
            return next(iter(store.list()), None) is not None
        except MemwalOpsError:
            return True

    def _holder(
        self, path: str, why: str, one: MemWal, candidate: LanceCandidate | None, until: datetime | None
    ) -> RowHolder:
        kind = "MemTable" if path.endswith("/") else "log file"
        if one.state is not State.MERGED:
            if one.state is State.FLUSHED and not self.merged:
                return RowHolder(kind, path, f"{why}; it is merged first")
            act = "memwal-ops merge reports why" if one.state is State.FLUSHED else f"{one.owner_id!r} must flush it"
            return RowHolder(kind, path, f"{why}; {one.id} is {one.state.name}: {act}", blocks=True)
        if candidate is None:
            return RowHolder(kind, path, f"{why}; it is merged, and gc deletes nothing there: delete it", blocks=True)
        if candidate.verdict is Verdict.DELETE:
            return RowHolder(kind, path, why)
        waits = all(_UNMERGED in gate.text for gate in candidate.gates if not gate.met)
        blocks = self.merged and not waits
        return RowHolder(kind, path, f"{why}; {candidate.why}", until if waits else None, blocks)


@dataclass
class LegacyErasure(job.TableErasure):
    """The erasure of rows of a table with the legacy MemWAL index."""

    has_log: ClassVar[bool] = True
    surveyor_of: ClassVar[type[survey.Surveyor]] = LegacySurveyor
    not_seen: ClassVar[tuple[str, ...]] = (
        *job.TableErasure.not_seen,
        "logs and MemTables outside of the table, once the index does not list them any more",
    )

    @staticmethod
    def check(table: Table) -> None:
        """Raise ``UnsupportedFeatureError`` if the table has stable row ids."""
        check_mergeable(table)

    def commit(self, table: Table, operation: lance.LanceOperation.Delete, note: CommitNote) -> None:
        """See the base class."""
        change = Rewrite((), tuple(operation.updated_fragments), tuple(operation.deleted_fragment_ids), ())
        publish(table, Change(), note, merge_draft(table, change))

    def _merge(self) -> None:
        self.context.step("merge")
        try:
            report = merge.apply(self.table, MergeOptions(), self.context)
        except NoPrimaryKeyError as error:
            self.faults.append(RowHolder("MemWAL", "not merged", f"{error} (memwal-ops merge)", blocks=True))
        else:
            self.count("generations_merged", sum(len(merge_pass.ids) for merge_pass in report.passes))
        self.table = self.table.newest()
        self.surveyor.merged = True

    def _rewrite(self, found: Survey) -> None:
        self.context.step("compact")
        for number in found.stained:
            retry = CommitRetry()
            while any(fragment.id == number for fragment in self.table.manifest.manifest.fragments):
                self.context.checkpoint()
                change = _rewritten(self.table, number)
                self.table.guard.register(change.written_files())
                try:
                    with deleted_unless_named(partial(remove_files, self.table, change.written_files())):
                        publish(self.table, Change(), CommitNote("erase"), merge_draft(self.table, change))
                except CommitLostError as error:
                    self.table = retry.conflict(self.table, error)
                else:
                    self.table = retry.landed(self.table)
                    self.count("fragments_rewritten", 1)

    def _rebuild(self, found: Survey) -> None:
        """Build anew the indexes that may hold such rows, and those that have not seen all that is merged."""
        self.context.step("catchup")
        for name, index in base_indexes(self.table).items():
            if name not in found.indexes and self.table.fragment_ids <= index.covered:
                continue
            try:
                self._build(index)
            except CommitLostError as error:
                self.table = CommitRetry().conflict(self.table, error)  # the next run builds it
            except MemwalOpsError as error:
                self.faults.append(RowHolder("index", name, f"it cannot be built anew: {error}", blocks=True))
            else:
                self.count("indexes_rebuilt", 1)

    def _build(self, index: BaseIndex) -> None:
        table, note = self.table, CommitNote("erase")
        fragments = [int(fragment.id) for fragment in table.manifest.manifest.fragments]
        arguments = arguments_like(table, index)
        with lance_errors("build index", index.name):
            built = arguments.whole(table.dataset, index.name, fragments, lance_options(table.location))
        entry = from_pylance(built)
        written = f"{INDICES_FOLDER}/{built.uuid}"
        with deleted_unless_named(partial(_discard, table, written)):
            compared = compare_answers(table, index, [entry], SAMPLE, note, self.context)
            refuse_worse(index, compared, "It is kept as it is.")
            before = draft_of(table.manifest)
            kept = tuple(other for other in before.indexes if other.name != index.name)
            publish(table, Change(), note, Draft(before.fragments, before.max_fragment_id, (*kept, entry)))
        self.table = table.newest()

    def _collect(self) -> None:
        if any(holder.kind == OUTSIDE for holder in self.survey().holders):
            return  # once it is trimmed, nothing names it any more
        self.context.step("gc")
        report = gc.apply(self.table.newest(), self.surveyor.gc_options, self.context)
        self.count("objects_deleted", report.deleted_objects)
        self.count("mem_wals_trimmed", report.drained)


plan, apply = job.job_of(LegacyErasure)


def _rewritten(table: Table, number: int) -> Rewrite:
    dataset = table.dataset
    with lance_errors("rewrite a fragment of", table.location.uri):
        part = dataset.get_fragment(number)
        assert part is not None  # noqa: S101 - the manifest has it
        if not part.count_rows():
            return Rewrite((), (), (number,), ())
        reader = dataset.scanner(fragments=[part], blob_handling="all_binary").to_reader()
        if dictionary_columns(dataset.schema) and not fixed_dictionaries(table):
            reader = pa.RecordBatchReader.from_batches(reader.schema, with_values_in_use(reader))
        made = write_fragments(
            reader,
            dataset,
            schema=written_schema(dataset.schema),
            mode="append",
            data_storage_version=dataset.data_storage_version,
            storage_options=lance_options(table.location),
        )
    assert isinstance(made, list)  # noqa: S101 - narrows pylance's union; True without return_transaction
    return Rewrite(tuple(made), (), (number,), ())


def _discard(table: Table, folder: str) -> None:
    paths = [meta.path for meta in table.store.list(folder)]
    table.guard.register(paths)
    table.discard(paths)
