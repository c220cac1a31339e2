"""Seal a region: flush its log as a writer does, so that no writer can claim it any more. Move its generations.

A move to a new region is for one with a reused id (:mod:`memwal_ops.formats.lance.generations.region_identity`). A
crash may happen after each step, and each step may be repeated by any number of processes at once:

1. Fence the old region's writer, flush its log, and seal the region: no writer can claim it any more.
2. Copy the listed generations, and the log entries that are still needed, to the new region's folder.
3. Publish the new region's first manifest. From then on its generations are in the backlog.
4. Remove the generations from the old region's manifest.

Until step 4 the old region stays blocked, so that no row is merged twice; until step 3 nothing in the new region's
folder is merged or collected, as it has no manifest. The new id is derived from the old one and the name of the first
generation, which is random, so that a repetition finds the files that were already copied.

Generations of a moved table get manifests that name the table that has them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops import errors
from memwal_ops.formats.lance.files.datasets import lance_errors, open_dataset, own_log
from memwal_ops.formats.lance.files.named_files import Places, sizes_of
from memwal_ops.formats.lance.files.version_files import VERSIONS_FOLDER, list_versions
from memwal_ops.formats.lance.generations.generation import FLUSHED, GenerationRef, generation_ref, lacks_files
from memwal_ops.formats.lance.generations.wal import log_gap, unflushed_entries, unflushed_rows, wal_entry_path
from memwal_ops.formats.lance.log.region_files import wait
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds
from memwal_ops.formats.lance.wire import names
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, RegionStatus
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest
from memwal_ops.storage.api import ObjectMeta, concurrently, results_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.formats.lance.generations.backlog import RegionBacklog
    from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
    from memwal_ops.formats.lance.table import Table


_ATTEMPTS = 10
_CONCURRENT_READS = 4
# pylance's defaults. It refuses to replay a log of a writer that had higher limits, and more rows or batches.
_REPLAYED_ROWS, _REPLAYED_BATCHES = 100_000, 8_000


def seal_region(table: Table, region_id: UUID) -> RegionManifest:
    """Seal the region, and return its newest manifest: every row that was acknowledged is in a generation.

    Each step may be the last one before a crash, and be repeated by any number of processes at once:

    1. Claim the region as a writer does: its epoch rises, its log is replayed and flushed to a generation, and an
       entry without rows is put at the next position, where a stalled writer detects that it was fenced.
    2. Publish the sealed manifest, unless another writer claimed the region meanwhile: then all is done again.

    Raises:
        CommitConflictError: writers claimed the region repeatedly.
        WalCorruptError, UnsupportedFeatureError: the log cannot be replayed.
        StorageError: the store failed; do it again.
    """
    region = table.region(region_id)
    for attempt in range(_ATTEMPTS):
        newest = region.latest(checked=True)
        if newest.sealed:
            return newest
        try:
            claimed = flush_log(table, newest)
        except errors.MemwalOpsError:
            if region.latest(checked=True).writer_epoch <= newest.writer_epoch + 1:
                raise
        else:
            flushed = region.latest(checked=True)
            # Not claimed since. Timeline without this check: another writer claims after the flush and writes;
            # the region is sealed; the row that it puts next is acknowledged, and in no generation ever.
            if flushed.writer_epoch == claimed and _publish_sealed(table, region, flushed):
                return region.latest(checked=True)
        # Two processes that seal the region fence each other, and a claim is slow.
        wait(attempt, first=0.1, longest=10)
    raise errors.CommitConflictError(f"Region {region_id} is claimed by writers repeatedly; stop them first.")


def _publish_sealed(table: Table, region: RegionManifestStore, flushed: RegionManifest) -> bool:
    replayed = flushed.replay_after_wal_id
    # pylance leaves the empty entry of its claim behind the last flush.
    unflushed = unflushed_entries(table, flushed)
    if unflushed and unflushed_rows(table, flushed):
        return False
    last = (replayed or 0) + unflushed
    layout, region_id = table.layout_of(flushed.region_id), flushed.region_id
    path = wal_entry_path(region_id, last + 1, layout)
    # pylance takes a temporary file for an entry. Timeline without it: a writer stalls while it puts entry 3; pylance
    # claims with entry 4; readers refuse the log for its gap, or the writer resumes, and a row is in no generation.
    if log_gap(table, region_id, last + 1) and any(
        meta.path.startswith(f"{path}.tmp.") for meta in table.store.list(f"{names.region_folder(region_id)}/wal")
    ):
        table.store.put_if_absent(path, layout.empty_entry(table.schema, flushed.writer_epoch, path))
        return False
    sealed = replace(
        flushed.next(),
        status=RegionStatus.SEALED,
        writer_epoch=flushed.writer_epoch + 1,
        replay_after_wal_id=last or replayed,
        wal_id_last_seen=last or flushed.wal_id_last_seen,
    )
    return region.commit(sealed)


def flush_log(table: Table, manifest: RegionManifest) -> int:
    """Claim a region, flush its log to a generation, and put an entry at which earlier writers detect the fence.

    Returns the writer epoch of the claim, if no other writer claimed the region since ``manifest``. If one did, the
    newest manifest may have another epoch.

    Raises:
        WriterFencedError: another writer claimed the region meanwhile.
        WalCorruptError, UnsupportedFeatureError: the log cannot be replayed.
        StorageError: the store failed, or, of the shard layout, any of these.
    """
    table.guard.check()
    if not table.layout_of(manifest.region_id).claims_with_entry:
        with RegionWriter(table, manifest.region_id) as writer:
            writer.fence()
        return writer.epoch
    return _by_pylance(table, manifest)


def _by_pylance(table: Table, manifest: RegionManifest) -> int:
    """Pylance's writer fences the current one, replays the log and flushes it."""
    rows, batches = _size_of_log(table, manifest)
    with lance_errors("flush the log of", f"{table.location.uri}/{names.region_folder(manifest.region_id)}"):
        open_dataset(table.location).mem_wal_writer(
            str(manifest.region_id),
            max_memtable_rows=max(_REPLAYED_ROWS, rows),
            max_memtable_batches=max(_REPLAYED_BATCHES, batches),
        ).close()
    return manifest.writer_epoch + 1  # pylance does not report it


