"""Check the newest version of a table with a log: its files and those before it, the MemWAL index, each region."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.core.verification import Inconsistency, Severity, finding_of
from memwal_ops.formats.lance.checks.rows import check_indexes, check_sampled_filter
from memwal_ops.formats.lance.files import version_files
from memwal_ops.formats.lance.generations import generation_files
from memwal_ops.formats.lance.generations.generation import Generation, generation_ref, open_generation
from memwal_ops.formats.lance.generations.wal import read_epochs, wal_entry_path
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes
from memwal_ops.formats.lance.indexes.index_faults import checked_fault, dot_product_error
from memwal_ops.formats.lance.indexes.snapshots import history_shows_coverage, read_snapshot, stale_entries
from memwal_ops.formats.lance.layouts import MixedLayoutsError
from memwal_ops.formats.lance.regions.manifests import RegionManifestGoneError
from memwal_ops.formats.lance.retention.damage import check_versions, damages
from memwal_ops.formats.lance.retention.live_versions import LiveVersions, tags_of
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, is_staged_name, parse_generation_dir
from memwal_ops.formats.lance.wire.region_manifest import RegionManifest, listed_as_stored
from memwal_ops.storage.api import LinkError
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.generations.backlog import RegionBacklog
    from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
    from memwal_ops.formats.lance.table import Table


_PAGE = errors.runbook(errors.TableCorruptError.exit_code) or ""
# Without --deep, the number of newest version manifests that are decoded.
_NEWEST_VERSIONS = 100


def check_files(table: Table) -> Iterator[Inconsistency]:
    """Every file that the newest version needs exists and is complete, and so does its transaction file."""
    for damage in damages(table):
        yield Inconsistency(
            Severity.ERROR, "base_file", damage.path, f"It {damage.why}.",
            "Queries by the index fail; all rows are there." if damage.folder == INDICES_FOLDER
            else "Scans of the newest version fail.",
            damage.remedy, _PAGE,
        )  # fmt: skip
    name = table.manifest.manifest.transaction_file
    if name and not _is_transaction(table, f"{version_files.TRANSACTIONS_FOLDER}/{name}"):
        yield Inconsistency(
            Severity.WARNING, "transaction_file", f"{version_files.TRANSACTIONS_FOLDER}/{name}",
            "The newest version names it, and it is missing or damaged.",
            "A commit that began before this version cannot be compared with it, and fails.",
            "None: the next commit names its own.",
        )  # fmt: skip


def _is_transaction(table: Table, path: str) -> bool:
    try:
        return version_manifest.is_transaction(table.store.get(path))
    except errors.ObjectNotFoundError:
        return False


def check_version_manifests(table: Table, *, deep: bool) -> Iterator[Inconsistency]:
    """Each version's manifest has its own number inside and can be read; none lost all rows by a fault."""
    manifests = {
        version: path
        for path in version_files.list_manifests(table.store, version_files.VERSIONS_FOLDER)
        if (version := version_files.version_of_main(path)) is not None
    }
    kept = _kept(table)
    for version, path in sorted(check_versions(table, kept).unreadable.items()):
        if path == manifests.get(version):
            continue  # reported below
        evidence, keeper = f"{path} is missing or damaged.", kept.get(version)
        if keeper is not None:
            yield Inconsistency(
                Severity.ERROR, "version_unreadable", f"version {version}", evidence,
                f"Readers of that version fail, and it is to be kept: {keeper}.",
                "Restore the file from a backup. If nobody needs the version: delete the tag or branch, or release the "
                "hold; memwal-ops expire URI deletes it then.", _PAGE,
            )  # fmt: skip
            continue
        yield Inconsistency(
            Severity.WARNING, "version_unreadable", f"version {version}", evidence,
            "Readers of that version fail; the newest does not need the file.",
            "memwal-ops expire URI deletes the version once nothing keeps it.", errors.runbook(26) or "",
        )  # fmt: skip
    rows_before = 0
    for version, path in sorted(manifests.items())[0 if deep else -_NEWEST_VERSIONS :]:
        try:
            decoded = version_manifest.decode_version_manifest(table.store.get(path))
        except errors.ObjectNotFoundError:
            continue  # expired meanwhile
        except errors.InvalidFormatError as error:
            yield finding_of(
                errors.TableCorruptError(f"It cannot be decoded: {error}"), "version_manifest", path,
                "Readers of that version fail, and gc and expire delete nothing.",
            )  # fmt: skip
            continue
        if decoded.manifest.version != version:
            yield Inconsistency(
                Severity.ERROR, "version_manifest", path, f"Its content is that of version {decoded.manifest.version}.",
                "Readers of that version read another one, and gc and expire delete nothing.",
                "Restore the manifest from a backup.", _PAGE,
            )  # fmt: skip
        why = (
            version_manifest.lost_dictionary(decoded) if version != table.version else None
        )  # of the newest, with its files
        if why is not None:
            yield Inconsistency(
                Severity.ERROR if version in kept else Severity.WARNING, "version_unreadable", path, f"It {why}.",
                "Readers of that version read other values, or fail.", version_manifest.LOST_VALUES, _PAGE,
            )  # fmt: skip
        rows = sum(fragment.physical_rows for fragment in decoded.manifest.fragments)
        if rows_before and not decoded.manifest.fragments and version == table.version:
            yield Inconsistency(
                Severity.WARNING, "version_emptied", path,
                f"It has no fragments; the version before has {rows_before:,} rows.",
                "If the rows were not deleted on purpose, the newest version hides them.",
                f"If so: lance.dataset(URI, version={version - 1}).restore()", _PAGE,
            )  # fmt: skip
        rows_before = rows


