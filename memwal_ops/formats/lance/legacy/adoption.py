"""Migrate a table from the legacy layout: adopt its MemWALs' rows as generations, and replace its index.

The order of a migration; the run may be killed after any step:

1. Claim every MemWAL that is not flushed, by changing its owner: every later operation of its writer fails (S1-023).
2. Write generations, and region manifests that list them. No reader of a legacy table opens ``_mem_wal/``. The files of
   a run that was killed are orphans, which gc finds after the migration; the next run writes its own. A region's
   manifest is published again by each run, under the next number, before the table's own commit: a run that stalls and
   resumes finds that number taken.
3. Keep the old details beside the table, for a rollback.
4. Publish version V + 1: the current kind of details with the progress of each region, the primary key marked. If
   another writer published V + 1 first, everything is planned again.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
import uuid
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from lance.fragment import write_fragments

from memwal_ops import errors
from memwal_ops.formats.lance.commit.commit import CommitNote, commit_details
from memwal_ops.formats.lance.engines.merge.collapse import collapse
from memwal_ops.formats.lance.files.datasets import lance_errors, lance_options, open_dataset
from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.generations.projection import TOMBSTONE
from memwal_ops.formats.lance.legacy.index import legacy_entry
from memwal_ops.formats.lance.log.create import plan_mem_wal
from memwal_ops.formats.lance.log.region_files import WAL_SUFFIX, put_entry, put_generation
from memwal_ops.formats.lance.regions.manifests import NoRegionManifestError
from memwal_ops.formats.lance.regions.specs import MANUAL
from memwal_ops.formats.lance.wire import region_manifest
from memwal_ops.formats.lance.wire.memwal_index import with_progress
from memwal_ops.formats.lance.wire.names import (
    LayoutRecord,
    NamingScheme,
    parse_wal_entry_name,
    region_folder,
    with_layout_record,
)
from memwal_ops.formats.lance.wire.version_manifest import BASE_PATHS, TABLE_CONFIG, encode_version_manifest
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    import numpy.typing as npt

    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.log.region_columns import RegionColumns
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.storage.api import Store


LEGACY_FOLDER = "_mem_wal_ops/legacy"
_ENTRY_ROWS = 1 << 16
_READ_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """The planned region for a legacy region's name.

    ``merged``: its progress: legacy generation g counts as g + 1. ``current``: the generation that its next writer
    fills. ``flushed``: the generations that it lists.
    """

    region_id: UUID
    merged: int
    current: int
    flushed: tuple[region_manifest.FlushedGeneration, ...]


def region_id_of(store: Store, region: str, *, record: bool) -> UUID | None:
    """The id of a legacy region's name, as an earlier run recorded it; the first one to record it decides.

    Without ``record``, None if there is none. Raises ``InvalidFormatError``: the record cannot be read.
    """
    name = hashlib.blake2b(region.encode(), digest_size=16).hexdigest()
    path = f"{LEGACY_FOLDER}/regions/{name}.json"
    if record:
        made = {"region": region, "region_id": str(uuid.uuid4())}
        store.put_if_absent(path, encode_record(made))
    try:
        return uuid.UUID(decode_record(store.get(path), path)["region_id"])
    except errors.ObjectNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise errors.InvalidFormatError(f"{path} has no readable id of a region: {error}") from error


class Adopter:
    """Writes generations of one region, of a version whose primary key is set."""

    def __init__(self, table: Table, region_id: UUID, columns: RegionColumns, layout: str) -> None:
        """Nothing is read or written yet."""
        self._table, self._region_id, self._columns, self._layout = table, region_id, columns, layout
        self.last_entry: int | None = None
        """The last WAL entry that was put; None: none."""

    def adopt(self, generation: Generation, number: int, epoch: int) -> region_manifest.FlushedGeneration:
        """Write a generation with the newest row of each key.

        Raises:
            StorageError: the store failed; the written files are orphans.
            InvariantViolatedError: it does not read back as it was written; nothing refers to it.
        """
        winners = collapse([generation], self._table.primary_key)
        mask = np.zeros(winners.rows_read, dtype=np.bool_)
        mask[winners.rows] = True
        self._table.guard.check()
        path = f"{secrets.token_hex(4)}_gen_{number}"
        write = self._write_shard if self._layout == "shard" else self._write_region
        size = write(path, self._rows(generation, mask), epoch)
        with lance_errors("read back", path):
            count = open_dataset(self._table.location, f"{region_folder(self._region_id)}/{path}").count_rows()
        if count != int(mask.sum()):
            raise errors.InvariantViolatedError(f"{path} has {count} rows, and {int(mask.sum())} were to be adopted.")
        return region_manifest.FlushedGeneration(number, path, in_memory_bytes=size, physical_rows=count)

    def _rows(self, generation: Generation, mask: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        tombstones = generation.read_keys().column(TOMBSTONE)
        start = 0
        for batch in generation.read_rows(max_bytes=_READ_BYTES):
            wanted = pa.array(mask[start : start + batch.num_rows])
            dead = tombstones.slice(start, batch.num_rows).filter(wanted).combine_chunks()
            start += batch.num_rows
            at = 0
            for part in generation.projected(batch.filter(wanted), max_bytes=_READ_BYTES, references=False):
                columns = [*part.columns, dead.slice(at, part.num_rows)]
                at += part.num_rows
                yield pa.RecordBatch.from_arrays(
                    [column.cast(field.type) for column, field in zip(columns, self._columns.schema, strict=True)],
                    schema=self._columns.schema,
                )

    def _write_shard(self, path: str, batches: Iterator[pa.RecordBatch], epoch: int) -> int:
        """A dataset with files of its own; its fields have the base table's ids."""
        del epoch
        table, columns = self._table, self._columns
        folder = f"{region_folder(self._region_id)}/{path}"
        written = list(batches)
        reader = pa.RecordBatchReader.from_batches(columns.schema, written)
        with lance_errors("write", folder):
            fragments = write_fragments(
                reader,
                f"{table.location.uri}/{folder}",
                mode="create",
                data_storage_version=columns.file_version,
                storage_options=lance_options(table.location),
            )
        made = deepcopy(columns.template)
        del made.manifest.fragments[:]
        del made.manifest.base_paths[:]
        made.manifest.reader_feature_flags &= ~BASE_PATHS
        made.manifest.writer_feature_flags &= ~BASE_PATHS
        made.manifest.ClearField("max_fragment_id")
        assert isinstance(fragments, list)  # noqa: S101 - narrows pylance's union
        for number, copied in enumerate(fragments):
            fragment = made.manifest.fragments.add(id=number, physical_rows=copied.physical_rows)
            made.manifest.max_fragment_id = number
            for file in copied.to_json()["files"]:
                attributes = {name: value for name, value in file.items() if value is not None}
                attributes["fields"] = [columns.ids[field] if field >= 0 else field for field in attributes["fields"]]
                fragment.files.add(**attributes)
        made.manifest.timestamp.FromNanoseconds(time.time_ns())
        target = version_path(made.manifest.version, NamingScheme.V2, folder=folder)
        if not table.store.put_if_absent(target, encode_version_manifest(made)):
            raise errors.InvariantViolatedError(f"{target} exists, although its folder has a random name.")
        return sum(batch.nbytes for batch in written)

    def _write_region(self, path: str, batches: Iterator[pa.RecordBatch], epoch: int) -> int:
        table = self._table
        if self.last_entry is None:
            self.last_entry = _last_entry(table.store, self._region_id)
        rows = pa.Table.from_batches(batches, schema=self._columns.schema)
        entries = []
        for start in range(0, rows.num_rows, _ENTRY_ROWS):
            part = rows.slice(start, _ENTRY_ROWS).combine_chunks()
            entry = put_entry(table.store, self._region_id, self.last_entry + 1, part, epoch, self._columns)
            if entry is None:
                raise errors.CommitConflictError(
                    f"Another migration writes into region {self._region_id}; run it again."
                )
            self.last_entry += 1
            entries.append(entry)
        if not put_generation(table.store, table.location, self._region_id, path, entries, self._columns):
            raise errors.InvariantViolatedError(f"{path} exists, although it has a random name.")
        return int(rows.nbytes)


