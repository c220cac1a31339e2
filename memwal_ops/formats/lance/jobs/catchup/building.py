"""Build the segments that bring one index up to a version, and check them before they are published.

Three ways: new rows are added to the index (``update``); a vector index is trained anew, with a number of partitions
that fits its rows (``retrain``); an index of any type is built anew by its own parameters (``rebuild``). In all of them
the segments are stored beside the old ones, which serve until one commit exchanges them.

Spark builds those that can be built by parts, so that several machines share the work. A part is built from rows, never
from a segment that is published: what such a segment still has of rows that were moved or changed would be found again
by a segment merged with it (measured with full-text and label list indexes of tables with stable row ids). So an update
by parts indexes again the fragments of the segments that it replaces.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self
from uuid import UUID

from memwal_ops import errors
from memwal_ops.core.options import EngineChoice, choose_engine
from memwal_ops.formats.lance.commit.index_build import IndexBuild, create_index, discard, update_index
from memwal_ops.formats.lance.engines.merge.rewrite import Figures, IndexParts
from memwal_ops.formats.lance.indexes import index_arguments
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, coverage, covered_by, index_folder, is_nested
from memwal_ops.formats.lance.indexes.codebook import CodebookParameters, read_codebook, rotated_model
from memwal_ops.formats.lance.indexes.index_faults import fault_of, refusal
from memwal_ops.formats.lance.jobs.catchup.tiers import segments_to_merge
from memwal_ops.formats.lance.wire.version_manifest import had_moves, moved_later

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.engines.spark.indexing import SparkBuilder
    from memwal_ops.formats.lance.options import CatchupOptions
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


class Builders:
    """The engines of one run. Spark is started for the first index that it builds.

    ``choices``: by index, the engine that built it last. ``figures``: by index, those of the stages on Spark.
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
        self, table: Table, index: BaseIndex, method: str, arguments: index_arguments.IndexArguments | None
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
        self, table: Table, index: BaseIndex, method: str, arguments: index_arguments.IndexArguments | None = None
    ) -> IndexBuild | None:
        """The segment that Spark built; None: this process is to build it.

        Raises ``SparkUnavailableError``: PySpark, pandas or Java is missing; ``SparkJobFailedError``: nothing was made.
        """
        self.choices[index.name], parts = self.choose(table, index, method, arguments)
        if parts is None:
            return None
        figures = self.figures[index.name] = {}
        if self._spark is None:
            from memwal_ops.formats.lance.engines.spark import indexing  # noqa: PLC0415 - Spark only

            self._spark = self._exit.enter_context(indexing.SparkBuilder(self._options.master, self._context))
        return self._spark.build(table, index.name, parts, figures)


# The scalar types of which pylance builds segments, and merges them.
_SCALAR = frozenset(
    ["BTREE", "BITMAP", "LABEL_LIST", "INVERTED", "NGRAM", "RTREE", "ZONEMAP", "BLOOMFILTER", "MINHASHLSH"]
)
# pylance trains the bounds of scalar quantization by the rows of each segment, takes none as an argument, and merges
# segments with different bounds as if all had those of the first: their rows are not found (recall 0.96 -> 0.48).
_BOUNDS = "SQ"
_ROTATED = "RQ"


def parts_of(
    table: Table,
    index: BaseIndex,
    options: CatchupOptions,
    method: str,
    arguments: index_arguments.IndexArguments | None,
) -> IndexParts | str:
    """The parts by which an index is built; or why it is built by one process, with pylance's own update.

    ``method``: ``update``, ``retrain`` or ``rebuild``. ``arguments``: of a rebuild: how the index is built; with a
    codebook, if it must keep its own. Raises ``UnsupportedFeatureError``: its parameters cannot be read.
    """
    if method == "retrain":
        return "pylance derives the number of partitions when it trains them anew"
    if arguments is None:
        return _updated(table, index, options)
    if not index.is_vector and arguments.kind not in _SCALAR:
        return f"pylance builds no segments of type {index.type}"
    sizes = _sizes(table, table.fragment_ids)
    if not sizes:
        return "the table has no rows"
    parts = IndexParts(arguments, sizes, index.segment_ids)
    if not index.is_vector or "ivf_centroids" in arguments.options:
        return parts
    divisible = not arguments.kind.endswith(_BOUNDS) and arguments.column in table.schema.names
    return replace(parts, trained=divisible, divisible=divisible)


