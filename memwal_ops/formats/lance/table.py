"""Open a Lance table as an immutable ``Table``, pinned to one version.

Its dataset, its manifest and its merge progress all belong to the same version.
After a commit conflict, a job opens a new one with :meth:`Table.newest` and replans from the start.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from memwal_ops import errors
from memwal_ops.core import registry
from memwal_ops.core.anchors import CommitGuard, GuardedStore, GuardedTable, Unguarded
from memwal_ops.formats.lance import layouts
from memwal_ops.formats.lance.files import datasets, version_files
from memwal_ops.formats.lance.files.named_files import Damage, damaged_deletions
from memwal_ops.formats.lance.regions.manifests import RegionListing, RegionManifestStore, list_regions
from memwal_ops.formats.lance.regions.merge_history import MergeHistory
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire.memwal_index import MemWalIndex, decode_memwal_index, find_memwal_entry, is_legacy
from memwal_ops.formats.lance.wire.names import (
    LayoutRecord,
    NamingScheme,
    layout_record,
    naming_scheme,
    parse_version_manifest_name,
)
from memwal_ops.formats.lance.wire.region_manifest import RegionRecord, decode_version_hint, region_records
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.storage.external_manifests import manifest_entries, refuse_plain_uri
from memwal_ops.storage.locations import LOCAL, Location
from memwal_ops.storage.objects import is_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping
    from uuid import UUID

    import lance
    import pyarrow as pa

    from memwal_ops.core.job import JobSpec
    from memwal_ops.core.protocols import TableFormat, TableSummary
    from memwal_ops.storage.api import ObjectMeta, Store

_T = TypeVar("_T")
_FORMAT = "lance"
_REGION, _SHARD = "region", "shard"
_OPEN_ATTEMPTS = 4
# Per fragment: a row address has 32 bits for the row's offset.
_MAX_ROWS = 1 << 32
_KEY_FLAG = "lance-schema:unenforced-primary-key"
_KEY_POSITION = "lance-schema:unenforced-primary-key:position"
_TRUE = frozenset({b"true", b"1", b"yes"})
# Columns without a position come after those with one.
_LAST = 10_000


@dataclass(frozen=True)
class Table(GuardedTable):
    """One version of one table.

    Attributes:
        location: its URI and storage options; its ``repr`` contains no secret.
        store: the table's folder as an object store.
        handle: pylance's handle, pinned to ``version``.
        manifest: the version manifest of exactly that version, including unknown fields.
        naming: the naming scheme of ``_versions/``.
        memwal: the MemWAL index of that version: configuration, merge progress, catch-up; None if it has none.
        primary_key: names of the key columns in key order.
        listed: the listing of versions before the manifest was read.
        sound: the files that were opened since the table was, for this or another version, and are not damaged: each
            is read once in a run.
    """

    location: Location
    store: Store
    handle: datasets.PinnedDataset
    manifest: version_manifest.VersionManifest
    naming: NamingScheme
    memwal: MemWalIndex | None
    primary_key: tuple[str, ...]
    listed: version_files.VersionPage
    guard: CommitGuard = field(default_factory=Unguarded, compare=False)
    sound: set[str] = field(default_factory=set, compare=False, repr=False)

    @property
    def format(self) -> TableFormat:
        """The Lance format."""
        return registry.formats()[_FORMAT]

    @property
    def jobs(self) -> Mapping[str, JobSpec]:
        """The registered jobs that apply to the table's layout, each with its code for that layout."""
        registered = registry.job_specs(_FORMAT)
        distinguished = not self.log.exists or any(map(_distinguishes_regions, registered.values()))
        layout = self.layout.name if distinguished else _REGION  # finding out which of the two takes listings
        return {name: spec.for_layout(layout) for name, spec in registered.items() if spec.applies_to(layout)}

    def why_not(self, job: str) -> errors.MemwalOpsError | None:
        """Why a job does not apply, or (migrate) has nothing to do here; None: it applies, or there is no such job."""
        if self.log.exists or job not in registry.job_specs(_FORMAT):
            return None
        idle = job == "migrate" and self.layout is layouts.NONE and manifest_entries(self.store) is None
        return self.layout.why_not(self, job) if idle or job not in self.jobs else None

    @property
    def revision(self) -> int:
        """The base version."""
        return self.version

    def has_revision(self, revision: int) -> bool:
        """Whether that version's manifest exists. One request."""
        return self.store.head(version_files.version_path(revision, self.naming)) is not None

    def summary(self) -> TableSummary:
        """See :meth:`memwal_ops.core.protocols.TableFormat.summarize`."""
        return self.format.summarize(self)

    @property
    def version(self) -> int:
        """The base version that this table is pinned to."""
        return int(self.manifest.manifest.version)

    @property
    def dataset(self) -> lance.LanceDataset:
        """The handle of pylance, pinned to ``version``, to read rows: no deletion file is damaged.

        For its schema, tags and indexes, ``handle`` is enough. Requests, at the first use: one for each deletion file.

        Raises:
            TableCorruptError: a deletion file is damaged.
        """
        self.refuse_damaged_deletions()
        return self.handle.get()

    def dataset_at(self, version: int) -> lance.LanceDataset:
        """:attr:`dataset` of another version.

        Raises:
            ObjectNotFoundError: it does not exist.
            TableCorruptError: a deletion file of it is damaged.
        """
        if version == self.version:
            return self.dataset
        manifest = version_files.read_version_manifest(self.store, version, self.naming)
        return replace(self, manifest=manifest, handle=datasets.PinnedDataset(self.location, manifest)).dataset

    def manifest_of(self, version: int) -> version_manifest.VersionManifest | None:
        """The manifest of another version; None: it is gone, or does not decode."""
        try:
            return version_files.read_version_manifest(self.store, version, self.naming)
        except (errors.ObjectNotFoundError, errors.InvalidFormatError):
            return None

    def refuse_damaged_deletions(self) -> None:
        """Refuse to read rows if a deletion file is damaged: pylance may end the process, or return other rows.

        Raises:
            TableCorruptError: with the file's name.
        """
        damage = self.once("deletion files", self._damaged_deletions)
        if damage is not None:
            raise damage.error

    def _damaged_deletions(self) -> Damage | None:
        try:
            return damaged_deletions(self.location, self.store, self.manifest.manifest, self.sound)
        except NotExportedError:
            return None

    @property
    def schema(self) -> pa.Schema:
        """The schema of the version."""
        return self.handle.get().schema

    @cached_property
    def fragment_ids(self) -> frozenset[int]:
        """The ids of the version's fragments."""
        return frozenset(fragment.id for fragment in self.manifest.manifest.fragments)

    def once(self, what: Hashable, read: Callable[[], _T]) -> _T:
        """``read()``, called once for this table value: what a version has does not change."""
        if what not in self._read:
            self._read[what] = read()
        return self._read[what]  # type: ignore[no-any-return]  # what read returned

    def is_at_rest(self, after: timedelta) -> bool:
        """Whether this version was committed at least so long ago; not if it does not record when."""
        made = self.manifest.manifest
        return made.HasField("timestamp") and datetime.now(UTC) - made.timestamp.ToDatetime(UTC) >= after

    @cached_property
    def _read(self) -> dict[Hashable, Any]:
        return {}

    @property
    def file(self) -> ObjectMeta | None:
        """The manifest's file as it was listed before it was read; None if the listing does not have it."""
        return self.listed.versions.get(self.version)

    @property
    def inherits_progress(self) -> bool:
        """Whether it is a branch or a shallow clone: it has the merge progress of another table, not its regions."""
        return self.branch_name is not None or bool(self.manifest.manifest.base_paths)

    @property
    def regions_gone(self) -> int:
        """How many regions have no folder any more: what they had not merged is lost."""
        index, existing = self.index, self.regions.region_ids
        known = 0 if existing or index.snapshot_ts_millis is None else index.num_regions
        return 0 if self.inherits_progress else max(known, len(index.merged_generations.keys() - existing))

    @property
    def branch_name(self) -> str | None:
        """The branch that the table's location is; None: main."""
        return self.manifest.manifest.branch or None

    @cached_property
    def branch(self) -> datasets.Branch:
        """The same with the root of the table.

        Raises:
            InvalidUsageError, NotExportedError: the root of a branch is not known.
        """
        branch = datasets.resolve_branch(self.location, self.store, self.branch_name)
        return branch if branch.name is None else replace(branch, root=GuardedStore(branch.root, self.guard))

    @cached_property
    def regions(self) -> RegionListing:
        """The region directories, listed once per table value."""
        return list_regions(self.store)

    @property
    def log(self) -> layouts.Log:
        """What the table's log means for jobs; a plain variant where the version has no current MemWAL index."""
        return layouts.NO_LOG if self.memwal is None else layouts.LOG

    @property
    def index(self) -> MemWalIndex:
        """``memwal``; of a plain table an empty one, to be read only.

        Raises:
            LegacyLayoutError: the table has one that is not decoded here.
        """
        return self.layout.without_index(self) if self.memwal is None else self.memwal

    @cached_property
    def index_removed_after(self) -> int | None:
        """The last version with a MemWAL index, if it was removed since, and the table was not overwritten; else None.

        That version shows what of the regions is merged. Read only if the table has no index.
        """
        indexed = None if self.log.exists else self.history.indexed_before(self.version)
        return None if indexed is None else indexed[0]

    @cached_property
    def refusal(self) -> errors.MemwalOpsError | None:
        """Why no job runs on the table: it has regions, and they are not its own; else None."""
        return None if self.log.exists else self.layout.refusal(self)

    def require_memwal(self, what: str = "This") -> None:
        """Refuse a table without the current MemWAL index, for operations that need regions.

        Args:
            what: the operation, as the subject of the message.

        Raises:
            NoMemWalIndexError, LegacyLayoutError: it has none.
        """
        refused = None if self.log.exists else self.layout.why_not(self, what)
        if refused is not None:
            raise refused

    @cached_property
    def layout(self) -> layouts.Layout:
        """The layout, as a migration recorded it, or detected from the stored bytes.

        New regions are written in it. Detecting it takes some listings, at the first use.
        """
        entry = find_memwal_entry(self.manifest.indexes)
        recorded = None if self.layout_record is None else layouts.layout_named(self.layout_record.layout)
        return (
            layouts.layout_of_entry(entry) or recorded or layouts.layout_of_regions(self.store, self.regions.region_ids)
        )

    @property
    def layout_record(self) -> LayoutRecord | None:
        """The record of a migration between the current layouts."""
        return layout_record(self.manifest.manifest)

    def layout_of(self, region_id: UUID) -> layouts.Layout:
        """The layout of one region: after a migration, earlier regions remain in the layout that they were written in.

        One or two listings, at the first use, if the table was migrated.
        """
        if self.layout_record is None:
            return self.layout
        if (layout := self._region_layouts.get(region_id) or layouts.layout_of_region(self.store, region_id)) is None:
            return self.layout
        return self._region_layouts.setdefault(region_id, layout)

    @cached_property
    def _region_layouts(self) -> dict[UUID, layouts.Layout]:
        return {}

    @cached_property
    def records(self) -> Mapping[UUID, RegionRecord]:
        """The record of each region: its last merged generation, as far as this version records it."""
        return region_records(self.manifest.manifest)

    @cached_property
    def history(self) -> MergeHistory:
        """The history of merges in the existing versions, read lazily."""
        return MergeHistory(self.store, self.listed, self.manifest)

    def region(self, region_id: UUID) -> RegionManifestStore:
        """The manifest store of one region; the region need not exist."""
        return RegionManifestStore(self.store, region_id)

    def newest(self) -> Table:
        """The newest version of the same table. One request if it is this one, else two."""
        return replace(load(self.location.refreshed(), self.store, self), guard=self.guard, sound=self.sound)

    def remember(self, published: version_manifest.VersionManifest, listed: version_files.VersionPage) -> None:
        """Remember the version that a commit published on this one, if a listing proves that it is stored as encoded.

        The proof is the entity tag, where that is the MD5 sum of the content: on S3, without encryption by customer
        keys. So no other object can be mistaken for it, not even if the table was replaced since.
        """
        data = version_manifest.encode_version_manifest(published)
        file = listed.versions.get(int(published.manifest.version))
        if file is not None and file.e_tag == hashlib.md5(data, usedforsecurity=False).hexdigest():
            table = _table_of(
                self.location, self.store, version_manifest.decode_version_manifest(data), self.naming, listed
            )
            self._committed.append(replace(table, guard=self.guard, sound=self.sound))

    def committed(self) -> Table | None:
        """See :class:`memwal_ops.core.protocols.RemembersCommit`; once, as a rebased commit may follow on this one.

        With renewed credentials, as by :meth:`newest`: the passes of a run may take longer than the first ones live.
        """
        if not self._committed:
            return None
        table, location = self._committed.pop(), self.location.refreshed()
        return replace(table, location=location, handle=table.handle.at(location))

    @cached_property
    def _committed(self) -> list[Table]:
        return []


