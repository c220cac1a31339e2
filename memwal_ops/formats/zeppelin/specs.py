"""The jobs of Zeppelin namespaces, as registered in pyproject.toml, and their options. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import ClassVar

from memwal_ops.core import options
from memwal_ops.core.demo import DemoSpec
from memwal_ops.core.job import JobSpec, MetricSpec, Saving, maintain_job, read_only_job, repair_job, verify_job
from memwal_ops.core.options import (
    SAFE_AGE,
    AnswersOptions,
    CollectOptions,
    EraseOptions,
    MaintenanceOptions,
    RepairOptions,
)

DEFAULT_MAX_BYTES = 256 << 20
DEFAULT_SPARK_ABOVE = 16 << 30
"""Bytes of vectors above which auto uses Spark: docs/formats/zeppelin.md has the reason."""


def _refuse_master(master: str | None, engine: str) -> None:
    if master is not None and engine == "local":
        raise options.OptionError("{master} applies to Spark only, and {engine} is local.", "master")


@dataclass(frozen=True)
class ZeppelinMergeOptions(options.Options):
    """Options of merge."""

    max_bytes: int = options.size(
        DEFAULT_MAX_BYTES, minimum=1, help="Budget of one pass: bytes of log read, and of rows in memory."
    )
    metric: str | None = options.choice(
        None, "cosine", "euclidean", "dot_product", help="The metric of a namespace without meta.json."
    )
    retrain: bool = options.flag(help="Train new centroids.")
    retrain_imbalance_threshold: float = options.number(
        10.0, minimum=1.0, metavar="X", help="Train new centroids if largest cluster / smallest cluster is above this."
    )
    clusters: int | None = options.count(
        None, minimum=1, metavar="N", help="Clusters to train; by default one per 3,000 rows."
    )
    quantization: str | None = options.choice(
        None, "none", "scalar", "product", help="Additional codes; by default as the last segment's."
    )
    bitmap_field: tuple[str, ...] = options.texts(metavar="FIELD", help="Also build a bitmap index of this attribute.")
    fts_field: tuple[str, ...] = options.texts(metavar="FIELD", help="Also build an inverted index of this attribute.")
    lease_ttl: timedelta = options.duration(
        timedelta(minutes=5), minimum=timedelta(seconds=1), maximum=timedelta(days=1), help="Time to live of the lease."
    )
    wait: timedelta = options.duration(timedelta(0), help="Wait that long while another compactor holds the lease.")
    engine: str = options.choice(
        "auto", "local", "spark", "auto", help="Where rows are assigned and clusters written; auto: by size."
    )
    master: str | None = options.text(None, shown_default="configured", help="Spark master URL.")
    spark_above: ClassVar[int] = DEFAULT_SPARK_ABOVE

    def validate(self) -> None:
        """Refuse a Spark master for the local engine."""
        _refuse_master(self.master, self.engine)


@dataclass(frozen=True)
class ZeppelinGcOptions(CollectOptions, options.SafeMinimums):
    """Options of gc."""

    minimums = {  # noqa: RUF012 - as the base class has it
        "reader_grace": (
            timedelta(minutes=1),
            "a reader reads the manifest, a compaction publishes the next one, the segment that it replaced is "
            "collected, and the reader, which then opens it, fails.",
        ),
        # After that, the writer of memwal-ops writes a fragment again before it lists it.
        "orphan_min_age": (
            timedelta(hours=1),
            "a writer has written a fragment, it is collected as an orphan, and the writer, whose compare-and-swap "
            "failed, tries again and lists a fragment that does not exist.",
        ),
    }

    reader_grace: timedelta = options.duration(
        timedelta(minutes=15), help="Readers may use a manifest that long after the next one was published."
    )
    keep_revisions: int | None = options.count(
        None,
        minimum=1,
        metavar="N",
        help="Keep the objects that the newest N revisions need.",
        shown_default="1; 128 of a native namespace, as its server does",
    )
    orphan_min_age: timedelta = options.duration(
        timedelta(days=7), help="Delete an unlisted fragment after that; until then its writer may be stalled."
    )


@dataclass(frozen=True)
class ZeppelinEraseOptions(EraseOptions):
    """Options of erase."""

    minimums = {"older_than": (SAFE_AGE, ZeppelinGcOptions.minimums["reader_grace"][1])}  # noqa: RUF012 - see above


@dataclass(frozen=True)
class ZeppelinWhyOptions(ZeppelinGcOptions):
    """Options of why: the target, and the retention periods that gc would use."""

    target: str = options.text("", positional=True, metavar="PATH", help="The object to explain.")


@dataclass(frozen=True, kw_only=True)
class ZeppelinVerifyOptions(AnswersOptions):
    """Options of verify."""

    metric: str | None = options.choice(
        None, "cosine", "euclidean", "dot_product", help="The metric of a namespace without meta.json."
    )
    retrain_imbalance_threshold: float = options.number(
        10.0, minimum=1.0, metavar="X", help="Report if largest cluster / smallest cluster is above this."
    )


@dataclass(frozen=True)
class ZeppelinInspectOptions(options.Options):
    """Options of inspect."""

    limit: int = options.count(100, minimum=0, metavar="N", help="List at most this many fragments in --json.")


@dataclass(frozen=True)
class ZeppelinMaintainOptions(MaintenanceOptions):
    """Options of maintain."""

    merge: ZeppelinMergeOptions = options.group(ZeppelinMergeOptions, help="Options of the merge step.")
    gc: ZeppelinGcOptions = options.group(ZeppelinGcOptions, help="Options of the gc step.")


@dataclass(frozen=True)
class ZeppelinMigrateOptions(options.Options):
    """Options of migrate."""

    target: str | None = options.text(
        None, positional=True, metavar="TARGET", help="The Lance table to create or to update."
    )
    engine: str = options.choice(
        "local",
        "local",
        "spark",
        help="Where rows are read and compared; Spark for namespaces too large for one machine.",
    )
    master: str | None = options.text(None, shown_default="as configured", help="Spark master URL.")

    def validate(self) -> None:
        """Refuse a Spark master for the local engine."""
        _refuse_master(self.master, self.engine)


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
    options=ZeppelinMergeOptions,
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
    options=ZeppelinGcOptions,
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
    options=ZeppelinEraseOptions,
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
    options=ZeppelinVerifyOptions,
    load=f"{_JOBS}.verify",
    after=frozenset({"merge", "gc", "maintain"}),
)
WHY = read_only_job(
    name="why",
    summary="Print why an object is kept, or is deletable.",
    options=ZeppelinWhyOptions,
    load=f"{_JOBS}.gc:Why",
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
    options=ZeppelinMigrateOptions,
    load=f"{_JOBS}.migrate",
    deletes=True,
    by_hand=True,
)
INSPECT = read_only_job(
    name="inspect",
    summary="Show a namespace and its backlog.",
    options=ZeppelinInspectOptions,
    load="memwal_ops.formats.zeppelin.backlog",
)
REPAIR = repair_job(
    options=RepairOptions,
    help="""Verify the Zeppelin namespace at URI, and release leases of supervisors that expired.

The namespace itself is not written: for each other finding it prints the choices that you have, and their consequences.

Safe to kill, and to run twice. Without --apply, nothing is changed.

\b
Examples:
  memwal-ops repair my_namespace
  memwal-ops repair my_namespace --apply

Exit codes: 0 nothing_to_repair, planned or repaired; 9 an error needs your decision; others:
runbooks/README.md.""",
    load=f"{_JOBS}.verify:REPAIR",
)
MAINTAIN = maintain_job(
    summary="Run merge and gc, in that order.",
    options=ZeppelinMaintainOptions,
    hung_after=timedelta(hours=2),
    metrics={"conflicts": _CONFLICTS},
)
DEMO = DemoSpec("A namespace of vectors with a log of fragments.", "memwal_ops.formats.zeppelin.jobs.demo:demo")
