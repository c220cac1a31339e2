"""Define ``Layout``, the interface to everything that differs between table layouts, so that no job compares them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memwal_ops.errors import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import pyarrow as pa

    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.formats.lance.regions.manifests import RegionListing
    from memwal_ops.formats.lance.wire._pb import memwal_pb2
    from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
    from memwal_ops.formats.lance.wire.snapshot_rows import Row
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location


class TableWithoutIndex(Protocol):
    """What a layout asks of a table that has no current MemWAL index."""

    @property
    def location(self) -> Location:
        """Its URI."""

    @property
    def store(self) -> Store:
        """Its folder."""

    @property
    def regions(self) -> RegionListing:
        """The regions in its log."""

    @property
    def index_removed_after(self) -> int | None:
        """The last version with a MemWAL index, if the regions are the table's own; else None."""


class Layout:
    """One layout. Methods that a layout does not implement raise; no job of the layout calls them.

    Attributes:
        name: as in JSON and options.
        title: as printed by ``inspect``.
    """

    name: str
    title: str

    def refusal(self, table: TableWithoutIndex) -> MemwalOpsError | None:
        """The error if no job runs on a table of this layout, else None. Called when a table is opened."""
        del table
        return None

    def why_not(self, table: TableWithoutIndex, what: str) -> MemwalOpsError | None:
        """Why something that needs regions does not work on such a table; None: it has regions.

        Args:
            table: of this layout.
            what: the operation, as the subject of the message.
        """
        del what
        return self.refusal(table)

    def without_index(self, table: TableWithoutIndex) -> MemWalIndex:
        """The MemWAL index of a table without the current one, for code that only reads it."""
        raise self.why_not(table, "This") or self._lacks("other index than its own")

    @property
    def wal_suffix(self) -> str:
        """The file name extension of a WAL entry, without the dot."""
        raise self._lacks("region logs")

    def writer_epoch(self, store: Store, path: str) -> bytes | None:
        """The ``writer_epoch`` in the metadata of the WAL entry at a path, as stored; None if it has none (S0-032).

        Raises:
            InvalidFormatError: it is not a readable entry.
            ObjectNotFoundError: it does not exist.
        """
        del store, path
        raise self._lacks("region logs")

    @property
    def claims_with_entry(self) -> bool:
        """Whether a writer that claims a region puts an empty WAL entry before it searches for the end of the log."""
        raise self._lacks("writers of regions")

    def entry_rows(self, store: Store, path: str) -> int:
        """The number of rows in the WAL entry at a path.

        Raises:
            InvalidFormatError: it is not a readable entry.
            ObjectNotFoundError: it does not exist.
        """
        del store, path
        raise self._lacks("region logs")

    def entry_table(self, store: Store, path: str) -> pa.Table:
        """The rows of the WAL entry at a path. Raises as :meth:`entry_rows`."""
        del store, path
        raise self._lacks("region logs")

    def emptied_entry(self, store: Store, path: str) -> bytes:
        """The WAL entry at a path without its rows: as it is but for these. Raises as :meth:`entry_rows`."""
        del store, path
        raise self._lacks("region logs")

    def empty_entry(self, schema: pa.Schema, writer_epoch: int, path: str) -> bytes:
        """A WAL entry without rows, as one by which a writer claims a region.

        Args:
            schema: of the region's rows.
            writer_epoch: its writer's.
            path: where it is to be, for errors.
        """
        del schema, writer_epoch, path
        raise self._lacks("region logs")

    @property
    def generations_in_log(self) -> bool:
        """Whether a generation's rows are in WAL entries that it refers to (S0-147), and not in files of its own."""
        raise self._lacks("generations")

    @property
    def unlisted_index_is_caught_up(self) -> bool:
        """Whether readers treat an index that ``index_catchup`` does not list as caught up (S0-079)."""
        raise self._lacks("an index catch-up list")

    def snapshot_rows(
        self,
        regions: Mapping[UUID, RegionManifest | Row],
        states: Mapping[UUID, Sequence[int | None]],
        specs: Sequence[memwal_pb2.RegionSpec],
    ) -> pa.Table:
        """The rows of a region snapshot in the columns that the layout's readers expect.

        Args:
            regions: per region its manifest, or its row of an earlier snapshot that is still valid.
            states: of each: version, ``replay_after_wal_id``, ``wal_id_last_seen``, by which a later snapshot
                determines whether the row is still valid.
            specs: the table's region specs, which add a column for each field.
        """
        del regions, states, specs
        raise self._lacks("region snapshots")

    def _lacks(self, what: str) -> InvariantViolatedError:
        return InvariantViolatedError(f"A table of the layout {self.name} has no {what}.")
