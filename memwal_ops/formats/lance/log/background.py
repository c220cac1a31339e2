"""The threads of a writer: periodic work, and the group commit of concurrent writes.

Periodic work runs in a thread that keeps neither its object nor the program alive.
"""

from __future__ import annotations

import copy
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

from memwal_ops.errors import MemwalOpsError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

OwnerT = TypeVar("OwnerT")


class Background(Generic[OwnerT]):
    """Periodic work of an object. It ends when it returns False, or the object is garbage-collected."""

    def __init__(self, owner: OwnerT, work: Callable[[OwnerT], bool], interval: float) -> None:
        """The thread, once started, calls ``work`` each ``interval`` (seconds), until it returns False."""
        self._owner, self._work = weakref.ref(owner), work
        self._interval = interval
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._over = False
        self.thread: threading.Thread | None = None
        """None before it was needed."""

    def start(self) -> None:
        """Start the thread, if it does not run yet.

        It is joined at the end of the program, or when the object is garbage-collected: a thread that is inside pylance
        while the interpreter ends aborts the process.
        """
        with self._lock:
            owner = self._owner()
            if self.thread is None and owner is not None:
                self.thread = threading.Thread(target=self._run, daemon=True, name="region-writer")
                self.thread.start()
                weakref.finalize(owner, self._end)

    def wake(self) -> None:
        """Call ``work`` now."""
        self._due.set()

    def _run(self) -> None:
        while True:
            self._due.wait(self._interval)
            self._due.clear()
            owner = self._owner()
            if self._over or owner is None or not self._work(owner):
                return
            del owner

    def _end(self) -> None:
        self._over = True
        self._due.set()
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()


class _Group:
    """Writes that share one entry. If ``error`` is set, none of them is acknowledged."""

    __slots__ = ("done", "error", "generation", "parts")

    def __init__(self) -> None:
        self.parts: list[pa.Table] = []
        self.done = False
        self.error: BaseException | None = None
        self.generation = 0


class GroupCommit:
    """Combine concurrent writes into one WAL entry.

    One thread at a time puts an entry. Writes that arrive meanwhile wait, and the first one to get the lock puts all of
    them as the next entry. Entries are put strictly in order, and a write is acknowledged with its own entry: a gap
    before an acknowledged entry would end the next replay too early.
    """

    def __init__(self, log: threading.RLock, put: Callable[[Sequence[pa.Table]], int]) -> None:
        """``put`` puts rows as one entry, under the lock ``log``, and returns the number of their generation."""
        self._log, self._put = log, put
        self._joining = threading.Lock()
        self._open = _Group()

    def write(self, rows: pa.Table) -> int:
        """Write rows, and return the number of their generation; each writer gets the error of the group's put."""
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
