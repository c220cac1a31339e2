"""The jobs of index folders, as they are registered (pyproject.toml), and their options. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from memwal_ops.core import options
from memwal_ops.core.demo import DemoSpec
from memwal_ops.core.job import InitSpec, JobSpec, MetricSpec, maintain_job, read_only_job, repair_job, verify_job


@dataclass(frozen=True, kw_only=True)
class WaitOptions(options.Options):
    """Options of all jobs that open the store."""

    wait: timedelta = options.duration(
        timedelta(seconds=30), help="How long to wait for another writer or job before exiting as busy."
    )


@dataclass(frozen=True, kw_only=True)
class IndexMergeOptions(WaitOptions):
    """Options of merge."""

    max_bytes: int = options.size(
        64 << 20, minimum=1 << 16, help="Bytes of delta blocks per commit; about the memory used."
    )


@dataclass(frozen=True, kw_only=True)
class IndexCatchupOptions(WaitOptions):
    """Options of catchup."""

    batch: int = options.count(500, minimum=1, metavar="N", help="Deleted nodes per commit.")
    max_rows: int = options.count(100_000, minimum=1, metavar="N", help="Rows of the followed table per commit.")
    rebuild: bool = options.flag(
        help="Compare all rows of the followed table, regardless of its history. Of an index that follows none: build "
        "the graph and its codebook anew."
    )
    build_memory: int = options.size(4 << 30, minimum=1 << 20, help="Memory to build a graph anew in.")


@dataclass(frozen=True, kw_only=True)
class IndexCompactOptions(WaitOptions):
    """Options of compact."""

    max_bytes: int | None = options.size(
        None, minimum=1, shown_default="all",
        help="Begin no commit after moving that many bytes of blocks; the next run continues.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class IndexGcOptions(options.CollectOptions, WaitOptions):
    """Options of gc."""


@dataclass(frozen=True)
class IndexEraseOptions(options.EraseOptions):
    """Options of erase: a folder keeps no times, so no age is too low."""

    minimums = {}  # noqa: RUF012 - as the base class has it


@dataclass(frozen=True, kw_only=True)
class IndexSnapshotOptions(WaitOptions):
    """Options of snapshot."""

    destination: str | None = options.text(
        None,
        positional=True,
        metavar="DEST",
        help="The destination of the copy: a local folder, or the URI of a store.",
    )


@dataclass(frozen=True, kw_only=True)
class IndexWhyOptions(IndexGcOptions):
    """Options of why."""

    target: str = options.text(
        "", positional=True, metavar="PATH", help="The candidate to explain: nodes/17, or a file."
    )


@dataclass(frozen=True, kw_only=True)
class IndexMaintainOptions(options.MaintenanceOptions):
    """Options of maintain."""

    merge: IndexMergeOptions = options.group(IndexMergeOptions, help="Options of merge.")
    catchup: IndexCatchupOptions = options.group(IndexCatchupOptions, help="Options of catchup.")
    compact: IndexCompactOptions = options.group(IndexCompactOptions, help="Options of compact.")
    gc: IndexGcOptions = options.group(IndexGcOptions, help="Options of gc.")


@dataclass(frozen=True, kw_only=True)
class IndexInitOptions(options.Options):
    """Options of init, which cannot be changed later."""

    dimension: int = options.count(128, minimum=1, help="Floats per vector.")
    index_metric: str = options.choice("l2", "l2", "cosine", help="The distance metric.")
    links: int = options.count(
        70, minimum=4, help="R: maximum number of links of a node; fewer than 16 cost recall, 4 up to half of it."
    )
    alpha: float = options.number(
        1.2, minimum=1.0, metavar="X", help="Pruning parameter: a value above 1 also keeps longer links."
    )
    search_list: int = options.count(
        100,
        minimum=1,
        help="L: length of the candidate list of inserts, and the default for searches; many dimensions need more.",
    )
    quantizer: str = options.choice("pq", "pq", "ternary", help="How the vectors of neighbours are compressed.")
    table: str | None = options.text(None, metavar="URI", help="Follow this Lance table: catchup inserts its rows.")
    column: str | None = options.text(
        None, metavar="NAME", help="The column of vectors of --table; gives the dimension."
    )
    key: str | None = options.text(
        None, metavar="NAME", help="The int64 column of --table that identifies rows. Default: stable row ids."
    )

    def validate(self) -> None:
        """Refuse a table without its column, and columns without a table."""
        if (self.table is None) != (self.column is None):
            raise options.OptionError("{table} and {column} are given together, or not at all.", "table", "column")
        if self.key is not None and self.table is None:
            raise options.OptionError("{key} is a column of {table}, which is not given.", "key", "table")


@dataclass(frozen=True, kw_only=True)
class IndexInspectOptions(options.Options):
    """Options of inspect."""


@dataclass(frozen=True, kw_only=True)
class IndexVerifyOptions(options.AnswersOptions, WaitOptions):
    """Options of verify."""

    min_recall: float = options.number(
        0.9, minimum=0, metavar="X", help="Recall of the nearest 10 rows, by distance, below which it is a finding."
    )


_JOBS = "memwal_ops.formats.lm_diskann.jobs"

MERGE = JobSpec(
    name="merge",
    summary="Merge delta blocks into the graph file.",
    help="""Merge the delta blocks of the index folder at URI into its graph.

