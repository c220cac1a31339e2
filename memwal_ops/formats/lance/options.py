"""The options of the jobs of Lance tables, with their units, bounds and help. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

from memwal_ops.core import options

DEFAULT_MAX_BYTES = 1 << 30
"""Budget of one pass of the local engine, in bytes; its memory follows it."""
SPARK_MAX_BYTES = 1 << 40
"""The same for Spark, whose memory per executor follows the size of a generation instead."""
DEFAULT_SPARK_ABOVE = 64 << 30
# Of the processor seconds of a vector index as large, a session and a build on it add a tenth (docs/spark.md).
SPARK_ABOVE_OF_INDEXES = 32 << 30
"""Backlog, or data to index, rewrite or check, above which ``auto`` selects Spark; below, one machine is faster."""
DEFAULT_TARGET_ROWS = 1 << 20
DEFAULT_TARGET_BYTES = 1 << 30
DEFAULT_DELETED_FRACTION = 0.19
"""So that a fragment of which a fifth is deleted is rewritten: 4 bytes for each that is deleted."""
DEFAULT_INSPECT_LIMIT = 1000


@dataclass(frozen=True, kw_only=True)
class LegacyOptions(options.Options):
    """What only the user knows of a legacy table, with the MemWAL index of Lance 0.31 to 1.x."""

    primary_key: tuple[str, ...] = options.texts(
        help="A key column of a table that marks none (repeatable).", flag="--primary-key", metavar="COLUMN"
    )
    flushed_means: str | None = options.choice(
        None, "merged", "unmerged", help="Meaning of FLUSHED if the release is unknown."
    )
    mem_table: str | None = options.text(
        None, metavar="URI", help="Flushed MemTables, if moved: see docs/legacy-memwal.md."
    )
    wal_reader: str | None = options.text(
        None, metavar="MODULE:NAME", shown_default="Lance and Arrow files", help="Reader of a log."
    )
    restore: bool = options.flag(help="First restore rows that MemWAL commits dropped.")

    def given(self) -> tuple[str, ...]:
        """The names of those that differ from their defaults."""
        return tuple(field.name for field in fields(LegacyOptions) if getattr(self, field.name) != field.default)

    def refuse_legacy(self) -> None:
        """Raise ``OptionError`` where one is given: the table is of another layout."""
        if names := self.given():
            listed = ", ".join(f"{{{name}}}" for name in names)
            raise options.OptionError(
                f"{listed} applies only to tables with the legacy MemWAL index; this table has the current one.", *names
            )


@dataclass(frozen=True)
class MigrateOptions(LegacyOptions):
    """Options of migrate."""

    to: str | None = options.choice(
        None,
        "shard",
        "region",
        "s3",
        help="The layout: shard is pylance's own, region that of the specification; or s3, off DynamoDB.",
        shown_default="shard for a legacy table; else none",
    )
    rollback: bool = options.flag(help="Restore the previous layout; a legacy index only while no region was written.")

    def validate(self) -> None:
        """Refuse a rollback with other options."""
        if self.rollback and self.given():
            raise options.OptionError("{rollback} takes no other options.", "rollback")

    @property
    def layout(self) -> str:
        """The layout that a legacy table is migrated to."""
        return self.to or "shard"


def _engine(what: str) -> Any:
    return options.choice("local", "local", "spark", "auto", help=f"Where {what}; auto: by size.")


def _master() -> Any:
    return options.text(None, shown_default="configured", help="Spark master URL.")


_AT_REST = "Idle for so long, join more; 0s: now."


def _answers(what: str) -> Any:
    return options.choice("sample", "off", "sample", "strict", help=what)


def _refuse_master(master: str | None, engine: str) -> None:
    if master is not None and engine == "local":
        raise options.OptionError("{master} applies to Spark only, and {engine} is local.", "master")


@dataclass(frozen=True)
class MergeOptions(LegacyOptions):
    """Options of merge."""

    regions: tuple[UUID | str, ...] = options.parts(
        help="Only this region, by id or a prefix of 8 (repeatable).", flag="--region", metavar="ID"
    )
    engine: str = options.choice(
        "auto",
        "local",
        "spark",
        "auto",
        help="Where the merge runs; auto selects Spark for a backlog above --spark-above, if Spark can run.",
    )
    max_bytes: int | None = options.size(
        None,
        minimum=1,
        shown_default="1GiB; on Spark 1TiB",
        help="Budget of a pass; it bounds local memory.",
    )
    max_generations: int | None = options.count(None, minimum=1, help="At most this many generations in one pass.")
    accept_drained: bool = options.flag(help="Do as adopt --drained does, each time.")
    master: str | None = _master()
    spark_above: int = options.size(DEFAULT_SPARK_ABOVE, minimum=0, help="Backlog above which auto uses Spark.")

    def validate(self) -> None:
        """Refuse a Spark master for the local engine."""
        _refuse_master(self.master, self.engine)


@dataclass(frozen=True)
class CatchupOptions(options.Options):
    """Options of catchup."""

    indexes: tuple[str, ...] = options.texts(help="Only this index (repeatable).", flag="--index", metavar="NAME")
    min_uncovered_rows: int = options.count(0, minimum=0, help="Skip one that is behind by fewer rows.")
    max_bytes: int | None = options.size(
        None,
        minimum=1,
        help="Build no more indexes once they have that size, but one in any case; the next run continues.",
        shown_default="all",
    )
    max_segments: int = options.count(8, minimum=1, help="Merge segments of an index that has more.")
    tier_factor: int = options.count(4, minimum=1, metavar="N", help="Merge segments that grow N-fold; 1: all.")
    retrain_imbalance_threshold: float = options.number(
        20.0,
        minimum=1,
        help="Report an IVF index whose largest partition has N times the rows of its smallest (S4-038).",
    )
    retrain: str = options.choice(
        "never",
        "auto",
        "never",
        "always",
        bare="always",
        help="Plain tables: train new centroids; auto: if appended rows are found less well. Without a value: always.",
    )
    rebuild: bool = options.flag(help="Build all, or those of --index, anew; with a log, by its codebook.")
    answers: str = _answers("Publish no index that answers worse than before; strict: more queries, no tolerance.")
    engine: str = _engine("it runs")
    master: str | None = _master()
    spark_above: ClassVar[int] = SPARK_ABOVE_OF_INDEXES
    allow_upgrade: bool = options.flag(help="Let an index get a version its last writers do not maintain.")
    migrate_codebook: tuple[str, ...] = options.texts(
        values=2, metavar="OLD NEW", help="Next step of replacing index OLD by NEW (new centroids)."
    )
    rest_after: timedelta = options.duration(timedelta(days=1), help=_AT_REST)

    def validate(self) -> None:
        """Refuse two ways to new centroids at once."""
        _refuse_master(self.master, self.engine)
        retrains = self.retrain == "always"
        if self.rebuild and (retrains or self.migrate_codebook):
            other = "retrain" if retrains else "migrate_codebook"
            raise options.OptionError(f"{{rebuild}} and {{{other}}} exclude each other.", "rebuild", other)
        if retrains and self.migrate_codebook:
            raise options.OptionError(
                "{retrain} and {migrate_codebook} exclude each other.", "retrain", "migrate_codebook"
            )

    def validate_repeated(self) -> None:
        """Refuse to build all indexes anew in each run."""
        if self.rebuild and not self.indexes:
            raise options.OptionError(
                "{rebuild} builds all indexes anew in each run of a service; name those by {indexes}, too.",
                "rebuild",
                remedy="Give {indexes}, or build them once by hand: memwal-ops catchup URI --rebuild.",
            )


@dataclass(frozen=True)
class EraseOptions(options.EraseOptions):
    """Options of erase: a record in the table alone changes no folder of this machine."""

    followers: tuple[str, ...] = options.texts(
        help="Erase this index folder, too, which follows the table (repeatable).", flag="--follower", metavar="FOLDER"
    )


@dataclass(frozen=True)
class CompactOptions(options.Options):
    """Options of compact."""

    target_rows: int | None = options.count(
        None,
        minimum=1,
        shown_default=f"the table's setting, else {DEFAULT_TARGET_ROWS}",
        help="Target rows of a fragment; smaller neighbors are joined.",
    )
    target_bytes: int | None = options.size(
        None, minimum=1, shown_default="the table's, else 1GiB", help="Its target size."
    )
    tier_factor: int = options.count(
        4,
        minimum=1,
        metavar="N",
        help="Join neighbors once the result is N times the largest of them; 1: all below the target.",
    )
    deleted_fraction: float | None = options.number(
        None,
        minimum=0.0,
        maximum=1.0,
        shown_default=f"the table's setting, else {DEFAULT_DELETED_FRACTION}",
        help="Rewrite fragments of which more is deleted.",
    )
    max_bytes: int | None = options.size(
        None,
        minimum=1,
        help="Rewrite files of that size at most, but one group of them in any case; the next run continues.",
        shown_default="all",
    )
    engine: str = _engine("it runs")
    master: str | None = _master()
    spark_above: ClassVar[int] = DEFAULT_SPARK_ABOVE
    storage_version: str | None = options.choice(
        None, "2.0", "2.1", "2.2", shown_default="the table's setting", help="Of new data files."
    )
    allow_upgrade: bool = options.flag(help="Though a writer of the table cannot read such files.")
    answers: str = _answers("Publish no index that answers worse.")
    rest_after: timedelta = options.duration(timedelta(days=1), help=_AT_REST)

    def validate(self) -> None:
        """Refuse a Spark master for the local engine."""
        _refuse_master(self.master, self.engine)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(options.AnswersOptions):
    """Options of verify."""

    engine: str = _engine("--deep and --answers read rows")
    master: str | None = _master()
    spark_above: ClassVar[int] = DEFAULT_SPARK_ABOVE

    @property
    def reads_rows(self) -> bool:
        """Whether there is anything to do for Spark."""
        return self.deep or self.asks

    def validate(self) -> None:
        """Refuse Spark where nothing runs on it."""
        super().validate()
        _refuse_master(self.master, self.engine)
        if self.engine == "spark" and not self.reads_rows:
            raise options.OptionError(
                "{engine} spark reads rows, and without {deep} or {answers} none are read.", "engine", "deep", "answers"
            )


@dataclass(frozen=True)
class SnapshotOptions(options.Options):
    """Options of snapshot."""

    inline_threshold: int = options.count(
        100, minimum=0, help="Up to this many regions, store the rows inside the index; else in a file (S0-104)."
    )


@dataclass(frozen=True)
class ExpireOptions(options.SafeMinimums):
    """Options of expire."""

    minimums = {"older_than": (options.SAFE_AGE, options.EXPIRED_TOO_EARLY)}  # noqa: RUF012 - as the base class has it

    older_than: timedelta = options.duration(
        timedelta(days=7), help="Expire only versions that were published at least this long ago."
    )
    keep: int = options.count(1, minimum=1, help="Keep the newest N versions, at any age.", metavar="N")
    keep_at_most: int | None = options.count(
        None,
        minimum=1,
        metavar="N",
        help="Keep the newest N versions, at any age, and expire the others when they are an hour old, or as old as a "
        "lower --older-than; without it, versions expire by age alone.",
    )
    version: int | None = options.count(
        None,
        minimum=1,
        metavar="N",
        help="Expire this version alone, if it is an hour old; refused if it is the newest, or something needs it.",
    )

    @property
    def newest(self) -> int:
        """How many of the newest versions are kept at any age."""
        return self.keep if self.keep_at_most is None else self.keep_at_most

    @property
    def age(self) -> timedelta:
        """The age below which a version is kept."""
        by_age = self.keep_at_most is None and self.version is None
        return self.older_than if by_age else min(self.older_than, options.SAFE_AGE)

    def validate(self) -> None:
        """Refuse bounds that contradict each other."""
        super().validate()
        if self.keep_at_most is not None and self.keep_at_most < self.keep:
            raise options.OptionError(
                f"{{keep_at_most}} must be at least {{keep}}, {self.keep}, not {self.keep_at_most}.",
                "keep_at_most",
                "keep",
            )
        if self.keep_at_most is not None and self.version is not None:
            raise options.OptionError(
                "{version} names the only version to expire: give no {keep_at_most}.", "keep_at_most"
            )


@dataclass(frozen=True)
class RetentionOptions(options.SafeMinimums):
    """The retention periods on which the gates of gc depend."""

    minimums = {  # noqa: RUF012 - as the base class has it
        "reader_grace": (
            timedelta(minutes=1),
            "a reader reads the manifest, a merge commits, the generation is collected, and the reader, which then "
            "opens it, fails or misses its rows.",
        ),
        "orphan_min_age": (
            timedelta(hours=1),
            "a writer has written a generation's files, they are collected as an orphan, and the writer publishes a "
            "generation that does not exist.",
        ),
        "manifest_retention": (
            2,
            "a reader reads version N from the hint, a writer publishes N+1, N is collected, and the reader finds no "
            "version at all.",
        ),
        "fence_retention": (
            timedelta(days=1),
            "a writer stalls, two others claim the region, the entry at its position is collected, and the writer "
            "resumes: its next write is acknowledged and lost.",
        ),
        "drain_after": (
            timedelta(days=1),
            "a process opens the table and keeps that version, as lancedb's handles do by default, a generation is "
            "merged and taken off its region's list, and the process reads without its rows, and without an error.",
        ),
    }

    reader_grace: timedelta = options.duration(
        timedelta(minutes=15), help="How long a reader may use a region manifest after it read it."
    )
    orphan_min_age: timedelta = options.duration(timedelta(days=3), help="How long a flush or a commit may take.")
    manifest_retention: int = options.count(
        20, minimum=1, help="How many of each region's newest manifest versions to keep."
    )
    fence_retention: timedelta = options.duration(
        timedelta(days=30), help="How long a fenced writer may stall and then write again."
    )
    drain_after: timedelta = options.duration(
        timedelta(days=30),
        help="How long a reader may keep a version open while it reads region manifests anew, as lancedb's handles do: "
        "a merged generation stays on its region's list as long.",
    )


@dataclass(frozen=True)
class GcOptions(options.CollectOptions, RetentionOptions):
    """Options of gc."""


@dataclass(frozen=True)
class AdoptOptions(options.Options):
    """Options of adopt: an operator's decision."""

    answer: str | None = options.choice(
        None,
        "merged",
        "unmerged",
        flag="--as",
        help="merged: the base table has the generations, as its progress records. unmerged: merge them all.",
    )
    regions: tuple[UUID | str, ...] = options.parts(
        help="Only this region, by its id or the first 8 characters or more (repeatable).  [default: all blocked]",
        flag="--region",
        metavar="ID",
    )
    up_to: int | None = options.count(
        None,
        minimum=1,
        metavar="N",
        help="With --as merged and one --region: the base table has its generations up to N, although the table has no "
        "such progress.",
    )
    same_columns: bool = options.flag(
        help="The columns of generations blocked by schema_projection are those of the base, as the plan spells out."
    )
    moved: bool = options.flag(
        help="The table was copied or moved: generations that name its old path name this table."
    )
    drained: bool = options.flag(
        help="Another program merged the generations that it dropped, as drained_elsewhere reports."
    )

    def validate(self) -> None:
        """Refuse two decisions at once."""
        if self.moved and (self.answer is not None or self.same_columns):
            raise options.OptionError(
                "{moved} excludes {answer} and {same_columns}.", "moved", "answer", "same_columns"
            )
        if self.drained and (self.answer is not None or self.same_columns or self.moved):
            raise options.OptionError("{drained} is a decision of its own, without {answer}.", "drained", "answer")
        if self.up_to is not None and (self.answer != "merged" or len(self.regions) != 1):
            raise options.OptionError("{up_to} is for {answer} merged and one region.", "up_to", "answer", "regions")
        if self.same_columns and self.answer is not None:
            raise options.OptionError("{same_columns} and {answer} exclude each other.", "same_columns", "answer")
        if self.same_columns and self.regions:
            raise options.OptionError(
                "{same_columns} is about all regions, without {regions}.", "same_columns", "regions"
            )


