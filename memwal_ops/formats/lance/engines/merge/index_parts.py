"""The interface of engines that build an index by parts, on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.commit.index_build import IndexBuild
    from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments
    from memwal_ops.formats.lance.table import Table

Figures = dict[str, "Mapping[str, float]"]
"""Per stage: seconds, tasks, lost attempts and seconds of executors."""


@dataclass(frozen=True, slots=True)
class IndexParts:
    """A new segment of an index, to be built from the rows of some fragments.

    Attributes:
        arguments: how it is built. If segments are to be merged, with centroids and codebook, or ``trained``.
        sizes: the fragments that it will cover, with the bytes of their data files.
        replaced: the segments that it replaces.
        trained: whether centroids and codebook are trained first, by rows of the whole table, and then shared.
        divisible: whether segments of parts can be merged into one; if not, one task builds it.
    """

    arguments: IndexArguments
    sizes: Mapping[int, int]
    replaced: frozenset[UUID]
    trained: bool = False
    divisible: bool = True

    @property
    def bytes(self) -> int:
        """Size of the data files of the fragments."""
        return sum(self.sizes.values())


class PartsBuilder(Protocol):
    """Builds indexes by parts."""

    def build(self, table: Table, name: str, parts: IndexParts, figures: Figures) -> IndexBuild:
        """The segment, not published, and what it replaces.

        Args:
            figures: what is added of each stage.
        """
