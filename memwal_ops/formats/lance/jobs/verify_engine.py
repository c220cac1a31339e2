"""Choose where a verification reads rows, and report it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.core.engine_choice import EngineChoice, choose_engine
from memwal_ops.core.export import exported_store
from memwal_ops.core.verification import VerifyReport
from memwal_ops.formats.lance.answers.reading import Reader
from memwal_ops.formats.lance.options import VerifyOptions
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.verification import VerifyOptions as AnyVerifyOptions
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True)
class LanceVerifyReport(VerifyReport):
    """The report for a Lance table.

    Attributes:
        engine: which read rows, and why; None: none were to be read.
        stages: of Spark: by name, seconds, tasks, lost attempts and seconds of executors.
    """

    engine: EngineChoice | None = None
    stages: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document of ``verify --json``."""
        return super().to_json() | {
            "engine": None if self.engine is None else self.engine.name,
            "engine_reason": None if self.engine is None else self.engine.reason,
            "stages": {name: dict(figures) for name, figures in self.stages.items()},
        }

    def describe(self) -> str:
        """The report as human-readable text."""
        if self.engine is None or (self.engine.name == "local" and self.engine.reason == "requested"):
            return super().describe()
        took = "".join(
            f" {name}: {counted(int(one['tasks']), 'task')} in {one['seconds']:.1f} s."
            for name, one in self.stages.items()
        )
        engine = f"Engine: {self.engine.name} ({self.engine.reason.removesuffix('.')}).{took}"
        return "\n".join([super().describe(), "", paragraph(engine, hanging="  ")])


@contextmanager
def reader_of(
    table: Table, options: AnyVerifyOptions, context: RunContext
) -> Iterator[tuple[Reader, EngineChoice | None]]:
    """What reads rows; Spark is started with the first that it reads."""
    if not isinstance(options, VerifyOptions) or not options.reads_rows or exported_store(table) is not None:
        yield Reader(context.checkpoint), None
        return
    choice = choose_engine(options, "data to check", _size(table, options))
    if choice.name != "spark":
        yield Reader(context.checkpoint), choice
        return
    from memwal_ops.formats.lance.answers.reading_on_spark import SparkReader  # noqa: PLC0415 - Spark only
    from memwal_ops.formats.lance.engines.spark.runner import TaskRunner  # noqa: PLC0415

    with TaskRunner(options.master, context, "memwal-ops verify") as runner:
        yield SparkReader(table, runner, context.checkpoint), choice


def _size(table: Table, options: VerifyOptions) -> int:
    """Bytes of the data files, and of these at most what the indexes are asked for, if that is all."""
    size = sum(file.file_size_bytes for one in table.manifest.manifest.fragments for file in one.files)
    return size if options.deep else min(size, options.max_bytes)