def _distinguishes_regions(spec: JobSpec) -> bool:
    """Whether a job differs between the two layouts that have regions."""
    region_load, shard_load = ((spec.applies_to(name), spec.for_layout(name).load) for name in (_REGION, _SHARD))
    return region_load != shard_load


def open_lance_table(
    uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None, branch: str | None = None
) -> Table:
    """:func:`memwal_ops.core.registry.open_table`, for code that works on the regions of Lance tables only.

    Raises:
        LegacyLayoutError: it has the MemWAL index of older Lance releases.
        NotALanceTableError: it is a table of another format.
        MemwalOpsError: as :func:`memwal_ops.core.registry.open_table` and :func:`load`.
    """
    table = registry.open_table(uri, storage_options, branch=branch)
    if not isinstance(table, Table):
        raise errors.NotALanceTableError(
            f"{table.location.uri} is a table of the format {table.format.name}, and this works on Lance tables only.",
            remedy="Give a Lance table, or use a job of that format: memwal-ops inspect URI shows the table.",
        )
    table.require_memwal()
    return table


def load(location: Location, store: Store, known: Table | None = None, *, refuse_regions: bool = True) -> Table:
    """Open the newest version of a Lance table: with MemWAL, in a current or the legacy layout, or without.

    Args:
        location: of the table.
        store: its folder.
        known: a version that was read before: it is not read again if it is still the newest, and the same file.
        refuse_regions: False: also with regions that are not its own (:attr:`Table.refusal`), to show them.

    Raises:
        TableNotFoundError: the prefix is empty.
        NotALanceTableError: it is not a Lance table.
        NoMemWalIndexError: it has regions, but no MemWAL index.
        NoPrimaryKeyError: it has MemWAL, but no unenforced primary key (S0-002); legacy tables may have none.
        UnsupportedFeatureError: it needs a feature that this release does not support (S3-012).
        TableCorruptError: its newest manifest does not decode, or naming schemes are mixed (S3-047).
        StorageError: the store refused or failed, by kind.
    """
    table = read_table(location, store, known)
    if refuse_regions:
        refuse_log_beside_dynamodb(location, logged=find_memwal_entry(table.manifest.indexes) is not None)
    if refuse_regions and table.refusal is not None:
        raise table.refusal
    if table.log.exists and not table.primary_key:
        raise errors.NoPrimaryKeyError(
            f"{location.uri} has a MemWAL index, but no column is marked as its primary key."
        )
    return table


