"""Report the retained history of a Lance table: versions, generations, indexes and storage. Reads metadata only.

Determine from a few listings whether anything was written to a table since its backlog figures were read.

The figures depend on the versions of the table, and on the manifests of its regions: every commit adds a version
manifest, and every flush, claim and collection of a region adds a region manifest. A listing shows these files with
their sizes, times and tags.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core import table_history
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.regions.manifests import list_regions
from memwal_ops.formats.lance.wire.memwal_index import merge_progress
from memwal_ops.formats.lance.wire.names import (
    JOB_PROPERTY,
    MEM_WAL_FOLDER,
    NamingScheme,
    VersionName,
    parse_region_manifest_name,
    parse_version_manifest_name,
    region_folder,
)
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, decode_version_manifest
from memwal_ops.storage.api import ObjectMeta, Store, results_of
from memwal_ops.text import known_sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.region_manifest import FlushedGeneration, RegionManifest


_CONCURRENT_READS = 16
_MAX_REGIONS = 20
_MAX_MANIFESTS = 20


@dataclass(frozen=True, slots=True)
class _Version:
    """A version that was read, and its merge progress."""

    number: int
    committed: datetime
    manifest: VersionManifest
    merged: Mapping[UUID, int]


@dataclass(frozen=True, slots=True)
class _Region:
    """The newest manifests of a region. They ascend, each with the time at which it was published."""

    region_id: UUID
    manifests: Sequence[tuple[datetime, RegionManifest]]


def recent_history(table: Table, limit: int) -> table_history.TableHistory:
    """The newest ``limit`` versions and at most 10 times as many generations, of at most 20 regions.

    Requests: one for each version, one listing for each region, and one for each of its newest 20 manifests.
    """
    newest = results_of(lambda meta: _version(table, meta), _newest(table, limit + 1), threads=_CONCURRENT_READS)
    versions = [version for version in newest if version]
    ids = table.regions.region_ids if table.log.shows_progress else ()
    regions = results_of(lambda region_id: _region(table, region_id), ids[:_MAX_REGIONS], threads=_CONCURRENT_READS)
    sizes = {
        (region.region_id, flushed.generation): flushed
        for region in regions
        for _, manifest in region.manifests
        for flushed in manifest.flushed_generations
    }
    revisions = [
        _revision(version, previous, sizes) for version, previous in zip(versions, [*versions[1:], None], strict=True)
    ]
    left_out = ""
    if len(ids) > _MAX_REGIONS:
        left_out = f"generations of {_MAX_REGIONS} of {len(ids):,} regions"
    log = [record for region in regions for record in _generations(table, region, versions)]
    log.sort(key=lambda record: record[0], reverse=True)
    return table_history.TableHistory(
        tuple(revisions[:limit]),
        tuple(record for _, record in log[: 10 * limit]),
        tuple(_indexes(table)),
        tuple(_storage(table, versions)),
        left_out,
    )


def _newest(table: Table, count: int) -> list[ObjectMeta]:
    numbered = version_files.list_versions(table.store).numbered
    return [numbered[version] for version in nlargest(count, numbered)]


def _version(table: Table, meta: ObjectMeta) -> _Version | None:
    """A version; None if it cannot be read: it was expired meanwhile, or is damaged (``verify`` reports that)."""
    try:
        read = decode_version_manifest(table.store.get(meta.path))
        merged = merge_progress(read.indexes)
    except (errors.ObjectNotFoundError, errors.InvalidFormatError, errors.TableCorruptError):
        return None
    return _Version(int(read.manifest.version), read.manifest.timestamp.ToDatetime(UTC), read, merged)


def _revision(
    version: _Version, previous: _Version | None, sizes: Mapping[tuple[UUID, int], FlushedGeneration]
) -> table_history.RevisionRecord:
    manifest, transaction = version.manifest.manifest, version.manifest.transaction
    merged = dict(_merged_in(version, previous))
    known = [size for (region_id, generation), size in sizes.items() if generation in merged.get(region_id, ())]
    files = [file for fragment in manifest.fragments for file in fragment.files]
    return table_history.RevisionRecord(
        version.number,
        version.committed,
        _author(manifest, transaction),
        "" if transaction is None else version_files.operation_of(transaction),
        sum(
            int(fragment.physical_rows) - int(fragment.deletion_file.num_deleted_rows)
            for fragment in manifest.fragments
        ),
        known_sum(int(file.file_size_bytes) or None for file in files),
        sum(max(0, span.stop - span.start) for span in merged.values()),
        known_sum(generation.physical_rows for generation in known),
        known_sum(generation.accounted_bytes for generation in known),
    )


def _merged_in(version: _Version, previous: _Version | None) -> Iterator[tuple[UUID, range]]:
    """The generations of each region that a version merged, if the version before it was read."""
    if previous is not None and previous.number == version.number - 1:
        for region_id, progress in version.merged.items():
            yield region_id, range(previous.merged.get(region_id, 0) + 1, progress + 1)


def _author(manifest: table_pb2.Manifest, transaction: table_pb2.Transaction | None) -> str:
    job = "" if transaction is None else transaction.transaction_properties.get(JOB_PROPERTY, "")
    if job:
        return f"memwal-ops {job}"
    return f"{manifest.writer_version.library} {manifest.writer_version.version}".strip() or "unknown"


def _region(table: Table, region_id: UUID) -> _Region:
    region = table.region(region_id)
    named = (
        (parse_region_manifest_name(meta.path.rpartition("/")[2]), meta) for meta in table.store.list(region.folder)
    )
    numbered = ((number, meta.last_modified) for number, meta in named if number is not None)
    manifests = []
    for number, published in sorted(nlargest(_MAX_MANIFESTS, numbered, key=lambda pair: pair[0])):
        try:
            manifests.append((published, region.read(number)))
        except errors.RegionManifestCorruptError:
            continue  # collected meanwhile, or damaged: inspect and verify report that
    return _Region(region_id, manifests)


def _generations(
    table: Table, region: _Region, versions: Sequence[_Version]
) -> Iterator[tuple[tuple[datetime, int], table_history.LogRecord]]:
    """The generations that any of a region's manifests lists, each with the key by which they are sorted."""
    if not region.manifests:
        return
    progress = table.index.merged_generations.get(region.region_id, 0)
    listed = {
        flushed.generation: flushed for _, manifest in region.manifests for flushed in manifest.flushed_generations
    }
    lists = [
        (when, {flushed.generation for flushed in manifest.flushed_generations}) for when, manifest in region.manifests
    ]
    for number, flushed in listed.items():
        first = next(at for at, (_, numbers) in enumerate(lists) if number in numbers)
        unlisted = next((at for at in range(first, len(lists)) if number not in lists[at][1]), None)
        merge = _merge_of(versions, region.region_id, number)
        removed = None if unlisted is None else lists[unlisted][0]
        state = "removed" if removed else "merged" if number <= progress else "waiting"
        began = lists[first][0] if first else None
        record = table_history.LogRecord(
            f"{str(region.region_id)[:8]}/{number}",
            flushed.physical_rows,
            flushed.accounted_bytes,
            began,
            None if merge is None else merge.committed,
            None if merge is None else merge.number,
            removed,
            state,
        )
        yield (lists[first][0], number), record