Batch by batch; each is written to slots that no reader uses, synced, and then committed. Safe to kill and to run
again; readers are not affected. Waits for another writer or job.

Exit codes: 0 merged, nothing_to_merge or dry_run; 10 a delta block is missing or damaged (the others are merged); 57
busy; others: runbooks/README.md.""",
    options=IndexMergeOptions,
    load="memwal_ops.formats.lm_diskann.jobs.merge",
    pool="merge",
    enabled=True,
    every=timedelta(minutes=10),
    when="delta_bytes >= 256MiB or dirty_percent >= 20",
    metrics={
        "delta_blocks": MetricSpec("count", "Delta blocks that are not merged.", role="backlog"),
        "delta_bytes": MetricSpec("bytes", "Bytes of unmerged delta blocks.", exported="backlog_bytes"),
        "dirty_percent": MetricSpec("count", "Percentage of nodes with a delta block."),
        "blocked_parts": MetricSpec(
            "count", "Whether the view, the graph, the store or the followed table cannot be used.", role="blocked"
        ),
        "blocks_merged": MetricSpec("count", "Delta blocks merged.", "run"),
        "bytes_merged": MetricSpec("bytes", "Bytes of the delta blocks merged.", "run", "merged_bytes"),
    },
    in_maintain=True,
)
CATCHUP = JobSpec(
    name="catchup",
    summary="Follow the index's table, and heal the graph around deleted rows.",
    help="""Heal the graph of the index folder at URI: the neighbours of deleted nodes are linked to each other, batch
by batch, and gc can then free their slots. Unreachable nodes are linked again. If the rows became unlike those on which
the codebook was trained, and searches lose some, the graph is built anew.

An index that follows a Lance table (init --table) first gets the rows that were inserted, changed and deleted since the
version that it has. After a restore, an overwrite, or an expiry of versions that it has not read, it is unusable until
--rebuild, which compares all rows; of an index that follows none, it builds the graph anew.

Safe to kill and to run again; readers are not affected. Waits for another writer or job.

\b
Examples:
  memwal-ops catchup vectors.lmd
  memwal-ops catchup vectors.lmd --rebuild

