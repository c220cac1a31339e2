"""The fixes of ``repair`` for Lance tables, each with its proof. Findings without one need an operator's decision.

* ``version_hint``: write that of the newest manifest. No version is missing, and the hint names none above it.
* ``merged_generation_missing``: remove it from the region's list. By gc's own conditions, it is not needed.
* ``generation_order``: write the list in order. It decodes to the same generations.
* ``index_catchup``, ``index_behind``: lower the entry to what the fragments cover. Users of the entry read more.
* ``snapshot`` (or its ``base_file``) that cannot be read: take another. The manifests are authoritative, and all read.
* ``transaction_file``: write it again. The version's manifest has the transaction, under the same id.
* ``version_emptied``: publish the rows of the version before. The commit that lost them changed indexes alone.
* what a region lacks: write it again (:mod:`memwal_ops.formats.lance.jobs.repair.regions`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core import commit_retry, quarantine, verification
from memwal_ops.core.context import RunContext
from memwal_ops.core.repair import Fix, FixAttempt, Keep, RepairJob, UnsafeError
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.commit.commit import CommitNote, IndexChange, publish_change
from memwal_ops.formats.lance.files.version_files import TRANSACTIONS_FOLDER, read_version_manifest, transaction_of
from memwal_ops.formats.lance.indexes.snapshots import is_external, read_snapshot, snapshot_path, stale_entries
from memwal_ops.formats.lance.jobs import snapshot, verify
from memwal_ops.formats.lance.jobs.gc.evidence import read_evidence
from memwal_ops.formats.lance.jobs.gc.region import read_region_view
from memwal_ops.formats.lance.jobs.repair import choices
from memwal_ops.formats.lance.jobs.repair.regions import entry_fix, generation_fix, manifest_fix, swap_region
from memwal_ops.formats.lance.options import GcOptions, SnapshotOptions
from memwal_ops.formats.lance.regions.manifests import HINT
from memwal_ops.formats.lance.retention.damage import missing_of_manifest
from memwal_ops.formats.lance.wire import region_manifest
from memwal_ops.formats.lance.wire.memwal_index import decode_memwal_index, find_memwal_entry, with_catchup
from memwal_ops.formats.lance.wire.version_manifest import VersionManifest, is_transaction
from memwal_ops.storage.clock import store_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.core.verification import Inconsistency
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest


def fix_of(table: Table, finding: Inconsistency) -> Fix[Table] | None:
    """The fix of a finding; None: there is none for such findings. Reads only.

    Raises ``UnsafeError``: it is not safe here.
    """
    make = _FIXES.get(finding.check)
    return None if make is None else make(table, finding)


# -- regions


def _hint(table: Table, finding: Inconsistency) -> Fix[Table]:
    region_id = UUID(finding.about)
    newest = table.region(region_id).latest(checked=True).version

    def make(table: Table, keep: Keep) -> FixAttempt:
        region = table.region(region_id)
        place = quarantine.object_place(table.store, f"{region.folder}/{HINT}")
        seen = place.read()
        # A gap, or a hint above the newest version, is refused: versions may be lost, and a hint would hide that.
        version = region.latest(checked=True).version
        if seen is not None and region_manifest.decode_version_hint(seen) == version:
            return FixAttempt.GONE
        data = region_manifest.encode_version_hint(version)
        keep(place.name, seen, data)
        # Writers publish meanwhile, and a store without compare-and-swap keeps the older hint: write the newer one.
        return FixAttempt.DONE if place.swap(seen, data) and region.latest().version == version else FixAttempt.CONFLICT

    return Fix(f"hint:{region_id}", f"write the hint of region {region_id}: version {newest}", make)


def _drain(table: Table, finding: Inconsistency) -> Fix[Table]:
    region, _, number = finding.about.partition("/")
    region_id, generation = UUID(region), int(number)
    _, drainable = _drainable(table, region_id, generation, datetime.now(UTC))
    listed = ", ".join(map(str, drainable))

    def make(table: Table, keep: Keep) -> FixAttempt:
        try:
            manifest, numbers = _drainable(table, region_id, generation, store_time(table.store))
        except _NotMissingError:
            return FixAttempt.GONE
        return swap_region(table, manifest, manifest.without_generations(numbers), keep)

    return Fix(f"drain:{region_id}", f"remove generation {listed} from the list of region {region_id}", make)


class _NotMissingError(UnsafeError):
    """The generation is not listed any more, or has its files again."""


def _drainable(table: Table, region_id: UUID, wanted: int, now: datetime) -> tuple[RegionManifest, tuple[int, ...]]:
    """The newest manifest, and the generations without files that it need not list, by gc's conditions.

    Raises ``UnsafeError``: ``wanted`` is not among them.
    """
    evidence = read_evidence(table, GcOptions(), now)
    view = read_region_view(evidence, region_id)
    merged = evidence.table.index.merged_generations.get(region_id, 0)
    missing = {
        flushed.generation
        for flushed in view.newest.flushed_generations
        if flushed.generation <= merged and flushed.path not in view.contents.directories
    }
    if wanted not in missing:
        raise _NotMissingError(f"Generation {wanted} is not listed any more, or has its files again.")
    numbers = tuple(number for number in view.drainable() if number in missing)
    if wanted not in numbers:
        gates = (*view.base_gates(), *evidence.drain_gates(region_id, wanted))
        unmet = "; ".join(gate.text for gate in gates if not gate.met)
        raise UnsafeError(
            f"If it were removed from the list, a reader that needs it would miss its rows without an error: {unmet}."
        )
    return view.newest, numbers


def _order(table: Table, finding: Inconsistency) -> Fix[Table]:
    del table
    region_id = UUID(finding.about)

    def make(table: Table, keep: Keep) -> FixAttempt:
        manifest = table.region(region_id).latest(checked=True)
        numbers = region_manifest.listed_as_stored(manifest.source)
        if numbers == sorted(set(numbers)):
            return FixAttempt.GONE
        return swap_region(table, manifest, manifest, keep)

    return Fix(f"order:{region_id}", f"write the list of region {region_id} in order", make)


# -- the MemWAL index


def _catchup(table: Table, finding: Inconsistency) -> Fix[Table]:
    del table
    name = finding.about

    def make(table: Table, keep: Keep) -> FixAttempt:
        def change(newest: Table) -> IndexChange | None:
            corrected = stale_entries(newest, [name])
            if not corrected:
                return None
            details = with_catchup(newest.index.details, corrected)
            before, after = (
                choices.catchup_entry(index_details, name) for index_details in (newest.index.details, details)
            )
            keep(choices.catchup_place(newest, name).name, before, after)
            return IndexChange(details)

        newest = publish_change(table, change, CommitNote("repair"), commit_retry.CommitRetry())
        return FixAttempt.GONE if newest is table else FixAttempt.DONE

    return Fix(f"catchup:{name}", f"set the catch-up entry of index {name} to what its fragments cover", make)


def _base_file(table: Table, finding: Inconsistency) -> Fix[Table] | None:
    """The file of a region snapshot is listed with the base table's; no other file of it can be made again."""
    own = {snapshot_path(table.index.uuid), snapshot_path(table.index.uuid).rpartition("/")[0]}
    return _take_snapshot(table) if is_external(table) and finding.place in own else None


