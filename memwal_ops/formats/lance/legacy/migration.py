"""Replace the legacy MemWAL index of a table by the current one, and roll that back.

The order of a migration; the run may be killed after any step:

1. Claim every MemWAL that is not flushed, by changing its owner: every later operation of its writer fails (S1-023).
2. Write generations, and region manifests that list them. No reader of a legacy table looks there.
3. Keep the old details beside the table, for a rollback.
4. Publish version V + 1: the current kind of details with the progress of each region, the primary key marked. If
   another writer published V + 1 first, everything is planned again.
"""

from __future__ import annotations

import base64
import uuid
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError, InvalidUsageError, ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import commit_details
from memwal_ops.formats.lance.legacy.adoption import LEGACY_FOLDER, newest_manifest, sealed_after
from memwal_ops.formats.lance.legacy.index import legacy_entry
from memwal_ops.formats.lance.log.create import plan_mem_wal
from memwal_ops.formats.lance.wire.layout_record import LayoutRecord, with_layout_record
from memwal_ops.formats.lance.wire.memwal_index import with_progress
from memwal_ops.formats.lance.wire.region_manifest import UNMERGED, RegionRecord, mark_of, with_region_records
from memwal_ops.formats.lance.wire.version_manifest import TABLE_CONFIG
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.legacy.adoption import RegionPlan
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2

CONFIG_KEY = "memwal-ops.legacy"
_TOP = -1
_KEY_FLAG = "lance-schema:unenforced-primary-key"
_KEY_POSITION = "lance-schema:unenforced-primary-key:position"


@dataclass(frozen=True, slots=True)
class Kept:
    """The data that a migration keeps for its rollback.

    Attributes:
        path: its file, relative to the table's root.
        version: the last legacy version.
        details: the legacy details.
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

    Raises:
        InvalidUsageError: the table was not migrated.
        InvalidFormatError: it cannot be read.
        UnsupportedFeatureError: a later release wrote it.
    """
    path = table.manifest.manifest.config.get(CONFIG_KEY, "")
    if not path:
        raise InvalidUsageError(
            f"{table.location.uri} was not migrated from the legacy layout: there is nothing to roll back.",
            remedy="An older version is restored by dataset.checkout_version(N) and restore().",
        )
    try:
        document = decode_record(table.store.get(path), path)
        regions = {
            name: (uuid.UUID(one["region_id"]), int(one["merged_generation"]), int(one["manifest_version"]))
            for name, one in document["regions"].items()
        }
        details = base64.b64decode(document["details"], validate=True)
        return Kept(path, int(document["version"]), details, regions, str(document["layout"]))
    except (ObjectNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidFormatError(
            f"{path}, which the migration kept for its rollback, cannot be read: {error}"
        ) from error


def publish_migrated(table: Table, plans: Mapping[str, RegionPlan], kept: Kept, note: CommitNote) -> int:
    """Publish the next version with the current kind of details.

    Args:
        table: the legacy version; its primary key is set.
        plans: the regions, whose manifests are written.

    Raises: as :func:`memwal_ops.formats.lance.commit.commit.commit_built`.
    """
    version = table.version + 1
    progress = {plan.region_id: plan.merged for plan in plans.values() if plan.merged}
    details = with_progress(plan_mem_wal(table), progress)
    manifest = with_region_records(table.manifest.manifest, _records(plans, version))
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
    """Seal the regions of a migration that is rolled back; refuse if anything was written to them.

    Raises:
        InvalidUsageError: a region was written, merged or created since the migration.
    """
    made = {region_id: (name, merged, first) for name, (region_id, merged, first) in kept.regions.items()}
    others = [str(one) for one in table.regions.region_ids if one not in made]
    merged_now = table.index.merged_generations
    changed = [f"region {one} was created" for one in others]
    for region_id, (name, merged, first) in made.items():
        newest = newest_manifest(table, region_id)
        if merged_now.get(region_id, 0) != merged:
            changed.append(f"region {name!r} was merged up to generation {merged_now.get(region_id, 0)}")
        elif newest is None or newest.version > first + newest.sealed:
            changed.append(f"region {name!r} was claimed by a writer")
    if changed:
        raise InvalidUsageError(
            f"{table.location.uri} cannot be rolled back: since its migration, {', and '.join(changed)}.",
            remedy="The legacy index does not have these rows. Continue in the current layout.",
        )
    for region_id, (name, _, _) in made.items():
        newest = newest_manifest(table, region_id)
        if newest is not None and not newest.sealed and not table.region(region_id).commit(sealed_after(newest)):
            raise InvalidUsageError(
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


def _records(plans: Mapping[str, RegionPlan], version: int) -> dict[UUID, RegionRecord]:
    """Records that progress belongs to these regions, and rows to the current columns: no operator has to decide."""
    return {
        plan.region_id: RegionRecord(plan.merged, mark_of(f"{plan.region_id}:{plan.merged}"), version)
        if plan.merged
        else RegionRecord(version, UNMERGED, version)
        for plan in plans.values()
    }
