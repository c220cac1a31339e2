"""Verify, before a merge or gc, that a region is the one whose merge progress the table records.

A region's id may be reused: a branch and a clone inherit the progress of their table and none of its regions, a
region's folder may be removed, a table may be overwritten without its regions. Timeline of the loss: R is merged up to
generation 3; R is created again and flushes 1 to 5; a merge that compares numbers alone treats 1 to 3 as merged, merges
4 and 5, and gc deletes 1 to 3, which no base table has.

Evidence, in this order:

1. The record that every merge stores in the version (:mod:`memwal_ops.formats.lance.wire.region_manifest`): the
   directory of the last merged generation. A region that lists another one under that number is another region. One
   that does not list the number any more was drained, which gc does only to a region whose identity it verified.
2. If other programs merged and stored no record: whether the generation was flushed before the first version in which
   it is merged, as long as that version and the previous one exist.
3. For a region with no merged generation: whether a version without a MemWAL index was published after the region was
   created, by the store's times or by the timestamps inside the files. Timeline of the loss: a region flushes; its
   table is removed and created again at the same URI; the old ``_mem_wal/`` is copied back by a tool that does not
   preserve times, so that by the store's times it is younger than the new table. Only the timestamps inside are older.
   A writer whose clock is behind by more than the time between the table's creation and its first flush causes the same
   evidence; then the operator has to decide once.

If the evidence is not conclusive, an operator decides (``memwal-ops adopt``).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

from memwal_ops.errors import InvalidFormatError, InvalidUsageError, ObjectNotFoundError, RegionReplacedError
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER
from memwal_ops.formats.lance.regions.merge_history import Moment, is_earlier
from memwal_ops.formats.lance.regions.specs import MANUAL, RegionSpec, by_region, decode_spec, region_values
from memwal_ops.formats.lance.wire import region_manifest
from memwal_ops.formats.lance.wire.names import region_folder
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    import pyarrow as pa

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta, Store


UNDECIDED_RECORD = region_manifest.RegionRecord(0, region_manifest.UNDECIDED)


def check_identity(
    table: Table, manifest: region_manifest.RegionManifest, *, created: datetime | None = None
) -> region_manifest.RegionRecord | None:
    """Refuse a region that is not, or may not be, the one whose progress the table records, at this version.

    ``created``: when the oldest existing manifest of the region was written, by the store's clock. None: for a region
    with no merged generation, only the record is checked, and not whether it is older than the table's MemWAL index;
    for jobs that neither merge it nor delete unmerged generations.

    Returns the record that the next commit should store, if there was none and the identity followed from times, which
    expire with the versions. None: nothing to store.

    Raises ``RegionReplacedError``: it is another region, or that cannot be excluded.
    """
    merged = table.index.merged_generations.get(manifest.region_id, 0)
    record = table.records.get(manifest.region_id)
    if manifest.sealed and not manifest.flushed_generations:
        return None  # nothing can be merged from it any more
    check_record(table, manifest)
    if not merged:
        _check_age(table, manifest, record, created)
        return None
    return (
        None
        if record is not None and record.mark != region_manifest.UNMERGED
        else _check_by_times(table, manifest, merged)
    )


def check_record(table: Table, manifest: region_manifest.RegionManifest) -> None:
    """Refuse a region that is another one by the table's records; no request, and no times are compared.

    Raises ``RegionReplacedError``: it is another region, or an operator has to decide whether it is.
    """
    region_id = manifest.region_id
    merged = table.index.merged_generations.get(region_id, 0)
    record = table.records.get(region_id)
    if manifest.sealed and not manifest.flushed_generations:
        return
    if record is not None and record.mark == region_manifest.UNDECIDED:
        raise _older_than_the_index(manifest)
    if merged and merged >= manifest.current_generation:
        raise RegionReplacedError(
            f"Region {region_id}: by the table's progress, generation {merged} is merged, but the region's current "
            f"generation is {manifest.current_generation}. The progress belongs to another region of this id: one that "
            "was removed, or that of the table from which this branch or clone was made.",
            remedy=_remedy(region_id, may_be_merged=False),
        )
    if record is None or record.mark == region_manifest.UNMERGED:
        return
    if not merged:
        raise RegionReplacedError(
            f"Region {region_id}: generation {record.generation} of it was merged, but the table's MemWAL "
            "index has no progress for it: the index was initialized again, alone or with an overwrite of the table. "
            "The region's rows may belong to the table as it was before.",
            remedy=f"{_remedy_for_lost(region_id)} {_remedy_for_old(region_id)}",
        )
    listed = _listed(manifest, record.generation)
    if listed is not None and region_manifest.mark_of(listed.path) != record.mark:
        raise RegionReplacedError(
            f"Region {region_id}: the generation {record.generation} that was merged is not {listed.path}, "
            f"which this region lists. The progress (generation {merged} is merged) belongs to "
            "another region of this id: one that was removed, or that of the table from which this branch or "
            "clone was made.",
            remedy=_remedy(region_id),
        )


def lost_progress(
    table: Table, manifest: region_manifest.RegionManifest
) -> tuple[int, region_manifest.RegionRecord | None] | None:
    """The progress of a region that the newest version lacks, since its MemWAL index was removed and made again.

    Proof: the newest version descends, without an overwrite, from one that has the progress, by transactions that
    exist; and by its record or by times, the region is the one that was merged there.

    Returns the last merged generation, and the record of its region, if it is known. None: nothing is lost, or not
    proven.
    """
    region_id = manifest.region_id
    if table.index.merged_generations.get(region_id, 0):
        return None
    progress = table.history.progress_before(region_id)
    if progress is None or progress[1] >= manifest.current_generation:
        return None
    version, merged = progress
    record = table.records.get(region_id)
    if record is not None and record.mark == region_manifest.UNMERGED and record.generation > version:
        return None  # an operator decided since
    if record is None or record.mark in {region_manifest.UNMERGED, region_manifest.UNDECIDED}:
        try:
            return merged, _check_by_times(table, manifest, merged, until=version)
        except RegionReplacedError:
            return None
    listed = _listed(manifest, record.generation)
    is_same = record.generation <= merged and (listed is None or region_manifest.mark_of(listed.path) == record.mark)
    return (merged, record) if is_same else None


def _listed(manifest: region_manifest.RegionManifest, generation: int) -> region_manifest.FlushedGeneration | None:
    return next((flushed for flushed in manifest.flushed_generations if flushed.generation == generation), None)


def _check_by_times(
    table: Table, manifest: region_manifest.RegionManifest, merged: int, *, until: int | None = None
) -> region_manifest.RegionRecord | None:
    """Check a region by times: other programs merged it, and stored no record. ``until``: the version to begin at."""
    existing = _newest_existing(table.store, manifest, merged)
    if existing is None:
        return None  # no existing generation counts as merged
    flushed, at = existing
    merge = table.history.merged_at(manifest.region_id, flushed.generation, until=until)
    earlier = None if merge is None else is_earlier(at, merge[0])
    if merge is None or not earlier or not merge[1]:
        what = (
            "was flushed after that"
            if earlier is False
            else "may have been flushed before or after that: the versions that would show it are expired"
            if earlier
            else "may have been flushed before or after that: the times are not conclusive"
        )
        raise RegionReplacedError(
            f"Region {manifest.region_id}: by the table's progress, generation {merged} is merged, but there is no "
            f"record of which region that was, and {flushed.path} {what}. The progress may belong to another region of "
            "this id: one that was removed, or that of the table from which this branch or clone was made.",
            remedy=_remedy(manifest.region_id),
        )
    return region_manifest.RegionRecord(flushed.generation, region_manifest.mark_of(flushed.path))


def _check_age(
    table: Table,
    manifest: region_manifest.RegionManifest,
    record: region_manifest.RegionRecord | None,
    created: datetime | None,
) -> None:
    """Check that a region with no merged generation is not of a table that was at this place before."""
    if created is None or not manifest.flushed_generations:
        return
    first = _first_existing(table.store, manifest.region_id, manifest.flushed_generations)
    if first is None:
        return
    began = Moment(min(created, first[1].stored), first[1].inside)
    # An operator's decision is for the table as it was then, and not after it was overwritten again.
    decided_at = 0 if record is None else record.generation
    without_index = table.history.without_index_since(began.earliest, after=decided_at)
    later = [
        version
        for version, moment in without_index.items()
        if is_earlier(moment, began) is not True or began.inside < moment.earliest
    ]
    if any(table.history.indexed_before(version) is None for version in later):
        raise _older_than_the_index(manifest)
    # Else the index was removed and made again, and the table was not overwritten.
    if later and (lost := table.history.progress_before(manifest.region_id, since=began)) is not None:
        raise RegionReplacedError(
            f"Region {manifest.region_id}: version {lost[0]} has its generations up to {lost[1]}, but the table's "
            "MemWAL index was removed and made again since, and has no progress for it.",
            remedy=_remedy_for_lost(manifest.region_id),
        )


def _older_than_the_index(manifest: region_manifest.RegionManifest) -> RegionReplacedError:
    return RegionReplacedError(
        f"Region {manifest.region_id} is, or may be, older than the table's MemWAL index, by the times of its files or "
        "by the timestamps in them. Then it belongs to the table as it was before it was overwritten, before it was "
        "removed and created again, or before its MemWAL index was initialized again. The same is found if the table "
        "was copied without file times and _mem_wal/ first, or if a writer's clock is behind.",
        remedy=_remedy_for_old(manifest.region_id),
        undecided=True,
    )


def _newest_existing(
    store: Store, manifest: region_manifest.RegionManifest, most: int
) -> tuple[region_manifest.FlushedGeneration, Moment] | None:
    """The newest of the listed generations up to ``most`` that exists, and when it was flushed."""
    listed = [flushed for flushed in manifest.flushed_generations if flushed.generation <= most]
    return _first_existing(store, manifest.region_id, listed[::-1])


def _first_existing(
    store: Store, region_id: UUID, generations: Sequence[region_manifest.FlushedGeneration]
) -> tuple[region_manifest.FlushedGeneration, Moment] | None:
    for flushed in generations:
        folder = f"{region_folder(region_id)}/{flushed.path}"
        metas = [meta for meta in store.list(f"{folder}/{VERSIONS_FOLDER}") if meta.path.endswith(".manifest")]
        for meta in sorted(metas, key=lambda meta: meta.last_modified):
            read = _read_generation(store, meta)
            if read is not None:
                return flushed, read
    return None


def _read_generation(store: Store, meta: ObjectMeta) -> Moment | None:
    try:
        manifest = decode_version_manifest(store.get(meta.path)).manifest
    except (ObjectNotFoundError, InvalidFormatError):
        return None
    return Moment.of(meta, manifest)


def _remedy(region_id: UUID, *, may_be_merged: bool = True) -> str:
    adopt = f"memwal-ops adopt URI --region {region_id} --as"
    merged = f" If they are in the table already, as its progress records: {adopt} merged." if may_be_merged else ""
    return (
        "Nothing of it is merged or deleted before you decide. If its generations are not in the table yet, this "
        f"moves them to a new region: {adopt} unmerged.{merged} runbooks/merge-blocked.md describes how to find out."
    )


def _remedy_for_lost(region_id: UUID) -> str:
    return (
        "If the index was removed and made again, and the table was not overwritten, memwal-ops merge URI takes the "
        "progress from the versions before. If these do not exist any more, and the table has the rows of all "
        f"generations up to N: memwal-ops adopt URI --region {region_id} --as merged --up-to N."
    )


def _remedy_for_old(region_id: UUID) -> str:
    return (
        "Nothing of it is merged or deleted before you decide. If its rows belong to this table: memwal-ops adopt "
        f"URI --region {region_id} --as unmerged. If they do not: stop its writer and move _mem_wal/{region_id} to a "
        "place outside the table. runbooks/merge-blocked.md describes how to find out."
    )


_TOP = -1
# Regions of the same values, each but the last of which was sealed.
_MOST_SEALED = 100


@dataclass(frozen=True)
class RegionValues:
    """A spec, and one value for each of its fields; None is NULL."""

    spec: RegionSpec
    values: tuple[Any, ...]

    def encoded(self) -> tuple[tuple[str, bytes], ...]:
        """The values as a region manifest stores them; NULL is left out."""
        stored = (
            (field.field_id, region_manifest.encode_field(value, region_manifest.field_type(field.result_type)))
            for field, value in zip(self.spec.fields, self.values, strict=True)
        )
        return tuple((name, value) for name, value in stored if value is not None)

    def region_id(self, number: int) -> UUID:
        """The id of the region with these values, derived from them; the next number where that one is sealed."""
        text = repr((self.spec.spec_id, self.encoded(), number)).encode()
        return UUID(bytes=sha256(text).digest()[:16], version=4)

    def has_region(self, region_id: UUID) -> bool:
        """Whether the id is derived from these values."""
        return any(self.region_id(number) == region_id for number in range(_MOST_SEALED))

    def other_values(self, rows: pa.Table) -> list[tuple[Any, ...]]:
        """The region values of rows that belong to other regions."""
        return [values for values, _ in by_region(region_values(self.spec, rows)) if values != self.values]


def table_spec(table: Table, spec_id: int) -> RegionSpec:
    """The table's spec of that id, its sources by the names that columns have in this version.

    Raises:
        InvalidUsageError: there is no such spec.
        TableCorruptError: the stored spec is invalid.
    """
    names = {
        schema_field.id: schema_field.name
        for schema_field in table.manifest.manifest.fields
        if schema_field.parent_id == _TOP
    }
    for stored in table.index.region_specs:
        if stored.spec_id == spec_id:
            return decode_spec(stored, names)
    known = ", ".join(str(spec.spec_id) for spec in table.index.region_specs)
    raise InvalidUsageError(f"{table.location.uri} has no region spec {spec_id}; it has: {known or 'none'}.")


def region_values_of(table: Table, manifest: region_manifest.RegionManifest) -> RegionValues | None:
    """The values of a region; None: it belongs to no spec.

    Raises:
        InvalidUsageError: the table has no such spec.
        InvalidFormatError: its manifest has a value that is not of the field's type.
    """
    if manifest.region_spec_id == MANUAL:
        return None
    spec, stored = table_spec(table, manifest.region_spec_id), dict(manifest.region_fields)
    return RegionValues(
        spec,
        tuple(
            region_manifest.decode_field(stored[field.field_id], region_manifest.field_type(field.result_type))
            if field.field_id in stored
            else None
            for field in spec.fields
        ),
    )
