"""A store on which a job is overtaken by others: deterministic interleavings, without a thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from memwal_ops.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITES = {"put", "put_if_absent", "put_back", "compare_and_swap", "delete_many"}
# Of the store's calls those after which nothing is asked any more: what comes between the last question and
# such a call can be noticed on no store.
CARRIED_OUT = {"delete_many", "put", "put_if_absent", "put_back"}


class Overtaken(StoreWrapper):
    """A store that lets others work before its n-th call.

    Not where pylance itself is waiting for the call (the transactions, while it commits), and not on
    the threads that read regions: there it waits for the next call. With ``writes`` only calls that
    write are counted: right before those, everything is decided and nothing is done.
    """

    def __init__(self, store: Any, at: int, others: Callable[[], None], *, writes: bool = False) -> None:
        super().__init__(store)
        self._writes = writes
        self._left = at
        self._others: Callable[[], None] | None = others

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        if not self._writes or verb in _WRITES:
            self._left -= 1
            waits = threading.current_thread() is not threading.main_thread() or "_transactions" in str(arguments[:1])
            if self._left <= 0 and not waits and self._others is not None:
                others, self._others = self._others, None
                others()
        return method(*arguments, **named)


class Replaced(StoreWrapper):
    """A store under which others replace the table right before its n-th call."""

    def __init__(self, store: Any, at: int, replace_it: Callable[[], None]) -> None:
        super().__init__(store)
        self._at, self._replace = at, replace_it
        self.calls = 0
        self.happened = False

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls >= self._at and not self.happened and verb not in CARRIED_OUT:
            self.happened = True
            self._replace()
        return method(*arguments, **named)
