"""Publish changes of indexes on a table that others commit to all the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.commit import CommitLostError, CommitNote, IndexChange, commit_indexes
from memwal_ops.core.index_build import IndexBuild, discard, still_fits
from memwal_ops.errors import CommitStateUnknownError, MemwalOpsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.table import Table
    from memwal_ops.jobs.races import Races


def publish_change(
    table: Table, change: Callable[[Table], IndexChange | None], note: CommitNote, races: Races
) -> Table:
    """Decide on the newest version what to change, and publish it; again after each lost race.

    Args:
        table: the newest version, as far as the caller knows.
        change: gives the change for a version, or None where none is needed (any more).

    Returns:
        The newest version; ``table`` itself if nothing was needed at once.

    Raises:
        CommitConflictError: too many races were lost in a row.
    """
    while True:
        wanted = change(table)
        if wanted is None:
            return table
        try:
            commit_indexes(table, wanted, note)
        except CommitLostError as error:
            table = races.lose(table, error)
        else:
            return races.win(table)


def publish_build(
    built_on: Table,
    name: str,
    build: IndexBuild,
    change: Callable[[Table], IndexChange],
    note: CommitNote,
    races: Races,
) -> Table:
    """Publish segments of index ``name``, on later versions too as long as they are right there.

    Their files are deleted again where they cannot be published.

    Args:
        built_on: the version that they were built on.
        name: the index.
        build: the segments.
        change: gives the change for the version that they are published on.
        note: who commits.
        races: counts and waits.

    Returns:
        The newest version.

    Raises:
        CommitLostError: the index or what it covers was changed by others: build again.
        CommitConflictError: too many races were lost in a row.
        CommitStateUnknownError: they may have been published, or not.
    """
    table = built_on
    # Whether a version may name the new files: then they must stay, whatever happens. True from before
    # the put until we were told of a failure: Ctrl-C or SIGTERM may come when the version just landed.
    named = False
    try:
        while still_fits(build, built_on, table, name):
            wanted = change(table)
            earlier, named = named, True
            try:
                commit_indexes(table, wanted, note)
            except CommitLostError as error:
                named = earlier or not error.files_are_ours
                table = races.lose(table, error)
            except CommitStateUnknownError:
                raise
            except MemwalOpsError:
                named = earlier  # refused before anything was published
                raise
            else:
                return races.win(table)
        raise CommitLostError(f"Index {name} was changed while it was being built.")
    finally:
        if not named:
            discard(built_on, build)
