"""The interface of a run history, for plans that tell how long a run takes (:mod:`memwal_ops.core.outlook`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run that succeeded. Its seconds, its document of ``--json``, and what it used and achieved, if known."""

    seconds: float
    report: Mapping[str, Any]
    used: Mapping[str, Any] | None = None
    achieved: Mapping[str, float] | None = None


class PastRuns(Protocol):
    """A run history."""

    def __call__(self, uri: str, job: str) -> Iterable[PastRun]:
        """The runs of a job on a table that succeeded, the newest first."""


def no_past_runs(uri: str, job: str) -> Iterable[PastRun]:
    """No runs: there is no run history."""
    del uri, job
    return ()
