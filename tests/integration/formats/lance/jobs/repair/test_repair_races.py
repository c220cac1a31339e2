"""repair is killed at each write, loses its lease, and meets writers, merges and renewals: it loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import run_job
from memwal_ops.core.anchors import GuardedStore, LeaseGuard
from memwal_ops.core.leases import Holder, acquire, break_lease, list_leases
from memwal_ops.errors import InvalidUsageError, LeaseLostError
from memwal_ops.formats.lance.table import Table
from tests.integration.formats.lance.jobs.repair.repair_tables import (
    counts,
    merged_generations_gone,
    opened,
    quarantine,
    repaired,
    snapshot_unreadable,
    without_quarantine,
)
from tests.integration.formats.lance.jobs.verify_tables import (
    drop_transaction,
    expired_lease,
    hint_behind,
)
from tests.support.dying_store import DyingStore, Killed
from tests.support.stores import beside
from tests.support.tables import damage
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.tables.lsm_table import LsmTable


def several(uri: str, region: str) -> None:
    """One damage of each kind of write."""
    merged_generations_gone(uri, region)
    snapshot_unreadable(uri, region)
    drop_transaction(uri, region)
    hint_behind(uri, region)


def with_store(uri: str, wrap: Callable[[Any], Any]) -> Table:
    table = opened(uri)
    return replace(table, store=wrap(table.store))


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.long), 9])
def test_killed_at_each_write_and_repeated(merged_table: LsmTable, tmp_path: Path, step: int) -> None:
    trial = damage.copy_table(merged_table.uri, str(tmp_path / "trial.lance"))
    several(trial, merged_table.regions[0])
    writes = [at for at, verb in enumerate(calls_of(trial), 1) if verb in {"put", "put_if_absent", "delete_many"}]
    assert len(writes) > 10
    broken = damage.copy_table(merged_table.uri, str(tmp_path / "broken.lance"))
    several(broken, merged_table.regions[0])
    rows = read_spec(broken)
    for number, at in enumerate(writes[::step]):
        uri = damage.copy_table(broken, str(tmp_path / f"t{at}.lance"))
        with pytest.raises(Killed):
            kill(uri, at, after=bool(number % 2))
        assert_same(read_spec(uri), rows)
        assert repaired(uri)["decision"] in {"repaired", "nothing_to_repair"}
        assert counts(uri) == {}
        assert_same(read_spec(uri), rows)
        for name in {Path(path).parent.name for path in quarantine(uri)}:
            try_to_undo(uri, name)
        assert_same(read_spec(uri), rows)


def try_to_undo(uri: str, name: str) -> None:
    """What was repaired again since is refused, all else is brought back."""
    try:
        assert run_job(uri, "repair", apply=True, undo=name).decision in {"undone", "nothing_to_undo"}
    except InvalidUsageError as error:
        assert "changed since" in str(error) or "No repair" in str(error)


def calls_of(uri: str) -> list[str]:
    counting: list[DyingStore] = []

    def wrap(store: Any) -> DyingStore:
        counting.append(DyingStore(store, 1 << 30, after=False))
        return counting[-1]

    assert run_job(with_store(uri, wrap), "repair", apply=True).decision == "repaired"
    return counting[0].calls


def kill(uri: str, at: int, *, after: bool) -> None:
    run_job(with_store(uri, lambda store: DyingStore(store, at, after=after)), "repair", apply=True)


def test_a_writer_flushes_in_the_middle(tmp_path: Path) -> None:
    """Right before the region's manifest is published: the flush is kept, and the reference goes with the next try."""
    table = Workload(4, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    (region,) = table.regions
    for _ in range(2):
        table.put([1, 2])
        table.flush()
        run_job(table.uri, "merge")
    run_job(table.uri, "catchup")
    run_job(table.uri, "expire", apply=True, older_than="0s", allow_unsafe=True, keep=1)
    merged_generations_gone(table.uri, region)

    def write() -> None:
        table.put([3, 50])
        table.flush()

    wrapped = with_store(table.uri, beside("put_if_absent", ".binpb", write))
    assert run_job(wrapped, "repair", apply=True).decision == "repaired"
    assert counts(table.uri) == {}
    run_job(table.uri, "merge")
    assert_same(read_base(table.uri), table.expected())
    table.close()


def test_a_merge_commits_in_the_middle(merged_copy: tuple[str, str], merged_table: LsmTable) -> None:
    uri, _ = merged_copy
    snapshot_unreadable(uri, "")
    wrapped = with_store(uri, beside("put_if_absent", "_versions/", lambda: run_job(uri, "merge")))
    assert run_job(wrapped, "repair", apply=True).decision == "repaired"
    assert counts(uri).keys() <= {"index_behind"}
    assert_same(read_base(uri), merged_table.expected())


def test_a_lease_that_is_renewed_meanwhile_is_not_released(merged_copy: tuple[str, str]) -> None:
    uri, region = merged_copy
    expired_lease(uri, region)

    def renew() -> None:
        acquire(opened(uri).store, "merge", Holder("1", "op@host pid 7"), timedelta(hours=1))

    wrapped = with_store(uri, beside("put_if_absent", "_mem_wal_ops/leases", renew))
    (fix,) = run_job(wrapped, "repair", apply=True).to_json()["fixes"]
    assert fix["outcome"] == "gone"
    (lease,) = list_leases(opened(uri).store)
    assert lease.ended is None
    break_lease(opened(uri).store, "merge", "test")


@dataclass
class Loses:
    """A lease that is lost after so many checks."""

    left: int

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise LeaseLostError("another one has it")


def test_nothing_is_written_without_the_lease(merged_copy: tuple[str, str]) -> None:
    uri, region = merged_copy
    several(uri, region)
    run_job(uri, "repair", undo="")  # the probe of the store is done once in a process
    before = without_quarantine(uri)
    with pytest.raises(LeaseLostError):
        run_job(opened(uri).with_guard(LeaseGuard(Loses(0))), "repair", apply=True)
    assert without_quarantine(uri) == before
    assert isinstance(opened(uri).with_guard(LeaseGuard(Loses(0))).store, GuardedStore)
