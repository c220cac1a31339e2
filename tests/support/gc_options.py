"""Options of gc that tests share."""

from __future__ import annotations

from datetime import timedelta

from memwal_ops.formats.lance.jobs.gc.job import GcOptions

#: No waiting; fence posts as usual.
IMMEDIATE = GcOptions(
    reader_grace=timedelta(0),
    orphan_min_age=timedelta(0),
    manifest_retention=2,
    drain_after=timedelta(0),
    allow_unsafe=True,
)
PATIENT = GcOptions(
    reader_grace=timedelta(minutes=15),
    orphan_min_age=timedelta(minutes=15),
    manifest_retention=2,
    drain_after=timedelta(0),
    allow_unsafe=True,
)
#: The defaults, but for readers that keep a version open.
NONE_PINNED = GcOptions(drain_after=timedelta(0), allow_unsafe=True)
#: As options of a job, of a configuration and of Airflow.
AT_ONCE = {
    "reader_grace": "0s",
    "orphan_min_age": "0s",
    "manifest_retention": 2,
    "drain_after": "0s",
    "allow_unsafe": True,
}
#: The same on a command line.
AT_ONCE_FLAGS = (
    "--reader-grace=0", "--orphan-min-age=0", "--manifest-retention=2", "--drain-after=0", "--allow-unsafe"
)  # fmt: skip
#: The defaults, but for readers that keep a version open.
NONE_PINNED_FLAGS = ("--drain-after=0", "--allow-unsafe")
