"""What is built of an index by parts, on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments

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
