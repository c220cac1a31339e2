"""Every reason for which a region is blocked has a way out without a copy, and no more is lost than what is gone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import run_job
from memwal_ops.formats.lance.log.region_seal import flush_log
from memwal_ops.memwal import RegionField, RegionRouter, RegionSpec, create_mem_wal, read
from tests.integration.formats.lance.jobs.repair.repair_tables import (
    counts,
    generation_and_log_gone,
    opened,
    without_quarantine,
)
from tests.integration.formats.lance.jobs.verify_tables import (
    add_entries,
    build,
    hint_ahead,
    hint_gone,
    log_entries,
    manifest_folder,
    raise_log_position,
    rewrite,
    waiting,
)
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.layouts import LAYOUTS
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base
from tests.support.tables.schemas import key_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.tables.lsm_table import LsmTable

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("value", pa.string()),
    ]
)


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LsmTable]:
    table = build(request.param, tmp_path_factory.mktemp("whole") / "t.lance")
    yield table
    table.close()


@pytest.fixture
def copy(whole: LsmTable, tmp_path: Path) -> tuple[str, str]:
    return damage.copy_table(whole.uri, str(tmp_path / "t.lance")), whole.regions[0]


def all_generations(uri: str, region: str) -> None:
    for number in range(wire.progress(Files(uri))[region] + 1, waiting(uri, region) + 1):
        damage.remove_generation(uri, region, number)


def unlist_newest(uri: str, region: str) -> None:
    rewrite(uri, region, lambda message: message.flushed_generations.pop())


def one_manifest(uri: str, region: str) -> None:
    damage.remove_region_manifest_version(uri, region, 3)


def several_manifests(uri: str, region: str) -> None:
    for version in (2, 3, 5):
        damage.remove_region_manifest_version(uri, region, version)


def newest_manifest(uri: str, region: str) -> None:
    damage.region_manifest_path(uri, region).unlink()  # the hint still names it


def all_manifests(uri: str, region: str) -> None:
    for path in manifest_folder(uri, region).iterdir():
        path.unlink()


def last_entry(uri: str, region: str) -> None:
    log_entries(uri, region)[-1].write_bytes(b"ARROW1")


def log_of(uri: str) -> dict[str, bytes]:
    return {path: data for path, data in without_quarantine(uri).items() if path.startswith("_mem_wal/")}


def flush_all(uri: str) -> None:
    """A writer takes each region, and flushes its log."""
    table = opened(uri)
    for region_id in table.regions.region_ids:
        flush_log(table, table.region(region_id).latest(checked=True))


def assert_well(uri: str) -> None:
    """Writers, merges and readers go on, and nothing is wrong."""
    flush_all(uri)
    merged = run_job(uri, "merge")
    assert merged.exit_code == 0, merged.describe()
    report = run_job(uri, "verify", deep=True)
    assert report.exit_code == 0, report.describe()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("harm", "check"),
    [
        (lambda u, r: damage.remove_generation(u, r, waiting(u, r)), "generation_missing"),
        (all_generations, "generation_missing"),
        (lambda u, r: damage.truncate_generation_manifest(u, r, waiting(u, r)), "generation"),
        (one_manifest, "region_manifest_gap"),
        (several_manifests, "region_manifest_gap"),
    ],
)
def test_what_is_there_twice_is_written_again(copy: tuple[str, str], whole: LsmTable, harm: Any, check: str) -> None:
    uri, region = copy
    harm(uri, region)
    assert counts(uri)[check], "the damage is no damage"
    assert "Up to date" not in run_job(uri, "inspect").describe()
    assert run_job(uri, "merge").exit_code == 10
    done = run_job(uri, "repair", apply=True)
    assert (done.decision, done.exit_code, done.to_json()["decisions"]) == ("repaired", 0, [])
    assert not [fix for fix in done.to_json()["fixes"] if fix["loss"]]
    assert_well(uri)
    assert_same(read_base(uri), whole.expected())


def test_what_a_later_manifest_dropped_is_adopted(copy: tuple[str, str], whole: LsmTable) -> None:
    """Another program may have merged it, and newer rows: repair leaves it to adopt, which compares each key."""
    uri, region = copy
    unlist_newest(uri, region)
    (fault,) = run_job(uri, "merge").to_json()["blocked"]
    repaired = run_job(uri, "repair", apply=True).to_json()["fixes"]
    if opened(uri).layout.name == "region":  # no other program merges it
        assert fault["reason"] == "generation_missing"
        assert not [fix for fix in repaired if fix["loss"]]
    else:
        assert (fault["reason"], repaired) == ("drained_elsewhere", [])
        assert run_job(uri, "adopt", drained=True, apply=True).exit_code == 0
        flush_all(uri)
        assert run_job(uri, "merge", accept_drained=True).exit_code == 0
    assert_well(uri)
    assert_same(read_base(uri), whole.expected())


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("harm", "check", "keys"),
    [
        (generation_and_log_gone, "generation_missing", {10}),  # key 0 is in the log as well
        (last_entry, "wal_entry", {0}),
        (lambda u, r: add_entries(u, r, 2), "wal_gap", set()),
        (lambda u, r: rewrite(u, r, raise_log_position), "wal_gap", set()),
        (damage.truncate_region_manifest, "region_manifest_corrupt", set()),
        (newest_manifest, "region_manifest_gap", set()),
        (hint_ahead, "region_manifest_gap", set()),
        (all_manifests, "region_manifest_corrupt", set()),
    ],
)
def test_what_is_gone_is_left_out_if_that_is_accepted(
    copy: tuple[str, str], whole: LsmTable, harm: Any, check: str, keys: set[int]
) -> None:
    uri, region = copy
    harm(uri, region)
    assert "Up to date" not in run_job(uri, "inspect").describe()
    before = log_of(uri)
    refused = run_job(uri, "repair", apply=True)
    decisions = [one for one in refused.to_json()["decisions"] if one["loss"]]
    assert refused.exit_code == 9
    assert {one["check"] for one in decisions} == {check}
    assert all("--accept-loss" in one["choices"][-1]["choice"] for one in decisions)
    assert log_of(uri) == before

    done = run_job(uri, "repair", accept_loss=True, apply=True)
    assert (done.decision, done.exit_code, done.to_json()["decisions"]) == ("repaired", 0, [])
    if check == "wal_entry":
        (fix,) = [one for one in done.to_json()["fixes"] if one["loss"]]
        assert run_job(uri, "repair", undo=fix["quarantine"], apply=True).decision == "undone"
        assert counts(uri)[check], "the finding is back"
        assert run_job(uri, "repair", accept_loss=True, apply=True).decision == "repaired"
    assert_well(uri)
    base, expected = read_base(uri), whole.expected()
    lost = {key for key in base.keys() | expected.keys() if base.get(key) != expected.get(key)}
    assert lost == {key_of("int64", number) for number in keys}


@pytest.fixture
def routed(tmp_path: Path) -> tuple[str, Path]:
    """A table with region specs; its only region has two generations, and an entry in its log."""
    uri = str(tmp_path / "t.lance")
    lance.write_dataset(rows([0], "base"), uri)
    create_mem_wal(uri, [RegionSpec((RegionField.parse("bucket(id, 1)"),))])
    for at in range(2):
        with RegionRouter(uri) as router:
            router.put(rows([at, at + 1], f"first {at}"))
            router.put(rows([10 + at], f"second {at}"))
    RegionRouter(uri).put(rows([20], "logged"))
    (region_id,) = opened(uri).regions.region_ids
    return uri, Path(uri, "_mem_wal", str(region_id))


def rows(ids: list[int], value: str) -> pa.Table:
    return pa.table({"id": ids, "value": [value] * len(ids)}, schema=SCHEMA)


def values(uri: str) -> dict[int, str]:
    return {row["id"]: row["value"] for row in read(uri).scan().to_table().to_pylist()}


def test_the_keys_of_lost_rows_are_named(routed: tuple[str, Path]) -> None:
    """The key index of the generation has them by row address, and a fragment is an entry of the log."""
    uri, region = routed
    log_entries(uri, region.name)[2].write_bytes(b"cut")
    assert run_job(uri, "merge").exit_code == 10
    (decision,) = run_job(uri, "repair").to_json()["decisions"]
    assert (decision["loss"]["rows"], decision["loss"]["keys"]) == (2, ["1", "2"])
    assert decision["choices"][-1]["cost"].endswith("Older rows of these keys are visible again.")
    assert run_job(uri, "repair", accept_loss=True, apply=True).exit_code == 0
    assert_well(uri)
    assert values(uri) == {0: "first 0", 1: "first 0", 10: "second 0", 11: "second 1", 20: "logged"}


def test_a_region_without_any_manifest_is_found_by_its_rows(routed: tuple[str, Path]) -> None:
    uri, region = routed
    expected = values(uri)
    shutil.rmtree(region / "manifest")
    assert run_job(uri, "repair", accept_loss=True, apply=True).exit_code == 0
    with RegionRouter(uri) as router:
        router.put(rows([21], "new"))
    assert [str(one) for one in opened(uri).regions.region_ids] == [region.name]
    assert_well(uri)
    assert values(uri) == {**expected, 21: "new"}


def test_manifests_that_are_older_than_the_log(routed: tuple[str, Path]) -> None:
    """As a copy of the folder brings them back: the claim of the last writer is missing, and its entries are there."""
    uri, region = routed
    expected = values(uri)
    damage.region_manifest_path(uri, region.name).unlink()
    hint_gone(uri, region.name)
    (decision,) = run_job(uri, "repair").to_json()["decisions"]
    assert (decision["check"], decision["loss"]["rows"]) == ("wal_epoch", 0)
    assert decision["choices"][-1]["cost"].endswith("no row is lost."), "no older row of any key comes back"
    assert run_job(uri, "repair", accept_loss=True, apply=True).exit_code == 0
    assert_well(uri)
    assert values(uri) == expected
