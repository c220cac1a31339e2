"""Build the base table's maintained indexes on a generation (S0-111, S0-135 to S0-139).

A generation's index is used for the same queries as the base's, and both results are merged: so it has the base's name,
type and parameters, and a vector index its centroids and codebook, without training. After the build, its parameters
are compared with the base's; parameters that pylance does not accept as arguments are refused beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import CodebookChangedError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.datasets import open_dataset
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, is_of_key
from memwal_ops.formats.lance.indexes.codebook import Codebook, codebook_at
from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments, arguments_like, without_hints
from memwal_ops.formats.lance.indexes.segment_files import index_folder
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER
from memwal_ops.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    import lance

    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table

_SCALAR = frozenset({"BTREE", "BITMAP", "LABEL_LIST", "NGRAM", "INVERTED", "ZONEMAP"})


@dataclass(frozen=True)
class GenerationIndex:
    """How to build one index on a generation.

    Attributes:
        name: that of the base's index.
        arguments: of pylance's call; with centroids and codebook for a vector index.
        codebook: of the base's index; None for a scalar one.
    """

    name: str
    arguments: IndexArguments
    codebook: Codebook | None

    @property
    def column(self) -> str:
        """Of the base."""
        return self.arguments.column

    def build(self, dataset: lance.LanceDataset) -> None:
        """Build it, and commit it to the generation."""
        self.arguments.create(dataset, self.name)


def generation_indexes(table: Table, *, strict: bool) -> tuple[GenerationIndex, ...]:
    """The indexes of generations: the maintained ones, and that of the key where the base has one.

    Args:
        table: the version that has the configuration, and the codebooks.
        strict: whether one that cannot be built is refused; otherwise it is logged and left out.

    Raises:
        UnsupportedFeatureError: pylance cannot build one like the base's.
    """
    known = base_indexes(table)
    key = [name for name, one in known.items() if is_of_key(table, one)]
    planned = []
    for name in dict.fromkeys([*table.index.maintained_indexes, *key]):
        if name not in known:
            continue  # dropped since: there is no base index to compare it with
        try:
            planned.append(planned_index(table, known[name]))
        except UnsupportedFeatureError as error:
            if strict:
                raise
            get_logger(__name__).warning("index_not_maintained", index=name, reason=str(error))
    return tuple(planned)


def build_indexes(table: Table, folder: str, indexes: Sequence[GenerationIndex]) -> None:
    """Build indexes on the generation at ``folder``, below the table's root, and compare them with the base's.

    Raises:
        CodebookChangedError: one that was built has other parameters than the base's.
        StorageError: pylance or the store failed.
    """
    for one in indexes:
        with lance_errors(f"build index {one.name} on", folder):
            dataset = open_dataset(table.location, folder)
            if one.column not in dataset.schema.names:
                continue  # entries of a writer that began before the column was added
            one.build(dataset)
            (built,) = (made for made in dataset.describe_indices() if made.name == one.name)
            (segment,) = (UUID(str(made.uuid)) for made in built.segments)
        same = without_hints(built.details) == one.arguments.described
        if one.codebook is not None:
            place = f"{table.location.uri}/{folder}/{INDICES_FOLDER}/{segment}"
            same = codebook_at(table.location, place, one.name) == one.codebook
        if not same:
            raise CodebookChangedError(
                f"Index {one.name} of {folder} was not built with the parameters of the base's: results from both "
                "could not be compared.",
                remedy="No generation was published, and the rows are in the region's log. Remove the index from the "
                "maintained ones, and open the region again.",
            )


def planned_index(table: Table, index: BaseIndex) -> GenerationIndex:
    """How to build an index like one of the base's.

    Raises:
        UnsupportedFeatureError: pylance cannot build one like it.
    """
    arguments = arguments_like(table, index, trained=True)
    if not index.is_vector:
        if arguments.kind not in _SCALAR:
            raise UnsupportedFeatureError(f"Index {index.name} is of the type {index.type}, which is not built here.")
        return GenerationIndex(index.name, arguments, None)
    codebook = codebook_at(table.location, index_folder(table, index.segments[-1]), index.name)
    return GenerationIndex(index.name, arguments, codebook)
