"""The jobs of the matrix: a job that is registered here is tested with every fault and every other job."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance

from memwal_ops import open_table
from memwal_ops.core.holds import holds, take_hold
from memwal_ops.core.leases import Holder, acquire
from memwal_ops.core.options import RepairOptions, VerificationOptions
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, VersionGoneError
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage
from memwal_ops.formats.lance.indexes.snapshots import read_snapshot
from memwal_ops.formats.lance.jobs import expire, merge, snapshot, verify
from memwal_ops.formats.lance.jobs.catchup import job, job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.jobs.gc import job as gc
from memwal_ops.formats.lance.jobs.migrate import job as migrate
from memwal_ops.formats.lance.jobs.repair import fixes as repair
from memwal_ops.formats.lance.layouts import REGION
from memwal_ops.formats.lance.options import MigrateOptions
from memwal_ops.storage import probe
from tests.support.gc_options import PATIENT
from tests.support.tables import wire
from tests.support.tables.files import Files

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.lance.table import Table
    from tests.campaigns.faults.tables import Prepared

OLD, NEW = "vec_idx", "fresh_idx"
ENOUGH_RUNS = 12


@dataclass(frozen=True, slots=True)
class Job:
    """One job.

    Attributes:
        name: what a test and the command line call it.
        module: where it lives.
        run: one run, as a user starts it.
        finish: run it, after whatever happened, until it says that nothing is left to do; fail where that is not so.
        takes: the kinds by which the witness allows files to go; see tests.campaigns.sim.witness.
        regions: how many its table has; the fewer, the cheaper.
        prepare: brings a littered table to where the job has work, if it has none there.
        refuses: errors with which it may refuse while others work, beside those of a fault.
        is_beside: whether it meets others: they run in the middle of it, and it in the middle of them. What is
            but a part or a variant of a job meets nobody, and is hit only where it changes something.
        exact: whether the files left by a run that was hit, and then finished, are by name those of one that was not.
    """

    name: str
    module: str
    run: Callable[[Table], Any]
    finish: Callable[[Prepared], None]
    takes: frozenset[str] = frozenset()
    regions: int = 2
    prepare: Callable[[Prepared], None] | None = None
    refuses: tuple[type[MemwalOpsError], ...] = ()
    is_beside: bool = True
    exact: bool = False


# -- merge


def _merge(table: Table) -> Any:
    return merge.apply(table, merge.MergeOptions())


def _finish_merge(prepared: Prepared) -> None:
    assert _merge(open_table(prepared.uri)).decision in {"merged", "nothing_to_merge"}
    files = Files(prepared.uri)
    flushed = {region: wire.region_manifest(files, region).current_generation - 1 for region in wire.regions(files)}
    assert wire.progress(files) == flushed


# -- snapshot


def _snapshot(table: Table) -> Any:
    """In a file, or inside the index."""
    return snapshot.apply(table, snapshot.SnapshotOptions(100 if table.layout is REGION else 0))


def _finish_snapshot(prepared: Prepared) -> None:
    assert _snapshot(open_table(prepared.uri)).decision in {"built", "unchanged"}
    table = open_table(prepared.uri)
    found, files = read_snapshot(table), Files(prepared.uri)
    assert found is not None
    # The rows of the shard layout are of the regions alone, and stay as they are when these are flushed.
    versions = {str(one.region_id): None if one.state is None else one.state.version for one in found.regions}
    assert versions == {
        region: wire.region_manifest(files, region).version if prepared.layout == "region" else None
        for region in wire.regions(files)
    }


# -- catchup


def _catchup(table: Table) -> Any:
    return catchup.apply(table, catchup.CatchupOptions())


def _finish_catchup(prepared: Prepared) -> None:
    assert _catchup(open_table(prepared.uri)).decision in {"caught_up", "unchanged"}
    table = open_table(prepared.uri)
    for name, index in base_indexes(table).items():
        assert coverage(index.covered, table.manifest).complete, name
        assert table.index.index_catchup.get(name) == table.index.merged_generations, name


def _rebuild(table: Table) -> Any:
    """Every index, the vector index with its codebook."""
    return catchup.apply(table, catchup.CatchupOptions(indexes=tuple(base_indexes(table)), rebuild=True))


def _finish_rebuild(prepared: Prepared) -> None:
    report = _rebuild(open_table(prepared.uri))
    assert {one.decision for one in report.indexes} == {"updated"}
    _finish_catchup(prepared)


def _migrate(table: Table) -> Any:
    """All steps in one run, as a script might do; writers that were not restarted end it early."""
    for _ in range(ENOUGH_RUNS):
        report = job.migrate(table, OLD, NEW)
        if report.decision in {"done", "waiting"}:
            return report
    raise AssertionError(report)


def _merge_first(prepared: Prepared) -> None:
    """Merge what waits: generations that were flushed without a new index, or keep versions for their columns."""
    _merge(open_table(prepared.uri))


def _finish_migration(prepared: Prepared) -> None:
    if _migrate(open_table(prepared.uri)).decision == "waiting":
        _merge(open_table(prepared.uri))  # what was flushed without the new index
        assert _migrate(open_table(prepared.uri)).decision == "done"
    table = open_table(prepared.uri)
    indexes = base_indexes(table)
    assert OLD not in indexes
    assert coverage(indexes[NEW].covered, table.manifest).complete


# -- compact


def _compact(table: Table) -> Any:
    return compact.apply(table, compact.CompactOptions())


def _finish_compaction(prepared: Prepared) -> None:
    """A run leaves alone what was added since it began, also by itself: the next may join that."""
    for _ in range(ENOUGH_RUNS):
        if _compact(open_table(prepared.uri)).decision == "unchanged":
            return
    raise AssertionError("compact does not come to an end")


# -- expire, gc, hold


# Versions that are old; younger ones may belong to a commit in progress (expire's own warning).
_OLD_ONES = expire.ExpireOptions(timedelta(hours=1), 1)


def _expire(table: Table) -> Any:
    return expire.apply(table, _OLD_ONES)


def _finish_expiry(prepared: Prepared) -> None:
    assert _expire(open_table(prepared.uri)).decision in {"expired", "nothing_to_expire"}
    assert not expire.plan(open_table(prepared.uri), _OLD_ONES).versions
    assert lance.dataset(prepared.uri, version="kept").count_rows()


def _gc(table: Table) -> Any:
    return gc.apply(table, PATIENT)


def _gc_few(table: Table) -> Any:
    """Directories are left half deleted, to be taken up again."""
    return gc.apply(table, replace(PATIENT, max_deletes=3))


def _finish_gc(prepared: Prepared) -> None:
    for _ in range(ENOUGH_RUNS):
        report = _gc(open_table(prepared.uri))
        assert not report.failed
        assert not report.faults
        if report.decision == "nothing_to_delete":
            return
    raise AssertionError("gc does not come to an end")


def _hold(table: Table) -> Any:
    """Of the oldest version, which an expiry is about to take."""
    return take_hold(table, min(int(one["version"]) for one in table.dataset.versions()), timedelta(hours=2))


def _finish_hold(prepared: Prepared) -> None:
    hold = _hold(open_table(prepared.uri))
    table = open_table(prepared.uri)
    assert hold.number in {one.number for one in holds(table) if not one.released}
    assert hold.versions[0] not in expire.plan(table, _OLD_ONES).versions


# -- repair


def _repair(table: Table) -> Any:
    return repair.JOB.apply(table, RepairOptions())


def _damage(prepared: Prepared) -> None:
    """A hint that is behind, a transaction file that is gone, a lease that nobody renewed; the indexes are behind."""
    table = open_table(prepared.uri)
    table.region(table.regions.region_ids[0]).write_hint(1)
    os.unlink(f"{prepared.uri}/_transactions/{table.manifest.manifest.transaction_file}")
    acquire(table.store, "merge", Holder("1", "op@host"), timedelta(minutes=5))  # all files are made older afterwards


def _finish_repair(prepared: Prepared) -> None:
    for _ in range(ENOUGH_RUNS):
        report = _repair(open_table(prepared.uri))
        assert all(one.outcome in {"repaired", "gone"} for one in report.fixes)
        if not report.fixes:
            break
    table = open_table(prepared.uri)
    assert not {one.check for one in verify.verified(table, VerificationOptions()).findings.kept} & {
        "version_hint", "transaction_file", "lease_expired", "index_behind", "index_catchup",
    }  # fmt: skip
    for region_id in table.regions.region_ids:
        region = table.region(region_id)
        assert region.hint() == region.latest(checked=True).version


# -- migrate


def _change_layout(table: Table) -> Any:
    """To the layout that the table was not made in."""
    before = table.layout_record
    first = table.layout.name if before is None else before.before
    return migrate.apply(table, MigrateOptions(to="shard" if first == "region" else "region"))


def _finish_change_of_layout(prepared: Prepared) -> None:
    assert _change_layout(open_table(prepared.uri)).decision in {"migrated", "nothing_to_migrate"}
    table, files = open_table(prepared.uri), Files(prepared.uri)
    assert {table.layout.name, prepared.layout} == {"shard", "region"}
    progress = wire.progress(files)
    for region_id in table.regions.region_ids:
        newest = table.region(region_id).latest(checked=True)
        assert newest.sealed
        assert progress.get(str(region_id), 0) == newest.current_generation - 1


# -- what every job does first


def _probe(table: Table) -> Any:
    probe._proven.clear()
    probe.probe_conditional_writes(table.store)


def _finish_probe(prepared: Prepared) -> None:
    _probe(open_table(prepared.uri))


JOBS = {
    one.name: one
    for one in (
        Job("merge", "memwal_ops.formats.lance.jobs.merge", _merge, _finish_merge),
        Job("snapshot", "memwal_ops.formats.lance.jobs.snapshot", _snapshot, _finish_snapshot),
        Job("catchup", "memwal_ops.formats.lance.jobs.catchup.job", _catchup, _finish_catchup),
        Job(
            "rebuild",
            "memwal_ops.formats.lance.jobs.catchup.job",
            _rebuild,
            _finish_rebuild,
            regions=1,
            is_beside=False,
        ),
        Job(
            "migrate-codebook",
            "memwal_ops.formats.lance.jobs.catchup.job",
            _migrate,
            _finish_migration,
            regions=1,
            prepare=_merge_first,
            refuses=(InvalidUsageError,),  # to drop the old index after a concurrent write
        ),
        Job("compact", "memwal_ops.formats.lance.jobs.compact.job", _compact, _finish_compaction),
        Job(
            "expire",
            "memwal_ops.formats.lance.jobs.expire",
            _expire,
            _finish_expiry,
            frozenset({"expire"}),
            regions=1,
            prepare=_merge_first,  # a generation that waits keeps the versions that tell what its columns are
            exact=True,
        ),
        Job("gc", "memwal_ops.formats.lance.jobs.gc.job", _gc, _finish_gc, frozenset({"gc"}), regions=1, exact=True),
        Job(
            "gc-few",
            "memwal_ops.formats.lance.jobs.gc.job",
            _gc_few,
            _finish_gc,
            frozenset({"gc"}),
            regions=1,
            is_beside=False,
            exact=True,
        ),
        Job("hold", "memwal_ops.core.holds", _hold, _finish_hold, regions=1, refuses=(VersionGoneError,)),
        Job(
            "repair", "memwal_ops.formats.lance.jobs.repair.fixes", _repair, _finish_repair, regions=1, prepare=_damage
        ),
        Job(
            "migrate",
            "memwal_ops.formats.lance.jobs.migrate.job",
            _change_layout,
            _finish_change_of_layout,
            regions=1,
            is_beside=False,  # the table's writers are of the layout of before; test_migrate_layout.py has the meetings
        ),
        Job("probe", "memwal_ops.storage.probe", _probe, _finish_probe, regions=1, is_beside=False),
    )
}


# -- whom a job may meet, beside the other jobs


def _write(prepared: Prepared) -> None:
    """A writer claims both regions, writes, deletes and flushes."""
    made = prepared.made
    for at, region in enumerate(made.regions):
        made.put([at, at + 2, at + 40])
        made.delete([at + 4])
        made.flush(region)


def _compact_with_pylance(prepared: Prepared) -> None:
    lance.dataset(prepared.uri).optimize.compact_files()


def _acting(job: Job) -> Callable[[Prepared], None]:
    def act(prepared: Prepared) -> None:
        with suppress(*job.refuses):
            job.run(open_table(prepared.uri))

    return act


#: Who runs in the middle of a job, from its beginning to its end.
OTHERS: dict[str, Callable[[Prepared], None]] = {
    "writer": _write,
    "pylance-compaction": _compact_with_pylance,
    **{name: _acting(job) for name, job in JOBS.items() if job.is_beside},
}
