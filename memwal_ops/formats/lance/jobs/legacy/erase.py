"""The erase job of tables with the legacy MemWAL index.

pylance commits nothing to such a table, but writes files: fragments, deletion vectors and index segments. Each step
publishes them as exactly the next version (:mod:`memwal_ops.formats.lance.legacy.publish`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from lance.fragment import write_fragments

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.erasure import Holder
from memwal_ops.errors import MemwalOpsError, NoPrimaryKeyError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote
from memwal_ops.formats.lance.commit.index_build import from_pylance
from memwal_ops.formats.lance.commit.publication import deleted_unless_named
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, remove_files
from memwal_ops.formats.lance.files.blobs import written_schema
from memwal_ops.formats.lance.files.datasets import lance_options
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.index_arguments import arguments_like
from memwal_ops.formats.lance.jobs.answers_guard import SAMPLE, compare_answers, refuse_worse
from memwal_ops.formats.lance.jobs.erase.job import TableErasure, job_of
from memwal_ops.formats.lance.jobs.legacy import gc, merge
from memwal_ops.formats.lance.jobs.legacy.erase_log import OUTSIDE, LegacySurveyor
from memwal_ops.formats.lance.legacy.publish import Draft, check_mergeable, draft_of, merge_draft, publish
from memwal_ops.formats.lance.legacy.states import Change
from memwal_ops.formats.lance.options import MergeOptions
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER

if TYPE_CHECKING:
    import lance

    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.jobs.erase.found import Survey
    from memwal_ops.formats.lance.jobs.erase.survey import Surveyor
    from memwal_ops.formats.lance.table import Table

__all__ = ["apply", "plan"]


@dataclass
class LegacyErasure(TableErasure):
    """The erasure of rows of a table with the legacy MemWAL index."""

    has_log: ClassVar[bool] = True
    surveyor_of: ClassVar[type[Surveyor]] = LegacySurveyor
    not_seen: ClassVar[tuple[str, ...]] = (
        *TableErasure.not_seen,
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
            self.faults.append(Holder("MemWAL", "not merged", f"{error} (memwal-ops merge)", blocks=True))
        else:
            self.count("generations_merged", sum(len(one.ids) for one in report.passes))
        self.table = self.table.newest()
        self.surveyor.merged = True

    def _rewrite(self, found: Survey) -> None:
        self.context.step("compact")
        for number in found.stained:
            retry = CommitRetry()
            while any(one.id == number for one in self.table.manifest.manifest.fragments):
                self.context.checkpoint()
                change = _rewritten(self.table, number)
                self.table.guard.register(change.written_files())
                try:
                    with deleted_unless_named(partial(remove_files, self.table, change.written_files())):
                        publish(self.table, Change(), CommitNote.new("erase"), merge_draft(self.table, change))
                except CommitLostError as error:
                    self.table = retry.conflict(self.table, error)
                else:
                    self.table = retry.landed(self.table)
                    self.count("fragments_rewritten", 1)

    def _rebuild(self, found: Survey) -> None:
        """Build anew the indexes that may hold such rows, and those that have not seen all that is merged."""
        self.context.step("catchup")
        for name, index in base_indexes(self.table).items():
            if name not in found.indexes and not self._is_behind(index):
                continue
            try:
                self._build(index)
            except CommitLostError as error:
                self.table = CommitRetry().conflict(self.table, error)  # the next run builds it
            except MemwalOpsError as error:
                self.faults.append(Holder("index", name, f"it cannot be built anew: {error}", blocks=True))
            else:
                self.count("indexes_rebuilt", 1)

    def _is_behind(self, index: BaseIndex) -> bool:
        return not self.table.fragment_ids <= index.covered

    def _build(self, index: BaseIndex) -> None:
        table, note = self.table, CommitNote.new("erase")
        fragments = [int(one.id) for one in table.manifest.manifest.fragments]
        arguments = arguments_like(table, index)
        with lance_errors("build index", index.name):
            built = arguments.whole(table.dataset, index.name, fragments, lance_options(table.location))
        entry = from_pylance(built)
        written = f"{INDICES_FOLDER}/{built.uuid}"
        with deleted_unless_named(partial(_discard, table, written)):
            compared = compare_answers(table, index, [entry], SAMPLE, note, self.context)
            refuse_worse(index, compared, "It is kept as it is.")
            before = draft_of(table.manifest)
            kept = tuple(one for one in before.indexes if one.name != index.name)
            publish(table, Change(), note, Draft(before.fragments, before.max_fragment_id, (*kept, entry)))
        self.table = table.newest()

    def _collect(self) -> None:
        if any(one.kind == OUTSIDE for one in self.survey().holders):
            return  # once it is trimmed, nothing names it any more
        self.context.step("gc")
        report = gc.apply(self.table.newest(), self.surveyor.gc_options, self.context)
        self.count("objects_deleted", report.deleted_objects)
        self.count("mem_wals_trimmed", report.drained)


plan, apply = job_of(LegacyErasure)


def _rewritten(table: Table, number: int) -> Rewrite:
    """The living rows of a fragment as new ones."""
    dataset = table.dataset
    with lance_errors("rewrite a fragment of", table.location.uri):
        part = dataset.get_fragment(number)
        assert part is not None  # noqa: S101 - the manifest has it
        if not part.count_rows():
            return Rewrite((), (), (number,), ())
        reader = dataset.scanner(fragments=[part], blob_handling="all_binary").to_reader()
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
