"""Options of gc that tests share."""

from __future__ import annotations

from datetime import timedelta

from memwal_ops.formats.lance.jobs.gc import GcOptions

#: No waiting; fence posts as usual.
IMMEDIATE = GcOptions(reader_grace=timedelta(0), orphan_min_age=timedelta(0), manifest_retention=2, allow_unsafe=True)
PATIENT = GcOptions(
    reader_grace=timedelta(minutes=15), orphan_min_age=timedelta(minutes=15), manifest_retention=2, allow_unsafe=True
)
