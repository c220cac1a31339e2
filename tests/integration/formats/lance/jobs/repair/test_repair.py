"""repair fixes each damage that has a safe fix, keeps what it replaced, and leaves all else to a person."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from memwal_ops import run_job
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.errors import InvalidUsageError
from tests.integration.formats.lance.jobs.repair.repair_tables import (
    catchup_too_high,
    counts,
    emptied_by_an_index_commit,
    generation_and_log_gone,
    hint_unreadable,
    merged_generations_gone,
    opened,
    quarantine,
    repaired,
    snapshot_file_cut,
    snapshot_unreadable,
    without_quarantine,
)
from tests.integration.formats.lance.jobs.verify_tables import (
    DAMAGES,
    drop_transaction,
    expired_lease,
    hint_ahead,
    hint_behind,
    hint_gone,
    manifest_folder,
    rewrite,
    turn_order,
    waiting,
)
from tests.support.gc_options import AT_ONCE
from tests.support.run_cli import contents, run_here
from tests.support.tables import damage, wire
from tests.support.tables.files import Files
from tests.support.tables.model import assert_same
from tests.support.tables.reading import read_base, read_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.tables.lsm_table import LsmTable


FIXABLE: list[tuple[Callable[[str, str], Any], str]] = [
    (hint_behind, "version_hint"),
    (hint_gone, "version_hint"),
    (hint_unreadable, "version_hint"),
    (merged_generations_gone, "merged_generation_missing"),
    (lambda u, r: rewrite(u, r, turn_order), "generation_order"),
    (snapshot_unreadable, "snapshot"),
    (snapshot_file_cut, "snapshot"),
    (catchup_too_high, "index_catchup"),
    (expired_lease, "lease_expired"),
    (drop_transaction, "transaction_file"),
    (emptied_by_an_index_commit, "version_emptied"),
]
NAMES = [getattr(harm, "__name__", check).replace("<lambda>", check) for harm, check in FIXABLE]
each_fixable = pytest.mark.parametrize(("harm", "check"), FIXABLE, ids=NAMES)


@pytest.mark.sampled(4)
@each_fixable
def test_each_is_fixed_and_brought_back(
    merged_copy: tuple[str, str], merged_table: LsmTable, harm: Callable[[str, str], Any], check: str
) -> None:
    uri, region = merged_copy
    harm(uri, region)
    assert counts(uri)[check], "the damage is no damage"
    lost = check == "version_emptied"
    rows = merged_table.read_spec() if lost else read_spec(uri)
    before = contents(uri)

    plan = run_job(uri, "repair").to_json()
    assert contents(uri) == before, "a plan changes nothing"
    assert (plan["decision"], plan["decisions"]) == ("planned", [])
    assert {one["check"] for fix in plan["fixes"] for one in fix["findings"]} == counts(uri).keys()

    done = repaired(uri)
    assert (done["decision"], {fix["outcome"] for fix in done["fixes"]}) == ("repaired", {"repaired"})
    assert counts(uri) == {}
    assert_same(read_spec(uri), rows)
    assert repaired(uri)["decision"] == "nothing_to_repair"

    (name,) = {fix["quarantine"] for fix in done["fixes"]}
    assert (name is None) == (check == "lease_expired")
    if name is not None:
        if lost:
            other = damage.copy_table(uri, f"{uri}.merged")
            run_job(other, "merge")
            assert_same(read_base(other), merged_table.expected())
        undo(uri, name, check)
        again = repaired(uri)
        if lost:  # by whom the version was emptied is not to be seen any more
            assert again["decision"] == "decision_needed"
            return
    run_job(uri, "merge")
    assert_same(read_base(uri), merged_table.expected())


def undo(uri: str, name: str, check: str) -> None:
    """It shows what it would do, does it, and says when there is nothing left to do."""
    assert run_job(uri, "repair", undo=name).decision == "planned"
    report = run_job(uri, "repair", apply=True, undo=name)
    assert (report.decision, report.exit_code) == ("undone", 0)
    assert counts(uri)[check], "the finding is back"
    assert run_job(uri, "repair", apply=True, undo=name).decision == "nothing_to_undo"


def test_an_object_is_brought_back_byte_for_byte(merged_copy: tuple[str, str]) -> None:
    uri, region = merged_copy
    hint_behind(uri, region)
    before = without_quarantine(uri)
    (fix,) = repaired(uri)["fixes"]
    record = json.loads(quarantine(uri)[f"{QUARANTINE_FOLDER}/{fix['quarantine']}/record.json"])
    assert record["check"] == "version_hint"
    assert record["place"] == f"object:_mem_wal/{region}/manifest/version_hint.json"
    assert quarantine(uri)[record["content"]] == b'{"version":1}'
    run_job(uri, "repair", apply=True, undo=fix["quarantine"])
    assert without_quarantine(uri) == before


def test_what_was_changed_since_is_not_undone(merged_copy: tuple[str, str]) -> None:
    uri, region = merged_copy
    merged_generations_gone(uri, region)
    (fix,) = repaired(uri)["fixes"]
    run_job(uri, "merge")
    rewrite(uri, region, lambda one: setattr(one, "wal_id_last_seen", one.wal_id_last_seen + 1))
    before = contents(uri)
    for apply in (False, True):
        with pytest.raises(InvalidUsageError, match="changed since") as refused:
            run_job(uri, "repair", apply=apply, undo=fix["quarantine"])
        assert f"{QUARANTINE_FOLDER}/{fix['quarantine']}/content" in refused.value.remedy
    changed = {name for name, data in contents(uri).items() if before.get(name) != data}
    assert not {name for name in changed if "probe" not in name}


@pytest.mark.parametrize("name", ["0123456789abcdef", "../../data", ""])
def test_an_id_that_no_repair_has(merged_copy: tuple[str, str], name: str) -> None:
    if not name:
        assert run_job(merged_copy[0], "repair", undo=name).decision == "nothing_to_repair"
        return
    with pytest.raises(InvalidUsageError, match="No repair"):
        run_job(merged_copy[0], "repair", undo=name)


# -- what a person decides


def catchup_missing_for_old_version(uri: str, region: str) -> None:
    """A merged generation without files, which a version that a tag keeps still needs."""
    import lance

    lance.dataset(uri).tags.create("kept", lance.dataset(uri).version)
    run_job(uri, "merge")
    damage.remove_generation(uri, region, waiting(uri, region))


FIXED_CHECKS = {check for _, check in FIXABLE}
UNFIXABLE = [
    pytest.param(harm, check, severity, id=name)
    for name, harm, check, severity in [
        *DAMAGES,
        ("a generation that a tag needs", catchup_missing_for_old_version, "merged_generation_missing", "warning"),
    ]
    if severity != "info"
    and (check not in FIXED_CHECKS or "tag needs" in name)
    # test_losses.py: these are written again.
    and name not in {"a generation's folder is gone", "a generation's manifest is cut", "a region manifest is missing"}
    # These need older versions, or rows that are in the log alone.
    and check not in {"version_manifest", "tag", "hold", "wal_entry", "wal_epoch"}
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("harm", "check", "severity"), UNFIXABLE)
def test_what_has_no_safe_fix_names_the_choices(
    merged_copy: tuple[str, str], harm: Callable[[str, str], Any], check: str, severity: str
) -> None:
    uri, region = merged_copy
    harm(uri, region)
    before = without_quarantine(uri)
    report = run_job(uri, "repair", apply=True)
    (decide,) = [one for one in report.to_json()["decisions"] if one["check"] == check][:1]
    assert decide["why"]
    assert decide["choices"]
    assert all(one["choice"] and one["cost"] for one in decide["choices"])
    assert report.exit_code == (9 if severity == "error" else 0)
    fixed = {one["check"] for fix in report.to_json()["fixes"] for one in fix["findings"]}
    assert fixed <= FIXED_CHECKS - {check}
    if not fixed:
        assert report.decision == "decision_needed"
        assert without_quarantine(uri) == before


def test_an_unreadable_generation_blocks_and_stays(merged_copy: tuple[str, str]) -> None:
    uri, region = merged_copy
    number = waiting(uri, region)
    generation_and_log_gone(uri, region)
    before = without_quarantine(uri)
    assert repaired(uri)["decision"] == "decision_needed"
    assert without_quarantine(uri) == before
    assert run_job(uri, "merge").exit_code == 10
    assert wire.progress(Files(uri))[region] < number
    assert wire.region_manifest(Files(uri), region).generations[number]


def test_a_snapshot_ahead_of_its_region_is_not_replaced(merged_copy: tuple[str, str]) -> None:
    """It may be the only one that names what was flushed: see the manifests that were lost."""
    uri, region = merged_copy
    if region_layout(uri):
        run_job(uri, "snapshot")
        manifest = wire.region_manifest(Files(uri), region)
        damage.region_manifest_path(uri, region, manifest.version).unlink()
        hint_gone(uri, region)
        assert "snapshot" in counts(uri)
        snapshot = opened(uri).index.inline_snapshots
        document = repaired(uri)
        assert "snapshot" in {one["check"] for one in document["decisions"]}
        assert opened(uri).index.inline_snapshots == snapshot


def region_layout(uri: str) -> bool:
    return opened(uri).layout.name == "region"


def test_a_hint_above_the_newest_manifest_is_not_lowered(merged_copy: tuple[str, str]) -> None:
    uri, region = merged_copy
    hint_ahead(uri, region)
    report = run_job(uri, "repair", apply=True)
    assert report.exit_code == 9
    assert json.loads((manifest_folder(uri, region) / "version_hint.json").read_text())["version"] == 99


def test_gc_and_expire_keep_the_quarantine(merged_copy: tuple[str, str]) -> None:
    uri, region = merged_copy
    hint_behind(uri, region)
    (fix,) = repaired(uri)["fixes"]
    kept = quarantine(uri)
    report = run_job(uri, "gc", apply=True, **{**AT_ONCE, "manifest_retention": 1}).to_json()
    assert {one["kind"] for one in report["held"] if fix["quarantine"] in one["path"]} == {"quarantine"}
    assert not [one for one in report["unknown"] if "quarantine" in one["path"]]
    assert quarantine(uri) == kept


def test_the_command(merged_copy: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    uri, region = merged_copy
    assert run_here(capfd, "repair", uri, "--json").document["decision"] == "nothing_to_repair"
    hint_behind(uri, region)
    generation_and_log_gone(uri, region)
    plan = run_here(capfd, "repair", uri)
    assert plan.code == 9
    assert "PLANNED: write the hint" in plan.out
    assert "DECISION NEEDED: generation_missing" in plan.out
    assert "Add --apply" in plan.out
    done = run_here(capfd, "repair", uri, "--apply", "--json")
    (fix,) = done.document["fixes"]
    assert (done.code, done.document["decision"], fix["outcome"]) == (9, "repaired", "repaired")
    undone = run_here(capfd, "repair", uri, "--undo", fix["quarantine"], "--apply")
    assert (undone.code, undone.out.split(":")[0]) == (0, "undone")
    assert run_here(capfd, "repair", uri, "--undo", "nothing").code == 2


def test_a_record_names_no_path_of_its_choice(merged_copy: tuple[str, str]) -> None:
    from memwal_ops.errors import InvalidFormatError
    from memwal_ops.formats.lance.jobs.repair.choices import place_of

    table = opened(merged_copy[0])
    for name in ("object:data/x.lance", "object:../x", f"region:{UUID(int=1)}/x", "anything"):
        with pytest.raises(InvalidFormatError):
            place_of(table, name)
