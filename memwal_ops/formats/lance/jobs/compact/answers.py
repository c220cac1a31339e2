"""Publish a compaction unless an index would answer worse by it.

Each version that pylance would publish is asked, also one that it rebased over commits of others, if the entries of the
index are not those that were asked before: other writers change rows, for which an index is not the worse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.commit.rebased_commit import commit_checked
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.files.versions import TRANSACTIONS_FOLDER, read_version_manifest, references
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.jobs.answers_guard import OFF, Comparison, compare_answers, refuse_worse
from memwal_ops.formats.lance.jobs.compact.indexes import without_dropped_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import lance

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


@dataclass(slots=True)
class AnswersGuard:
    """Compares answers before and after each commit.

    Attributes:
        mode: off, sample or strict.
        note: the job and run.
        context: can stop the run between two queries.
        compared: by index, one comparison for each commit that changed it.
    """

    mode: str
    note: CommitNote
    context: RunContext
    compared: list[tuple[str, Comparison]] = field(default_factory=list)

    def commit(self, table: Table, dataset: lance.LanceDataset, commit: Callable[[lance.LanceDataset], object]) -> int:
        """Commit on ``table``, and return the published version.

        Args:
            table: the version that the commit was computed on.
            dataset: a handle on it.
            commit: commits with a handle, as pylance does; it writes nothing before but files that no version names.

        Raises:
            AnswersWorseError: an index would answer worse; the files of the commit are deleted.
            StorageError: pylance's own errors, and those of reading rows.
        """
        if self.mode == OFF or not base_indexes(table):
            with lance_errors("commit the compaction of", table.location.uri):
                commit(dataset)
            return int(dataset.version)
        return commit_checked(table, commit, _Question(self, table))


@dataclass(slots=True)
class _Question:
    """Asked of each version that a commit would publish."""

    guard: AnswersGuard
    before: Table
    asked: dict[str, list[bytes]] = field(default_factory=dict)

    def __call__(self, later: Table) -> None:
        """Ask the indexes that the version changes.

        Raises:
            AnswersWorseError: one would answer worse.
        """
        accepted = False
        try:
            for index, entries in _changed(self.before, later):
                if self.asked.get(index.name) != (known := [one.SerializeToString() for one in entries]):
                    self._ask(index, entries, later)
                    self.asked[index.name] = known
            accepted = True
        finally:
            if not accepted:
                _discard(self.before, later)

    def _ask(self, index: BaseIndex, entries: list[table_pb2.IndexMetadata], later: Table) -> None:
        guard = self.guard
        compared = compare_answers(self.before, index, entries, guard.mode, guard.note, guard.context, later)
        guard.compared.append((index.name, compared))
        refuse_worse(
            index,
            compared,
            f"Build it anew, then compact again: memwal-ops catchup URI --index {index.name} --rebuild.",
        )


def _changed(before: Table, later: Table) -> Iterator[tuple[BaseIndex, list[table_pb2.IndexMetadata]]]:
    """The indexes with other files or another coverage than before, and their entries once the run has ended."""
    final = {entry.uuid.uuid: entry for entry in without_dropped_rows(later, before)}
    for name, index in base_indexes(before).items():
        entries = [one for one in _entries(later) if one.name == name]
        if entries and _state(entries) != _state(index.segments):
            yield index, [final.get(one.uuid.uuid, one) for one in entries]


def _entries(table: Table) -> list[table_pb2.IndexMetadata]:
    return [] if table.manifest.indexes is None else [*table.manifest.indexes.indices]


def _state(entries: Iterable[table_pb2.IndexMetadata]) -> set[tuple[bytes, bytes]]:
    return {(one.uuid.uuid, one.fragment_bitmap) for one in entries}


def _discard(before: Table, later: Table) -> None:
    """Delete the files of a version that is not published: those that the one before it does not name."""
    try:
        parent = read_version_manifest(before.store, later.version - 1, before.naming)
    except ObjectNotFoundError:
        return  # expired meanwhile; without it, files of other writers could not be told apart
    paths = [f"{TRANSACTIONS_FOLDER}/{later.manifest.manifest.transaction_file}"]
    for key in sorted(references(later.manifest).own - references(parent).own):
        folder = key.removesuffix(".lance")  # of a data file: that of its blobs
        paths += [key] * (folder != key) + [meta.path for meta in before.store.list(folder)]
    before.discard(paths)