@dataclass(frozen=True)
class InspectOptions(options.Options):
    """Options of inspect."""

    limit: int = options.count(
        DEFAULT_INSPECT_LIMIT, minimum=0, metavar="N", help="List at most this many generations, and this many strays."
    )
    stale: timedelta = options.duration(
        timedelta(days=30), help="Report what a branch holds that nobody wrote to for so long."
    )


@dataclass(frozen=True)
class WhyOptions(RetentionOptions):
    """Options of why: the target, and the retention periods that gc would use."""

    target: str = options.text(
        "", positional=True, metavar="PATH_OR_REGION[/GENERATION]", help="The object to explain."
    )


@dataclass(frozen=True)
class MaintainOptions(options.MaintenanceOptions):
    """Options of maintain."""

    merge: MergeOptions = options.group(MergeOptions, "max_bytes", help="Options of merge.")
    catchup: CatchupOptions = options.group(CatchupOptions, help="Options of catchup.")
    compact: CompactOptions = options.group(CompactOptions, help="Options of compact.")
    snapshot: SnapshotOptions = options.group(SnapshotOptions, "inline_threshold", help="Options of snapshot.")
    expire: ExpireOptions = options.group(
        ExpireOptions, "older_than", "keep", "keep_at_most", "allow_unsafe", help="Options of expire."
    )
    gc: GcOptions = options.group(
        GcOptions,
        "reader_grace",
        "orphan_min_age",
        "manifest_retention",
        "fence_retention",
        "drain_after",
        "max_deletes",
        "allow_unsafe",
        help="Options of gc.",
    )


@dataclass(frozen=True)
class InitOptions(options.Options):
    """Options of init: key, region specs, maintained indexes."""

    primary_key: tuple[str, ...] = options.texts(
        help="First mark this column as the primary key (repeatable, in order). It is set once and for all; each value "
        "must be there once, and none NULL.",
        flag="--primary-key",
        metavar="COLUMN",
    )
    region_fields: tuple[str, ...] = options.texts(
        help="How rows are routed to regions, for example 'bucket(id, 16)'; several make one spec. Without it, "
        "writers choose their regions. An expression is given as JSON: field_id, sources, expression, result_type.",
        flag="--region-field",
        metavar="FIELD",
    )
    maintained_indexes: tuple[str, ...] = options.texts(
        help="A base index that writers maintain for rows that are not merged yet (repeatable).",
        flag="--maintained-index",
        metavar="NAME",
    )
