"""Decide whether an index can be built by parts, and of which fragments, so that several machines share the work.

A part is built from rows, never from a segment that is published: what such a segment still has of rows that were
moved or changed would be found again by a segment merged with it (measured with full-text and label list indexes of
tables with stable row ids). So an update by parts indexes again the fragments of the segments that it replaces.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.engines.merge.rewrite import IndexParts
from memwal_ops.formats.lance.indexes.base_indexes import coverage, covered_by, index_folder
from memwal_ops.formats.lance.indexes.codebook import rotated_model
from memwal_ops.formats.lance.indexes.index_arguments import arguments_like
from memwal_ops.formats.lance.jobs.catchup.tiers import segments_to_merge
from memwal_ops.formats.lance.wire.version_manifest import had_moves

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments
    from memwal_ops.formats.lance.options import CatchupOptions
    from memwal_ops.formats.lance.table import Table

# The scalar types of which pylance builds segments, and merges them.
_SCALAR = frozenset(
    {"BTREE", "BITMAP", "LABEL_LIST", "INVERTED", "NGRAM", "RTREE", "ZONEMAP", "BLOOMFILTER", "MINHASHLSH"}
)
# pylance trains the bounds of scalar quantization by the rows of each segment, takes none as an argument, and merges
# segments with different bounds as if all had those of the first: their rows are not found (recall 0.96 -> 0.48).
_BOUNDS = "SQ"
_ROTATED = "RQ"


def parts_of(
    table: Table, index: BaseIndex, options: CatchupOptions, method: str, arguments: IndexArguments | None
) -> IndexParts | str:
    """The parts by which an index is built; or why it is built by one process, with pylance's own update.

    Args:
        table: the version to build on.
        index: the index.
        options: of the run.
        method: ``update``, ``retrain`` or ``rebuild``.
        arguments: of a rebuild: how the index is built; with a codebook, if it must keep its own.

    Raises:
        UnsupportedFeatureError: its parameters cannot be read.
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
        arguments = arguments_like(table, index)
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


def _with_codebook(table: Table, index: BaseIndex) -> IndexArguments | None:
    """The arguments of a vector index with all that is trained; None: pylance does not take it."""
    if index.type.endswith(_ROTATED):
        model = rotated_model(table.location, index_folder(table, index.segments[-1]), index.name)
        arguments = arguments_like(table, index)
        return None if model is None else arguments.with_options(model)
    try:
        return arguments_like(table, index, trained=True)
    except UnsupportedFeatureError:
        return None


def _sizes(table: Table, fragments: Iterable[int]) -> Mapping[int, int]:
    """Of those fragments that exist, in their order: the bytes of their data files; 1, where none are recorded."""
    chosen = frozenset(fragments)
    return {
        one.id: sum(file.file_size_bytes for file in one.files) or 1
        for one in table.manifest.manifest.fragments
        if one.id in chosen
    }
