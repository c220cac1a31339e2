"""Name in the log what a job wrote and leaves behind: nothing that may be somebody's is removed."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.commit import CommitLostError
from memwal_ops.engines.rewrite import Rewrite, deletion_path
from memwal_ops.errors import CommitStateUnknownError, MemwalOpsError
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from memwal_ops.core.table import Table

_NAMED_FILES = 50
_CLOCK_SKEW = timedelta(minutes=1)


def name_files(table: Table, paths: Sequence[str], because: str) -> None:
    """Name these files, if there are any."""
    if paths:
        get_logger(__name__).warning(
            "files_left",
            table=table.location.uri,
            because=because,
            count=len(paths),
            files=paths[:_NAMED_FILES],
        )


@contextmanager
def named_where_they_stay(table: Table, paths: Sequence[str]) -> Iterator[None]:
    """Around a commit of these files: name them where it fails and a version may name them all the same."""
    try:
        yield
    except CommitLostError as error:
        if not error.files_are_ours:
            name_files(table, paths, "a version may name them")
        raise
    except CommitStateUnknownError:
        name_files(table, paths, "the outcome of the commit is unknown")
        raise


def name_strays(table: Table, began: datetime) -> None:
    """Name the files that are younger than ``began`` and in no version: attempts of tasks were lost.

    Nothing tells them from the files of somebody's commit that is under way, so they stay, for pylance's
    own clean-up to take when they are old enough.
    """
    try:
        fragments = table.newest().dataset.get_fragments()
        known = set(Rewrite(tuple(one.metadata for one in fragments), (), (), ()).written_files())
        known |= {path for one in fragments if (path := deletion_path(one.metadata)) is not None}
        left = [
            meta.path
            for folder in ("data", "_deletions")
            for meta in table.store.list(folder)
            if meta.last_modified >= began - _CLOCK_SKEW and meta.path not in known
        ]
    except MemwalOpsError as error:  # what went wrong before is what has to be said
        get_logger(__name__).warning("files_left", table=table.location.uri, because=f"not known: {error}")
        return
    name_files(table, left, "no version mentions them: lost attempts of tasks, or somebody's commit under way")
