"""Run lists of tasks of a job on a Lance table, and log the files that lost attempts leave.

Files that may belong to another commit are not deleted.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, cast

from memwal_ops.core.spark import runner
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.commit.publication import may_be_named
from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite, deletion_path
from memwal_ops.formats.lance.files.referenced_files import index_key
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from memwal_ops.core.protocols import Table as AnyTable
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
        known = set(Rewrite(tuple(one.metadata for one in fragments), (), (), ()).written_files())
        known |= {path for one in fragments if (path := deletion_path(one.metadata)) is not None}
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


class TaskRunner(runner.TaskRunner):
    """Logs what lost attempts left. No version names these files; ``expire`` deletes them once they are old enough."""

    def log_leftovers(self, table: AnyTable, began: datetime) -> None:
        """Log the files that are in no version."""
        log_leftovers(cast("Table", table), began)
