"""Losing races for the next version: wait a little, look again, and give up some time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import CommitConflictError
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from memwal_ops.core.table import Table
    from memwal_ops.errors import MemwalOpsError

# A commit of indexes takes milliseconds: whoever loses this often stands beside something stuck in a loop.
_MOST_IN_A_ROW = 24
_BACKOFF_SECONDS = 0.02
_LONGEST_WAIT = 64


@dataclass(slots=True)
class Races:
    """The races that one run has lost, in all and in a row."""

    lost: int = 0
    lost_in_a_row: int = 0

    def lose(self, table: Table, error: MemwalOpsError) -> Table:
        """The newest version, after a random wait that doubles with each race lost in a row.

        Raises:
            CommitConflictError: too many in a row.
        """
        self.lost += 1
        self.lost_in_a_row += 1
        get_logger(__name__).info(
            "commit_lost", table=table.location.uri, version=table.version + 1, attempt=self.lost_in_a_row
        )
        if self.lost_in_a_row > _MOST_IN_A_ROW:
            raise CommitConflictError(
                f"Lost {self.lost_in_a_row} races in a row for the next version of {table.location.uri}; "
                "what earlier steps published stays, and nothing else was changed."
            ) from error
        time.sleep(random.uniform(0, _BACKOFF_SECONDS * min(2**self.lost_in_a_row, _LONGEST_WAIT)))  # noqa: S311 - jitter
        return table.newest()

    def win(self, table: Table) -> Table:
        """The newest version, after a commit of ours."""
        self.lost_in_a_row = 0
        return table.newest()