def refuse_log_beside_dynamodb(location: Location, *, logged: bool) -> None:
    """Refuse a table with a MemWAL whose versions are recorded in DynamoDB.

    pylance cannot flush a generation there (docs/upstream.md), so that what its writers have acknowledged cannot be
    merged.

    Raises:
        UnsupportedFeatureError: it is one.
    """
    if logged and location.dynamodb_table is not None:
        raise errors.UnsupportedFeatureError(
            f"{location.uri} has a MemWAL, and its versions are recorded in DynamoDB, where no log can be flushed.",
            remedy="Use plain S3: memwal-ops migrate URI --to s3, before the table gets a MemWAL; or drop the index "
            "__lance_mem_wal, if nothing was written to its log, migrate, and create it again.",
        )


def read_table(location: Location, store: Store, known: Table | None = None) -> Table:
    """Open the newest version of a Lance table of any layout, including those to which no job applies.

    Requests: a listing, and the manifest. pylance finds the newest version if the listing does not show it: of tables
    with 1,000 versions that are not listed in order.

    Raises: see :func:`load`, but NoMemWalIndexError and NoPrimaryKeyError.
    """
    datasets.require_pylance()
    for attempt in range(_OPEN_ATTEMPTS):
        listed = version_files.list_page(store)
        if known is not None and _is_stale(store, listed, known):
            if attempt == _OPEN_ATTEMPTS - 1:
                raise errors.StoreUnavailableError(
                    f"A listing of {location.uri} lacks its version {known.version}, which exists: the listings of the "
                    "store are behind its objects."
                )
            continue
        if location.scheme == "s3":
            refuse_plain_uri(
                location, store, listed.files, partial(version_files.is_left_by_checked_commit, store, listed)
            )
        naming = _naming_scheme(location, store, listed)
        try:
            if listed.newest is None:
                manifest, handle = _newest_by_lance(location, store, naming)
            elif (
                known is not None
                and listed.newest == known.version
                and version_files.is_same_file(known.file, listed.versions[known.version])
            ):
                manifest, handle = known.manifest, known.handle.at(location)
            else:
                manifest, handle = _read_manifest(store, listed.newest, naming), None
        except (errors.ObjectNotFoundError, errors.TableNotFoundError) as error:
            # If others commit meanwhile, a clean-up may remove the version after it was found to be the newest and
            # before it is read: then there is a newer one.
            if attempt == _OPEN_ATTEMPTS - 1:
                raise errors.NotALanceTableError(f"{location.uri} does not open as a Lance table: {error}") from error
            continue
        is_known = known is not None and manifest is known.manifest
        lost = None if is_known else _lost_version(location, store, listed, int(manifest.manifest.version), naming)
        if lost is None:
            return _table_of(location, store, manifest, naming, listed, handle)
        # A listing beside a writer or a clean-up may be older than the hint.
        if attempt == _OPEN_ATTEMPTS - 1:
            raise errors.TableCorruptError(
                f"{version_files.version_path(lost, naming)} is missing, and {version_files.VERSION_HINT} names it as "
                "the newest version: what was committed by it is not in the table.",
                remedy="Stop everything that writes the table, gc and expire too, and restore the manifest from a "
                f"backup. Without one, or if this is a copy made beside a writer, move {version_files.VERSION_HINT} "
                f"aside: version {manifest.manifest.version} is the newest then; see the page before you do.",
            )
    raise AssertionError  # pragma: no cover - the loop returns or raises


