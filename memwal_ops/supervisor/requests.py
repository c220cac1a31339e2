"""What the supervisor and its worker processes say to each other: one JSON document a line, over pipes.

To the worker: ``run``, ``look``, ``stop`` (no further step), ``quit``. From it: ``ready``, ``began``,
``progress``, ``done``. Storage options go this way and not by arguments, which every user of a machine can
read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.core.leases import Holder, Lease

if TYPE_CHECKING:
    from collections.abc import Mapping

_LARGEST_REPORT = 64 << 10


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run a job (``apply``), or plan it, under a lease or without."""

    id: int
    uri: str
    storage_options: Mapping[str, str]
    job: str
    options: Mapping[str, Any]
    apply: bool
    lease: Mapping[str, Any] | None = None
    do: str = "run"


@dataclass(frozen=True, slots=True)
class LookRequest:
    """Read the backlog figures of some jobs."""

    id: int
    uri: str
    storage_options: Mapping[str, str]
    jobs: tuple[str, ...]
    do: str = "look"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        outcome: succeeded, partial (it did all it could; the exit code says what is left), failed, stopped or lost.
        decision: the report's own word.
        report: the report, cut down where it is larger than 64 KiB.
        figures: of a look, the backlog; of a run, its sums.
    """

    id: int
    outcome: str
    exit_code: int = 0
    decision: str | None = None
    reason: str | None = None
    message: str | None = None
    remedy: str | None = None
    report: Mapping[str, Any] | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    version: int | None = None
    say: str = "done"


def encode(message: Any) -> bytes:
    """A line."""
    document = message if isinstance(message, dict) else asdict(message)
    return json.dumps(document, default=str).encode() + b"\n"


def lease_document(lease: Lease) -> dict[str, Any]:
    """What a worker needs of a lease to check it."""
    return {
        "job": lease.job,
        "number": lease.number,
        "token": lease.token,
        "instance": lease.holder.instance,
        "name": lease.holder.name,
    }


def lease_of(document: Mapping[str, Any]) -> Lease:
    """The same in the worker; its times are not needed there."""
    never = datetime.min.replace(tzinfo=UTC)
    holder = Holder(document["instance"], document["name"])
    return Lease(document["job"], document["number"], document["token"], holder, never, never, timedelta(0))


def bounded(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report of at most 64 KiB: where it is larger, its lists are cut, and ``truncated`` says so."""
    if len(json.dumps(report, default=str)) <= _LARGEST_REPORT:
        return dict(report)
    cut: dict[str, Any] = {key: value[:10] if isinstance(value, list) else value for key, value in report.items()}
    cut["truncated"] = True
    if len(json.dumps(cut, default=str)) <= _LARGEST_REPORT:
        return cut
    plain = {key: value for key, value in report.items() if isinstance(value, int | float | bool | None)}
    return {**plain, "decision": str(report.get("decision"))[:100], "truncated": True}