def _kept(table: Table) -> Mapping[int, str]:
    """The versions that a tag, branch or hold keeps, and which; none if these cannot be read, which is a finding."""
    names = LiveVersions()
    try:
        names.read_names(table, datetime.now(UTC))
    except errors.MemwalOpsError:
        return {}
    return names.protected()


def check_references(table: Table) -> Iterator[Inconsistency]:
    """Tags on the table's branch name versions that are listed."""
    own = table.branch.name
    for name, (branch, version) in sorted(tags_of(table).items()):
        if branch == own and not table.has_revision(version):
            yield Inconsistency(
                Severity.WARNING, "tag", f"the tag {name!r}", f"It names version {version}, which does not exist.",
                "Readers by that tag fail.", "Delete the tag, or set it to an existing version.",
                errors.runbook(26) or "",
            )  # fmt: skip


_INDEX = "the MemWAL index"
_SNAPSHOT_AGAIN = "memwal-ops snapshot URI makes a new one."


def check_progress(table: Table, regions: Mapping[UUID, RegionBacklog]) -> Iterator[Inconsistency]:
    """Progress is that of regions that exist, and below the generation that each writes."""
    for region_id, merged in sorted(table.index.merged_generations.items()):
        if region_id not in table.regions.region_ids:
            yield _without_folder(table, region_id, _INDEX, f"It has merged generation {merged} of region {region_id}")
        elif region_id in regions and merged >= regions[region_id].manifest.current_generation:
            now = regions[region_id].manifest.current_generation
            yield Inconsistency(
                Severity.ERROR, "progress", _INDEX,
                f"It has merged generation {merged} of region {region_id}, whose writer is at generation {now}.",
                "The region's next generation would count as merged, and its rows be lost.",
                "Stop the writer; find out which of the two was restored, and see the page.", errors.runbook(29) or "",
            )  # fmt: skip


def _without_folder(table: Table, region_id: UUID, place: str, evidence: str) -> Inconsistency:
    evidence = f"{evidence}, which has no folder."
    if table.inherits_progress:
        return Inconsistency(
            Severity.INFO, "progress_of_unknown_region", place, evidence, "None: it is a branch or a clone.", "None."
        )
    return Inconsistency(
        Severity.WARNING, "progress_of_unknown_region", place, evidence, "What the region had not merged is lost.",
        f"Restore _mem_wal/{region_id} from a backup, unless it was removed, or left out of a copy, on purpose.",
        "runbooks/alerts/MemwalOpsRegionsGone.md",
    )  # fmt: skip


