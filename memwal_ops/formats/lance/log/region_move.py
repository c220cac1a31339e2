"""Move a region's generations to a new region, and let generations of a moved table name the table that has them.

A move is for a region with a reused id (:mod:`memwal_ops.formats.lance.generations.region_identity`). A crash may
happen after each step, and each step may be repeated by any number of processes at once:

1. Fence the old region's writer, flush its log, and seal the region: no writer can claim it any more.
2. Copy the listed generations, and the log entries that are still needed, to the new region's folder.
3. Publish the new region's first manifest. From then on its generations are in the backlog.
4. Remove the generations from the old region's manifest.

Until step 4 the old region stays blocked, so that no row is merged twice; until step 3 nothing in the new
region's folder is merged or collected, as it has no manifest. The new id is derived from the old one and the name of
the first generation, which is random, so that a repetition finds the files that were already copied.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.errors import CommitConflictError, ForeignRootError, GenerationMissingError, InvariantViolatedError
from memwal_ops.formats.lance.files.datasets import own_log
from memwal_ops.formats.lance.files.named_files import Places, sizes_of
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER, list_versions
from memwal_ops.formats.lance.generations.generation import lacks_files
from memwal_ops.formats.lance.generations.generation_ref import GenerationRef, generation_ref
from memwal_ops.formats.lance.generations.writer_release import FLUSHED
from memwal_ops.formats.lance.log.region_seal import seal_region
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.formats.lance.wire.names import (
    log_folder,
    parse_version_manifest_name,
    parse_wal_entry_name,
    region_folder,
)
from memwal_ops.formats.lance.wire.region_manifest import RegionStatus
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.storage.concurrently import concurrently

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.formats.lance.generations.backlog import RegionBacklog
    from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
    from memwal_ops.storage.api import ObjectMeta

_CONCURRENT_READS = 8


@dataclass(frozen=True, slots=True)
class Move:
    """The result of a move. ``new_id`` is None if the region had no generations."""

    new_id: UUID | None
    generations: tuple[int, ...]


def new_region_id(manifest: RegionManifest) -> UUID | None:
    """The id of the new region for the listed generations; None if none is listed."""
    if not manifest.flushed_generations:
        return None
    name = manifest.region_id.bytes + manifest.flushed_generations[0].path.encode()
    return UUID(bytes=hashlib.blake2b(name, digest_size=16).digest(), version=4)


def check_complete(table: Table, manifest: RegionManifest) -> None:
    """Refuse a region with a lost generation: the rows of the others may be older than the base table's.

    Raises:
        GenerationMissingError: one between the first and the newest is not listed, or has no files.
    """
    listed = {one.generation: one.path for one in manifest.flushed_generations}
    for generation in range(1, manifest.current_generation):
        path = f"{region_folder(manifest.region_id)}/{listed.get(generation, '')}"
        if generation not in listed or next(iter(table.store.list(path)), None) is None:
            raise GenerationMissingError(
                f"Generation {generation} of region {manifest.region_id} is not listed, or has no files."
            )


def move_region(table: Table, region_id: UUID) -> Move:
    """Move all generations of a region, in the steps above.

    Memory: the largest file of a generation.

    Raises:
        CommitConflictError: writers claimed the region repeatedly.
        GenerationMissingError: see :func:`check_complete`.
        WalCorruptError, UnsupportedFeatureError: its log cannot be replayed.
        StorageError: the store failed; run it again.
    """
    old = table.region(region_id)
    sealed = seal_region(table, region_id)
    check_complete(table, sealed)
    new_id = new_region_id(sealed)
    if new_id is not None:
        new = table.region(new_id)
        if not new.versions():  # otherwise it was moved before, and may already be merged and collected
            _copy(table, sealed, new_id)
            first = replace(sealed, region_id=new_id, version=1, status=RegionStatus.ACTIVE)
            if not new.commit(first) and not new.versions():
                raise InvariantViolatedError(f"Region {new_id} could not be published, and does not exist.")
    _empty(table, old, sealed)
    return Move(new_id, tuple(one.generation for one in sealed.flushed_generations))


def _copy(table: Table, manifest: RegionManifest, new_id: UUID) -> None:
    old, new = region_folder(manifest.region_id), region_folder(new_id)
    for meta in table.store.list(f"{old}/wal"):
        entry = parse_wal_entry_name(meta.path.rsplit("/", 1)[-1])
        needed = table.layout_of(manifest.region_id).generations_in_log or (
            entry and entry.entry_id > (manifest.replay_after_wal_id or 0)
        )
        if entry is not None and needed:
            table.store.put_if_absent(new + meta.path.removeprefix(old), table.store.get(meta.path))
    for flushed in manifest.flushed_generations:
        for meta in table.store.list(f"{old}/{flushed.path}"):
            data = _with_log(table, meta, f"{new}/{flushed.path}")
            table.store.put_if_absent(new + meta.path.removeprefix(old), data)


def _with_log(table: Table, meta: ObjectMeta, log_of: str) -> bytes:
    """A file of a generation; of a manifest with base paths a copy that has the log of the generation at ``log_of``.

    It keeps the time of the file, by which a column that was dropped and added again is told from the earlier one.
    """
    data = table.store.get(meta.path)
    generation, folder, name = meta.path.rsplit("/", 2)
    if folder != VERSIONS_FOLDER or parse_version_manifest_name(name) is None:
        return data
    version = decode_version_manifest(data)
    if not version.manifest.base_paths:
        return data
    for base in version.manifest.base_paths:
        own_log(table.location, generation, base.path)
        base.path = f"{table.location.uri}/{log_folder(log_of)}"
    version.manifest.table_metadata.setdefault(FLUSHED, str(nanoseconds(meta.last_modified)))
    return encode_version_manifest(version)


@dataclass(frozen=True, slots=True)
class ForeignGeneration:
    """A generation that names another path as its table.

    Attributes:
        ref: the generation.
        manifest: the file with the path.
        root: that path.
        files: how many data and deletion files it has, all of which are here.
        bytes: their sizes.
    """

    ref: GenerationRef
    manifest: ObjectMeta
    root: str
    files: int
    bytes: int


def foreign_generations(table: Table, regions: Iterable[RegionBacklog]) -> tuple[ForeignGeneration, ...]:
    """The listed generations of some regions that name another path as their table. Two requests for each or more.

    A merged one whose files are not here is left out: nothing can read it.

    Raises:
        ForeignRootError: the table lacks a file of one that is not merged, or has it in another size.
        InvalidFormatError: a manifest does not decode.
    """

    def read(ref: GenerationRef) -> ForeignGeneration | ForeignRootError | None:
        versions = list_versions(table.store, f"{ref.folder}/{VERSIONS_FOLDER}").numbered
        if not versions:
            return None
        meta = versions[max(versions)]
        manifest = decode_version_manifest(table.store.get(meta.path)).manifest
        places = Places(table.location, table.store, manifest, ref.folder)
        if places.foreign_root is None:
            return None
        files = tuple(places.data_files(manifest))
        sizes = sizes_of(table.store, files, {})
        lacking = lacks_files(ref, places.foreign_root, files, sizes)
        return lacking or ForeignGeneration(ref, meta, places.foreign_root, len(files), sum(sizes.values()))

    refs = {
        generation_ref(region.manifest.region_id, flushed): region.merged
        for region in regions
        for flushed in region.manifest.flushed_generations
    }
    found = []
    for ref, foreign in concurrently(read, refs, threads=_CONCURRENT_READS):
        if isinstance(foreign, ForeignGeneration):
            found.append(foreign)
        elif foreign is not None and ref.generation > refs[ref]:
            raise foreign
    return tuple(found)


def point_here(table: Table, generations: Iterable[ForeignGeneration]) -> None:
    """Let the manifests of generations name this table's log. A reader of one sees either path, and the same rows."""
    for generation in generations:
        table.store.put(generation.manifest.path, _with_log(table, generation.manifest, generation.ref.folder))


def _empty(table: Table, region: RegionManifestStore, sealed: RegionManifest) -> None:
    """Remove all generations from the old region's manifest: then the region is not blocked any more."""
    merged = table.index.merged_generations.get(region.region_id, 0)
    if sealed.flushed_generations:
        current = min(sealed.current_generation, merged + 1)
        region.commit(replace(sealed.next(), flushed_generations=(), current_generation=current))
    if region.latest(checked=True).flushed_generations:
        raise CommitConflictError(f"Region {region.region_id} was changed meanwhile; run the command again.")
