"""Retry a commit after a conflict: exponential backoff with jitter, then replan on the newest revision."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TypeVar

from memwal_ops import errors
from memwal_ops.core.protocols import RemembersCommit, Table
from memwal_ops.log import get_logger

TableT = TypeVar("TableT", bound="Table")

# A commit takes milliseconds: a run that conflicts this often has a concurrent writer that commits in a tight loop.
MAX_CONSECUTIVE_CONFLICTS = 24
_BACKOFF_SECONDS = 0.02
_MAX_BACKOFF_FACTOR = 64


@dataclass(slots=True)
class CommitRetry:
    """The commit conflicts of one run: all, and consecutive ones."""

    conflicts: int = 0
    consecutive: int = 0

    def conflict(self, table: TableT, error: errors.MemwalOpsError) -> TableT:
        """Return the newest revision after a random wait, the bound of which doubles with each consecutive conflict.

        Raises ``CommitConflictError``: more than ``MAX_CONSECUTIVE_CONFLICTS`` consecutive conflicts.
        """
        self.conflicts += 1
        self.consecutive += 1
        get_logger(__name__).info(
            "commit_conflict", table=table.location.uri, version=table.revision + 1, attempt=self.consecutive
        )
        if self.consecutive > MAX_CONSECUTIVE_CONFLICTS:
            raise errors.CommitConflictError(
                f"{table.location.uri}: other writers published the next version {self.consecutive} times in a row "
                "before this run could. What it published earlier stays, and nothing else was changed."
            ) from error
        time.sleep(random.uniform(0, _BACKOFF_SECONDS * min(2**self.consecutive, _MAX_BACKOFF_FACTOR)))  # noqa: S311 - jitter
        return table.newest()

    def conflict_or_expired(self, table: TableT, error: errors.MemwalOpsError) -> TableT:
        """:meth:`conflict`; also if a revision was expired whose object is missing: there is a newer one then.

        Raises ``ObjectNotFoundError``: ``error``, if the revision is still the newest: what is missing is its own.
        """
        if isinstance(error, errors.ObjectNotFoundError) and table.newest().revision == table.revision:
            raise error
        return self.conflict(table, error)

    def landed(self, table: TableT) -> TableT:
        """Return the newest revision after a successful commit on ``table``, and reset the backoff."""
        self.consecutive = 0
        return (table.committed() if isinstance(table, RemembersCommit) else None) or table.newest()