def _snapshot(table: Table, finding: Inconsistency) -> Fix[Table]:
    if finding.severity is verification.Severity.ERROR:
        raise UnsafeError(
            "The snapshot was made from a later manifest than the newest: manifests were lost or restored. It may be "
            "the only object that names generations that were flushed, so it is not replaced."
        )
    return _take_snapshot(table)


def _take_snapshot(table: Table) -> Fix[Table]:
    _refuse_unreadable_regions(snapshot.plan(table, _options(table)))

    def make(table: Table, keep: Keep) -> FixAttempt:
        try:
            if read_snapshot(table) is not None or not is_external(table):
                return FixAttempt.GONE
        except InvalidFormatError:
            pass
        _refuse_unreadable_regions(snapshot.plan(table, _options(table)))

        def before_commit(newest: Table, change: IndexChange, rows: bytes) -> None:
            after = choices.snapshot_content(change.details, change.uuid, rows)
            keep(choices.SNAPSHOT, choices.snapshot_place(newest).read(), after)

        report = snapshot.apply(
            table, _options(table), RunContext(guard=table.guard), update_hints=False, before_commit=before_commit
        )
        return FixAttempt.DONE if report.decision == "built" else FixAttempt.GONE

    return Fix("snapshot:", "take another region snapshot", make)


