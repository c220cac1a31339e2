"""A store that dies at the n-th call: before it reached the server, or after it was carried out there."""

from __future__ import annotations

from typing import Any

from memwal_ops.storage.wrapper import StoreWrapper


class Killed(BaseException):
    """What a process sees of SIGKILL: nothing. No handler of the code under test may stop it."""


class DyingStore(StoreWrapper):
    """Passes calls on to a real store until the n-th; from then on every call dies.

    With ``once`` only the n-th dies, as by Ctrl-C or SIGTERM: what the code does on its way out is carried out.
    """

    def __init__(self, store: Any, dies_at: int, *, after: bool, once: bool = False) -> None:
        super().__init__(store)
        self._dies_at = dies_at
        self._after = after
        self._once = once
        self.calls: list[str] = []

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        self.calls.append(verb)
        if len(self.calls) > self._dies_at and not self._once:
            raise Killed
        if len(self.calls) == self._dies_at and not self._after:
            raise Killed
        result = method(*arguments, **named)
        if len(self.calls) == self._dies_at:
            raise Killed
        return result