def _lost_version(
    location: Location, store: Store, listed: version_files.VersionPage, newest: int, naming: NamingScheme
) -> int | None:
    """The version that pylance's hint names as the newest, if neither it nor a newer one exists; else None.

    The hint, which only local files have, is written behind the manifest, and the newest version is never expired.
    """
    if location.scheme not in LOCAL or listed.has_hint() is False:
        return None
    try:
        hinted = decode_version_hint(store.get(version_files.VERSION_HINT))
    except (errors.ObjectNotFoundError, NotExportedError):
        return None
    if hinted is None or hinted <= newest or store.head(version_files.version_path(hinted, naming)) is not None:
        return None
    before = listed.versions.get(newest)
    return None if before is not None and _put_aside(location, before.last_modified) else hinted


def _put_aside(location: Location, version_before: datetime) -> bool:
    """Whether the newest version was put beside the table, as runbooks/errors/09-table_corrupt.md says.

    ``version_before``: when the one before was written; what is older is of an earlier such step.
    """
    with suppress(OSError):
        return os.stat(f"{location.folder}.damaged-manifest").st_mtime >= version_before.timestamp()
    return False


def _is_stale(store: Store, listed: version_files.VersionPage, known: Table) -> bool:
    """Whether a listing is older than a version that was read or published before.

    Timeline without this: a run publishes a version; the next listing is empty; the run ends with "No table found".
    """
    newest = listed.newest if listed.versions else 0
    if newest is None or newest >= known.version:
        return False
    return store.head(version_files.version_path(known.version, known.naming)) is not None


