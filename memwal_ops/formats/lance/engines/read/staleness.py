"""Determine which candidates of a search were written again or deleted since (S0-205, S0-217)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops.formats.lance.engines.merge.joins import with_keys
from memwal_ops.formats.lance.engines.read.take_last import last_keys
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS
from memwal_ops.formats.lance.generations.projection import TOMBSTONE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.engines.read.opened import Opened
    from memwal_ops.formats.lance.engines.read.unmerged import RegionRead, Unmerged
    from memwal_ops.formats.lance.generations.generation import Generation

_NUMBER = "__memwal_ops_number"


class Staleness:
    """Finds rows that were replaced. Bloom filters show which generations may have a newer row of a key.

    A filter has false positives for 1 key in 1,754: with 20 generations, dropping all its hits would drop one of a
    hundred live rows. So each hit is looked up, which makes the result exact.
    """

    def __init__(self, unmerged: Unmerged, opened: Opened) -> None:
        """Read the filters of all generations that are not merged."""
        self._table, self._opened = unmerged.table, opened
        self._regions = unmerged.regions
        refs = [ref for region in unmerged.regions for ref in region.flushed]
        self._filters = dict(zip(refs, opened.filters(self._table, refs), strict=True))

    def of_base(self, found: pa.Table) -> NDArray[np.bool_]:
        """Per row of the base whether a region has its key."""
        return self._written(found, [(region, 0) for region in self._regions])

    def of_generation(self, found: pa.Table, region: RegionRead, generation: Generation) -> NDArray[np.bool_]:
        """Per row of a generation, with ``_rowaddr``, whether it is not its key's newest one, or is a tombstone."""
        stale = self._written(found, [(region, generation.ref.generation)])
        keys = found.select([*self._table.primary_key])
        last = last_keys(generation, keys)
        newest = last.filter(pc.invert(last.column(TOMBSTONE))).column(ROW_ADDRESS)
        return stale | ~np.isin(found.column(ROW_ADDRESS).to_numpy(), newest.to_numpy())

    def _written(self, found: pa.Table, since: Iterable[tuple[RegionRead, int]]) -> NDArray[np.bool_]:
        """Per row whether its key is in memory, or in a generation above the given one of a region."""
        names = [*self._table.primary_key]
        keys = found.select(names).append_column(_NUMBER, pa.array(np.arange(found.num_rows)))
        stale = np.zeros(found.num_rows, bool)

        def mark(others: pa.Table) -> None:
            hits = with_keys(keys, others.select(names).cast(keys.select(names).schema), names)
            stale[hits.column(_NUMBER).to_numpy()] = True

        for region, above in since if found.num_rows else ():
            if region.memory is not None:
                mark(with_keys(region.memory, keys.select(names).cast(region.memory.select(names).schema), names))
            for ref in region.flushed:
                bloom = self._filters[ref]
                unresolved = keys.filter(pa.array(~stale))
                if ref.generation <= above or not unresolved.num_rows:
                    continue
                if bloom is not None:
                    columns = [column.combine_chunks() for column in unresolved.select(names).columns]
                    unresolved = unresolved.filter(pa.array(bloom.may_have(columns)))
                if unresolved.num_rows:
                    (generation,) = self._opened.generations(self._table, [ref])
                    mark(last_keys(generation, unresolved.select(names)))
        return stale
