"""The jobs of Zeppelin namespaces, as they are registered (pyproject.toml). Imports nothing heavy."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from memwal_ops.core.demo import DemoSpec
from memwal_ops.core.job import JobSpec, MetricSpec, Saving, maintain_job, read_only_job, verify_job
from memwal_ops.core.repair_spec import repair_job
from memwal_ops.formats.zeppelin.options import (
    EraseOptions,
    GcOptions,
    InspectOptions,
    MaintainOptions,
    MergeOptions,
    MigrateOptions,
    VerifyOptions,
    WhyOptions,
)

_JOBS = "memwal_ops.formats.zeppelin.jobs"
_CONFLICTS = MetricSpec(
    "count", "Commit conflicts: compare-and-swaps of the manifest that failed.", "run", "conflicts", per_job=True
)

MERGE = JobSpec(
    name="merge",
    summary="Compact WAL fragments into the indexed segment.",
    help="""Compact the WAL fragments of the Zeppelin namespace at URI into its segment.

Acquires the namespace's lease, puts its fencing token into the manifest, and publishes by compare-and-swap. Safe to
kill, to run twice, and to run beside writers; a second compactor exits with busy (57).

\b
Examples:
  memwal-ops merge s3://bucket/my_namespace --dry-run
  memwal-ops merge my_namespace --max-bytes 64MiB

Exit codes: 0 merged, nothing_to_merge, superseded or dry_run; 10 a fragment is blocked (those before it are merged); 57
another compactor holds the lease; others: runbooks/README.md.""",
    options=MergeOptions,
    load=f"{_JOBS}.merge",
    pool="merge",
    enabled=True,
    every=timedelta(seconds=30),
    when="fragments >= 100 or bytes >= 64MiB or oldest_age >= 5m",
    hung_after=timedelta(hours=1),
    work="rows",
    saves=(Saving("rows", "rows"),),
    objectives={"max_backlog_age": "oldest_age"},
    metrics={
        "fragments": MetricSpec(
            "count", "WAL fragments that are not compacted.", exported="backlog_wal_fragments", role="backlog"
        ),
        "rows": MetricSpec("count", "Vectors in uncompacted fragments.", exported="backlog_rows"),
        "bytes": MetricSpec("bytes", "Bytes of uncompacted fragments.", exported="backlog_bytes"),
        "oldest_age": MetricSpec(
            "seconds", "Age of the oldest uncompacted fragment.", exported="backlog_oldest_seconds", role="age"
        ),
        # With the regions of Lance tables: an alert on one is an alert on the other.
        "blocked_parts": MetricSpec(
            "count",
            "Fragments and segments that are missing or cut; an unreadable lease.",
            exported="blocked_regions",
            role="blocked",
        ),
        "fragments_merged": MetricSpec("count", "Fragments compacted.", "run", "merged_fragments"),
        "rows_merged": MetricSpec("count", "Rows of the fragments compacted.", "run", "merged_rows"),
        "conflicts": _CONFLICTS,
    },
    in_maintain=True,
)
GC = JobSpec(
    name="gc",
    summary="Plan the deletion of objects that no reader and no commit needs; with --apply, delete them.",
    options=GcOptions,
    load=f"{_JOBS}.gc",
    pool="collect",
    deletes=True,
    after=frozenset({"merge"}),
    every=timedelta(hours=1),
    metrics={
        "pending_keys": MetricSpec("count", "Keys in a native manifest that are pending deletion."),
        "bytes_collected": MetricSpec("bytes", "Bytes that gc deleted.", "run", "collected_bytes"),
        "objects_collected": MetricSpec("count", "Objects that gc deleted.", "run", "collected_objects"),
    },
    in_maintain=True,
)
ERASE = JobSpec(
    name="erase",
    summary="Delete rows for good, and prove that they are gone.",
    help="""Erase rows of the Zeppelin namespace at URI: delete them by an append, compact, and delete the fragments and
segments that the compaction replaced. --where is a filter as queries have it, as JSON, on attributes and "id".