def check_catchup(table: Table) -> Iterator[Inconsistency]:
    """No entry of ``index_catchup`` exceeds what its index covers, nor names an index that does not exist."""
    indexes = base_indexes(table)
    recorded = table.index.index_catchup
    for name in sorted(recorded.keys() - indexes.keys()):
        yield Inconsistency(
            Severity.INFO, "catchup_of_unknown_index", _INDEX, f"It has catch-up entries of an index {name!r}.",
            "None: the index was dropped.", "None: memwal-ops catchup URI leaves them out at its next commit.",
        )  # fmt: skip
    for name, correct in sorted(stale_entries(table, sorted(indexes)).items()):
        claimed = recorded.get(name)
        wrong = claimed is not None and any(number > correct.get(region, 0) for region, number in claimed.items())
        if claimed is None:
            yield Inconsistency(
                Severity.INFO, "index_behind", f"the index {name!r}",
                "It does not cover what was merged since, and has no catch-up entry, which the specification reads as "
                "caught up.",
                "A query by this index alone misses rows that were merged.", "memwal-ops catchup URI",
                errors.runbook(18) or "", about=name,
            )  # fmt: skip
        elif wrong and not history_shows_coverage(table, indexes[name]):
            yield Inconsistency(
                Severity.WARNING, "index_catchup", f"the index {name!r}",
                "No version that is left shows that the fragments that it covers reach as far as its catch-up entry: "
                "some were rewritten since, or versions have expired.",
                "If they do not, a query by this index misses rows.",
                "memwal-ops catchup URI lowers the entry to what is shown, or covers the rest.",
                errors.runbook(18) or "", about=name,
            )  # fmt: skip
        elif wrong:
            yield Inconsistency(
                Severity.ERROR, "index_catchup", f"the index {name!r}",
                "It is recorded as caught up further than the fragments that it covers.",
                "A query by this index skips generations, and misses their rows.",
                "memwal-ops catchup URI corrects the entry.", errors.runbook(18) or "", about=name,
            )  # fmt: skip
    for name in table.index.maintained_indexes:
        if name not in indexes:
            yield Inconsistency(
                Severity.WARNING, "maintained_index", _INDEX,
                f"Writers are to maintain an index {name!r}, which does not exist.",
                "Writers fail, or skip it.", "Create the index, or initialise MemWAL without it.",
            )  # fmt: skip


def check_rows_of_indexes(table: Table, found: Collection[str] = ()) -> Iterator[Inconsistency]:
    """Every scalar index has the fragments that it claims, and finds a sample of their rows; those ``found`` do not."""
    for name, index in sorted(base_indexes(table).items()):
        fault = None if name in found else checked_fault(table, index)
        if fault is None:
            continue
        if fault.proven:
            yield Inconsistency(
                Severity.ERROR, "index_rows", f"the index {name!r}", f"It {fault.why}.",
                "Queries by it fail, or miss rows that exist; pylance's merge_insert would insert their keys again.",
                "memwal-ops catchup URI builds it anew.", errors.runbook(18) or "", about=name,
            )  # fmt: skip
        else:
            yield Inconsistency(
                Severity.WARNING, "index_rows", f"the index {name!r}", f"It {fault.why}.",
                "Queries by it may not find all rows. Merges and reads of memwal-ops do not ask it.",
                f"See the page; once no release before 14.0 writes the table, memwal-ops catchup URI --index {name} "
                "--rebuild builds it anew.", errors.runbook(18) or "", about=name,
            )  # fmt: skip


def check_distances(table: Table, found: Collection[str] = ()) -> Iterator[Inconsistency]:
    """No vector index got rows that hide all others, but those ``found``.

    pylance's update into one segment leaves no trace of that: ``--answers`` measures it.
    """
    for name, index in sorted(base_indexes(table).items()):
        error = dot_product_error(table, index) if len(index.segments) > 1 and name not in found else None
        if error is not None:
            yield Inconsistency(
                Severity.ERROR, "index_distances", f"the index {name!r}",
                f"It has {len(index.segments)} segments. {error}", "Searches by it do not find the nearest rows.",
                error.remedy, errors.runbook(18) or "", about=name,
            )  # fmt: skip


def check_snapshot(table: Table, regions: Mapping[UUID, RegionBacklog]) -> Iterator[Inconsistency]:
    """The region snapshot decodes, has regions that exist, and is not newer than their manifests."""
    try:
        snapshot = read_snapshot(table)
        rows = () if snapshot is None else snapshot.regions
    except errors.InvalidFormatError as error:
        yield finding_of(
            error, "snapshot", "the region snapshot", f"Readers that use it fail. {_SNAPSHOT_AGAIN}", Severity.WARNING
        )
        return
    for row in rows:
        if row.region_id not in {*table.regions.region_ids, *table.index.merged_generations}:
            yield _without_folder(table, row.region_id, "the region snapshot", f"It has region {row.region_id}")
        state = regions.get(row.region_id)
        if state is not None and row.state is not None and row.state.version > state.manifest.version:
            yield Inconsistency(
                Severity.ERROR, "snapshot", "the region snapshot",
                f"It has manifest version {row.state.version} of region {row.region_id}; "
                f"the newest is {state.manifest.version}.",
                "The region's folder was restored or replaced beneath the table.",
                f"Find out which; then {_SNAPSHOT_AGAIN}",
                errors.runbook(29) or "",
            )  # fmt: skip


