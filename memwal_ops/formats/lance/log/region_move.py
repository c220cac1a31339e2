"""Move a region's generations to a new region, so that they are merged from the first one on.

For a region with a reused id (:mod:`memwal_ops.formats.lance.generations.region_identity`). A crash may happen after
each step, and each step may be repeated by any number of processes at once:

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

from memwal_ops.errors import CommitConflictError, GenerationMissingError, InvariantViolatedError
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER
from memwal_ops.formats.lance.log.region_seal import seal_region
from memwal_ops.formats.lance.wire.names import parse_version_manifest_name, parse_wal_entry_name, region_folder
from memwal_ops.formats.lance.wire.region_manifest import RegionStatus
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest

if TYPE_CHECKING:
    from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest
    from memwal_ops.storage.api import Store


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
            data = _pointing_to(table.store, meta.path, f"/{old}/", f"/{new}/")
            table.store.put_if_absent(new + meta.path.removeprefix(old), data)


def _pointing_to(store: Store, path: str, old: str, new: str) -> bytes:
    """A file of a generation, with base paths into the old region's folder changed to the new one's."""
    data = store.get(path)
    folder, name = path.split("/")[-2:]
    if folder != VERSIONS_FOLDER or parse_version_manifest_name(name) is None:
        return data
    version = decode_version_manifest(data)
    if not any(old in base.path for base in version.manifest.base_paths):
        return data
    for base in version.manifest.base_paths:
        base.path = base.path.replace(old, new)
    return encode_version_manifest(version)


def _empty(table: Table, region: RegionManifestStore, sealed: RegionManifest) -> None:
    """Remove all generations from the old region's manifest: then the region is not blocked any more."""
    merged = table.index.merged_generations.get(region.region_id, 0)
    if sealed.flushed_generations:
        current = min(sealed.current_generation, merged + 1)
        region.commit(replace(sealed.next(), flushed_generations=(), current_generation=current))
    if region.latest(checked=True).flushed_generations:
        raise CommitConflictError(f"Region {region.region_id} was changed meanwhile; run the command again.")
