"""Measure what a run uses (:class:`Measurement`), and tell what it achieved by its report (:func:`achieved_by`).

Requests, bytes, processor time and memory are those of the whole process: of two runs at once in one process, each is
measured with the other. Workers and commands run one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from memwal_ops.storage.locations import Location
from memwal_ops.storage.metering import LOCAL, REMOTE

SUMS = ("fragments", "versions", "bytes_freed", "rows_merged", "rows_rewritten", "rows_indexed")
"""What is summed up over runs: fragments and versions fewer, bytes freed, rows merged, rewritten, newly indexed."""
_RECALLS = ("recall_before", "recall_after")


def achieved_by(job: str, report: Mapping[str, Any]) -> dict[str, float]:
    """What a run achieved; of ``maintain``, its steps together. Without what it did not do.

    Besides :data:`SUMS`, ``recall_before`` and ``recall_after`` of the index that has the lowest one, if it was asked.
    """
    steps = report.get("steps")
    if isinstance(steps, list):
        parts = [achieved_by(str(step["step"]), step["report"]) for step in steps if step.get("report")]
        sums = {name: sum(part.get(name, 0) for part in parts) for name in SUMS}
        recalls = [part for part in parts if "recall_after" in part]
        sums |= {name: recalls[-1][name] for name in _RECALLS if recalls and name in recalls[-1]}
    else:
        sums = {name: count(report) for name, count in _COUNTS.get(job, {}).items()}
        sums |= _recalls(report)
    return {name: value for name, value in sums.items() if value or name in _RECALLS}


def _fragments(report: Mapping[str, Any]) -> float:
    return float(report.get("fragments_removed") or 0) - float(report.get("fragments_added") or 0)


def _expired(report: Mapping[str, Any]) -> float:
    counts = report.get("counts")
    return float(counts.get("expire", 0)) if isinstance(counts, dict) and report.get("apply") else 0.0


def _freed(job: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda report: rows_done(job, report) if report.get("apply") else 0.0


def _acted(job: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda report: 0.0 if report.get("decision") == "dry_run" else rows_done(job, report)


_COUNTS: Mapping[str, Mapping[str, Callable[[Mapping[str, Any]], float]]] = {
    "merge": {"rows_merged": _acted("merge")},
    "compact": {
        "fragments": lambda report: 0.0 if report.get("decision") == "dry_run" else _fragments(report),
        "rows_rewritten": _acted("compact"),
    },
    "catchup": {"rows_indexed": _acted("catchup")},
    "expire": {"versions": _expired, "bytes_freed": _freed("expire")},
    "gc": {"bytes_freed": _freed("gc")},
}


def _recalls(report: Mapping[str, Any]) -> dict[str, float]:
    """Of the index with the lowest recall afterwards; empty if no vector index was asked."""
    asked = [*_of_guard(report), *_of_verify(report)]
    if not asked:
        return {}
    before, after = min(asked, key=lambda recall: recall[1])
    return {"recall_after": after} | ({} if before is None else {"recall_before": before})


def _of_guard(report: Mapping[str, Any]) -> Iterable[tuple[float | None, float]]:
    """Recall before and after of what the guard of catchup and compact compared."""
    entries = [entry.get("answers") for entry in _entries(report, "indexes")] + _entries(report, "answers")
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("found"), int | float):
            yield entry.get("found_before"), float(entry["found"])


def _of_verify(report: Mapping[str, Any]) -> Iterable[tuple[float | None, float]]:
    for entry in _entries(report, "answers"):
        if isinstance(entry.get("recall"), int | float):
            yield None, float(entry["recall"])


def _entries(report: Mapping[str, Any], name: str) -> list[Any]:
    entries = report.get(name)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


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


def rows_done(job: str, report: Mapping[str, Any]) -> float:
    """Of what the need of a job counts, rows or bytes, how much a run did; 0 if its report does not show it."""
    count = _DONE.get(job)
    return 0.0 if count is None else float(count(report))


def _merged(report: Mapping[str, Any]) -> int:
    passes = _whole(report, "passes")
    return sum(
        int(merge_pass.get("rows_read") or merge_pass.get("upserts", 0) + merge_pass.get("deletes", 0))
        for merge_pass in passes
    )


def _indexed(report: Mapping[str, Any]) -> int:
    updated = (index for index in _whole(report, "indexes") if index.get("decision") == "updated")
    return sum(int(index.get("uncovered_rows", 0)) for index in updated) + int(report.get("inserted") or 0)


def _whole(report: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """A list of a report; nothing where the history has only the beginning of it."""
    return () if report.get("truncated") else report.get(name, ())


_DONE: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "merge": _merged,
    "catchup": _indexed,
    "compact": lambda report: report.get("rows_rewritten", 0),
    "expire": lambda report: report.get("bytes", 0),
    "gc": lambda report: report.get("deleted", {}).get("bytes", 0),
}
