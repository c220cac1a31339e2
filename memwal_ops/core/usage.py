"""Measure what a run uses: requests, bytes, processor time and memory (:class:`Measurement`).

All are those of the whole process: of two runs at once in one process, each is measured with the other. Workers and
commands run one at a time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memwal_ops.storage.metering import LOCAL, REMOTE

if TYPE_CHECKING:
    from memwal_ops.storage.locations import Location

_CLEAR = "/proc/self/clear_refs"
_STATUS = "/proc/self/status"
_RESET_PEAK = "5"
_KIB = 1 << 10
_STORES = {"s3": "s3", "s3+ddb": "s3", "gs": "gcs", "az": "azure"}
ON_FILES = "local"
"""The store of a table in a folder or in memory."""


class Measurement:
    """What this process uses from now on."""

    def __init__(self) -> None:
        """Begin."""
        self._before = {True: LOCAL.traffic(), False: REMOTE.traffic()}
        self._cpu = _cpu_seconds()
        with suppress(OSError), open(_CLEAR, "w", encoding="ascii") as file:
            file.write(_RESET_PEAK)

    def used(self, location: Location) -> dict[str, Any]:
        """The document ``used`` of a run on a table at a location."""
        local = location.scheme == "file"
        traffic = (LOCAL if local else REMOTE).traffic().since(self._before[local])
        return {
            "store": _STORES.get(location.scheme, ON_FILES),
            "requests": dict(traffic.requests),
            "bytes_read": traffic.bytes_read,
            "bytes_written": traffic.bytes_written,
            "cpu_seconds": round(max(0.0, _cpu_seconds() - self._cpu), 3),
            "peak_memory": _peak_memory(),
        }


def _cpu_seconds() -> float:
    """Processor time of this process, its threads and the children that have ended."""
    return sum(os.times()[:4])


def _peak_memory() -> int | None:
    """The most resident memory since it was reset, where the system tells it: on Linux."""
    with suppress(OSError, ValueError), open(_STATUS, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * _KIB
    return None
