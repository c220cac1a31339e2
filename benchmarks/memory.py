"""Give a process the allocators of a command, and read how much memory it had at most. Linux only."""

from __future__ import annotations

import os
from pathlib import Path

from memwal_ops.allocators import bound_allocators
from memwal_ops.cli import process


def as_command() -> None:
    """Set up this process as every command that opens a table does."""
    process.prepare()
    bound_allocators()


def peak_mib(process_id: int | None = None) -> float:
    """The most that a process had since it began, or since :func:`reset_peak`, in MiB.

    Not by ``getrusage``: what that says of a child begins with what its parent had.
    """
    lines = Path(f"/proc/{process_id or os.getpid()}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def reset_peak() -> None:
    """Forget the peak of this process: what was needed to import and open is not the work's."""
    Path("/proc/self/clear_refs").write_text("5")
