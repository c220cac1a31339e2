"""Read the rows with which a verification compares: group by group, here or on other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow.compute as pc

from memwal_ops.formats.lance.answers.ask import ROWS
from memwal_ops.formats.lance.files.lance_errors import lance_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from memwal_ops.formats.lance.answers.ask import Pinned
    from memwal_ops.formats.lance.table import Table

_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Repeated:
    """Values of a column that should be there once.

    Attributes:
        values: how many are in several rows.
        rows: rows that have these.
        marked: values that are wrong by themselves.
    """

    values: int
    rows: int
    marked: int


class Reader:
    """Reads rows in this process.

    Attributes:
        checkpoint: called between reads; it may raise.
        stages: figures of what other machines did, by name.
    """

    def __init__(self, checkpoint: Callable[[], object] = lambda: None) -> None:
        self.checkpoint = checkpoint
        self.stages: dict[str, Mapping[str, float]] = {}

    def each(
        self,
        pinned: Pinned,
        fragments: Sequence[int],
        work: Callable[[Pinned, Sequence[int]], _R],
        max_rows: int = ROWS,
    ) -> Iterator[_R]:
        """What ``work`` returns for each group of fragments, in their order.

        Args:
            fragments: to be divided into groups.
            work: may be sent to another process, with its result.
            max_rows: in a group of several fragments.
        """
        for group in pinned.chunks([*fragments], max_rows):
            self.checkpoint()
            yield work(pinned, group)

    def repeated_keys(self, table: Table, columns: Sequence[str]) -> Repeated:
        """Keys of several rows; ``marked``: NULLs. Memory: these columns."""
        with lance_errors("read the keys of", table.location.uri):
            keys = table.dataset.to_table(columns=[*columns])
        counts = keys.group_by([*columns]).aggregate([([], "count_all")])["count_all"]
        twice = counts.filter(pc.greater(counts, 1))
        nulls = sum(column.null_count for column in keys.columns)
        return Repeated(len(twice), pc.sum(twice).as_py() or 0, nulls)

    def repeated_row_ids(self, table: Table) -> Repeated:
        """Stable row ids of several rows; ``marked``: those not assigned yet. Memory: 8 bytes for each row."""
        with lance_errors("read the row ids of", table.location.uri):
            ids = np.sort(table.dataset.to_table(columns=[], with_row_id=True)["_rowid"].to_numpy())
        above = int(np.count_nonzero(ids >= table.manifest.manifest.next_row_id))
        again = ids[1:] == ids[:-1]
        values = int(np.count_nonzero(again & ~np.concatenate([[False], again[:-1]]))) if len(again) else 0
        return Repeated(values, values + int(np.count_nonzero(again)), above)
