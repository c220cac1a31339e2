"""Migrations of legacy tables in numbers: killed at each call, and from random state lists."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memwal_ops import open_table, run_job
from memwal_ops.formats.lance.jobs.migrate import job
from memwal_ops.formats.lance.options import MigrateOptions
from memwal_ops.memwal import read
from memwal_ops.storage import probe
from tests.support.calm import calm
from tests.support.dying_store import DyingStore, Killed
from tests.support.seeds import CAMPAIGN_SEED
from tests.support.tables.legacy_table import LegacyTable, base_rows, random_states, states_of


def filled(uri: str, *, marked: bool = True) -> LegacyTable:
    """Every state: merged, flushed, in a log alone, open with entries, open and empty."""
    table = LegacyTable(uri, marked=marked).create()
    table.other("a", 0, "MERGED")
    table.flushed("a", 1, {1: 100.0, 50: 5.0})
    table.flushed("a", 2, {1: 101.0, 2: 102.0})
    table.logged("b", 0, {0: {3: 7.0, 60: 6.0}, 2: {3: 8.0}}, strangers=(1, 5))
    table.logged("b", 1, {0: {61: 6.5}}, state="SEALED")
    table.logged("b", 2, {0: {62: 6.25}}, state="OPEN", suffix="lance")
    table.other("c", 4, "OPEN")
    table.merged |= {61: 6.5, 62: 6.25}
    return table.finish()


def migrate(uri: str, **options: Any) -> Any:
    return run_job(uri, "migrate", apply=options.pop("apply", True), **options)


def scanned(uri: str) -> dict[int, float]:
    """Base and log by the scan of today's layouts; the shard layout's log is its writers' own."""
    found = read(uri, "strong").scan().to_table().to_pydict()
    assert len({*found["id"]}) == len(found["id"])
    return dict(zip(found["id"], found["val"], strict=True))


def kill_and_repeat(tmp_path: Path, layout: str, *, every: int) -> None:
    """Kill a migration before and after each ``every``-th call of the store, and run it again."""
    table = filled(str(tmp_path / "t.lance"), marked=False)
    options = MigrateOptions(to=layout, primary_key=("id",))
    base, backup = base_rows(table.uri), str(tmp_path / "backup")
    shutil.copytree(table.uri, backup)

    def over(store: Any) -> Any:
        return replace(opened, store=store)

    with calm():
        probe._proven.clear()
        opened = open_table(table.uri)
        counting = DyingStore(opened.store, 1 << 30, after=False)
        job.apply(over(counting), options)
        calls = len(counting.calls)
        assert calls > 20
        for at in range(1 + CAMPAIGN_SEED % every, calls + 1, every):
            for after in (False, True):
                shutil.rmtree(table.uri)
                shutil.copytree(backup, table.uri)
                probe._proven.clear()
                opened = open_table(table.uri)
                with pytest.raises(Killed):
                    job.apply(over(DyingStore(opened.store, at, after=after)), options)
                where = f"call {at} of {calls}, {'after' if after else 'before'}"
                assert base_rows(table.uri) == base, where
                again = migrate(
                    table.uri, to=layout, **({} if open_table(table.uri).memwal else {"primary_key": ["id"]})
                )
                assert again.decision in {"migrated", "nothing_to_migrate"}, where
                assert scanned(table.uri) == table.merged, where
                assert base_rows(table.uri) == base, where
                if at % 7 == 0:
                    assert run_job(table.uri, "merge").decision == "merged", where
                    assert base_rows(table.uri) == table.merged, where


def migrate_random_lists(tmp_path: Path, seeds: range) -> None:
    """Each list is shown, and migrated with the rows that its states tell, or blocked and left as it is."""
    ended: dict[str, int] = {}
    base = LegacyTable(str(tmp_path / "base.lance"), size=2).create()
    for seed in seeds:
        random_ = random.Random(seed)
        uri = str(tmp_path / "t.lance")
        shutil.rmtree(uri, ignore_errors=True)
        shutil.copytree(base.uri, uri)
        table = LegacyTable(uri, size=2, model=dict(base.model), merged=dict(base.model))
        for one in random_states(random_, random_.randrange(1, 4)):
            region, generation, state = one["region"], one["generation"], one["state"]
            key = 1000 * int(region[1:]) + generation
            if random_.random() < 0.7 and state != "MERGED":
                table.logged(region, generation, {0: {key: 1.0}}, state=state)
                table.merged[key] = 1.0
            else:
                table.other(region, generation, state)
        if not table.listed:
            continue
        table.finish()
        shown = run_job(uri, "inspect").to_json()
        assert {(one["region"], one["generation"]): one["state"] for one in shown["mem_wals"]} == states_of(uri)
        late = [name for name in {one["region"] for one in table.listed} if _late(table, name)]
        report = migrate(uri)
        ended[report.decision] = ended.get(report.decision, 0) + 1
        assert report.decision == ("blocked" if late else "migrated"), (seed, report.describe())
        if late:
            assert {one.region for one in report.blocked} == {*late}, seed
            assert base_rows(uri) == table.model
            assert not Path(uri, "_mem_wal").exists()
            continue
        assert run_job(uri, "merge").exit_code == 0
        assert base_rows(uri) == table.merged, seed
    assert {*ended} == {"migrated", "blocked"}


def _late(table: LegacyTable, region: str) -> bool:
    """By the document alone: two unsealed ones, or rows of one that is not merged below one that is, or was."""
    states = {one["generation"]: one["state"] for one in table.listed if one["region"] == region}
    numbers = range(min(states), max(states) + 1)
    done = [number for number in numbers if states.get(number, "MERGED") == "MERGED"]
    waiting = [number for number in states if states[number] != "MERGED"]
    unsealed = [number for number in states if states[number] == "OPEN"]
    return len(unsealed) > 1 or bool(done and waiting and min(waiting) < max(done))
