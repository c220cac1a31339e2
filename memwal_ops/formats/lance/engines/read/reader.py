"""Read a table with its unmerged rows: scan, look up, search, and explain the plan (S0-191 to S0-206)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memwal_ops.formats.lance.engines.read import lookup
from memwal_ops.formats.lance.engines.read.nearest import VectorQuery, nearest, nearest_plan
from memwal_ops.formats.lance.engines.read.opened import Opened, look_up_plan
from memwal_ops.formats.lance.engines.read.pruning import WantedKeys
from memwal_ops.formats.lance.engines.read.scan import Scan
from memwal_ops.formats.lance.engines.read.unmerged import Consistency, at_newest, read_unmerged
from memwal_ops.formats.lance.log.region_router import RegionRouter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

    from memwal_ops.formats.lance.log.region_writer import RegionWriter
    from memwal_ops.formats.lance.table import Table

_SHOWN_KEYS = 5


@dataclass(frozen=True)
class Reader:
    """A version of a table with its unmerged rows. Each call reads the regions again.

    If generations that the version needs were merged and collected since, a call reads the newest version.

    ``table``: the version. ``consistency``: how recent the unmerged rows have to be. ``writer``: of this process, whose
    rows in memory are read as well (S0-199).
    """

    table: Table
    consistency: Consistency
    writer: RegionWriter | RegionRouter | None = None
    _opened: Opened = field(default_factory=Opened, repr=False, compare=False)

    def scan(self, columns: Sequence[str] | None = None, filter: str | None = None) -> Scan:  # noqa: A002 - Lance's word
        """A scan of all rows, or of those that meet a filter in SQL."""
        wanted = None if columns is None else tuple(columns)
        return Scan(self.table, self.consistency, wanted, filter, self._writers(), self._opened)

    def get(self, keys: pa.Table | Mapping[str, Any] | Sequence[Any]) -> pa.Table:
        """The newest row of each key that has one, in no order; a key that was deleted has none.

        ``keys``: a table or a mapping with the key's columns; or the values of a key of one column.
        Raises ``InvalidUsageError``: these are no keys of the table; ``MemwalOpsError``: an object that may have a key
        is missing or damaged.
        """
        return self.find(keys).rows

    def find(self, keys: pa.Table | Mapping[str, Any] | Sequence[Any]) -> lookup.LookupResult:
        """As :meth:`get`, and how many generations were opened for it."""
        given = lookup.keys_of(self.table, keys)

        def read(table: Table) -> lookup.LookupResult:
            wanted = WantedKeys(table, given)
            unmerged = read_unmerged(table, self.consistency, wanted=wanted, writers=self._writers())
            return lookup.look_up(unmerged, given, wanted, self._opened)

        return at_newest(self.table, read)

    def nearest(
        self,
        column: str,
        vector: Sequence[float] | pa.Array,
        k: int = 10,
        *,
        filter: str | None = None,  # noqa: A002 - Lance's word
        nprobes: int | None = None,
        refine_factor: int | None = None,
    ) -> pa.Table:
        """The ``k`` rows that are nearest to a vector, with ``_distance``, the nearest first.

        ``column``: of vectors. ``vector``: of the column's length. ``filter``: SQL; only rows that meet it count.
        ``nprobes`` and ``refine_factor``: as in Lance, for each index.
        Raises ``InvalidUsageError``: no such column, ``k`` below 1; ``UnsupportedFeatureError``: a filter, and a
        generation that has other columns than the table; ``StorageError``: a vector of another length.
        """
        query = VectorQuery(column, vector, k, filter, nprobes, refine_factor)
        return at_newest(
            self.table, lambda table: nearest(self.scan(filter=filter).unmerged(table), query, self._opened)
        )

    def search(self, column: str, text: str, k: int = 10, *, filter: str | None = None) -> pa.Table:  # noqa: A002
        """The ``k`` rows that match a text best, with ``_score`` (BM25), the best first.

        Scores count every live row once, whatever the filter. Costs a scan of the column and the keys.

        Raises: InvalidUsageError: no such column, ``k`` below 1.
        """
        scan = self.scan()
        return at_newest(self.table, lambda table: lookup.search(scan, scan.winning(table), column, text, k, filter))

    def explain(self) -> str:
        """The plan of a scan, with the specification's names of nodes (S0-203)."""
        return self.scan().explain()

    def explain_get(self, keys: pa.Table | Mapping[str, Any] | Sequence[Any]) -> str:
        """The plan of :meth:`get` (S0-204); reads manifests and logs, and no filters and generations."""
        given = lookup.keys_of(self.table, keys)

        def read(table: Table) -> str:
            unmerged = read_unmerged(table, self.consistency, wanted=WantedKeys(table, given), writers=self._writers())
            names = [*table.primary_key]
            condition = lookup.condition_of(given, names) if given.num_rows <= _SHOWN_KEYS else None
            text = condition or f"({', '.join(names)}) IN {given.num_rows} keys"
            return look_up_plan(unmerged, text, lookup.key_index(table.dataset, names))

        return at_newest(self.table, read)

    def explain_nearest(
        self,
        column: str,
        vector: Sequence[float] | pa.Array,
        k: int = 10,
        *,
        filter: str | None = None,  # noqa: A002 - Lance's word
    ) -> str:
        """The plan of :meth:`nearest` (S0-205), and which index is used for which rows (S0-201)."""
        query = VectorQuery(column, vector, k, filter)
        scan = self.scan(filter=filter)
        return at_newest(self.table, lambda table: nearest_plan(scan.unmerged(table), query, self._opened))

    def explain_search(self, column: str, text: str, k: int = 10, *, filter: str | None = None) -> str:  # noqa: A002
        """The plan of :meth:`search` (S0-206)."""
        scan = self.scan()
        return at_newest(self.table, lambda table: lookup.search_plan(scan.unmerged(table), column, text, k, filter))

    def _writers(self) -> tuple[RegionWriter, ...]:
        if isinstance(self.writer, RegionRouter):
            return tuple(self.writer.writers.values())
        return () if self.writer is None else (self.writer,)
