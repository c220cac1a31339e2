"""Run all jobs on a table, and record what each came to."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from memwal_ops import run_job
from memwal_ops.core.registry import open_table
from memwal_ops.errors import MemwalOpsError
from tests.support.gc_options import AT_ONCE

JOBS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("inspect", {}),
    ("merge", {}),
    ("compact", {}),
    ("catchup", {}),
    ("snapshot", {}),
    ("expire", {"apply": True, "older_than": timedelta(0), "keep": 1, "allow_unsafe": True}),
    ("gc", {"apply": True, **AT_ONCE}),
    ("verify", {"deep": True}),
)


def run_all(uri: str) -> dict[str, str]:
    """For each job that applies ``ok``, or why not: ``refused`` where an error came before any write."""
    found = {}
    for job, options in JOBS:
        before = files(uri)
        try:
            if job not in open_table(uri).jobs:
                continue
            report = run_job(uri, job, **options)
        except MemwalOpsError as error:
            kept = "refused" if files(uri) == before else "failed after a write"
            found[job] = f"{kept}: {type(error).__name__}: {error}"
        else:
            found[job] = f"{report.decision}: {report.describe()}" if report.exit_code else "ok"
    return found


def files(uri: str) -> dict[str, tuple[int, int]]:
    """Sizes and times of all files below a table."""
    found = ((path, path.stat()) for path in Path(uri).rglob("*") if path.is_file())
    return {str(path): (one.st_size, one.st_mtime_ns) for path, one in found}
