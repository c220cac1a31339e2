"""The options of the jobs of an index folder."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from memwal_ops.core.collector import CollectOptions
from memwal_ops.core.erasure import EraseOptions as BaseEraseOptions
from memwal_ops.core.maintain import MaintainOptions as BaseMaintainOptions
from memwal_ops.core.options import OptionError, Options, choice, count, duration, flag, group, number, size, text
from memwal_ops.core.verification import AnswersOptions


@dataclass(frozen=True, kw_only=True)
class WaitOptions(Options):
    """Options of all jobs that open the store."""

    wait: timedelta = duration(
        timedelta(seconds=30), help="How long to wait for another writer or job before exiting as busy."
    )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(WaitOptions):
    """Options of merge."""

    max_bytes: int = size(64 << 20, minimum=1 << 16, help="Bytes of delta blocks per commit; about the memory used.")


@dataclass(frozen=True, kw_only=True)
class CatchupOptions(WaitOptions):
    """Options of catchup."""

    batch: int = count(500, minimum=1, metavar="N", help="Deleted nodes per commit.")
    max_rows: int = count(100_000, minimum=1, metavar="N", help="Rows of the followed table per commit.")
    rebuild: bool = flag(
        help="Compare all rows of the followed table, regardless of its history. Of an index that follows none: build "
        "the graph and its codebook anew."
    )
    build_memory: int = size(4 << 30, minimum=1 << 20, help="Memory to build a graph anew in.")


@dataclass(frozen=True, kw_only=True)
class CompactOptions(WaitOptions):
    """Options of compact."""

    max_bytes: int | None = size(
        None, minimum=1, shown_default="all",
        help="Begin no commit after moving that many bytes of blocks; the next run continues.",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GcOptions(CollectOptions, WaitOptions):
    """Options of gc."""


@dataclass(frozen=True)
class EraseOptions(BaseEraseOptions):
    """Options of erase: a folder keeps no times, so no age is too low."""

    minimums = {}  # noqa: RUF012 - as the base class has it


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions(WaitOptions):
    """Options of snapshot."""

    destination: str | None = text(
        None,
        positional=True,
        metavar="DEST",
        help="The destination of the copy: a local folder, or the URI of a store.",
    )


@dataclass(frozen=True, kw_only=True)
class WhyOptions(GcOptions):
    """Options of why."""

    target: str = text("", positional=True, metavar="PATH", help="The candidate to explain: nodes/17, or a file.")


@dataclass(frozen=True, kw_only=True)
class MaintainOptions(BaseMaintainOptions):
    """Options of maintain."""

    merge: MergeOptions = group(MergeOptions, help="Options of merge.")
    catchup: CatchupOptions = group(CatchupOptions, help="Options of catchup.")
    compact: CompactOptions = group(CompactOptions, help="Options of compact.")
    gc: GcOptions = group(GcOptions, help="Options of gc.")


@dataclass(frozen=True, kw_only=True)
class InitOptions(Options):
    """Options of init, which cannot be changed later."""

    dimension: int = count(128, minimum=1, help="Floats per vector.")
    index_metric: str = choice("l2", "l2", "cosine", help="The distance metric.")
    links: int = count(
        70, minimum=4, help="R: maximum number of links of a node; fewer than 16 cost recall, 4 up to half of it."
    )
    alpha: float = number(
        1.2, minimum=1.0, metavar="X", help="Pruning parameter: a value above 1 also keeps longer links."
    )
    search_list: int = count(
        100,
        minimum=1,
        help="L: length of the candidate list of inserts, and the default for searches; many dimensions need more.",
    )
    quantizer: str = choice("pq", "pq", "ternary", help="How the vectors of neighbours are compressed.")
    table: str | None = text(None, metavar="URI", help="Follow this Lance table: catchup inserts its rows.")
    column: str | None = text(None, metavar="NAME", help="The column of vectors of --table; gives the dimension.")
    key: str | None = text(
        None, metavar="NAME", help="The int64 column of --table that identifies rows. Default: stable row ids."
    )

    def validate(self) -> None:
        """Refuse a table without its column, and columns without a table."""
        if (self.table is None) != (self.column is None):
            raise OptionError("{table} and {column} are given together, or not at all.", "table", "column")
        if self.key is not None and self.table is None:
            raise OptionError("{key} is a column of {table}, which is not given.", "key", "table")


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """Options of inspect."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(AnswersOptions, WaitOptions):
    """Options of verify."""

    min_recall: float = number(
        0.9, minimum=0, metavar="X", help="Recall of the nearest 10 rows, by distance, below which it is a finding."
    )
