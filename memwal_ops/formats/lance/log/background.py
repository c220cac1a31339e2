"""Run an object's periodic work in a background thread that keeps neither the object nor the program alive."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

OwnerT = TypeVar("OwnerT")


class Background(Generic[OwnerT]):
    """Periodic work of an object. It ends when it returns False, or the object is garbage-collected."""

    def __init__(self, owner: OwnerT, work: Callable[[OwnerT], bool], interval: float) -> None:
        """Create it; the thread is not started yet.

        Args:
            owner: the object.
            work: called with it; whether there will be more to do.
            interval: seconds.
        """
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