def newest_manifest(table: Table, region_id: UUID) -> region_manifest.RegionManifest | None:
    """The region's newest manifest; None where it has none yet."""
    try:
        return table.region(region_id).latest(checked=True)
    except NoRegionManifestError:
        return None


def publish_region(
    table: Table, plan: RegionPlan, before: region_manifest.RegionManifest | None, last_entry: int | None
) -> int:
    """Publish the region's next manifest, and return its number.

    ``before`` is the newest one, which was read before the table's version was.

    Raises ``CommitConflictError``: another migration published one first.
    """
    version, spec_id = (1, MANUAL) if before is None else (before.version + 1, before.region_spec_id)
    ends = (last_entry, last_entry)
    if last_entry is None and before is not None:
        ends = (before.replay_after_wal_id, before.wal_id_last_seen)
    manifest = region_manifest.RegionManifest(
        *(plan.region_id, version, spec_id, next_epoch(before), *ends, plan.current, plan.flushed),
        region_manifest.RegionStatus.ACTIVE,
        source=b"" if before is None else before.source,
    )
    if not table.region(plan.region_id).commit(manifest, ours_if_equal=False):
        raise errors.CommitConflictError(
            f"Another migration published the manifest of region {plan.region_id}; run it again."
        )
    return manifest.version