Exit codes: 0 caught_up, unchanged or dry_run; 28 unusable, until it is rebuilt; 57 busy; others:
runbooks/README.md.""",
    options=IndexCatchupOptions,
    load=f"{_JOBS}.catchup",
    after=frozenset({"merge"}),
    enabled=True,
    every=timedelta(hours=1),
    when="unhealed_percent >= 5 or versions_behind >= 1 or code_error_ratio >= 8",
    hung_after=timedelta(hours=1),
    metrics={
        "unhealed_nodes": MetricSpec("count", "Deleted nodes that searches still pass through."),
        "unhealed_percent": MetricSpec("count", "Percentage of nodes that are deleted and not healed."),
        "versions_behind": MetricSpec("count", "Versions of the followed table that the index does not have."),
        "code_error_ratio": MetricSpec(
            "count", "Error of the codes of the rows since the last build, in multiples of those before."
        ),
        "rows_followed": MetricSpec("count", "Rows of the followed table that were inserted or deleted.", "run"),
        "nodes_healed": MetricSpec("count", "Deleted nodes that were removed from the graph.", "run"),
    },
    in_maintain=True,
)
COMPACT = JobSpec(
    name="compact",
    summary="Move blocks into free slots of the graph, so that gc can truncate it.",
    help="""Move blocks from the end of the graph of the index folder at URI into free slots. gc then truncates it.

In batches: each is written to slots that no reader uses, synced, and then committed. Nothing is moved if less than a
twentieth of the slots can be spared. Safe to kill and to run again; readers are not affected. Waits for another writer
or job.

\b
Examples:
  memwal-ops compact vectors.lmd --dry-run
  memwal-ops compact vectors.lmd --max-bytes 1GiB

Exit codes: 0 compacted, unchanged or dry_run; 9 a block is damaged; 57 busy; others: runbooks/README.md.""",
    options=IndexCompactOptions,
    load=f"{_JOBS}.compact",
    after=frozenset({"merge", "catchup"}),
    enabled=True,
    every=timedelta(hours=6),
    when="free_percent >= 10",
    hung_after=timedelta(hours=1),
    metrics={
        "free_percent": MetricSpec("count", "Percentage of the graph's slots that compact and gc can free."),
        "bytes_compacted": MetricSpec("bytes", "Bytes of blocks that compact moved.", "run"),
    },
    in_maintain=True,
)
GC = JobSpec(
    name="gc",
    summary="Plan what can be deleted: healed nodes, the end of the graph, old views; with --apply, delete it.",
    help="""Collect the garbage of the index folder at URI.

That is: deleted nodes that catchup has healed and no reader or hold needs, whose slots become free; free slots, and
what killed runs wrote, at the end of the graph file; views that were replaced, files of views that killed runs left,
and the files of readers whose process has ended. Safe to kill and to run again. Waits for another writer or job.

\b
Examples:
  memwal-ops gc vectors.lmd
  memwal-ops gc vectors.lmd --apply

Exit codes: 0 planned, nothing_to_delete or deleted; 27 some deletions failed; 28 the folder was replaced; 57 busy;
others: runbooks/README.md.""",
    options=IndexGcOptions,
    load=f"{_JOBS}.gc",
    pool="collect",
    deletes=True,
    after=frozenset({"merge", "catchup", "compact"}),
    every=timedelta(hours=1),
    when="healed_nodes >= 10000",
    metrics={
        "healed_nodes": MetricSpec("count", "Deleted nodes that are healed, and whose slots are not free yet."),
        "objects_collected": MetricSpec("count", "Nodes and files that gc deleted.", "run", "collected_objects"),
    },
    in_maintain=True,
)
ERASE = JobSpec(
    name="erase",
    summary="Delete rows for good, and prove that they are gone.",
    help="""Erase rows of the index folder at URI: delete those of --where, an SQL expression over row_id, and remove
all that deleted rows left in the graph, the store and the views. Of an index that follows a table, rows are deleted
there.

A folder keeps no times: with --deleted-before or --within, all that was deleted is erased. A reader or a hold at an
older epoch is named, and must go first. Safe to kill and to run again. Waits for another writer or job.