What grace times do not allow yet is named with its date, and the next run continues. A hold or a snapshot that keeps
such rows is named. Safe to kill, to run twice, and to run beside writers, readers and all other jobs.

\b
Examples:
  memwal-ops erase s3://bucket/my_namespace --where '{"user": 17}'
  memwal-ops erase my_namespace --deleted-before 2026-11-01 --apply --certificate proof.json

Exit codes: 0 planned, waiting, erased or valid; 57 another compactor holds the lease; 63 held; 64 the certificate is
not valid; others: runbooks/README.md.""",
    options=EraseOptions,
    load=f"{_JOBS}.erase",
    uri_from="check",
    pool="collect",
    deletes=True,
    after=frozenset({"merge", "gc"}),
    every=timedelta(days=1),
    hung_after=timedelta(hours=2),
    metrics={
        "rows_deleted": MetricSpec("count", "Rows that erase deleted.", "run"),
        "objects_deleted": MetricSpec("count", "Objects that erase deleted.", "run"),
    },
)
# The term of the Zeppelin document.
COMPACT = replace(
    MERGE,
    name="compact",
    in_maintain=False,
    by_hand=True,
    enabled=False,
    every=None,
    when=None,
    metrics={},
    work=None,
    saves=(),
    objectives={},
)
VERIFY = verify_job(
    summary="Check all objects of a namespace for consistency.",
    help="""Check the Zeppelin namespace at URI: checksums of fragments, counts, missing objects, orphans, sizes of
clusters, rows against centroids (a sample; all with --deep), lease and tokens. With --answers, recall of
queries, and bitmaps and inverted lists against rows. Changes nothing.

\b
Examples:
  memwal-ops verify s3://bucket/my_namespace
  memwal-ops verify my_namespace --deep --json

Exit codes: 0 healthy, or warnings only; 9 an error was found: rows are missing, or a job cannot run; others:
runbooks/README.md.""",
    options=VerifyOptions,
    load=f"{_JOBS}.verify",
    after=frozenset({"merge", "gc", "maintain"}),
)
WHY = read_only_job(
    name="why",
    summary="Print why an object is kept, or is deletable.",
    options=WhyOptions,
    load=f"{_JOBS}.why",
)
MIGRATE = JobSpec(
    name="migrate",
    summary="Migrate a namespace into a Lance table with MemWAL.",
    help="""Migrate the Zeppelin namespace at URI into a Lance table with MemWAL at TARGET: ids become the primary key,
vectors and attributes become columns. Run it again to apply later writes; the namespace is not changed. It ends when
all writes are applied, and compares all rows. No other writer may write to TARGET before the decision is migrated.
After writes of others it refuses to run again, since it would undo them.

\b
Examples:
  memwal-ops migrate s3://bucket/my_namespace s3://bucket/my_table.lance
  memwal-ops migrate my_namespace my_table.lance --apply

Exit codes: 0 planned, migrated or nothing_to_migrate; others: runbooks/README.md.""",
    options=MigrateOptions,
    load=f"{_JOBS}.migrate",
    deletes=True,
    by_hand=True,
)
INSPECT = read_only_job(
    name="inspect",
    summary="Show a namespace and its backlog.",
    options=InspectOptions,
    load=f"{_JOBS}.inspect",
)
REPAIR = repair_job(
    help="""Verify the Zeppelin namespace at URI, and release leases of supervisors that expired.

The namespace itself is not written: for each other finding it prints the choices that you have, and their consequences.

Safe to kill, and to run twice. Without --apply, nothing is changed.

\b
Examples:
  memwal-ops repair my_namespace
  memwal-ops repair my_namespace --apply

Exit codes: 0 nothing_to_repair, planned or repaired; 9 an error needs your decision; others:
runbooks/README.md.""",
    load=f"{_JOBS}.repair:JOB",
)
MAINTAIN = maintain_job(
    summary="Run merge and gc, in that order.",
    options=MaintainOptions,
    hung_after=timedelta(hours=2),
    metrics={"conflicts": _CONFLICTS},
)
DEMO = DemoSpec("A namespace of vectors with a log of fragments.", "memwal_ops.formats.zeppelin.jobs.demo:demo")
