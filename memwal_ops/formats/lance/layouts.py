"""What differs between the layouts of tables. Only this module detects a layout, by stored bytes, not by a setting."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from memwal_ops import errors
from memwal_ops.formats.lance.files.blobs import lance_bytes, lance_rows, read_stream
from memwal_ops.formats.lance.files.version_files import PAGE, VERSIONS_FOLDER
from memwal_ops.formats.lance.regions.manifests import RegionListing, RegionManifestStore, log_suffixes
from memwal_ops.formats.lance.wire import memwal_index
from memwal_ops.formats.lance.wire.arrow_schema import schema_end, schema_metadata
from memwal_ops.formats.lance.wire.lance_file import check_lance_file
from memwal_ops.formats.lance.wire.names import WRITER_EPOCH, parse_generation_dir, parse_wal_entry_name, region_folder
from memwal_ops.storage.api import LinkError, Store
from memwal_ops.text import counted, known_sum, span_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.wire._pb import memwal_pb2, table_pb2
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
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

    def refusal(self, table: TableWithoutIndex) -> errors.MemwalOpsError | None:
        """The error if no job runs on a table of this layout, else None. Called when a table is opened."""
        del table
        return None

    def why_not(self, table: TableWithoutIndex, what: str) -> errors.MemwalOpsError | None:
        """Why something that needs regions does not work on such a table; None: it has regions.

        Args:
            table: of this layout.
            what: the operation, as the subject of the message.
        """
        del what
        return self.refusal(table)

    def without_index(self, table: TableWithoutIndex) -> memwal_index.MemWalIndex:
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
        regions: Mapping[UUID, RegionManifest | memwal_index.Row],
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

    def _lacks(self, what: str) -> errors.InvariantViolatedError:
        return errors.InvariantViolatedError(f"A table of the layout {self.name} has no {what}.")


@dataclass(frozen=True, slots=True)
class Log:
    """The log of a table.

    Attributes:
        exists: the newest version has the current MemWAL index. For code that makes, migrates or opens it.
        strict_commits: a commit is exactly the next version, since a rebase by pylance could revert merge progress.
        keeps_codebooks: vector indexes keep theirs, since distances from generations must compare with theirs.
        shows_progress: the newest version shows what is merged, so that generations are drained and collected.
        versions_hold_generations: an old version may be all that keeps a generation from being collected.
    """

    exists: bool
    strict_commits: bool
    keeps_codebooks: bool
    shows_progress: bool
    versions_hold_generations: bool


LOG = Log(exists=True, strict_commits=True, keeps_codebooks=True, shows_progress=True, versions_hold_generations=True)
NO_LOG = Log(
    exists=False, strict_commits=False, keeps_codebooks=False, shows_progress=False, versions_hold_generations=False
)

_NAMED = 3


class NoLayout(Layout):
    """A table without a log. Jobs that maintain the base table apply, those that need regions do not."""

    name = "none"
    title = "plain table"

    def refusal(self, table: TableWithoutIndex) -> errors.NoMemWalIndexError | None:
        """The error if there are regions of a table that was at this place before, with the remedy; else None.

        No job runs then: an expiry would delete the versions to which the regions belong. If the MemWAL index was
        removed, and the table not overwritten since, the regions are its own, and it is maintained as a plain table.
        """
        regions = table.regions.region_ids
        if not regions or table.index_removed_after is not None:
            return None
        named = "; ".join(_contents(table.store, region_id) for region_id in regions[:_NAMED])
        more = f"; and {len(regions) - _NAMED:,} more" if len(regions) > _NAMED else ""
        return errors.NoMemWalIndexError(
            f"{table.location.uri} is a Lance table without a MemWAL index, but its _mem_wal folder has "
            f"{counted(len(regions), 'region')}: {named}{more}. They belong to the table as it was before it was "
            "overwritten, or before its index was dropped.",
            remedy="Run memwal-ops inspect URI: it lists them. If their rows do not belong to this table: stop their "
            "writers, and move _mem_wal to a place outside the table. To return to the version that they belong to, as "
            "long as it exists: tag the newest version, then dataset.checkout_version(N) and restore(), which discards "
            "what was committed since.",
        )

    def why_not(self, table: TableWithoutIndex, what: str) -> errors.NoMemWalIndexError:
        """The error: there is no log, or no index for it."""
        if (refused := self.refusal(table)) is not None:
            return refused
        applies = f"{what} does not apply to {table.location.uri}: it is a Lance table without a MemWAL index"
        if not table.regions.region_ids:
            return errors.NoMemWalIndexError(f"{applies}, so there is no log to merge.")
        return errors.NoMemWalIndexError(
            f"{applies}: that was removed after version {table.index_removed_after}. The log in _mem_wal is kept.",
            remedy="Make it again, by memwal-ops init URI, lancedb's set_lsm_write_spec() or pylance's "
            "initialize_mem_wal(): then memwal-ops merge continues where it was.",
        )

    def without_index(self, table: TableWithoutIndex) -> memwal_index.MemWalIndex:
        """An empty index."""
        del table
        return memwal_index.NO_MEMWAL


def _contents(store: Store, region_id: UUID) -> str:
    """What a region has: the generations that it lists, as no version shows which of them were merged, and its log."""
    try:
        manifest = RegionManifestStore(store, region_id).latest()
    except errors.MemwalOpsError as error:
        return f"{region_id} (not readable: {error.reason})"
    listed = manifest.flushed_generations
    rows = known_sum(flushed.physical_rows for flushed in listed)
    numbers = span_text(listed[0].generation, listed[-1].generation) if listed else "none"
    of = "" if rows == 0 else f", with {counted(rows, 'row')}"
    return f"{region_id} (flushed generations: {numbers}{of}; written log entries: {manifest.wal_id_last_seen or 0:,})"


NONE = NoLayout()


class LegacyLayout(Layout):
    """Has its own merge, gc, verify and migrate jobs. Every other job would write the current kind of details."""

    name = "legacy"
    title = "legacy layout"

    def why_not(self, table: TableWithoutIndex, what: str) -> errors.LegacyLayoutError:
        """The error, with the remedy."""
        return errors.LegacyLayoutError(
            f"{what} does not apply to {table.location.uri}: it carries the legacy MemWAL index of Lance 0.31 to 1.x "
            "(mem_wal_list), which current releases of Lance cannot read, and so neither append nor index beside it."
        )


LEGACY = LegacyLayout()

# Enough for the column metadata of most files; more costs another request.
_TAIL_BYTES = 32 << 10
_EMPTY_VERSION = "2.0"


class RegionLayout(Layout):
    """The layout of the specification."""

    name = "region"
    title = "region layout"
    wal_suffix = "lance"
    claims_with_entry = False
    generations_in_log = True
    unlisted_index_is_caught_up = True

    def writer_epoch(self, store: Store, path: str) -> bytes | None:
        """The writer epoch from the footer of the Lance file; two requests for most."""
        meta = store.head(path)
        if meta is None:
            raise errors.ObjectNotFoundError(f"WAL entry {path} does not exist.")
        tail = store.get_range(path, max(0, meta.size - _TAIL_BYTES), _TAIL_BYTES)
        schema = check_lance_file(tail, meta.size) or check_lance_file(store.get(path), meta.size)
        return None if schema is None else schema.metadata.get(WRITER_EPOCH)

    def entry_rows(self, store: Store, path: str) -> int:
        """Rows of the Lance file."""
        return int(self.entry_table(store, path).num_rows)

    def entry_table(self, store: Store, path: str) -> pa.Table:
        """The Lance file."""
        return lance_rows(store.get(path), f"WAL entry {path}")

    def emptied_entry(self, store: Store, path: str) -> bytes:
        """A file with the same columns and metadata, in which is the writer epoch, and no rows."""
        data = store.get(path)
        rows, lance_file = lance_rows(data, f"WAL entry {path}"), check_lance_file(data, len(data))
        metadata = {} if lance_file is None else dict(lance_file.metadata)
        return lance_bytes(rows.slice(0, 0).replace_schema_metadata(metadata), _EMPTY_VERSION, f"WAL entry {path}")

    def empty_entry(self, schema: pa.Schema, writer_epoch: int, path: str) -> bytes:
        """A file with these columns."""
        rows = schema.with_metadata({WRITER_EPOCH: str(writer_epoch)}).empty_table()
        return lance_bytes(rows, _EMPTY_VERSION, f"WAL entry {path}")

    def snapshot_rows(
        self,
        regions: Mapping[UUID, RegionManifest | memwal_index.Row],
        states: Mapping[UUID, Sequence[int | None]],
        specs: Sequence[memwal_pb2.RegionSpec],
    ) -> pa.Table:
        """Rows that contain the complete manifests (S0-106 to S0-109)."""
        del states
        return memwal_index.region_rows([*regions.values()], specs)


REGION = RegionLayout()

# Enough for a schema of about a hundred columns; a larger one costs a second request.
_SCHEMA_BYTES = 32 << 10


class ShardLayout(Layout):
    """The layout of pylance."""

    name = "shard"
    title = "shard layout"
    wal_suffix = "arrow"
    claims_with_entry = True
    generations_in_log = False
    unlisted_index_is_caught_up = False

    def writer_epoch(self, store: Store, path: str) -> bytes | None:
        """The writer epoch from the schema at the start of the Arrow stream; one request for most."""
        head = store.get_range(path, 0, _SCHEMA_BYTES)
        end = schema_end(head)
        if end > len(head) == _SCHEMA_BYTES:
            head = store.get_range(path, 0, end)
        return schema_metadata(head, WRITER_EPOCH.encode())

    def entry_rows(self, store: Store, path: str) -> int:
        """Rows of the Arrow stream."""
        return int(self.entry_table(store, path).num_rows)

    def entry_table(self, store: Store, path: str) -> pa.Table:
        """The Arrow stream."""
        try:
            return read_stream(store.get(path))
        except pa.ArrowException as error:
            raise errors.InvalidFormatError(f"WAL entry {path} is not an Arrow stream: {error}") from error

    def emptied_entry(self, store: Store, path: str) -> bytes:
        """A stream with the same schema, whose metadata has the writer epoch, and no batch."""
        return _without_batches(self.entry_table(store, path).schema)

    def empty_entry(self, schema: pa.Schema, writer_epoch: int, path: str) -> bytes:
        """A stream without columns, as pylance writes it for a claim."""
        del schema, path
        return _without_batches(pa.schema([], metadata={"fence_sentinel": "true", WRITER_EPOCH: str(writer_epoch)}))

    def snapshot_rows(
        self,
        regions: Mapping[UUID, RegionManifest | memwal_index.Row],
        states: Mapping[UUID, Sequence[int | None]],
        specs: Sequence[memwal_pb2.RegionSpec],
    ) -> pa.Table:
        """Rows with the regions' ids and fields only; their states are in the schema's metadata."""
        return memwal_index.with_states(memwal_index.shard_rows([*regions.values()], specs), states)


def _without_batches(schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, schema).close()
    return bytes(sink.getvalue())


SHARD = ShardLayout()


def layout_of_entry(entry: table_pb2.IndexMetadata | None) -> Layout | None:
    """The layout, if the MemWAL entry of a version determines it; None: use :func:`layout_of_regions`."""
    if entry is None:
        return NONE
    return LEGACY if memwal_index.is_legacy(entry) else None


# Regions whose layouts are compared where that costs no request.
_COMPARED = 16


class MixedLayoutsError(errors.UnsupportedFeatureError):
    """A table has regions, or log entries in a region, of both layouts that have regions, and no migration record.

    Timeline of the loss: rows are acknowledged in entry 5 of the region layout; pylance's writer, which does not see
    it, writes its own entry 5 and flushes it; the manifest has entry 5 as flushed, so that it is never replayed.
    """

    remedy = (
        "Stop the writers, and keep the regions' folders: runbooks/errors/08-unsupported_feature.md has the commands "
        "that show the rows of both kinds of entries. Restore the table from a backup of before the other writer, and "
        "write what it wrote again, by the writer of the table's layout."
    )


def refuse_mixed(folder: str, suffixes: Collection[str]) -> None:
    """Refuse a region whose log has entries with these suffixes, if they are of several layouts.

    Raises:
        MixedLayoutsError: they are.
    """
    if len(suffixes) > 1:
        raise MixedLayoutsError(
            f"{folder}/wal, or the logs of this table's regions, have entries of the region layout (.lance) and of the "
            "shard layout (.arrow): two kinds of writers wrote to it, and neither sees the other's rows."
        )


def layout_of_regions(store: Store, region_ids: Iterable[UUID]) -> Layout:
    """The layout by the first region whose files determine it.

    A ``.lance`` WAL entry is of the region layout (S0-034), an ``.arrow`` one of pylance's shard
    layout. If all WAL entries are collected, a generation with data files of its own is of the
    shard layout: the region layout's generations refer to ``wal/`` (S0-147). A table without
    regions is one that pylance initialized, hence shard.

    Raises:
        MixedLayoutsError: the log of a region has entries of both, and no other one determines it.
    """
    mixed: MixedLayoutsError | None = None
    for region_id in region_ids:
        try:
            shown = layout_of_region(store, region_id)
        except MixedLayoutsError as error:
            mixed = error
        else:
            if shown is not None:
                return shown
    if mixed is not None:
        raise mixed
    return SHARD


def mixed_regions(store: Store, region_ids: Iterable[UUID], *, migrated: bool) -> Mapping[UUID, MixedLayoutsError]:
    """The regions whose logs have entries of both layouts or, unless ``migrated``, of another one than the first log.

    Of the first regions, as far as no request is necessary; a verification and a collection list all of each log.
    """
    mixed: dict[UUID, MixedLayoutsError] = {}
    usual: frozenset[str] = frozenset()
    for region_id in islice(region_ids, _COMPARED):
        suffixes = log_suffixes(store, region_id)
        try:
            refuse_mixed(region_folder(region_id), suffixes | usual)
        except MixedLayoutsError as error:
            mixed[region_id] = error
        else:
            usual = usual if migrated else suffixes or usual
    return mixed


def layout_of_region(store: Store, region_id: UUID) -> Layout | None:
    """The layout that a region's files determine; None: it has no such files yet.

    Raises:
        MixedLayoutsError: of the first 1,000 entries of its log, some are of each.
    """
    with suppress(LinkError):  # links are not followed; the region is refused when it is read
        return _shown_by(store, region_folder(region_id))
    return None


def layout_named(name: str) -> Layout | None:
    """The layout that a migration recorded; None: this release does not support it."""
    return {layout.name: layout for layout in (REGION, SHARD)}.get(name)


def _shown_by(store: Store, folder: str) -> Layout | None:
    names = (parse_wal_entry_name(meta.path.rsplit("/", 1)[-1]) for meta in islice(store.list(f"{folder}/wal"), PAGE))
    suffixes = {name.suffix for name in names if name is not None}
    refuse_mixed(folder, suffixes)
    if suffixes:
        return REGION if REGION.wal_suffix in suffixes else SHARD
    for directory in store.list_level(folder).directories:
        if parse_generation_dir(directory.rsplit("/", 1)[-1]) is not None:
            if next(iter(store.list(f"{directory}/data")), None) is not None:
                return SHARD
            if next(iter(store.list(f"{directory}/{VERSIONS_FOLDER}")), None) is not None:
                return REGION  # without a manifest it is one that is being written or moved
    return None
