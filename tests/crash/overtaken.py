"""A store on which a job is overtaken by others: deterministic interleavings, without a thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_WRITES = {"put", "put_if_absent", "compare_and_swap", "delete_many"}


class Overtaken:
    """A store that lets others work before its n-th call.

    Not where pylance itself is waiting for the call (the transactions, while it commits), and not on
    the threads that read regions: there it waits for the next call. With ``writes`` only calls that
    write are counted: right before those, everything is decided and nothing is done.
    """

    def __init__(self, store: Any, at: int, others: Callable[[], None], *, writes: bool = False) -> None:
        self._store = store
        self._writes = writes
        self._left = at
        self._others: Callable[[], None] | None = others

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found) or (self._writes and name not in _WRITES):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._left -= 1
            waits = threading.current_thread() is not threading.main_thread() or "_transactions" in str(arguments[:1])
            if self._left <= 0 and not waits and self._others is not None:
                others, self._others = self._others, None
                others()
            return found(*arguments, **named)

        return call
