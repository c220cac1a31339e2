"""Check one region: its manifests and hint, the generations that it lists, and its write-ahead log."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from memwal_ops.core.verification import Finding, Severity, finding_of
from memwal_ops.errors import (
    ForeignRootError,
    GenerationMissingError,
    MemwalOpsError,
    ObjectNotFoundError,
    RegionManifestCorruptError,
    WalCorruptError,
    runbook,
)
from memwal_ops.formats.lance.generations.generation import open_generation
from memwal_ops.formats.lance.generations.generation_files import look_at_generations
from memwal_ops.formats.lance.generations.generation_ref import generation_ref
from memwal_ops.formats.lance.generations.region_contents import read_region_contents
from memwal_ops.formats.lance.generations.wal import read_epochs, wal_entry_path
from memwal_ops.formats.lance.layouts import MixedLayoutsError
from memwal_ops.formats.lance.regions.manifests import RegionManifestGoneError
from memwal_ops.formats.lance.wire.names import parse_generation_dir
from memwal_ops.formats.lance.wire.region_manifest import listed_as_stored
from memwal_ops.storage.api import LinkError
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from memwal_ops.formats.lance.generations.backlog import RegionBacklog
    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.generations.region_contents import RegionContents
    from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

# Without --deep, the number of newest manifest versions that are read of each region.
_NEWEST = 20
_MOST_MISSING = 100
_MIXED = "Entries that one writer acknowledged count as flushed by the other: their rows are in no generation."
_STOPS = "Merges stop before it; readers of the region do not see these rows, or fail."


def check_manifests(table: Table, state: RegionBacklog, *, deep: bool) -> Iterator[Finding]:
    """Every version that is kept decodes, and no number in them ever decreases; the hint names one of them."""
    manifest = state.manifest
    store = table.region(manifest.region_id)
    versions = store.versions()
    hint = store.hint()
    if hint is None:
        yield Finding(
            Severity.INFO, "version_hint", f"{store.folder}/version_hint.json", "It is missing, or cannot be read.",
            "Readers list the folder instead.", "None: the next writer, or gc, writes it.",
            about=str(manifest.region_id),
        )  # fmt: skip
    elif hint < manifest.version:
        yield Finding(
            Severity.INFO, "version_hint", f"{store.folder}/version_hint.json",
            f"It names version {hint}; the newest is {manifest.version}.",
            "Readers need a request for each version in between.", "None: the next writer, or gc, writes it.",
            about=str(manifest.region_id),
        )  # fmt: skip
    older: RegionManifest | None = None
    for version in versions if deep else versions[-_NEWEST:]:
        try:
            found = store.read(version)
        except RegionManifestGoneError:
            continue  # gc runs beside this
        except NotExportedError:
            continue
        except RegionManifestCorruptError as error:
            yield finding_of(
                error, "old_manifest", store.path(version), "A reader that uses it fails.", Severity.WARNING
            )
            continue
        for name in ("writer_epoch", "current_generation", "replay_after_wal_id"):
            before, now = (getattr(one, name) or 0 for one in (older or found, found))
            if now < before:
                yield Finding(
                    Severity.ERROR, name, store.path(version), f"{name} falls from {before} to {now}.",
                    "Two writers, or a restored folder: a fenced writer may be accepted again, rows may be replayed "
                    "twice or not at all.",
                    "Stop the region's writer. Restore the region's folder as a whole from one backup.",
                    runbook(RegionManifestCorruptError.exit_code) or "",
                )  # fmt: skip
        older = found


def check_generations(
    table: Table, state: RegionBacklog, contents: RegionContents, history: SchemaHistory
) -> Iterator[Finding | Generation]:
    """Every listed generation has its directory; every unmerged one has its files, and columns that the base table has.

    Yields: findings, and each unmerged generation that opens and has its files.
    """
    manifest, merged = state.manifest, state.merged
    files = look_at_generations(table, state, footers=True)
    for root in sorted({*files.foreign_roots.values()}):
        generations = [number for number, named in files.foreign_roots.items() if named == root]
        yield Finding(
            Severity.INFO, ForeignRootError.reason, f"{root} in {manifest.region_id}",
            f"By the manifests of {counted(len(generations), 'generation')} from {min(generations)} on, their table is "
            "at that path.",
            "Jobs read the files of this table. Programs that read generations by themselves read that path.",
            "If the table was copied or moved: memwal-ops adopt URI --moved --apply. If programs mount it at several "
            "paths: none.", runbook(ForeignRootError.exit_code) or "",
        )  # fmt: skip
    numbers = listed_as_stored(manifest.source)  # decoded, they are in order
    late = next((after for before, after in pairwise(numbers) if after <= before), None)
    if late is not None:
        yield Finding(
            Severity.INFO, "generation_order", str(manifest.region_id),
            f"Its manifest lists generation {late} twice, or behind a higher one.",
            "Jobs order by number and count it once; a reader that uses the list may read an older row.",
            "None: gc writes the list again when it drains; fix the writer.", about=str(manifest.region_id),
        )  # fmt: skip
    for flushed in manifest.flushed_generations:
        ref = generation_ref(manifest.region_id, flushed)
        about = f"{manifest.region_id}/{flushed.generation}"
        exists = flushed.path in contents.directories
        if flushed.generation <= merged:
            if not exists:
                yield Finding(
                    Severity.WARNING, "merged_generation_missing", ref.folder,
                    f"Generation {flushed.generation} is merged and listed, and its directory is missing.",
                    "The base table has its rows; a reader of an older version, or one whose index lacks them, fails.",
                    "memwal-ops gc URI --apply removes it from the list once nothing needs it.",
                    about=about,
                )  # fmt: skip
        elif not exists:
            error = GenerationMissingError(f"The directory of {ref} is missing.")
            yield finding_of(error, "generation_missing", ref.folder, _STOPS, about=about)
        elif (damage := files.damaged.get(flushed.generation)) is not None:
            yield finding_of(damage, "generation", ref.folder, _STOPS, about=about)
        else:
            try:
                yield open_generation(table, ref, history)
            except MemwalOpsError as error:
                yield finding_of(error, "generation", ref.folder, _STOPS, about=about)
    listed = {one.path for one in manifest.flushed_generations}
    for name, directory in sorted(contents.directories.items()):
        if parse_generation_dir(name) is not None and name not in listed:
            yield Finding(
                Severity.INFO, "unlisted_generation", f"_mem_wal/{manifest.region_id}/{name}",
                f"No manifest lists it; {directory.objects} objects, {directory.bytes:,} bytes.",
                "It uses space: a flush that was not finished, or a generation that was removed from the list.",
                "None: memwal-ops gc URI --apply deletes it when it is old enough.",
            )  # fmt: skip


def check_log(table: Table, state: RegionBacklog, contents: RegionContents) -> Iterator[Finding]:
    """Above the last flushed entry the log has no gap, its epochs never fall, and none is above the manifest's."""
    manifest, region_id = state.manifest, state.manifest.region_id
    layout = table.layout_of(region_id)
    flushed = manifest.replay_after_wal_id or 0
    ids = [entry for entry in contents.wal.ids if entry > flushed]
    last = max(manifest.wal_id_last_seen or 0, ids[-1] if ids else 0)
    for missing in _missing_entries(table, manifest, flushed, ids, last):
        path = wal_entry_path(region_id, missing, layout)
        error: MemwalOpsError = WalCorruptError(f"WAL entry {missing} is missing, although entry {last} was written.")
        what = "A replay stops there, and misses acknowledged rows above it."
        yield finding_of(error, "wal_gap", path, what, about=f"{region_id}/{missing}")
    highest = 0
    for entry, epoch in read_epochs(table, region_id, ids):
        path = wal_entry_path(region_id, entry, layout)
        if isinstance(epoch, ObjectNotFoundError | NotExportedError):
            continue
        if isinstance(epoch, MemwalOpsError):
            error = WalCorruptError(str(epoch))
            yield finding_of(error, "wal_entry", path, "A replay stops there.", about=f"{region_id}/{entry}")
            continue
        if epoch < highest or epoch > manifest.writer_epoch:
            late = epoch > manifest.writer_epoch
            above = (
                f"a claim of the manifest's epoch {manifest.writer_epoch}" if late else f"an entry of epoch {highest}"
            )
            yield Finding(
                Severity.ERROR, "wal_epoch", path, f"It was written under epoch {epoch}, behind {above}.",
                "A writer that was fenced continued to write, or the manifests are older than the log.",
                "Stop the region's writers; find out which of them wrote it before you trust any of its rows.",
                runbook(WalCorruptError.exit_code) or "", about=str(region_id) if late else "",
            )  # fmt: skip
        highest = max(highest, epoch)