def _merge_of(versions: Sequence[_Version], region_id: UUID, generation: int) -> _Version | None:
    """The version that merged a generation; None if it is not merged, or that version was not read."""
    merged = [version for version in versions if version.merged.get(region_id, 0) >= generation]
    before = [version for version in versions if version.merged.get(region_id, 0) < generation]
    return merged[-1] if merged and before and before[0].number < merged[-1].number else None


def _indexes(table: Table) -> Iterator[table_history.IndexRecord]:
    for index in base_indexes(table).values():
        state = coverage(index.covered, table.manifest)
        covered = state.fragments - len(state.uncovered)
        yield table_history.IndexRecord(index.name, index.type, covered, state.fragments, state.uncovered_rows)


def _storage(table: Table, versions: Sequence[_Version]) -> Iterator[table_history.StorageRecord]:
    """The data files of the base table; why other files are kept, ``gc`` reports."""
    newest = _files(table.manifest)
    yield table_history.StorageRecord(
        "data files", len(newest), sum(newest.values()), f"version {table.version}, the newest"
    )
    older: dict[str, int] = {}
    holding = []
    for version in versions:
        if files := {path: size for path, size in _files(version.manifest).items() if path not in newest}:
            older |= files
            holding.append(version.number)
    if older:
        first, last = holding[-1], holding[0]
        held = f"version {last}" if first == last else f"versions {first} to {last}"
        unread = any(number < versions[-1].number for number in table.listed.versions)
        held += f"{', and earlier ones were not read' if unread else ''} (memwal-ops expire)"
        yield table_history.StorageRecord("data files of older versions", len(older), sum(older.values()), held)


