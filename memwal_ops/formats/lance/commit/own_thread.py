"""Run what pylance calls back in the thread that waits for pylance.

pylance calls back in threads of its own, in which nothing may call it again, nor another library with such threads: the
process would be aborted. And a run's listener, its signals and its context belong to the thread of the run.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
# Only a limit: the waiting thread is notified.
_SECONDS = 1.0


@dataclass(eq=False)
class OwnThread:
    """Waits for a call in another thread, and runs what that asks for.

    Attributes:
        interrupted: Ctrl-C or SIGTERM while it waited: nothing is run any more.
    """

    interrupted: BaseException | None = None
    _asked: tuple[Callable[[], Any], Future[Any]] | None = None
    _wake: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False

    def run(self, function: Callable[[], _T]) -> _T:
        """Run a function in the thread that waits; for pylance's threads, one at a time."""
        answer: Future[_T] = Future()
        self._asked = function, answer
        self._wake.set()
        while True:
            try:
                return answer.result(_SECONDS)
            except TimeoutError:
                if self._ended and not answer.done():
                    raise InterruptedError("The run ends.") from None

    def wait_for(self, call: Callable[[], _T]) -> _T:
        """Make a call in another thread, wait for its end, and return or raise what it does.

        Raises:
            BaseException: what interrupted the wait; the call has ended then.
        """
        outcome: Future[_T] = Future()
        thread = threading.Thread(target=self._call, args=(call, outcome), name="pylance call", daemon=True)
        thread.start()
        try:
            while not outcome.done():
                try:
                    self._serve()
                except BaseException as error:  # noqa: BLE001 - the other thread must end first
                    self.interrupted = self.interrupted or error
        finally:
            self._ended = True
        if self.interrupted is not None:
            raise self.interrupted
        return outcome.result()

    def _serve(self) -> None:
        """Run what is asked for, if anything is; an interrupted one is answered at the next time."""
        self._wake.wait(_SECONDS)
        self._wake.clear()
        if self._asked is None:
            return
        function, answer = self._asked
        if not answer.done():
            try:
                if self.interrupted is not None:
                    raise InterruptedError("The run was interrupted.")
                answer.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised in the other thread
                answer.set_exception(error)
        self._asked = None

    def _call(self, call: Callable[[], _T], outcome: Future[_T]) -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            outcome.set_exception(error)
        self._wake.set()
