"""Publish changes of indexes on a table with concurrent commits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, IndexChange, commit_indexes
from memwal_ops.formats.lance.commit.index_build import IndexBuild, discard, still_fits
from memwal_ops.formats.lance.commit.publication import FilesDeletedError, may_be_named
from memwal_ops.formats.lance.commit.rebased_commit import commit_segments

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.commit_retry import CommitRetry
    from memwal_ops.formats.lance.table import Table


def publish_rebased(built_on: Table, name: str, build: IndexBuild, note: CommitNote, retry: CommitRetry) -> Table:
    """Publish segments of index ``name`` of a plain table, beside any writers; arguments as :func:`publish_build`.

    Their files are deleted if they cannot be published.

    Returns the newest version.
    Raises ``CommitLostError``: the index, or the data that it covers, was changed: build again; ``MemwalOpsError``:
    they may have been published, or not.
    """
    named = False
    try:
        newest = built_on.newest()
        if newest.log.strict_commits or not still_fits(build, built_on, newest, name):
            raise CommitLostError(f"Index {name} or its data was changed while it was being built.")
        named = True
        try:
            commit_segments(built_on, build, note)
        except CommitLostError as error:
            named = may_be_named(error)
            raise
        return retry.landed(built_on)
    finally:
        if not named:
            discard(built_on, build)


def publish_build(
    built_on: Table,
    name: str,
    build: IndexBuild,
    change: Callable[[Table], IndexChange],
    note: CommitNote,
    retry: CommitRetry,
) -> Table:
    """Publish segments of index ``name``, also on later versions as long as they are valid there.

    Their files are deleted if they cannot be published. ``built_on``: the version that they were built on.
    ``change``: returns the change for the version that they are published on. Returns the newest version.

    Raises:
        CommitLostError: another writer changed the index or its coverage: build again.
        CommitConflictError: too many commit conflicts in a row.
        CommitStateUnknownError: they may have been published, or not.
    """
    table = built_on
    # Whether a version may name the new files: then they must be kept. True from before the put until it is certain
    # that it failed: Ctrl-C or SIGTERM may arrive right after the version was published.
    named = False
    try:
        while still_fits(build, built_on, table, name):
            wanted = change(table)
            before, named = named, True
            try:
                commit_indexes(table, wanted, note)
            except MemwalOpsError as error:
                named = before or may_be_named(error)
                if not isinstance(error, CommitLostError) or isinstance(error, FilesDeletedError):
                    raise
                table = retry.conflict(table, error)
            else:
                return retry.landed(table)
        raise CommitLostError(f"Index {name} was changed while it was being built.")
    finally:
        if not named:
            discard(built_on, build)