def _table_of(
    location: Location,
    store: Store,
    manifest: version_manifest.VersionManifest,
    naming: NamingScheme,
    listed: version_files.VersionPage,
    handle: datasets.PinnedDataset | None = None,
) -> Table:
    version_manifest.check_readable(manifest.manifest)
    entry = find_memwal_entry(manifest.indexes)
    memwal = None if entry is None or is_legacy(entry) else decode_memwal_index(entry)
    handle = handle or datasets.PinnedDataset(location, manifest)
    return Table(location, store, handle, manifest, naming, memwal, _primary_key(manifest), listed)


def _naming_scheme(location: Location, store: Store, listed: version_files.VersionPage) -> NamingScheme:
    names = [meta.path.rsplit("/", 1)[-1] for meta in listed.files]
    scheme = naming_scheme(name for name in names if parse_version_manifest_name(name) is not None)
    if scheme is not None:
        return scheme
    if is_empty(store) and not os.path.isfile(location.uri):
        raise errors.TableNotFoundError(f"No table found at {location.uri}: the prefix is empty.")
    raise errors.NotALanceTableError(
        f"{location.uri} has no {version_files.VERSIONS_FOLDER}/*.manifest, so it is not a Lance table."
    )


def _newest_by_lance(
    location: Location, store: Store, naming: NamingScheme
) -> tuple[version_manifest.VersionManifest, datasets.PinnedDataset | None]:
    try:
        with datasets.lance_errors("open the table", location.uri):
            dataset = datasets.open_dataset(location)
        manifest = _read_manifest(store, dataset.version, naming)
    except (errors.ObjectNotFoundError, errors.TableNotFoundError):
        raise
    except errors.StorageError:
        # Raise a specific error if the newest manifest is the reason why pylance cannot open the table.
        names = (
            parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
            for meta in store.list(version_files.VERSIONS_FOLDER)
        )
        newest = max((name.version for name in names if name is not None and name.scheme is naming), default=0)
        version_manifest.check_readable(_read_manifest(store, newest, naming).manifest)
        raise
    return manifest, datasets.PinnedDataset(location, manifest, dataset)


