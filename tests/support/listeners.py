"""Contexts of runs whose listener does something at each checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.context import NullListener, RunContext

if TYPE_CHECKING:
    from collections.abc import Callable


class _AtCheckpoint(NullListener):
    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def checkpoint(self) -> None:
        self._call()


def at_checkpoint(call: Callable[[], object]) -> RunContext:
    """A context that calls ``call`` whenever the run could be stopped."""
    return RunContext(listener=_AtCheckpoint(call))