def _options(table: Table) -> SnapshotOptions:
    """The options with which a new snapshot is stored in the same place as the current one."""
    return SnapshotOptions(inline_threshold=0) if is_external(table) else SnapshotOptions()


def _refuse_unreadable_regions(report: snapshot.SnapshotReport) -> None:
    faults = [skipped.path for skipped in report.skipped if skipped.is_fault]
    if faults:
        raise UnsafeError(f"{faults[0]} cannot be read: readers of another snapshot would not see the region at all.")


# -- versions


def transaction_fix(table: Table, finding: Inconsistency) -> Fix[Table]:
    """Write the transaction file of the newest version again.

    Raises ``UnsafeError``: the version's manifest does not have the transaction.
    """
    del finding
    path, _ = _inline_transaction(table)

    def make(table: Table, keep: Keep) -> FixAttempt:
        path, data = _inline_transaction(table)
        place = quarantine.object_place(table.store, path)
        present = place.read()
        if present is not None and is_transaction(present):  # also where another commit just made the newest version
            return FixAttempt.GONE
        keep(place.name, present, data)
        return FixAttempt.DONE if place.swap(present, data) else FixAttempt.GONE

    return Fix("transaction:", f"write {path} from the manifest of version {table.version}", make)


def _inline_transaction(table: Table) -> tuple[str, bytes]:
    name, transaction = table.manifest.manifest.transaction_file, table.manifest.transaction
    if transaction is None or name != f"{transaction.read_version}-{transaction.uuid}.txn":
        raise UnsafeError("The version's manifest does not have the transaction itself, so the file cannot be written.")
    return f"{TRANSACTIONS_FOLDER}/{name}", transaction.SerializeToString(deterministic=True)


def _emptied(table: Table, finding: Inconsistency) -> Fix[Table]:
    del finding
    source = _rows_before(table)

    def make(table: Table, keep: Keep) -> FixAttempt:
        if table.manifest.manifest.fragments:
            return FixAttempt.GONE
        place = choices.rows_place(table)
        before, after = (
            choices.fragments_of(table.manifest.manifest),
            choices.fragments_of(_rows_before(table).manifest),
        )
        keep(place.name, before, after)
        return FixAttempt.DONE if place.swap(before, after) else FixAttempt.CONFLICT

    version = source.manifest.version
    return Fix("rows:", f"publish a version with the rows of version {version}, which a change of indexes lost", make)


def _rows_before(table: Table) -> VersionManifest:
    """The version before the newest, if the newest one lost its rows by a commit that cannot delete any."""
    transaction = transaction_of(table.store, table.manifest)
    if transaction is None or not transaction.HasField("create_index"):
        raise UnsafeError("The commit may have deleted the rows on purpose: the opposite cannot be proven.")
    try:
        before = read_version_manifest(table.store, table.version - 1, table.naming)
    except (ObjectNotFoundError, InvalidFormatError) as error:
        raise UnsafeError(f"Version {table.version - 1}, which had the rows, cannot be read.") from error
    if not before.manifest.fragments or list(before.manifest.fields) != list(table.manifest.manifest.fields):
        raise UnsafeError(f"Version {before.manifest.version} has no rows either, or other columns.")
    entry = find_memwal_entry(before.indexes)
    if entry is None or decode_memwal_index(entry).merged_generations != table.index.merged_generations:
        raise UnsafeError(f"The merge progress of version {before.manifest.version} differs.")
    if (gone := missing_of_manifest(table, before)) is not None:
        raise UnsafeError(f"{gone} is missing, which version {before.manifest.version} needs.")
    return before


_FIXES: dict[str, Callable[[Table, Inconsistency], Fix[Table] | None]] = {
    "base_file": _base_file,
    "version_hint": _hint,
    "merged_generation_missing": _drain,
    "generation_order": _order,
    "snapshot": _snapshot,
    "transaction_file": transaction_fix,
    "version_emptied": _emptied,
    **dict.fromkeys(("index_catchup", "index_behind"), _catchup),
    **dict.fromkeys(("wal_entry", "wal_gap"), entry_fix),
    **dict.fromkeys(("wal_epoch", "region_manifest_corrupt", "region_manifest_gap"), manifest_fix),
    **dict.fromkeys(("generation", "generation_corrupt", "generation_missing", "generation_rows"), generation_fix),
}
JOB = RepairJob(verify.verified, fix_of, choices.place_of, choices.CHOICES)