def _updated(table: Table, index: BaseIndex, options: CatchupOptions) -> IndexParts | str:
    if had_moves(table.manifest):
        return "a compaction left it to readers to find moved rows"
    uncovered = coverage(index.covered, table.manifest).uncovered
    if index.is_vector:
        arguments = _with_codebook(table, index)
        if arguments is None:
            return f"pylance takes no trained parameters of type {index.type}"
    else:
        arguments = index_arguments.arguments_like(table, index)
        if arguments.kind not in _SCALAR:
            return f"pylance builds no segments of type {index.type}"
    merged = segments_to_merge(table, index, options)
    replaced = index.segments[len(index.segments) - merged :]
    sizes = _sizes(table, uncovered | covered_by(replaced))
    if not sizes:
        return "none of its rows is left"
    if sum(sizes.values()) > 2 * sum(_sizes(table, uncovered).values()):
        return "most of what it writes is in segments already, which an update reads instead of rows"
    return IndexParts(arguments, sizes, frozenset(UUID(bytes=entry.uuid.uuid) for entry in replaced))


def _with_codebook(table: Table, index: BaseIndex) -> index_arguments.IndexArguments | None:
    """The arguments of a vector index with all that is trained; None: pylance does not take it."""
    if index.type.endswith(_ROTATED):
        model = rotated_model(table.location, index_folder(table, index.segments[-1]), index.name)
        arguments = index_arguments.arguments_like(table, index)
        return None if model is None else arguments.with_options(model)
    try:
        return index_arguments.arguments_like(table, index, trained=True)
    except errors.UnsupportedFeatureError:
        return None


def _sizes(table: Table, fragments: Iterable[int]) -> Mapping[int, int]:
    """Of those fragments that exist, in their order: the bytes of their data files; 1, where none are recorded."""
    chosen = frozenset(fragments)
    return {
        fragment.id: sum(file.file_size_bytes for file in fragment.files) or 1
        for fragment in table.manifest.manifest.fragments
        if fragment.id in chosen
    }


ALWAYS, AUTO, NEVER = "always", "auto", "never"


def method_of(table: Table, index: BaseIndex, options: CatchupOptions) -> str:
    """How the index is built: ``update``, ``retrain`` or ``rebuild``; evidence may change an update into a rebuild.

    One that lacks rows which it claims to cover is built anew, as an update would keep the gap. So is a scalar index
    that is older than a compaction with ``defer_index_remap``: pylance updates nothing of what was moved; and one of a
    nested field of whose fragments none is left (docs/upstream/nested_index_without_rows_fails.py).
    """
    emptied = not index.is_vector and is_nested(index, table.manifest) and index.covered.isdisjoint(table.fragment_ids)
    if options.rebuild or lacks_rows(table, index) or _waits_for_moved_rows(table, index) or emptied:
        return "rebuild"
    retrains = options.retrain == ALWAYS and index.is_vector and not table.log.keeps_codebooks
    return "retrain" if retrains else "update"


def lacks_rows(table: Table, index: BaseIndex) -> bool:
    """Whether an index lacks rows that it claims to cover; read once for a table value."""
    fault = table.once(("fault", index.name), lambda: fault_of(table, index))
    return fault is not None and fault.proven


def _waits_for_moved_rows(table: Table, index: BaseIndex) -> bool:
    waiting = {entry.name for entry in moved_later(table.manifest)}
    return index.name in waiting and not index.is_vector and not coverage(index.covered, table.manifest).complete


def refused(table: Table, index: BaseIndex, options: CatchupOptions, method: str) -> errors.MemwalOpsError | None:
    """The error with which a build by ``method`` would fail before it began; for a plan."""
    try:
        found = refusal(table, index, allow_upgrade=options.allow_upgrade, anew=method != "update")
        if found is None and method == "rebuild":
            rebuild_arguments(table, index)
    except errors.UnsupportedFeatureError as error:
        return error
    return found


def build_segments(
    table: Table, index: BaseIndex, options: CatchupOptions, method: str, builders: Builders
) -> IndexBuild | str:
    """Build by ``method`` (see :func:`method_of`) and check; the decision, if there is nothing to publish.

    Raises ``IndexesBehindError``: pylance must not update the index, or did not; ``CodebookChangedError``: they have
    another codebook than the log has; ``CommitLostError``: another process changes the index; ``MemwalOpsError``.
    """
    if (error := refusal(table, index, allow_upgrade=options.allow_upgrade, anew=method != "update")) is not None:
        raise error
    emptied = index.covered.isdisjoint(table.fragment_ids)
    trained = table.log.keeps_codebooks or (method == "update" and not emptied)
    whole = index_arguments.whole_segments(table, index) if method == "rebuild" else index.segments
    codebooks = frozenset(read_codebook(table, entry) for entry in whole if index.is_vector) if trained else None
    # pylance's update of an index without fragments would train another codebook.
    keeps = method == "update" and emptied and codebooks and _accepts_codebook(table, index)
    if method == "rebuild" or keeps:
        build = _rebuilt(table, index, builders)
    elif (build := builders.build(table, index, method)) is None:
        merge = segments_to_merge(table, index, options)
        build = update_index(table, index.name, merge=merge, retrain=method == "retrain")
    if build is None:
        _refuse_unbuilt(table, index)
        return "unchanged"
    if codebooks is None and not build.covered:  # there are too few rows to train with, and the segment is empty
        discard(table, build)
        return "below_threshold"
    try:
        _check(table, index, build, codebooks)
        if method == "rebuild":
            _check_parameters(table, index, build)
    except errors.MemwalOpsError:
        discard(table, build)
        raise
    return build


