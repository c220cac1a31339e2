"""Assign short requests of users to workers, beside runs and polls: the plan of a job, a hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.errors import WorkerDiedError
from memwal_ops.supervisor.state.outcomes import describe_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from memwal_ops.supervisor.workers.pools import WorkerProcess

    _Make = Callable[[int], Any]
    _Then = Callable[[Mapping[str, Any]], None]
    _Wanted = Callable[[], bool]

MAX_WAITING = 20


class Errands:
    """Errands that wait for a worker, and those in flight; only the scheduler's thread calls this.

    Args:
        number: returns the number of the next request.
        assign: sends a request to a worker of a pool.
        monotonic: returns monotonic seconds.
    """

    def __init__(
        self, number: Callable[[], int], assign: Callable[[str, Any], WorkerProcess], monotonic: Callable[[], float]
    ) -> None:
        """There is none."""
        self._number, self._assign, self._monotonic = number, assign, monotonic
        self._waiting: list[tuple[str, _Make, _Then, _Wanted]] = []
        self._running: dict[int, tuple[WorkerProcess, float, _Then]] = {}

    @property
    def in_flight(self) -> Iterator[tuple[WorkerProcess, float]]:
        """The workers of those in flight, each with its start time."""
        return ((worker, began) for worker, began, _ in self._running.values())

    def add(self, pool: str, make: _Make, then: _Then, is_wanted: _Wanted = lambda: True) -> bool:
        """Queue an errand; ``make`` returns its request, ``then`` gets its result. False: too many wait.

        What is not wanted any more, when a worker is free, is not begun: its caller was told that it is not done.
        """
        self._waiting = [errand for errand in self._waiting if errand[3]()]
        if len(self._waiting) >= MAX_WAITING:
            return False
        self._waiting.append((pool, make, then, is_wanted))
        return True

    def begin(self, free: Callable[[str], int]) -> None:
        """Start those whose pool has a free worker."""
        for errand in [*self._waiting]:
            pool, make, then, is_wanted = errand
            if not is_wanted():
                self._waiting.remove(errand)
            elif free(pool):
                self._waiting.remove(errand)
                number = self._number()
                self._running[number] = (self._assign(pool, make(number)), self._monotonic(), then)

    def on_result(self, request: int, result: Mapping[str, Any]) -> bool:
        """Return a result, if the request is an errand; return whether it is."""
        if request not in self._running:
            return False
        self._running.pop(request)[2](result)
        return True

    def on_worker_exit(self, request: int | None, status: int | None) -> bool:
        """Fail the errand of a worker that exited; return whether it had one."""
        error = WorkerDiedError(f"The process that worked on it exited ({describe_exit(status)}).")
        return request is not None and self.on_result(
            request, {"outcome": "failed", "message": str(error), "reason": error.reason, "report": None}
        )
