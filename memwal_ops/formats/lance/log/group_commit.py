"""Group commit: combine concurrent writes into one WAL entry.

One thread at a time puts an entry. Writes that arrive meanwhile wait, and the first one to get the lock puts all of
them as the next entry. Entries are put strictly in order, and a write is acknowledged with its own entry: a gap before
an acknowledged entry would end the next replay too early.
"""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa


class _Group:
    """Writes that share one entry. If ``error`` is set, none of them is acknowledged."""

    __slots__ = ("done", "error", "generation", "parts")

    def __init__(self) -> None:
        self.parts: list[pa.Table] = []
        self.done = False
        self.error: BaseException | None = None
        self.generation = 0


class GroupCommit:
    """Call ``put`` with groups of writes, in order of arrival."""

    def __init__(self, log: threading.RLock, put: Callable[[Sequence[pa.Table]], int]) -> None:
        """Create a group commit.

        Args:
            log: lock held while an entry is put.
            put: puts the rows as one entry and returns the number of the generation that will contain it.
        """
        self._log, self._put = log, put
        self._joining = threading.Lock()
        self._open = _Group()

    def write(self, rows: pa.Table) -> int:
        """Write rows, and return the number of the generation that will contain them.

        Raises:
            MemwalOpsError: the error of the group's put, raised for each of its writes.
        """
        with self._joining:
            group = self._open
            group.parts.append(rows)
        with self._log:
            if not group.done:
                with self._joining:
                    self._open = _Group()
                try:
                    group.generation = self._put(group.parts)
                except BaseException as error:
                    group.error = error
                    raise
                finally:
                    group.done = True
                    group.parts.clear()
                return group.generation
        if isinstance(group.error, MemwalOpsError):
            # A copy: threads must not share a traceback.
            raise copy.copy(group.error) from group.error
        if group.error is not None:
            raise StorageError("The put of the entry was interrupted.") from group.error
        return group.generation