def next_epoch(before: region_manifest.RegionManifest | None) -> int:
    """The epoch with which the migration claims the region: earlier writers are fenced."""
    return 1 if before is None else before.writer_epoch + 1


def sealed_after(manifest: region_manifest.RegionManifest) -> region_manifest.RegionManifest:
    """The next manifest, with which no writer can claim the region any more."""
    return replace(manifest.next(), status=region_manifest.RegionStatus.SEALED, writer_epoch=manifest.writer_epoch + 1)


def _last_entry(store: Store, region_id: UUID) -> int:
    names = (meta.path.rsplit("/", 1)[-1] for meta in store.list(f"{region_folder(region_id)}/wal"))
    parsed = (parse_wal_entry_name(name) for name in names)
    return max((entry.entry_id for entry in parsed if entry is not None and entry.suffix == WAL_SUFFIX), default=0)


CONFIG_KEY = "memwal-ops.legacy"
_TOP = -1
_KEY_FLAG = "lance-schema:unenforced-primary-key"
_KEY_POSITION = "lance-schema:unenforced-primary-key:position"


@dataclass(frozen=True, slots=True)
class Kept:
    """The data that a migration keeps for its rollback.

    Attributes:
        path: its file, relative to the table's root.
        version: the last legacy version, and ``details`` its details.
        regions: per region name: its id, its progress, and the number of its first manifest.
        layout: that was migrated to.
    """

    path: str
    version: int
    details: bytes
    regions: Mapping[str, tuple[UUID, int, int]]
    layout: str

    def encoded(self) -> bytes:
        """The stored form: JSON."""
        document = {
            "version": self.version,
            "details": base64.b64encode(self.details).decode(),
            "layout": self.layout,
            "regions": {
                name: {"region_id": str(region_id), "merged_generation": merged, "manifest_version": version}
                for name, (region_id, merged, version) in sorted(self.regions.items())
            },
        }
        return encode_record(document, indent=1)


def keep(table: Table, plans: Mapping[str, RegionPlan], manifests: Mapping[str, int], layout: str) -> Kept:
    """Write the data for a rollback, under a unique name."""
    path = f"{LEGACY_FOLDER}/{table.version}-{uuid.uuid4()}.json"
    regions = {name: (plan.region_id, plan.merged, manifests[name]) for name, plan in plans.items()}
    kept = Kept(path, table.version, legacy_entry(table).index_details.value, regions, layout)
    table.store.put_if_absent(path, kept.encoded())
    return kept