def _files(version: VersionManifest) -> dict[str, int]:
    return {file.path: int(file.file_size_bytes) for fragment in version.manifest.fragments for file in fragment.files}


_PLAIN, _WITH_LOG = "plain", "log"
# Stores on which a listing's start key saves no request: local files, and Azure, which lists from the beginning.
_WITHOUT_START_KEY = ("/", "az://")
# Sorts directly after the slash that ends a folder's name in a path.
_AFTER_FOLDER = "0"


def fingerprint(table: Table) -> str | None:
    """The fingerprint of a table that was just opened, to be taken before its backlog is read.

    Requests: see :func:`is_unchanged`.

    Returns:
        None: there is a newer version already.
    """
    kind = _WITH_LOG if table.log.exists else _PLAIN
    versions = _newest_versions(table.store)
    names = [name for meta in versions if (name := _version_name(meta)) is not None]
    newest = max((name.version for name in names if not name.detached), default=0)
    return _digest(kind, table.store, versions) if newest == table.version else None


def is_unchanged(store: Store, known: str) -> bool:
    """Whether the table has the fingerprint that it had: nothing was written that a backlog figure depends on.

    Not noticed: versions that were removed behind the newest 1,000, and generation directories that were removed
    without any commit.

    Requests: one, and with MemWAL one for each region, or fewer: regions of few objects share a page of a listing. One
    more for each region that has 1,000 files of generations, and one more in all on Azure, or if the last region has
    1,000 files.
    """
    return _digest(known.partition(":")[0], store, _newest_versions(store)) == known


def _digest(kind: str, store: Store, versions: Iterable[ObjectMeta]) -> str:
    digest = hashlib.sha256()
    for meta in [*versions, *(_log_objects(store) if kind == _WITH_LOG else ())]:
        digest.update(os.fsencode(f"{meta.path}\n{meta.size} {meta.last_modified.timestamp()} {meta.e_tag}\n"))
    return f"{kind}:{digest.hexdigest()}"


def _newest_versions(store: Store) -> Sequence[ObjectMeta]:
    """The first page of the versions if it begins with the newest one, else all versions."""
    listing = store.list(version_files.VERSIONS_FOLDER)
    page = list(islice(listing, version_files.PAGE))
    schemes = {name.scheme for meta in page if (name := _version_name(meta)) is not None}
    if len(page) == version_files.PAGE and schemes == {NamingScheme.V2} and version_files.is_ascending(page):
        return page
    return _by_path([*page, *listing])


def _log_objects(store: Store) -> Sequence[ObjectMeta]:
    if store.root.startswith(_WITHOUT_START_KEY):
        return _region_manifests(store)
    objects: list[ObjectMeta] = []
    after: str | None = None
    while True:
        page = list(islice(store.list(MEM_WAL_FOLDER, after=after), version_files.PAGE))
        if not version_files.is_ascending(page):  # S3 Express
            return _region_manifests(store)
        objects += page
        if len(page) < version_files.PAGE:
            return objects
        after = _next_start(page[-1].path)


def _next_start(last: str) -> str:
    """Where a listing continues after a full page: it skips a region's other files, but not its manifests.

    In a region's folder, directories of generations sort before ``manifest/``, and ``wal/`` after it.
    """
    region, _, inside = last.removeprefix(f"{MEM_WAL_FOLDER}/").partition("/")
    folder = f"{MEM_WAL_FOLDER}/{region}"
    if not inside or inside.startswith("manifest/"):
        return last
    # Never back: a copy of the manifests, in ``manifest.bak/``, sorts between the two.
    return max(last, f"{folder}/manifest") if inside < "manifest/" else f"{folder}{_AFTER_FOLDER}"


def _region_manifests(store: Store) -> Sequence[ObjectMeta]:
    regions = list_regions(store).region_ids
    return _by_path(meta for region_id in regions for meta in store.list(f"{region_folder(region_id)}/manifest"))


def _by_path(objects: Iterable[ObjectMeta]) -> list[ObjectMeta]:
    return sorted(objects, key=lambda meta: meta.path)


def _version_name(meta: ObjectMeta) -> VersionName | None:
    return parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])
