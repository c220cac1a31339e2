"""The options of the jobs of Zeppelin namespaces. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from memwal_ops.core.collector import CollectOptions
from memwal_ops.core.erasure import SAFE_AGE
from memwal_ops.core.erasure import EraseOptions as BaseEraseOptions
from memwal_ops.core.maintain import MaintainOptions as BaseMaintainOptions
from memwal_ops.core.options import (
    OptionError,
    Options,
    SafeMinimums,
    choice,
    count,
    duration,
    flag,
    group,
    number,
    size,
    text,
    texts,
)
from memwal_ops.core.verification import AnswersOptions

DEFAULT_MAX_BYTES = 256 << 20
DEFAULT_SPARK_ABOVE = 16 << 30
"""Bytes of vectors above which auto uses Spark: docs/formats/zeppelin.md has the reason."""


def _refuse_master(master: str | None, engine: str) -> None:
    if master is not None and engine == "local":
        raise OptionError("{master} applies to Spark only, and {engine} is local.", "master")


@dataclass(frozen=True)
class MergeOptions(Options):
    """Options of merge."""

    max_bytes: int = size(
        DEFAULT_MAX_BYTES, minimum=1, help="Budget of one pass: bytes of log read, and of rows in memory."
    )
    metric: str | None = choice(
        None, "cosine", "euclidean", "dot_product", help="The metric of a namespace without meta.json."
    )
    retrain: bool = flag(help="Train new centroids.")
    retrain_imbalance_threshold: float = number(
        10.0, minimum=1.0, metavar="X", help="Train new centroids if largest cluster / smallest cluster is above this."
    )
    clusters: int | None = count(None, minimum=1, metavar="N", help="Clusters to train; by default one per 3,000 rows.")
    quantization: str | None = choice(
        None,
        "none",
        "scalar",
        "product",
        help="Additional codes; by default as the last segment's.",
    )
    bitmap_field: tuple[str, ...] = texts(metavar="FIELD", help="Also build a bitmap index of this attribute.")
    fts_field: tuple[str, ...] = texts(metavar="FIELD", help="Also build an inverted index of this attribute.")
    lease_ttl: timedelta = duration(
        timedelta(minutes=5),
        minimum=timedelta(seconds=1),
        maximum=timedelta(days=1),
        help="Time to live of the lease.",
    )
    wait: timedelta = duration(timedelta(0), help="Wait that long while another compactor holds the lease.")
    engine: str = choice(
        "auto",
        "local",
        "spark",
        "auto",
        help="Where rows are assigned and clusters written; auto: by size.",
    )
    master: str | None = text(None, shown_default="configured", help="Spark master URL.")
    spark_above: ClassVar[int] = DEFAULT_SPARK_ABOVE

    def validate(self) -> None:
        """Refuse a Spark master for the local engine."""
        _refuse_master(self.master, self.engine)


@dataclass(frozen=True)
class GcOptions(CollectOptions, SafeMinimums):
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

    reader_grace: timedelta = duration(
        timedelta(minutes=15), help="Readers may use a manifest that long after the next one was published."
    )
    keep_revisions: int | None = count(
        None,
        minimum=1,
        metavar="N",
        help="Keep the objects that the newest N revisions need.",
        shown_default="1; 128 of a native namespace, as its server does",
    )
    orphan_min_age: timedelta = duration(
        timedelta(days=7), help="Delete an unlisted fragment after that; until then its writer may be stalled."
    )


@dataclass(frozen=True)
class EraseOptions(BaseEraseOptions):
    """Options of erase."""

    minimums = {"older_than": (SAFE_AGE, GcOptions.minimums["reader_grace"][1])}  # noqa: RUF012 - see above


@dataclass(frozen=True)
class WhyOptions(GcOptions):
    """Options of why: the target, and the retention periods that gc would use."""

    target: str = text("", positional=True, metavar="PATH", help="The object to explain.")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(AnswersOptions):
    """Options of verify."""

    metric: str | None = choice(
        None, "cosine", "euclidean", "dot_product", help="The metric of a namespace without meta.json."
    )
    retrain_imbalance_threshold: float = number(
        10.0, minimum=1.0, metavar="X", help="Report if largest cluster / smallest cluster is above this."
    )


@dataclass(frozen=True)
class InspectOptions(Options):
    """Options of inspect."""

    limit: int = count(100, minimum=0, metavar="N", help="List at most this many fragments in --json.")


@dataclass(frozen=True)
class MaintainOptions(BaseMaintainOptions):
    """Options of maintain."""

    merge: MergeOptions = group(MergeOptions, help="Options of the merge step.")
    gc: GcOptions = group(GcOptions, help="Options of the gc step.")


@dataclass(frozen=True)
class MigrateOptions(Options):
    """Options of migrate."""

    target: str | None = text(None, positional=True, metavar="TARGET", help="The Lance table to create or to update.")
    engine: str = choice(
        "local",
        "local",
        "spark",
        help="Where rows are read and compared; Spark for namespaces too large for one machine.",
    )
    master: str | None = text(None, shown_default="as configured", help="Spark master URL.")

    def validate(self) -> None:
        """Refuse a Spark master for the local engine."""
        _refuse_master(self.master, self.engine)
