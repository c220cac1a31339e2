"""Read how much memory a process had at most. Linux only, as the benchmarks are."""

from __future__ import annotations

import os
from pathlib import Path


def peak_mib(process: int | None = None) -> float:
    """The most that a process had since it began, or since :func:`reset_peak`, in MiB.

    Not by ``getrusage``: what that says of a child begins with what its parent had.
    """
    lines = Path(f"/proc/{process or os.getpid()}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def reset_peak() -> None:
    """Forget the peak of this process: what was needed to import and open is not the work's."""
    Path("/proc/self/clear_refs").write_text("5")