def _size_of_log(table: Table, manifest: RegionManifest) -> tuple[int, int]:
    """Rows and batches after the last flush; entries that cannot be read, which pylance refuses, count as empty."""
    layout, first = table.layout_of(manifest.region_id), (manifest.replay_after_wal_id or 0) + 1

    def size(entry: int) -> tuple[int, int]:
        try:
            rows = layout.entry_table(table.store, wal_entry_path(manifest.region_id, entry, layout))
        except (errors.InvalidFormatError, errors.ObjectNotFoundError):
            return 0, 0
        return rows.num_rows, len(rows.to_batches())

    numbers = range(first, first + unflushed_entries(table, manifest))
    sizes = results_of(size, numbers, threads=_CONCURRENT_READS)
    return sum(rows for rows, _ in sizes), sum(batches for _, batches in sizes)


_CONCURRENT_CHECKS = 8


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
    listed = {flushed.generation: flushed.path for flushed in manifest.flushed_generations}
    for generation in range(1, manifest.current_generation):
        path = f"{names.region_folder(manifest.region_id)}/{listed.get(generation, '')}"
        if generation not in listed or next(iter(table.store.list(path)), None) is None:
            raise errors.GenerationMissingError(
                f"Generation {generation} of region {manifest.region_id} is not listed, or has no files."
            )


def move_region(table: Table, region_id: UUID) -> Move:
    """Move all generations of a region, in the steps above. Memory: the largest file of a generation.

    Raises as :func:`seal_region` and :func:`check_complete`.
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
                raise errors.InvariantViolatedError(f"Region {new_id} could not be published, and does not exist.")
    _empty(table, old, sealed)
    return Move(new_id, tuple(flushed.generation for flushed in sealed.flushed_generations))


def _copy(table: Table, manifest: RegionManifest, new_id: UUID) -> None:
    old, new = names.region_folder(manifest.region_id), names.region_folder(new_id)
    for meta in table.store.list(f"{old}/wal"):
        entry = names.parse_wal_entry_name(meta.path.rsplit("/", 1)[-1])
        needed = table.layout_of(manifest.region_id).generations_in_log or (
            entry and entry.entry_id > (manifest.replay_after_wal_id or 0)
        )
        if entry is not None and needed:
            table.store.put_if_absent(new + meta.path.removeprefix(old), table.store.get(meta.path))
    for flushed in manifest.flushed_generations:
        files = table.store.list(f"{old}/{flushed.path}")
        # Manifests last: what has one and no data is taken for a generation of the region layout.
        for meta in sorted(files, key=lambda meta: VERSIONS_FOLDER in meta.path.split("/")):
            data = _with_log(table, meta, f"{new}/{flushed.path}")
            table.store.put_if_absent(new + meta.path.removeprefix(old), data)


def _with_log(table: Table, meta: ObjectMeta, log_of: str) -> bytes:
    """A file of a generation; of a manifest with base paths a copy that has the log of the generation at ``log_of``.

    It keeps the time of the file, by which a column that was dropped and added again is told from the earlier one.
    """
    data = table.store.get(meta.path)
    generation, folder, name = meta.path.rsplit("/", 2)
    if folder != VERSIONS_FOLDER or names.parse_version_manifest_name(name) is None:
        return data
    version = decode_version_manifest(data)
    if not version.manifest.base_paths:
        return data
    for base in version.manifest.base_paths:
        own_log(table.location, generation, base.path)
        base.path = f"{table.location.uri}/{names.log_folder(log_of)}"
    version.manifest.table_metadata.setdefault(FLUSHED, str(nanoseconds(meta.last_modified)))
    return encode_version_manifest(version)


@dataclass(frozen=True, slots=True)
class ForeignGeneration:
    """A generation whose manifest names another path as its table (``root``).

    ``files`` and ``bytes``: how many data and deletion files it has, all of which are here, and their sizes.
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

    def read(ref: GenerationRef) -> ForeignGeneration | errors.ForeignRootError | None:
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
    generations = []
    for ref, foreign in concurrently(read, refs, threads=_CONCURRENT_CHECKS):
        if isinstance(foreign, ForeignGeneration):
            generations.append(foreign)
        elif foreign is not None and ref.generation > refs[ref]:
            raise foreign
    return tuple(generations)


def point_here(table: Table, generations: Iterable[ForeignGeneration]) -> None:
    """Let the manifests of generations name this table's log. A reader of one sees either path, and the same rows."""
    for generation in generations:
        table.store.put(generation.manifest.path, _with_log(table, generation.manifest, generation.ref.folder))


def _empty(table: Table, region: RegionManifestStore, sealed: RegionManifest) -> None:
    merged = table.index.merged_generations.get(region.region_id, 0)
    if sealed.flushed_generations:
        current = min(sealed.current_generation, merged + 1)
        region.commit(replace(sealed.next(), flushed_generations=(), current_generation=current))
    if region.latest(checked=True).flushed_generations:
        raise errors.CommitConflictError(f"Region {region.region_id} was changed meanwhile; run the command again.")
