"""Shared by both plans of a pass on Spark: its stages, their number of tasks, and the files that they wrote.

Files that lost attempts leave, and that may belong to another commit, are logged and not deleted.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from lance.fragment import FragmentMetadata

from memwal_ops.core.spark import runner
from memwal_ops.core.spark.stages import Counters, StageProgress, Stages, part_numbers
from memwal_ops.errors import InvariantViolatedError, MemwalOpsError
from memwal_ops.formats.lance.commit.publication import may_be_named
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, deletion_path
from memwal_ops.formats.lance.files.version_files import index_key
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from pyspark.sql import SparkSession

    from memwal_ops.core.protocols import Table as AnyTable
    from memwal_ops.formats.lance.engines.merge.collapse import MergePass
    from memwal_ops.formats.lance.generations.generation import SealedGeneration
    from memwal_ops.formats.lance.table import Table


_LOGGED_FILES = 50
_CLOCK_SKEW = timedelta(minutes=1)


def log_files(table: Table, paths: Sequence[str], because: str) -> None:
    """Log these files, if there are any."""
    if paths:
        get_logger(__name__).warning(
            "files_left", table=table.location.uri, because=because, count=len(paths), files=paths[:_LOGGED_FILES]
        )


@contextmanager
def log_files_if_kept(table: Table, paths: Sequence[str]) -> Iterator[None]:
    """Around a commit of these files: log them if it fails although a version may name them."""
    try:
        yield
    except MemwalOpsError as error:
        if may_be_named(error):
            log_files(table, paths, "a version may name them")
        raise


def log_leftovers(table: Table, began: datetime) -> None:
    """Log the files that are younger than ``began`` and in no version: attempts of tasks were lost.

    They cannot be distinguished from the files of another writer's commit in flight, so they are kept until
    they are old enough for pylance's own clean-up.
    """
    try:
        newest = table.newest()
        fragments = newest.dataset.get_fragments()
        known = set(Rewrite(tuple(fragment.metadata for fragment in fragments), (), (), ()).written_files())
        known |= {path for fragment in fragments if (path := deletion_path(fragment.metadata)) is not None}
        known |= set(map(index_key, newest.manifest.index_entries))
        left = [
            meta.path
            for folder in ("data", "_deletions", INDICES_FOLDER)
            for meta in table.store.list(folder)
            if meta.last_modified >= began - _CLOCK_SKEW and not {meta.path, *_owners(meta.path)} & known
        ]
    except MemwalOpsError as error:  # must not hide the error that led here
        get_logger(__name__).warning("files_left", table=table.location.uri, because=f"not known: {error}")
        return
    log_files(table, left, "no version names them: lost attempts of tasks, or another writer's commit in flight")


def _owners(path: str) -> tuple[str, str]:
    """The data file that a blob's file is stored next to, and the folder of an index segment."""
    folder = path.rpartition("/")[0]
    return f"{folder}.lance", folder


class LoggingTaskRunner(runner.TaskRunner):
    """Logs what lost attempts left. No version names these files; ``expire`` deletes them once they are old enough."""

    def log_leftovers(self, table: AnyTable, began: datetime) -> None:
        """Log the files that are in no version."""
        log_leftovers(cast("Table", table), began)


_TASKS_PER_CORE = 3
_BYTES_PER_WRITE = 256 << 20


@dataclass(frozen=True, slots=True)
class Deletions:
    """The base fragments of which rows were superseded, by so many rows with the key of a tombstone.

    They have new deletion vectors, or are removed as a whole.
    """

    updated: tuple[FragmentMetadata, ...] = ()
    removed: tuple[int, ...] = ()
    tombstones: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """The results of the stages of a pass. ``use_index``: superseded rows were found through the key index."""

    fragments: tuple[FragmentMetadata, ...]
    deletions: Deletions
    use_index: bool


class Running:
    """One pass in progress, and the paths of the files that finished stages have written."""

    def __init__(
        self,
        spark: SparkSession,
        table: Table,
        merge_pass: MergePass,
        rows_per_task: int,
        on_progress: Callable[[StageProgress], None] | None,
        checkpoint: Callable[[], None] | None = None,
    ) -> None:
        self.spark, self.table, self.merge_pass, self._rows_per_task = spark, table, merge_pass, rows_per_task
        context = spark.sparkContext
        self.counters = None if on_progress is None else Counters.of(context)
        self.stages = Stages(context, table.location.uri, self.counters, on_progress, checkpoint)
        self.cores = max(1, int(context.defaultParallelism))
        self.files: list[str] = []

    def tasks(self, rows: int) -> int:
        """How many tasks a stage over that many rows gets."""
        return max(1, min(self.cores * _TASKS_PER_CORE, -(-rows // self._rows_per_task)))

    def groups(self, generations: Sequence[SealedGeneration], upserts: Sequence[int]) -> list[int]:
        """Per generation the number of the task that writes its rows; tasks are balanced by bytes."""
        sizes = [
            generation.data_bytes * rows // max(1, generation.physical_rows)
            for generation, rows in zip(generations, upserts, strict=True)
        ]
        tasks_wanted = min(self.cores, self.tasks(sum(upserts)))
        return part_numbers(sizes, tasks_wanted, _BYTES_PER_WRITE)

    def deletions(self, results: Iterable[dict[str, Any]]) -> Deletions:
        """The results of the tasks of the stage ``delete``.

        Raises ``InvariantViolatedError``: not exactly the rows that were found are hidden, or a fragment is listed
        twice.
        """
        results = list(results)
        updated = tuple(_fragment(fragment) for result in results for fragment in result["updated"])
        self.files += Rewrite((), updated, (), ()).written_files()
        removed = tuple(fragment for result in results for fragment in result["removed"])
        superseded = sum(result["superseded"] for result in results)
        before = {fragment.fragment_id: fragment.metadata for fragment in self.table.dataset.get_fragments()}
        touched = [*(fragment.id for fragment in updated), *removed]
        gone = sum(before[fragment.id].num_rows - fragment.num_rows for fragment in updated)
        gone += sum(before[fragment].num_rows for fragment in removed)
        if len(set(touched)) != len(touched) or gone != superseded:
            raise InvariantViolatedError(
                f"{gone} base rows were deleted for {superseded} that were superseded; this pass was not published."
            )
        return Deletions(updated, removed, sum(result["deleted"] for result in results))

    def fragments(self, results: Iterable[dict[str, Any]], wanted: int) -> tuple[FragmentMetadata, ...]:
        """The fragments that the tasks of the stage ``write`` have written.

        Raises ``InvariantViolatedError``: they have another number of rows than ``wanted``.
        """
        fragments = tuple(_fragment(fragment) for result in results for fragment in result["fragments"])
        self.files += Rewrite(fragments, (), (), ()).written_files()
        written = sum(fragment.physical_rows for fragment in fragments)
        if written != wanted:
            raise InvariantViolatedError(
                f"{written} rows were written for {wanted} winners; this pass was not published."
            )
        return fragments


def _fragment(document: dict[str, Any]) -> FragmentMetadata:
    return FragmentMetadata.from_json(json.dumps(document))