def kept_segments(index: BaseIndex, build: IndexBuild) -> list[table_pb2.IndexMetadata]:
    """The segments that the index keeps once the new ones are published."""
    return [entry for entry in index.segments if UUID(bytes=entry.uuid.uuid) not in build.removed]


def covered_after(index: BaseIndex, build: IndexBuild) -> frozenset[int]:
    """The fragments that the index covers once the segments are published."""
    return build.covered | covered_by(kept_segments(index, build))


def _rebuilt(table: Table, index: BaseIndex, builders: Builders) -> IndexBuild | None:
    """Build an index anew by its own parameters; where there is a log, a vector index with its own codebook."""
    arguments = rebuild_arguments(table, index)
    if (build := builders.build(table, index, "rebuild", arguments)) is not None:
        return build
    build = create_index(table, index.name, lambda dataset: arguments.create(dataset, index.name))
    return None if build is None else IndexBuild(build.added, build.removed | index.segment_ids)


def rebuild_arguments(table: Table, index: BaseIndex) -> index_arguments.IndexArguments:
    """How an index is built anew.

    Raises ``UnsupportedFeatureError``: its parameters cannot be read, or pylance does not accept the codebook it keeps.
    """
    if not (table.log.keeps_codebooks and index.is_vector):
        return index_arguments.arguments_like(table, index)
    try:
        return index_arguments.arguments_like(table, index, trained=True)
    except errors.UnsupportedFeatureError as error:
        raise errors.UnsupportedFeatureError(
            f"Index {index.name} cannot be built anew with its codebook, with which distances from the log compare: "
            f"{error}",
            remedy=_migrate(index),
        ) from error


def _migrate(index: BaseIndex) -> str:
    return f"Replace it by a new one: memwal-ops catchup URI --migrate-codebook {index.name} NEW"


def _accepts_codebook(table: Table, index: BaseIndex) -> bool:
    """Whether pylance builds an index of that kind with a codebook that it is given."""
    try:
        index_arguments.arguments_like(table, index, trained=True)
    except errors.UnsupportedFeatureError:
        return False
    return True


def _refuse_unbuilt(table: Table, index: BaseIndex) -> None:
    """Raise if the index is behind although pylance built nothing: it silently skips an index with missing files."""
    covers = coverage(index.covered, table.manifest)
    if covers.uncovered_rows:
        raise errors.IndexesBehindError(
            f"pylance built nothing for index {index.name} and raised no error, although the index does not cover "
            f"{covers.uncovered_rows:,} rows in fragments {sorted(covers.uncovered)}.",
            remedy=f"Its files may be missing or damaged. Build it anew: memwal-ops catchup URI --index {index.name} "
            "--rebuild (runbooks/index-behind.md).",
        )


def _check(table: Table, index: BaseIndex, build: IndexBuild, before: frozenset[CodebookParameters] | None) -> None:
    """Refuse a build that does not cover its version, or has another codebook (``before`` is None: that is allowed)."""
    uncovered = coverage(covered_after(index, build), table.manifest).uncovered
    if uncovered:
        raise errors.InvariantViolatedError(
            f"pylance updated index {index.name}, but it does not cover fragments {sorted(uncovered)}."
        )
    if before is None:
        return
    after = frozenset(read_codebook(table, entry) for entry in build.added) if index.is_vector else frozenset()
    if after - before:
        old, new = (sorted(codebook.partitions for codebook in codebooks) for codebooks in (before, after))
        raise errors.CodebookChangedError(
            f"pylance changed the codebook of index {index.name} (partitions before {old}, after {new}); "
            "that build was not published.",
            remedy=f"Build it anew: memwal-ops catchup URI --index {index.name} --rebuild"
            if not table.log.keeps_codebooks or _accepts_codebook(table, index)
            else _migrate(index),
        )


def _check_parameters(table: Table, index: BaseIndex, build: IndexBuild) -> None:
    """Refuse an index that was built anew by other parameters than the old one has."""
    before = index_arguments.parameters_kept(table, index) or {}
    for entry in build.added:
        after = index_arguments.parameters_of(table, index, entry)
        # Files of older releases lack parameters, of which there was one value alone.
        changed = sorted(name for name, value in before.items() if after.get(name) != value)
        if changed:
            raise errors.UnsupportedFeatureError(
                f"pylance built index {index.name} anew with other parameters ({', '.join(changed)}); that build was "
                "not published.",
                remedy="Create it again yourself, with the parameters that you want: dataset.drop_index(NAME), then "
                "dataset.create_scalar_index(..., name=NAME) or dataset.create_index(..., name=NAME).",
            )
