"""Call everything that happens on one thread, one event after the other, so that no decision takes a lock."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

_ASK_SECONDS = 10.0
_Answer = TypeVar("_Answer")


class EventLoop:
    """The events of a scheduler; :meth:`call` holds ``lock``, which readers on other threads take.

    Args:
        on_error: called after an unexpected error, which is logged.
    """

    def __init__(self, on_error: Callable[[], None]) -> None:
        """There are none yet."""
        self.lock = threading.RLock()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._on_error = on_error
        self._log = get_logger(__name__)

    def post(self, event: Callable[[], None]) -> None:
        """Call ``event`` on the scheduler's thread, soon; from any thread."""
        self._events.put(event)

    def ask(self, question: Callable[[], _Answer], timeout: float = _ASK_SECONDS) -> _Answer:
        """Call ``question`` on the scheduler's thread, and return its result, or raise what it raised.

        Raises:
            TimeoutError: the loop did not call it in time; it will not be called any more.
        """
        answer: Future[_Answer] = Future()

        def reply() -> None:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(question())
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    answer.set_exception(error)

        self.post(reply)
        try:
            return answer.result(timeout)
        except TimeoutError:
            answer.cancel()
            raise

    def handle(self, seconds: float) -> None:
        """Wait for events for at most ``seconds``, and call them."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return
        self.call(event)
        while not self._events.empty():
            self.call(self._events.get())

    def call(self, handler: Callable[[], None]) -> None:
        """Log and count an unexpected error: one bug must not end the maintenance of all tables."""
        with self.lock:
            try:
                handler()
            except Exception:  # noqa: BLE001 - see above
                self._on_error()
                self._log.exception("internal_error")