def read_kept(table: Table) -> Kept:
    """The data that the table's migration kept.

    Raises ``InvalidUsageError``: the table was not migrated; ``InvalidFormatError``: it cannot be read;
    ``UnsupportedFeatureError``: a later release wrote it.
    """
    path = table.manifest.manifest.config.get(CONFIG_KEY, "")
    if not path:
        raise errors.InvalidUsageError(
            f"{table.location.uri} was not migrated from the legacy layout: there is nothing to roll back.",
            remedy="An older version is restored by dataset.checkout_version(N) and restore().",
        )
    try:
        document = decode_record(table.store.get(path), path)
        regions = {
            name: (uuid.UUID(region["region_id"]), int(region["merged_generation"]), int(region["manifest_version"]))
            for name, region in document["regions"].items()
        }
        details = base64.b64decode(document["details"], validate=True)
        return Kept(path, int(document["version"]), details, regions, str(document["layout"]))
    except (errors.ObjectNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise errors.InvalidFormatError(
            f"{path}, which the migration kept for its rollback, cannot be read: {error}"
        ) from error


def publish_migrated(table: Table, plans: Mapping[str, RegionPlan], kept: Kept, note: CommitNote) -> int:
    """Publish the next version with the current kind of details; the plans' manifests are written.

    Raises: as :func:`memwal_ops.formats.lance.commit.commit.commit_built`.
    """
    version = table.version + 1
    progress = {plan.region_id: plan.merged for plan in plans.values() if plan.merged}
    details = with_progress(plan_mem_wal(table), progress)
    manifest = region_manifest.with_region_records(table.manifest.manifest, _records(plans, version))
    manifest = with_layout_record(manifest, LayoutRecord(kept.layout, None))
    manifest.config[CONFIG_KEY] = kept.path
    manifest.writer_feature_flags |= TABLE_CONFIG
    mark_key(manifest.fields, table.primary_key)
    return commit_details(table, manifest, details.SerializeToString(deterministic=True), note)


def publish_rolled_back(table: Table, kept: Kept, note: CommitNote) -> int:
    """Publish the next version with the legacy details; rows, key and configuration do not change.

    Raises: as :func:`memwal_ops.formats.lance.commit.commit.commit_built`.
    """
    manifest = deepcopy(table.manifest.manifest)
    manifest = with_layout_record(manifest, None)
    del manifest.config[CONFIG_KEY]
    return commit_details(table, manifest, kept.details, note)


def seal_regions(table: Table, kept: Kept) -> None:
    """Seal the regions of a migration that is rolled back.

    Raises ``InvalidUsageError``: a region was written, merged or created since the migration.
    """
    made = {region_id: (name, merged, first) for name, (region_id, merged, first) in kept.regions.items()}
    others = [str(region_id) for region_id in table.regions.region_ids if region_id not in made]
    merged_now = table.index.merged_generations
    changed = [f"region {other} was created" for other in others]
    for region_id, (name, merged, first) in made.items():
        newest = newest_manifest(table, region_id)
        if merged_now.get(region_id, 0) != merged:
            changed.append(f"region {name!r} was merged up to generation {merged_now.get(region_id, 0)}")
        elif newest is None or newest.version > first + newest.sealed:
            changed.append(f"region {name!r} was claimed by a writer")
    if changed:
        raise errors.InvalidUsageError(
            f"{table.location.uri} cannot be rolled back: since its migration, {', and '.join(changed)}.",
            remedy="The legacy index does not have these rows. Continue in the current layout.",
        )
    for region_id, (name, _, _) in made.items():
        newest = newest_manifest(table, region_id)
        if newest is not None and not newest.sealed and not table.region(region_id).commit(sealed_after(newest)):
            raise errors.InvalidUsageError(
                f"{table.location.uri} cannot be rolled back: a writer claimed region {name!r} meanwhile.",
                remedy="Continue in the current layout.",
            )


def mark_key(fields: Sequence[table_pb2.Field], key: Sequence[str]) -> None:
    """Mark columns as the primary key, in its order, and as never NULL; unchanged where they are marked already."""
    by_name = {field.name: field for field in fields if field.parent_id == _TOP}
    marks = {_KEY_FLAG, _KEY_POSITION}
    if all(by_name[name].unenforced_primary_key or marks & {*by_name[name].metadata} for name in key):
        return
    for position, name in enumerate(key, 1):
        field = by_name[name]
        field.nullable = False
        field.unenforced_primary_key = True
        if len(key) == 1:
            field.metadata[_KEY_FLAG] = b"true"
        else:
            field.metadata[_KEY_POSITION] = str(position).encode()
            field.unenforced_primary_key_position = position


def _records(plans: Mapping[str, RegionPlan], version: int) -> dict[UUID, region_manifest.RegionRecord]:
    """Records that progress belongs to these regions, and rows to the current columns: no operator has to decide."""

    def record(plan: RegionPlan) -> region_manifest.RegionRecord:
        if not plan.merged:
            return region_manifest.RegionRecord(version, region_manifest.UNMERGED, version)
        mark = region_manifest.mark_of(f"{plan.region_id}:{plan.merged}")
        return region_manifest.RegionRecord(plan.merged, mark, version)

    return {plan.region_id: record(plan) for plan in plans.values()}
