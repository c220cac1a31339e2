"""Lock a file against other processes of this machine (``flock``), within a limit.

The kernel frees a lock when its process ends, but not when the process is suspended: so no lock is waited for without
a limit, and the error names the holder.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

_PAUSE = 0.02
_LOCKS = "/proc/locks"


def lock_within(file: int, wait: float, *, announced: bool = True) -> str | None:
    """Lock an open file exclusively.

    Args:
        file: its descriptor, open for writing; the lock is released when it is closed.
        wait: how long to wait for another process that has it, in seconds.
        announced: whether to write this process's id into it.

    Returns:
        None: it is locked. Else the id of the process that still has it, or ``unknown``.
    """
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return holder_of(file)
            time.sleep(_PAUSE)
        else:
            break
    if announced:
        with suppress(OSError):  # it is only for messages: a full disk is no error
            os.ftruncate(file, 0)
            os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return None


def holder_of(file: int) -> str:
    """The id of the process that has an open file locked: as the kernel lists it, else as the file names it."""
    named = os.pread(file, 100, 0).decode(errors="replace").strip() or "unknown"
    # The file may name a process that was killed, and whose id another one has by now.
    found = _listed(os.fstat(file).st_ino)
    return named if not found or named in found else found[0]


def _listed(inode: int) -> list[str]:
    try:
        with open(_LOCKS, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:  # not Linux
        return []
    # "3: FLOCK  ADVISORY  WRITE 1234 fe:01:5678 0 EOF"; a waiting process has "->" before FLOCK.
    return [one[4] for one in lines if one[1:4] == ["FLOCK", "ADVISORY", "WRITE"] and one[5].endswith(f":{inode}")]
