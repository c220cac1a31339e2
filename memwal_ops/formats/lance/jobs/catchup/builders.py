"""Choose for each index of a run where it is built, and let Spark build those that it builds."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from memwal_ops.core.options import EngineChoice, choose_engine
from memwal_ops.formats.lance.jobs.catchup.dividing import parts_of

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.commit.index_build import IndexBuild
    from memwal_ops.formats.lance.engines.merge.rewrite import Figures, IndexParts
    from memwal_ops.formats.lance.engines.spark.indexing import SparkBuilder
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments
    from memwal_ops.formats.lance.options import CatchupOptions
    from memwal_ops.formats.lance.table import Table


class Builders:
    """The engines of one run. Spark is started for the first index that it builds.

    Attributes:
        choices: by index, the engine that built it last.
        figures: by index, those of the stages on Spark.
    """

    def __init__(self, options: CatchupOptions, context: RunContext) -> None:
        self._options, self._context = options, context
        self._exit = ExitStack()
        self._spark: SparkBuilder | None = None
        self.choices: dict[str, EngineChoice] = {}
        self.figures: dict[str, Figures] = {}

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Stop Spark if this started it."""
        self._exit.close()

    def choose(
        self, table: Table, index: BaseIndex, method: str, arguments: IndexArguments | None
    ) -> tuple[EngineChoice, IndexParts | None]:
        """The engine that builds an index, and the parts for Spark; arguments as :func:`parts_of`."""
        if self._options.engine == "local":
            return EngineChoice("local", "requested"), None
        parts = parts_of(table, index, self._options, method, arguments)
        if isinstance(parts, str):
            return EngineChoice("local", parts), None
        choice = choose_engine(self._options, "data to index", parts.bytes)
        return choice, parts if choice.name == "spark" else None

    def build(
        self, table: Table, index: BaseIndex, method: str, arguments: IndexArguments | None = None
    ) -> IndexBuild | None:
        """The segment that Spark built; None: this process is to build it.

        Raises:
            SparkUnavailableError: PySpark, pandas or Java is missing, here or on the executors.
            SparkJobFailedError: Spark failed; nothing was published.
        """
        self.choices[index.name], parts = self.choose(table, index, method, arguments)
        if parts is None:
            return None
        figures: Figures = {}
        self.figures[index.name] = figures
        return self._builder().build(table, index.name, parts, figures)

    def _builder(self) -> SparkBuilder:
        if self._spark is None:
            from memwal_ops.formats.lance.engines.spark import indexing  # noqa: PLC0415 - Spark only

            self._spark = self._exit.enter_context(indexing.SparkBuilder(self._options.master, self._context))
        return self._spark