def _read_manifest(store: Store, version: int, scheme: NamingScheme) -> version_manifest.VersionManifest:
    try:
        manifest = version_files.read_version_manifest(store, version, scheme)
    except errors.InvalidFormatError as error:
        path = version_files.version_path(version, scheme)
        raise errors.TableCorruptError(
            f"The manifest of version {version} cannot be read: {error}",
            remedy=f"Stop everything that writes the table, gc and expire too, and restore {path} from a backup. "
            f"Without one, move it and {version_files.VERSION_HINT} aside: the version before is the newest then, and "
            "readers lose what was committed since; see the page before you do.",
        ) from error
    for fragment in manifest.manifest.fragments:
        rows, deleted = fragment.physical_rows, fragment.deletion_file.num_deleted_rows
        if rows > _MAX_ROWS or 0 < rows < deleted:  # 0: not recorded, by old releases
            raise errors.TableCorruptError(
                f"{version_files.version_path(version, scheme)}: fragment {fragment.id} has {rows:,} rows, of which "
                f"{deleted:,} are deleted, which is impossible. Reading it could exhaust the memory."
            )
    return manifest


def _primary_key(version: version_manifest.VersionManifest) -> tuple[str, ...]:
    """Names of the key columns, by their position if the manifest has one (S0-002)."""
    marked: list[tuple[int, str]] = []
    columns = [schema_field for schema_field in version.manifest.fields if schema_field.parent_id < 0]
    for order, column in enumerate(columns):
        text = column.metadata.get(_KEY_POSITION, b"")
        position = column.unenforced_primary_key_position or (int(text) if text.isdigit() else 0)
        if position > 0:
            marked.append((position, column.name))
        elif column.unenforced_primary_key or column.metadata.get(_KEY_FLAG, b"").lower() in _TRUE:
            marked.append((_LAST + order, column.name))
    return tuple(name for _, name in sorted(marked))