def contents_of(table: Table, state: RegionBacklog) -> RegionContents | Finding:
    """A listing of the region's folder, or why there is none."""
    try:
        return read_region_contents(table.store, state.manifest.region_id, table.layout_of(state.manifest.region_id))
    except LinkError as error:
        return finding_of(error, "link", str(state.manifest.region_id), "Files behind a link are not seen.")
    except MixedLayoutsError as error:
        return finding_of(error, "mixed_layouts", str(state.manifest.region_id), _MIXED)


def check_unrecognized(contents: RegionContents) -> Iterator[Finding]:
    """Objects in a region's folder that neither Lance nor memwal-ops writes."""
    for path in sorted(contents.strays):
        yield Finding(
            Severity.INFO, "unrecognized", path, "No writer of this format creates such a file.",
            "No job reads or deletes it.", "Remove it yourself if it is yours.",
        )  # fmt: skip


def _missing_entries(
    table: Table, manifest: RegionManifest, flushed: int, listed: Iterable[int], last: int
) -> Iterator[int]:
    """The first entries behind the flushed ones, up to ``last``, that do not exist.

    A listing of local files beside a writer may lack an entry, and have the next one.
    """
    layout, known = table.layout_of(manifest.region_id), {*listed}
    if len(known) >= last - flushed:
        return
    missing = 0
    for entry in range(flushed + 1, last + 1):
        if entry not in known and table.store.head(wal_entry_path(manifest.region_id, entry, layout)) is None:
            missing += 1
            yield entry
        if missing == _MOST_MISSING:  # a damaged ``last`` may be huge
            return