# Without --deep, the number of newest manifest versions that are read of each region.
_NEWEST_MANIFESTS = 20
_MOST_MISSING = 100
_MIXED = "Entries that one writer acknowledged count as flushed by the other: their rows are in no generation."
_STOPS = "Merges stop before it; readers of the region do not see these rows, or fail."


def check_manifests(table: Table, state: RegionBacklog, *, deep: bool) -> Iterator[Inconsistency]:
    """Every version that is kept decodes, and no number in them ever decreases; the hint names one of them."""
    manifest = state.manifest
    store = table.region(manifest.region_id)
    versions = store.versions()
    hint = store.hint()
    if hint is None:
        yield Inconsistency(
            Severity.INFO, "version_hint", f"{store.folder}/version_hint.json", "It is missing, or cannot be read.",
            "Readers list the folder instead.", "None: the next writer, or gc, writes it.",
            about=str(manifest.region_id),
        )  # fmt: skip
    elif hint < manifest.version:
        yield Inconsistency(
            Severity.INFO, "version_hint", f"{store.folder}/version_hint.json",
            f"It names version {hint}; the newest is {manifest.version}.",
            "Readers need a request for each version in between.", "None: the next writer, or gc, writes it.",
            about=str(manifest.region_id),
        )  # fmt: skip
    older: RegionManifest | None = None
    for version in versions if deep else versions[-_NEWEST_MANIFESTS:]:
        try:
            stored = store.read(version)
        except RegionManifestGoneError:
            continue  # gc runs beside this
        except NotExportedError:
            continue
        except errors.RegionManifestCorruptError as error:
            yield finding_of(
                error, "old_manifest", store.path(version), "A reader that uses it fails.", Severity.WARNING
            )
            continue
        for name in ("writer_epoch", "current_generation", "replay_after_wal_id"):
            before, now = (getattr(state, name) or 0 for state in (older or stored, stored))
            if now < before:
                yield Inconsistency(
                    Severity.ERROR, name, store.path(version), f"{name} falls from {before} to {now}.",
                    "Two writers, or a restored folder: a fenced writer may be accepted again, rows may be replayed "
                    "twice or not at all.",
                    "Stop the region's writer. Restore the region's folder as a whole from one backup.",
                    errors.runbook(errors.RegionManifestCorruptError.exit_code) or "",
                )  # fmt: skip
        older = stored