Exit codes: 0 planned, waiting, erased or valid; 57 busy; 63 held; 64 the certificate is not valid; others:
runbooks/README.md.""",
    options=IndexEraseOptions,
    load=f"{_JOBS}.erase",
    uri_from="check",
    pool="collect",
    deletes=True,
    after=frozenset({"merge", "catchup", "compact", "gc"}),
    every=timedelta(days=1),
    hung_after=timedelta(hours=1),
    metrics={
        "rows_deleted": MetricSpec("count", "Rows that erase deleted.", "run"),
        "objects_deleted": MetricSpec("count", "Objects that erase deleted.", "run"),
    },
)
REPAIR = repair_job(
    options=options.RepairOptions,
    help="""Verify the index folder at URI, and fix each finding that has a provably safe fix.

The published view is made again from the store, if the store has no findings of its own; rows are mapped to nodes
again, if the blocks prove which node has which row; with --deep, nodes to which no path leads are linked again; expired
leases are released.
For the other findings it prints the choices that you have, and their consequences. Waits for another writer or job.

Safe to kill, and to run twice. Without --apply, nothing is changed.

\b
Examples:
  memwal-ops repair vectors.lmd
  memwal-ops repair vectors.lmd --apply

Exit codes: 0 nothing_to_repair, planned or repaired; 9 an error needs your decision; others:
runbooks/README.md.""",
    load=f"{_JOBS}.verify:REPAIR",
)
SNAPSHOT = JobSpec(
    name="snapshot",
    summary="Copy an index folder in use to another folder or a store, or restore it from a store.",
    help="""Copy the index folder at URI to DEST: a local folder, or the URI of a store. A copy on a store is
restored by giving its URI as URI, and a folder as DEST.

The copy has one epoch, and appears when it is complete. Writers wait only while the store is copied. Every
block is checked. Safe to kill and to run again, concurrently with writers, readers and all jobs.

\b
Examples:
  memwal-ops snapshot vectors.lmd s3://bucket/vectors-monday
  memwal-ops snapshot s3://bucket/vectors-monday vectors.lmd

Exit codes: 0 copied, unchanged or dry_run; 9 the index or the copy is damaged; 57 busy; others: runbooks/README.md.""",
    options=IndexSnapshotOptions,
    load=f"{_JOBS}.snapshot",
    by_hand=True,
)
MAINTAIN = maintain_job(summary="Run merge, catchup, compact and gc, in that order.", options=IndexMaintainOptions)
WHY = read_only_job(
    name="why",
    summary="Print why a deleted node or a file is kept, or is deletable.",
    options=IndexWhyOptions,
    load=f"{_JOBS}.gc:Why",
)
INSPECT = read_only_job(
    name="inspect",
    summary="Show an index folder and its backlog.",
    help="Show the index folder at URI: parameters, epochs, rows and the backlog. Changes nothing.",
    options=IndexInspectOptions,
    load=f"{_JOBS}.inspect",
)
VERIFY = verify_job(
    summary="Read every block of an index folder, and check the index for consistency.",
    help="""Check the index folder at URI: checksums of all blocks, the slot map, rows against blocks, links in both
directions, the published view against the store. With --deep also which nodes searches reach, lost slots, and the
recall of a sample of rows, which --answers measures alone. Changes nothing. Waits for another writer or job.

\b
Examples:
  memwal-ops verify vectors.lmd
  memwal-ops verify vectors.lmd --json

Exit codes: 0 healthy, or warnings only; 9 an error was found; 57 busy; others: runbooks/README.md.""",
    options=IndexVerifyOptions,
    load=f"{_JOBS}.verify",
    after=frozenset({"merge", "catchup", "compact", "gc", "maintain"}),
)
INIT = InitSpec(
    summary="creates an empty index folder for vectors of --dimension floats, on a local disk.",
    options=IndexInitOptions,
    load=f"{_JOBS}.init:init",
)
DEMO = DemoSpec("A graph index with unmerged delta blocks.", "memwal_ops.formats.lm_diskann.jobs.init:demo")
