"""Delete the living rows that match, by a commit of our own, whose transaction has no expression in it.

Lance's own delete stores the expression, with the values in it, in the version and in its transaction file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import lance
import numpy as np

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import CommitLostError, commit_strict
from memwal_ops.formats.lance.commit.publication import may_be_named
from memwal_ops.formats.lance.commit.rebased_commit import commit_deletion
from memwal_ops.formats.lance.engines.merge.rewrite import Target as Base
from memwal_ops.formats.lance.engines.merge.rewrite import delete_superseded, deletion_path

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.jobs.erase.target import Target
    from memwal_ops.formats.lance.table import Table


Commit = Callable[["Table", lance.LanceOperation.Delete, "CommitNote"], object]
"""Publishes the next version with the deletion. Raises ``CommitLostError`` if another commit was first."""


def delete_living(
    table: Table, target: Target, note: CommitNote, context: RunContext, commit: Commit
) -> tuple[Table, int]:
    """Delete the rows that match and are not deleted; return the newest version, and how many rows.

    Raises:
        CommitConflictError: too many commit conflicts in a row.
        CommitStateUnknownError: the outcome of a commit is unknown; run it again.
    """
    retry = CommitRetry()
    while True:
        batches = [batch.to_numpy() for batch in target.living(table.dataset, table.location.uri)]
        addresses = np.sort(np.concatenate(batches)) if batches else np.empty(0, np.uint64)
        if not addresses.size:
            return table, 0
        context.checkpoint()
        try:
            _publish(table, addresses, note, commit)
        except (CommitLostError, ObjectNotFoundError) as error:
            table = retry.conflict_or_expired(table, error)
        else:
            context.figures["conflicts"] += retry.conflicts
            return retry.landed(table), int(addresses.size)


def touch(table: Table, note: CommitNote, commit: Commit) -> Table:
    """Publish a version without any change: the newest one has the expression of a deletion in it."""
    retry = CommitRetry()
    while True:
        try:
            commit(table, lance.LanceOperation.Delete([], [], ""), note)
        except CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return retry.landed(table)


def _publish(table: Table, addresses: np.ndarray, note: CommitNote, commit: Commit) -> None:
    updated, removed = delete_superseded(Base(table.location, table.dataset), addresses.astype(np.uint64))
    written = [path for fragment in updated if (path := deletion_path(fragment)) is not None]
    table.guard.register(written)
    try:
        commit(table, lance.LanceOperation.Delete(updated, removed, ""), note)
    except BaseException as error:
        if not may_be_named(error):
            table.discard(written)
        raise


def commit_delete(table: Table, operation: lance.LanceOperation.Delete, note: CommitNote) -> None:
    """Publish a deletion: exactly the next version where there is a log."""
    if table.log.strict_commits:
        commit_strict(table, operation, {}, note)
    else:
        commit_deletion(table, operation, note)