def check_generations(
    table: Table, state: RegionBacklog, contents: generation_files.RegionContents, history: SchemaHistory, *, deep: bool
) -> Iterator[Inconsistency | Generation]:
    """Every listed generation has its directory; every unmerged one has its files, and columns that the base table has.

    Args:
        table: the table.
        state: the region.
        contents: of its folder.
        history: of the base's columns.
        deep: whether the caller compares key files with all rows, so that no sample is looked for here.

    Yields: findings, and each unmerged generation that opens and has its files.
    """
    manifest, merged = state.manifest, state.merged
    files = generation_files.look_at_generations(table, state, footers=True)
    for root in sorted({*files.foreign_roots.values()}):
        generations = [number for number, named in files.foreign_roots.items() if named == root]
        yield Inconsistency(
            Severity.INFO, errors.ForeignRootError.reason, f"{root} in {manifest.region_id}",
            f"By the manifests of {counted(len(generations), 'generation')} from {min(generations)} on, their table is "
            "at that path.",
            "Jobs read the files of this table. Programs that read generations by themselves read that path.",
            "If the table was copied or moved: memwal-ops adopt URI --moved --apply. If programs mount it at several "
            "paths: none.", errors.runbook(errors.ForeignRootError.exit_code) or "",
        )  # fmt: skip
    numbers = listed_as_stored(manifest.source)  # decoded, they are in order
    late = next((after for before, after in pairwise(numbers) if after <= before), None)
    if late is not None:
        yield Inconsistency(
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
                yield Inconsistency(
                    Severity.WARNING, "merged_generation_missing", ref.folder,
                    f"Generation {flushed.generation} is merged and listed, and its directory is missing.",
                    "The base table has its rows; a reader of an older version, or one whose index lacks them, fails.",
                    "memwal-ops gc URI --apply removes it from the list once nothing needs it.",
                    about=about,
                )  # fmt: skip
        elif not exists:
            error = errors.GenerationMissingError(f"The directory of {ref} is missing.")
            yield finding_of(error, "generation_missing", ref.folder, _STOPS, about=about)
        elif (damage := files.damaged.get(flushed.generation)) is not None:
            yield finding_of(damage, "generation", ref.folder, _STOPS, about=about)
        else:
            try:
                generation = open_generation(table, ref, history)
                yield from check_indexes(files.indexes.get(flushed.generation, ()), about, deep=deep)
                yield from () if deep else check_sampled_filter(table, generation)
                yield generation
            except errors.MemwalOpsError as error:
                yield finding_of(error, "generation", ref.folder, _STOPS, about=about)
    listed = {flushed.path for flushed in manifest.flushed_generations}
    for name, directory in sorted(contents.directories.items()):
        if parse_generation_dir(name) is not None and name not in listed:
            yield Inconsistency(
                Severity.INFO, "unlisted_generation", f"_mem_wal/{manifest.region_id}/{name}",
                f"No manifest lists it; {directory.objects} objects, {directory.bytes:,} bytes.",
                "It uses space: a flush that was not finished, or a generation that was removed from the list.",
                "None: memwal-ops gc URI --apply deletes it when it is old enough.",
            )  # fmt: skip


def check_log(table: Table, state: RegionBacklog, contents: generation_files.RegionContents) -> Iterator[Inconsistency]:
    """Above the last flushed entry the log has no gap, its epochs never fall, and none is above the manifest's."""
    manifest, region_id = state.manifest, state.manifest.region_id
    layout = table.layout_of(region_id)
    flushed = manifest.replay_after_wal_id or 0
    ids = [entry for entry in contents.wal.ids if entry > flushed]
    last = max(manifest.wal_id_last_seen or 0, ids[-1] if ids else 0)
    for missing in _missing_entries(table, manifest, flushed, ids, last):
        path = wal_entry_path(region_id, missing, layout)
        error = errors.WalCorruptError(f"WAL entry {missing} is missing, although entry {last} was written.")
        what = "A replay stops there, and misses acknowledged rows above it."
        yield finding_of(error, "wal_gap", path, what, about=f"{region_id}/{missing}")
    highest = 0
    for entry, epoch in read_epochs(table, region_id, ids):
        path = wal_entry_path(region_id, entry, layout)
        if isinstance(epoch, errors.ObjectNotFoundError | NotExportedError):
            continue
        if isinstance(epoch, errors.MemwalOpsError):
            error = errors.WalCorruptError(str(epoch))
            yield finding_of(error, "wal_entry", path, "A replay stops there.", about=f"{region_id}/{entry}")
            continue
        if epoch < highest or epoch > manifest.writer_epoch:
            late = epoch > manifest.writer_epoch
            above = (
                f"a claim of the manifest's epoch {manifest.writer_epoch}" if late else f"an entry of epoch {highest}"
            )
            yield Inconsistency(
                Severity.ERROR, "wal_epoch", path, f"It was written under epoch {epoch}, behind {above}.",
                "A writer that was fenced continued to write, or the manifests are older than the log.",
                "Stop the region's writers; find out which of them wrote it before you trust any of its rows.",
                errors.runbook(errors.WalCorruptError.exit_code) or "", about=str(region_id) if late else "",
            )  # fmt: skip
        highest = max(highest, epoch)


def contents_of(table: Table, state: RegionBacklog) -> generation_files.RegionContents | Inconsistency:
    """A listing of the region's folder, or why there is none."""
    try:
        return generation_files.read_region_contents(
            table.store, state.manifest.region_id, table.layout_of(state.manifest.region_id)
        )
    except LinkError as error:
        return finding_of(error, "link", str(state.manifest.region_id), "Files behind a link are not seen.")
    except MixedLayoutsError as error:
        return finding_of(error, "mixed_layouts", str(state.manifest.region_id), _MIXED)


def check_unrecognized(contents: generation_files.RegionContents) -> Iterator[Inconsistency]:
    """Objects in a region's folder that are no part of the format."""
    for path in sorted(contents.strays):
        if is_staged_name(path.rsplit("/", 1)[-1]):
            what, effect = (
                "A writer wrote it under a temporary name, and ended before it published it.",
                "It uses space.",
            )
            remedy = "None: memwal-ops gc URI --apply deletes it when it is old enough."
        else:
            what, effect = "No writer of this format creates such a file.", "No job reads or deletes it."
            remedy = "Remove it yourself if it is yours."
        yield Inconsistency(Severity.INFO, "unrecognized", path, what, effect, remedy)


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
