"""The messages between the supervisor and its worker processes, one JSON document per line, over pipes; and their end.

To the worker: ``run``, ``poll``, ``hold``, ``stop`` (no further step), ``quit``. From it: ``ready``, ``began``,
``progress``, ``log`` (a line of a run), ``done``; for one that a signal ended, ``opened``: what it opened last. Storage
options are sent this way and not as arguments, which every user of a machine can read.

Processes that jobs leave behind are ended: on Linux all descendants; elsewhere only the worker's process group.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from memwal_ops.core.leases import Holder, Lease

RELEASE_VARIABLE = "MEMWAL_OPS_WORKER_RELEASE"
"""The release of the service, in the environment of its workers."""
LAST_OPENED_VARIABLE = "MEMWAL_OPS_WORKER_LAST_OPENED"
"""The descriptor of a file in which a worker notes what it opens, in its environment."""
NOT_APPLICABLE = "not_applicable"
"""The decision of a run of a job that does not apply to its table: it did nothing."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Run a job (``apply``), or plan it, with or without a lease.

    ``named``: the configuration names the job for this table; else it is not a failure if it does not apply to it.
    ``foreign``: the job is of another package: its worker is replaced after the run.
    """

    id: int
    uri: str
    storage_options: Mapping[str, str]
    job: str
    options: Mapping[str, Any]
    apply: bool
    lease: Mapping[str, Any] | None = None
    named: bool = True
    foreign: bool = False
    do: str = "run"


@dataclass(frozen=True, slots=True)
class PollRequest:
    """Read the backlog figures of some jobs.

    Attributes:
        options: by job, the options of its runs.
        history: also read the table's recent history, as the result's report.
        fingerprint: of an idle table, the fingerprint in an earlier result: if it is the same now, nothing else is
            read. Empty: there is none yet. None: the table is not idle, and no fingerprint is needed.
        failing: the jobs whose last runs are read from their leases, as others may have run them: those that fail, and
            in a fleet those that this member has never run.
        record: also store in the table what its revisions show; False: nothing is written.
    """

    id: int
    uri: str
    storage_options: Mapping[str, str]
    jobs: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    history: bool = False
    fingerprint: str | None = None
    failing: tuple[str, ...] = ()
    record: bool = False
    do: str = "poll"


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """Take or end a hold.

    End the one with the number ``release``, else take one on the newest version or on ``version``.
    """

    id: int
    uri: str
    storage_options: Mapping[str, str]
    version: int | None = None
    seconds: float = 0.0
    note: str = ""
    release: int = 0
    do: str = "hold"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request.

    Attributes:
        outcome: succeeded, partial (it did all it could; the exit code shows what is left), failed, stopped or lost.
        report: the report, truncated if it is larger than 64 KiB; ``text``: of a plan, the same for people.
        figures: of a poll, the backlog; of a run, its sums.
        remaining: of a run that published and was blocked: the job's backlog after it, which it cannot reduce.
        fingerprint: of a poll that asked for it: what the next one may compare; None if there is none.
        unchanged: the table has the fingerprint of the request, and no figures were read.
        used: of a run or a poll, what it used, see :class:`memwal_ops.core.usage.Measurement`; None: unknown.
        achieved: of a run, what it achieved, see :func:`memwal_ops.core.usage.achieved_by`.
        applies: of a poll that opened the table, those of its jobs that apply to it; else None.
        recorded: of a poll, the last runs by the leases of ``failing`` jobs: outcome, instance, finished.
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
    remaining: Mapping[str, float] | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    version: int | None = None
    fingerprint: str | None = None
    unchanged: bool = False
    used: Mapping[str, Any] | None = None
    achieved: Mapping[str, float] = field(default_factory=dict)
    applies: tuple[str, ...] | None = None
    recorded: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    text: str = ""
    type: str = "done"


def encode(message: Any) -> bytes:
    """Return a message as one line of JSON."""
    document = message if isinstance(message, dict) else {name: getattr(message, name) for name in message.__slots__}
    return json.dumps(document, default=str).encode() + b"\n"


def lease_document(lease: Lease) -> dict[str, Any]:
    """Return the fields of a lease that a worker needs to check it."""
    return {
        "job": lease.job,
        "number": lease.number,
        "token": lease.token,
        "instance": lease.holder.instance,
        "name": lease.holder.name,
    }


def lease_from_document(document: Mapping[str, Any]) -> Lease:
    """Return the lease of a :func:`lease_document`; its times are not set, as a worker does not need them."""
    never = datetime.min.replace(tzinfo=UTC)
    holder = Holder(document["instance"], document["name"])
    return Lease(document["job"], document["number"], document["token"], holder, never, never, timedelta(0))


_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 3.0


def become_subreaper() -> None:
    """Become the parent of all descendants that lose theirs, including daemons in another session (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the process ids of all direct children, including zombies."""
    pids: set[int] = set()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there is none: no need to ask each thread
        return pids
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            pids |= {int(word) for word in path.read_text(encoding="ascii").split()}
    return pids


def signal_children(number: signal.Signals) -> bool:
    """Send a signal to all children, and reap those that have ended; return whether there were any."""
    pids = children()
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(pids)


def terminate_children(grace: float = _GRACE_SECONDS) -> None:
    """End all children (after :func:`become_subreaper` all descendants): SIGTERM, SIGKILL after ``grace`` seconds.

    On SIGTERM, Spark's JVM removes its temporary files.
    """
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, _GRACE_SECONDS)):
        ends = time.monotonic() + seconds
        while signal_children(number) and time.monotonic() < ends:
            time.sleep(_POLL_SECONDS)


def signal_group(leader: int, number: signal.Signals) -> bool:
    """Send a signal to the process group of a process that has ended; return whether any process is left in it."""
    # The kernel does not reuse the id while the group has members; if it has none, the call fails.
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
