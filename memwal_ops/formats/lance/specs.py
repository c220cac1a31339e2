"""The jobs of Lance tables, as they are registered (pyproject.toml). Imports nothing heavy."""

from __future__ import annotations

from datetime import timedelta

from memwal_ops.core import job
from memwal_ops.core.demo import DemoSpec
from memwal_ops.core.options import RepairOptions
from memwal_ops.formats.lance import options

_JOBS = "memwal_ops.formats.lance.jobs"
_WITH_REGIONS = frozenset({"region", "shard"})
_WITH_LOG, _CURRENT = _WITH_REGIONS | {"legacy"}, _WITH_REGIONS | {"none"}
_CONFLICTS = job.MetricSpec("count", "Commit conflicts of the run.", "run", "conflicts", per_job=True)

MERGE = job.JobSpec(
    name="merge",
    summary="Merge flushed generations into the base table.",
    help="""Merge the flushed generations of the table at URI into its base table.

Works pass by pass; each pass is one new version that carries rows, deletions and progress together. Safe to kill, to
run twice, and to run on several machines at once.

\b
Examples:
  memwal-ops merge s3://bucket/orders.lance --dry-run
  memwal-ops merge orders.lance --max-bytes 256MiB

Exit codes: 0 merged, nothing_to_merge, superseded or dry_run; 10 a region is blocked (the others are merged); others:
runbooks/README.md.""",
    options=options.MergeOptions,
    load=f"{_JOBS}.merge",
    layouts=_WITH_LOG,
    load_by_layout={"legacy": f"{_JOBS}.legacy.merge"},
    pool="merge",
    skip_if_unchanged=True,
    enabled=True,
    every=timedelta(minutes=10),
    when="generations >= 8 or bytes >= 256MiB",
    work="rows",
    saves=(job.Saving("rows", "rows"),),
    objectives={"max_backlog_age": "oldest_age"},
    metrics={
        "generations": job.MetricSpec(
            "count", "Flushed generations that are not merged.", exported="backlog_generations", role="backlog"
        ),
        "rows": job.MetricSpec("count", "Unmerged rows, as recorded, or by their files.", exported="backlog_rows"),
        "bytes": job.MetricSpec("bytes", "Unmerged bytes, as recorded, or by their files.", exported="backlog_bytes"),
        "oldest_age": job.MetricSpec(
            "seconds", "Age of the oldest unmerged generation.", exported="backlog_oldest_seconds", role="age"
        ),
        "regions_behind": job.MetricSpec("count", "Regions with an unmerged generation.", role="behind"),
        "blocked_regions": job.MetricSpec(
            "count", "Regions that cannot be merged completely.", exported="blocked_regions", role="blocked"
        ),
        "unflushed_entries": job.MetricSpec(
            "count",
            "Entries of the log whose rows no writer has flushed.",
            exported="unflushed_entries",
            role="unflushed",
            detail=True,
        ),
        "unflushed_oldest_seconds": job.MetricSpec(
            "seconds",
            "Age of the oldest of these entries.",
            exported="unflushed_oldest_seconds",
            role="unflushed_age",
            detail=True,
        ),
        "seconds_since_last_write": job.MetricSpec(
            "seconds",
            "Seconds since a writer last wrote to the log.",
            exported="seconds_since_last_write",
            role="last_write",
            detail=True,
        ),
        "merged_elsewhere": job.MetricSpec(
            "count",
            "Major release of Lance of another program that merges the table; none is known: absent.",
            exported="merged_elsewhere",
            role="merged_elsewhere",
            detail=True,
        ),
        "regions_gone": job.MetricSpec(
            "count", "Regions that were merged, without a folder.", exported="regions_gone", role="gone", detail=True
        ),
        "regions_blocked": job.MetricSpec(
            "count", "Regions that the run could not merge completely.", "run", role="blocked"
        ),
        "bytes_merged": job.MetricSpec("bytes", "Bytes of the generations merged.", "run", "merged_bytes"),
        "rows_merged": job.MetricSpec("count", "Rows of the generations merged.", "run", "merged_rows"),
        "conflicts": _CONFLICTS,
    },
    in_maintain=True,
)
CATCHUP = job.JobSpec(
    name="catchup",
    summary="Bring indexes up to the newest rows.",
    help="""Bring the indexes of the table at URI up to the newest rows of its base, and correct index_catchup.

Each index is committed as one new version. A vector index keeps its codebook, or is not changed. Safe to kill, to run
twice, and to run beside mergers and writers.

\b
Examples:
  memwal-ops catchup orders.lance --index embedding_idx --dry-run
  memwal-ops catchup s3://bucket/orders.lance --engine spark --master yarn

Exit codes: 0 caught_up, unchanged, no_indexes or dry_run; 10 a region's id was used before (region_replaced); 18 an
index failed (the others were updated); 19 a rebuild would have changed the codebook of each index that failed; 41 each
of them would answer worse; others: runbooks/README.md.""",
    options=options.CatchupOptions,
    load=f"{_JOBS}.catchup.job",
    layouts=_CURRENT,
    after=frozenset({"merge"}),
    enabled=True,
    every=timedelta(minutes=30),
    when="uncovered_rows >= 100000",
    debt=job.DebtSpec(
        when="indexes_urgent >= 1",
        due="indexes_due",
        nothing_due="No index lacks enough rows, or has too many segments.",
        rows="index_debt_rows",
        bytes_written="index_debt",
        bytes_read="index_debt",
        skips=True,
        checks="merged_regions",
    ),
    saves=(job.Saving("index_debt_rows", "rows"),),
    objectives={"max_unindexed_rows": "uncovered_rows"},
    low_recall_options={"retrain": "auto"},
    hung_after=timedelta(hours=2),
    metrics={
        "uncovered_rows": job.MetricSpec(
            "count",
            "Rows that the least complete base index does not cover.",
            exported="uncovered_rows",
            role="uncovered",
        ),
        "indexes": job.MetricSpec("count", "Base indexes.", role="indexes", detail=True),
        "uncovered_fragments": job.MetricSpec("count", "Fragments that the least complete base index does not cover."),
        "lookup_reads": job.MetricSpec(
            "count",
            "Segments and uncovered fragments that a look-up by the worst base index reads; without one, fragments.",
            role="lookup",
            detail=True,
        ),
        "indexes_behind": job.MetricSpec(
            "count", "Base indexes that lack a fragment, or have too many segments.", detail=True
        ),
        "indexes_due": job.MetricSpec("count", "Those of them that are worth a run by the schedule.", detail=True),
        "indexes_urgent": job.MetricSpec("count", "Those of them that are worth a run at once.", detail=True),
        "merged_regions": job.MetricSpec(
            "count",
            "Regions of which generations were merged: a catch-up records that indexes cover them.",
            detail=True,
        ),
        "index_debt": job.MetricSpec("bytes", "Bytes of indexes that a catch-up would write.", detail=True),
        "index_debt_rows": job.MetricSpec("count", "Rows that base indexes do not cover, of all indexes.", detail=True),
        "conflicts": _CONFLICTS,
    },
    in_maintain=True,
)
COMPACT = job.JobSpec(
    name="compact",
    summary="Join small base fragments and drop deleted rows.",
    help="""Join small fragments of the table at URI, and rewrite those with many deleted rows.

Small appends rewrite little: docs/jobs.md. Safe to kill, to run twice, and beside writers.

\b
Examples:
  memwal-ops compact orders.lance --target-rows 500000 --dry-run
  memwal-ops compact s3://bucket/orders.lance --engine spark --master yarn

Exit codes: 0 compacted, unchanged or dry_run; 41 answers_worse; others: runbooks/README.md.""",
    options=options.CompactOptions,
    load=f"{_JOBS}.compact.job",
    layouts=_CURRENT,
    after=frozenset({"merge", "catchup"}),
    enabled=True,
    every=timedelta(hours=6),
    debt=job.DebtSpec(
        when="urgent_fragments > 0",
        due="due_fragments",
        nothing_due="No fragments are to be joined by their sizes, and none has too many deleted rows.",
        rows="debt_rows",
        bytes_written="debt",
        bytes_read="debt_read",
        skips=True,
        checks="unchecked_segments",
    ),
    saves=(job.Saving("due_fragments", "fragments"),),
    objectives={"max_fragments": "fragments"},
    hung_after=timedelta(hours=2),
    metrics={
        "fragments": job.MetricSpec("count", "Fragments of the base table.", exported="fragments", role="parts"),
        "table_rows": job.MetricSpec("count", "Live rows of the base table.", exported="table_rows", role="table_rows"),
        "table_bytes": job.MetricSpec(
            "bytes", "Bytes of the base table's data files.", exported="table_bytes", role="table_bytes"
        ),
        "small_fragments": job.MetricSpec("count", "Fragments below the default target size of a compaction."),
        "deleted_rows": job.MetricSpec("count", "Deleted rows that fragments still have.", exported="deleted_rows"),
        "debt": job.MetricSpec("bytes", "Bytes that a compaction would write."),
        "debt_read": job.MetricSpec("bytes", "Bytes of the data files that it would read.", detail=True),
        "debt_rows": job.MetricSpec("count", "Rows that it would write.", detail=True),
        "due_fragments": job.MetricSpec("count", "Fragments that it would rewrite.", detail=True),
        "urgent_fragments": job.MetricSpec("count", "Fragments of which that is worth a run at once.", detail=True),
        "unchecked_segments": job.MetricSpec(
            "count", "Segments of indexes that it checks for rows which earlier ones dropped.", detail=True
        ),
        "bytes_compacted": job.MetricSpec("bytes", "Bytes of files that the run wrote.", "run"),
        "conflicts": _CONFLICTS,
    },
    in_maintain=True,
)
SNAPSHOT = job.JobSpec(
    name="snapshot",
    summary="Store the state of all regions for readers.",
    help="""Store a snapshot of all regions of the table at URI in its MemWAL index.

Readers then find the regions without a listing. Merge progress, configuration and index catch-up do not change. Safe to
kill, to run twice, and to run beside mergers and writers.

\b
Examples:
  memwal-ops snapshot s3://bucket/orders.lance
  memwal-ops snapshot orders.lance --dry-run

An LM-DiskANN index folder is copied to DEST, a folder or the URI of a store, and a copy on a store back to a folder:
docs/formats/lm-diskann-operation.md.

Exit codes: 0 built, unchanged or dry_run; 10 a region could not be read (the others are in the snapshot); others:
runbooks/README.md.""",
    options=options.SnapshotOptions,
    load=f"{_JOBS}.snapshot",
    layouts=_WITH_REGIONS,
    after=frozenset({"merge", "catchup", "compact"}),
    enabled=True,
    every=timedelta(minutes=15),
    metrics={
        "snapshot_age": job.MetricSpec("seconds", "Age of the region snapshot.", exported="snapshot_age_seconds"),
        "conflicts": _CONFLICTS,
    },
    in_maintain=True,
)
EXPIRE = job.JobSpec(
    name="expire",
    summary="Delete old versions, and the files that only they need.",
    help="""Delete old base versions of the table at URI that no tag, branch or hold keeps.

A version is deleted if it is older than --older-than AND not one of the newest --keep: first its manifest, then the
files that no other version and no branch refers to. Files that no version refers to at all are deleted after a week.
Generations that only an expired version needed can then be deleted by gc.

A shallow clone elsewhere reads this table's files: tag the version that it was cloned from first.

\b
Examples:
  memwal-ops expire s3://bucket/orders.lance
  memwal-ops expire orders.lance --older-than 30d --apply
  memwal-ops expire orders.lance --keep-at-most 100 --apply
  memwal-ops expire orders.lance --version 41 --apply

Exit codes: 0 planned, nothing_to_expire or expired; 27 some deletions failed; others: runbooks/README.md.""",
    options=options.ExpireOptions,
    load=f"{_JOBS}.expire",
    layouts=_CURRENT,
    pool="collect",
    deletes=True,
    skip_if_blocked=True,
    after=frozenset({"merge", "catchup", "compact", "snapshot"}),
    every=timedelta(hours=6),
    work="bytes_held",
    saves=(job.Saving("bytes_held", "bytes"),),
    objectives={"max_bytes_held": "bytes_held"},
    hung_after=timedelta(hours=2),
    metrics={
        "versions": job.MetricSpec("count", "Base versions that exist.", exported="versions", role="versions"),
        "bytes_held": job.MetricSpec(
            "bytes",
            "Bytes of a plain table's files that its newest version does not need.",
            exported="held_bytes",
            role="held",
        ),
        "bytes_collected": job.MetricSpec("bytes", "Bytes that gc and expire deleted.", "run", "collected_bytes"),
    },
    in_maintain=True,
)
GC = job.JobSpec(
    name="gc",
    summary="Plan the deletion of garbage; with --apply, delete it.",
    help="""Collect the garbage of the table at URI.

That is: merged generations, flushed WAL entries, old region manifests, orphans, old snapshots, and leftovers of killed
commits. Each deletion is proven, or not done: a generation stays while a version, tag, branch, hold or index needs it.
Safe to kill, to run twice, and to run beside writers, readers and all other jobs.

\b
Examples:
  memwal-ops gc s3://bucket/orders.lance
  memwal-ops gc orders.lance --apply --max-deletes 10000

Exit codes: 0 planned, nothing_to_delete, drained or deleted; 10 a region could not be read (all of it was kept); 27
some deletions failed; 28 the table may have been replaced since the plan; others: runbooks/README.md.""",
    options=options.GcOptions,
    load=f"{_JOBS}.gc.job",
    load_by_layout={"legacy": f"{_JOBS}.legacy.gc"},
    pool="collect",
    deletes=True,
    after=frozenset({"merge", "catchup", "compact", "snapshot", "expire"}),
    every=timedelta(hours=1),
    metrics={
        "merged_generations": job.MetricSpec(
            "count",
            "Merged generations that a region manifest still lists, and for which gc does not wait any more.",
            exported="merged_generations",
        ),
        "bytes_collected": job.MetricSpec("bytes", "Bytes that gc and expire deleted.", "run", "collected_bytes"),
        "objects_collected": job.MetricSpec("count", "Objects that gc deleted.", "run", "collected_objects"),
    },
    in_maintain=True,
)
ERASE = job.JobSpec(
    name="erase",
    has_dates=True,
    summary="Delete rows for good, and prove that they are gone.",
    help="""Erase rows of the table at URI: delete them, and remove all that still holds rows which were deleted.

Lance hides deleted rows: they stay in data files, indexes, old versions and the log. The plan names each such place.
With --apply, the living rows are deleted, just the fragments that hold them are rewritten, indexes that may hold them
are built anew, and the versions that do are expired. What grace times do not allow yet is named with its date, and the
next run continues. A tag, a hold or a branch that keeps such rows is named: you must act first.

Safe to kill, to run twice, and to run beside writers, readers and all other jobs.

\b
Examples:
  memwal-ops erase s3://bucket/users.lance --where "user_id = 17"
  memwal-ops erase users.lance --deleted-before 2026-11-01 --apply --certificate proof.json
  memwal-ops erase --check proof.json

Exit codes: 0 planned, waiting, erased or valid; 63 held; 64 the certificate is not valid; others:
runbooks/README.md.""",
    options=options.EraseOptions,
    load=f"{_JOBS}.erase.job",
    load_by_layout={"legacy": f"{_JOBS}.legacy.erase"},
    uri_from="check",
    pool="collect",
    deletes=True,
    every=timedelta(days=1),
    after=frozenset({"merge", "catchup", "compact", "snapshot", "expire", "gc"}),
    hung_after=timedelta(hours=2),
    metrics={
        "rows_deleted": job.MetricSpec("count", "Rows that erase deleted.", "run", "erased_rows"),
        "objects_deleted": job.MetricSpec("count", "Objects that erase deleted.", "run", "erased_objects"),
    },
)
MAINTAIN = job.maintain_job(
    summary="Run all jobs that apply to the table, in their order.",
    help="""Run all jobs that are due on the table at URI: merge, catchup, compact, snapshot, expire, gc.

The first four build and commit; expire and gc delete only with --apply. If a step fails, the other building steps still
run, and nothing is deleted. Safe to kill, to run twice, and to run several times at once.

\b
Examples:
  memwal-ops maintain s3://bucket/orders.lance --dry-run
  memwal-ops maintain orders.lance --apply --budget 45m
  memwal-ops maintain --database /data/lancedb --apply --json

Exit codes: 0 maintained, over_budget or dry_run; otherwise that of the first step that failed.""",
    options=options.MaintainOptions,
    hung_after=timedelta(hours=2),
    metrics={"conflicts": _CONFLICTS},
)
ADOPT = job.JobSpec(
    name="adopt",
    summary="Decide about a region or columns that block a merge.",
    help="""Decide about regions of the table at URI that are blocked by region_replaced, or schema_projection.

A replaced region's id was used before: on a branch or a clone, after a region's folder was removed, or before the
table was overwritten. If the table has merge progress for the old region, --as unmerged moves the generations to a new
region with a new id, seals the old region and fences its writer. Safe to kill and to run twice.

If the versions are gone that would show whether columns are those of unmerged generations, --same-columns lists the
generations and columns and spells out what you would assert; with --apply it records that they are the same.

\b
Examples:
  memwal-ops adopt orders.lance --same-columns
  memwal-ops adopt s3://bucket/orders.lance --as unmerged
  memwal-ops adopt orders.lance --region 0b8f2a1c --as merged --apply

Exit codes: 0 planned, adopted or nothing_to_adopt; others: runbooks/README.md.""",
    options=options.AdoptOptions,
    load=f"{_JOBS}.adopt",
    layouts=_WITH_REGIONS,
    deletes=True,
    by_hand=True,
)
INSPECT = job.read_only_job(
    name="inspect",
    summary="Show a table and its backlog.",
    help="""Show the table at URI: regions, generations, indexes and the backlog. Changes nothing.

\b
Examples:
  memwal-ops inspect s3://bucket/orders.lance
  memwal-ops inspect orders.lance --json

Exit code 0 also if a region is blocked: inspect reports it, and does not fail.""",
    options=options.InspectOptions,
    load=f"{_JOBS}.inspect.job",
    load_by_layout={"legacy": f"{_JOBS}.legacy.inspect"},
    from_export=True,
)
VERIFY = job.verify_job(
    summary="Check the objects of a table; changes nothing.",
    help="""Check the table at URI: files of the newest version, older versions, region manifests, generations, logs,
the MemWAL index, leases and holds. With --answers (and --deep), each index is asked for rows of every fragment, and
compared with a scan (docs/index-answers.md). Each finding names the object, the consequence and the remedy.

\b
Examples:
  memwal-ops verify s3://bucket/orders.lance
  memwal-ops verify orders.lance --deep --json
  memwal-ops verify orders.lance --answers --index by_vector

Exit codes: 0 healthy, or warnings alone; 9 an error was found; others: runbooks/README.md.""",
    options=options.VerifyOptions,
    load=f"{_JOBS}.verify",
    load_by_layout={"legacy": f"{_JOBS}.legacy.verify"},
    after=frozenset({"merge", "catchup", "compact", "snapshot", "expire", "gc", "maintain"}),
    from_export=True,
)
REPAIR = job.repair_job(
    options=RepairOptions,
    help="""Verify the table at URI, and fix each finding that has a provably safe fix: hints, references to merged
generations without files, snapshots that cannot be read, stale catch-up entries, expired leases, transaction files,
versions that a commit of indexes emptied, generations whose log has their rows, gaps in region manifests. For the other
findings it prints the choices that you have, and their consequences. With --accept-loss it also goes on without what
cannot be read any more: the plan prints what that is, in rows and keys as far as they are known.

What is replaced is kept below _mem_wal_ops/quarantine/; --undo ID restores it, unless it was changed since. Safe to
kill, to run twice, and to run beside writers and all other jobs. Without --apply, nothing is changed.

\b
Examples:
  memwal-ops repair s3://bucket/orders.lance
  memwal-ops repair orders.lance --apply
  memwal-ops repair orders.lance --accept-loss

Exit codes: 0 nothing_to_repair, planned, repaired or undone; 9 an error needs your decision; others:
runbooks/README.md.""",
    load=f"{_JOBS}.repair.fixes:JOB",
    load_by_layout={"legacy": f"{_JOBS}.repair.legacy:LEGACY_JOB"},
)
WHY = job.read_only_job(
    name="why",
    summary="Print why an object is kept, or is deletable.",
    help="""Print why a region, a generation or a file of the table at URI is kept, or is deletable. Changes nothing.

Each line is one condition of its deletion: + is met, - is not, with the reason. gc deletes an object that meets all.

\b
Examples:
  memwal-ops why s3://bucket/orders.lance 0b8f2a1c/3
  memwal-ops why orders.lance _versions/18446744073709551610.manifest

Exit codes: 0; 25 the target does not exist; others: runbooks/README.md.""",
    options=options.WhyOptions,
    load=f"{_JOBS}.why",
    load_by_layout={"legacy": f"{_JOBS}.legacy.why"},
)
MIGRATE = job.JobSpec(
    name="migrate",
    summary="Migrate a table to another layout of its MemWAL, or off DynamoDB.",
    help="""Migrate the table at URI to another layout of its MemWAL, or to plain S3. Safe to kill, and to repeat.

A table with the MemWAL index of Lance 0.31 to 1.x: its regions get ids, what is flushed is adopted as generations, the
primary key is marked, and the index is replaced, in one version. MemWALs that are not flushed are replayed from their
logs, or the migration is refused. Their writers are fenced.

A table of a current layout, with --to: its regions of the other layout are fenced, flushed, sealed and merged, and one
version records the layout. Stop their writers before: they cannot continue. No row that was acknowledged as durable is
lost. New writers make regions of their own. See docs/formats/lance.md.

A table at s3+ddb://, with --to s3: DynamoDB refuses every later commit; all versions stay.
See docs/formats/dynamodb.md.

\b
Examples:
  memwal-ops migrate orders.lance --primary-key id
  memwal-ops migrate s3://bucket/orders.lance --to region --apply
  memwal-ops migrate 's3+ddb://bucket/orders.lance?ddbTableName=manifests' --to s3

Exit codes: 0 planned, migrated, rolled_back or nothing_to_migrate; 10 a region blocks it; others:
runbooks/README.md.""",
    options=options.MigrateOptions,
    load=f"{_JOBS}.migrate.job",
    layouts=_WITH_LOG | {"none"},
    load_by_layout={"none": f"{_JOBS}.migrate.store"},
    deletes=True,
    by_hand=True,
)
INIT = job.InitSpec(
    summary="adds a MemWAL index to a Lance table, so that region-layout writers can use it; docs/jobs.md "
    "(Turning MemWAL on) lists what to consider first.",
    options=options.InitOptions,
    load=f"{_JOBS}.init:init",
)
DEMO = DemoSpec(
    "Orders, written by pylance's MemWAL writer.",
    "memwal_ops.formats.lance.jobs.demo.shard:demo",
    {
        "none": "memwal_ops.formats.lance.jobs.demo.plain:demo",
        "shard": "memwal_ops.formats.lance.jobs.demo.shard:demo",
        "region": "memwal_ops.formats.lance.jobs.demo.region:demo",
    },
)
