"""End the processes that jobs leave behind. On Linux all descendants; elsewhere only the worker's process group."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

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
