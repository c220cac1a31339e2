"""An index that follows a Lance table has the rows of the version that it names, or is refused by name."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError, TableCorruptError, TableNotFoundError, TableReplacedError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import source
from memwal_ops.formats.lm_diskann.jobs import catchup
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_sound
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from pathlib import Path

DIMENSION = 16


def data(ids: Any, vectors: np.ndarray) -> pa.Table:
    flat = pa.array(vectors.astype(np.float32).ravel())
    return pa.table({"id": pa.array(ids, pa.int64()), "vec": pa.FixedSizeListArray.from_arrays(flat, DIMENSION)})


@pytest.fixture(params=["stable", "key"])
def table(request: pytest.FixtureRequest, tmp_path: Path, vectors: np.ndarray) -> tuple[str, list[str]]:
    uri = str(tmp_path / "rows.lance")
    lance.write_dataset(
        data(np.arange(1500), vectors[:1500]), uri, enable_stable_row_ids=request.param == "stable",
        max_rows_per_file=500,
    )  # fmt: skip
    return uri, ["--key", "id"] if request.param == "key" else []


@pytest.fixture
def followed(folder: str, table: tuple[str, list[str]], capfd: pytest.CaptureFixture[str]) -> str:
    uri, key = table
    made = run_here(
        capfd,
        "init",
        folder,
        "--format",
        "lm_diskann",
        "--table",
        uri,
        "--column",
        "vec",
        "--links",
        "16",
        *key,
        "--json",
    )
    assert (made.code, made.document["dimension"], made.document["table"]) == (0, DIMENSION, uri)
    return folder


def expected(uri: str, version: int, *, key: bool) -> dict[int, tuple[float, ...]]:
    rows = lance.dataset(uri, version=version).scanner(with_row_id=True).to_table().to_pylist()
    return {one["id" if key else "_rowid"]: tuple(one["vec"]) for one in rows if one["vec"] is not None}


def check(folder: str, uri: str) -> None:
    view = View(folder)
    found = source.read_source(folder)
    assert found is not None
    assert view.followed == lance.dataset(uri).version
    assert view.live_rows() == expected(uri, view.followed, key=found.key is not None)


@pytest.mark.sampled(1)
def test_inserts_changes_deletes_and_compactions(
    followed: str, table: tuple[str, list[str]], vectors: np.ndarray
) -> None:
    uri, _ = table
    assert run_job(followed, "inspect").to_json()["backlog"]["versions_behind"] == 1
    assert run_job(followed, "catchup", apply=False).to_json()["versions"] == 1
    report = run_job(followed, "catchup").to_json()
    assert (report["decision"], report["inserted"], report["followed"]) == ("caught_up", 1500, 1)
    check(followed, uri)
    dataset = lance.dataset(uri)
    dataset.delete("id % 9 = 0")
    dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(
        data([5, 7, 5000, 5001], vectors[3000:3004])
    )
    lance.write_dataset(data([6000], vectors[3010:3011]), uri, mode="append")
    report = run_job(followed, "catchup").to_json()
    assert report["deleted"] >= 167
    assert report["inserted"] == 5, "a row of a rewritten fragment is left alone if its vector is the same"
    check(followed, uri)
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=10_000)
    report = run_job(followed, "catchup").to_json()
    assert (report["inserted"], report["deleted"]) == (0, 0)
    check(followed, uri)
    with lm_diskann.open(followed) as index:
        found, _ = index.search(vectors[3000:3001], k=1)
        assert index.view.state.followed == lance.dataset(uri).version
        assert found[0, 0] == 5 or table[1] == []
        with pytest.raises(InvalidUsageError, match="follows the table"):
            index.insert([1], vectors[:1])
    assert run_job(followed, "catchup").decision == "unchanged", "the deleted nodes are healed, too"
    check_sound(followed)


@pytest.mark.sampled(1)
def test_a_compaction_that_rewrites_an_index_of_the_table(followed: str, table: tuple[str, list[str]]) -> None:
    """pylance cannot read the transaction of one by itself: neither that of the followed version, nor a later one."""
    uri, _ = table
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    for divisor in (5, 7):
        lance.dataset(uri).delete(f"id % {divisor} = 0")
        assert run_job(uri, "compact", target_rows=10_000, deleted_fraction=0.1).decision == "compacted"
        assert run_job(followed, "catchup").decision == "caught_up"
        check(followed, uri)


def restored(uri: str) -> None:
    lance.dataset(uri, version=1).restore()


def overwritten(uri: str) -> None:
    lance.write_dataset(lance.dataset(uri).to_table(), uri, mode="overwrite")


def expired(uri: str) -> None:
    for one in (300, 301):
        lance.dataset(uri).delete(f"id = {one}")
    lance.dataset(uri).cleanup_old_versions(older_than=timedelta(0))


def replaced(uri: str) -> None:
    rows = lance.dataset(uri).to_table()
    stable = lance.dataset(uri).has_stable_row_ids
    shutil.rmtree(uri)
    lance.write_dataset(rows, uri, enable_stable_row_ids=stable)
    for one in range(4):
        lance.dataset(uri).delete(f"id = {one}")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", [restored, overwritten, expired, replaced])
def test_what_it_cannot_follow_is_named_until_it_is_rebuilt(
    followed: str, table: tuple[str, list[str]], vectors: np.ndarray, change: Any
) -> None:
    uri, _ = table
    run_job(followed, "catchup")
    lance.dataset(uri).delete("id < 100")
    run_job(followed, "catchup")
    before = View(followed).epoch
    change(uri)
    for _ in range(2):
        report = run_job(followed, "catchup")
        assert (report.decision, report.exit_code) == ("unusable", TableReplacedError.exit_code)
        words = {
            "restored": "restored",
            "overwritten": "overwritten",
            "expired": "expired",
            "replaced": "another one",
        }
        assert words[change.__name__] in report.describe()
    assert View(followed).unusable
    (finding,) = run_job(followed, "verify").to_json()["findings"]
    assert (finding["check"], report.to_json()["unusable"] in finding["evidence"]) == ("follow_damaged", True)
    shown = " ".join(run_job(followed, "inspect").describe().split())
    assert f"cannot be searched: {report.to_json()['unusable']}" in shown
    assert shown.endswith("Run memwal-ops catchup --rebuild on the index folder.")
    [blocked] = open_table(followed).summary().blocked
    assert blocked.reason == "table_replaced"
    with lm_diskann.open(followed, read_only=True) as index:
        with pytest.raises(source.IndexUnusableError, match="cannot be searched"):
            index.search(vectors[:1])
        assert index.search(vectors[200:201], k=1, as_of=before)[0][0, 0] == 200
    report = run_job(followed, "catchup", rebuild=True)
    assert (report.decision, report.exit_code) == ("caught_up", 0)
    check(followed, uri)
    with lm_diskann.open(followed, read_only=True) as index:
        index.search(vectors[:1])


@pytest.mark.sampled(1)
def test_rows_without_a_usable_vector_are_left_out(followed: str, table: tuple[str, list[str]]) -> None:
    uri, _ = table
    flat = np.zeros((3, DIMENSION), np.float32)
    flat[1, 3], flat[2, 3] = np.nan, 1e19
    odd = data([7000, 7001, 7002], flat)
    null = pa.table({"id": pa.array([7003], pa.int64()), "vec": pa.array([None], odd.schema.field("vec").type)})
    lance.write_dataset(pa.concat_tables([odd, null]), uri, mode="append")
    report = run_job(followed, "catchup").to_json()
    assert (report["inserted"], report["skipped"]) == (1501, 3)
    assert len(View(followed).live_rows()) == 1501


def rename(uri: str, **names: str) -> None:
    for name, other in names.items():
        lance.dataset(uri).alter_columns({"path": name, "name": other})


@pytest.mark.long
def test_columns_that_change_their_names(followed: str, table: tuple[str, list[str]], vectors: np.ndarray) -> None:
    """No file of the table changes when another column takes a followed name."""
    uri, _ = table
    more = data(np.arange(5000, 6500), vectors[2000:3500]).rename_columns(["id2", "vec2"])
    lance.dataset(uri).add_columns(more.to_reader())
    run_job(followed, "catchup")
    check(followed, uri)
    rename(uri, vec="was", vec2="vec")
    report = run_job(followed, "catchup").to_json()
    assert (report["inserted"], report["followed"]) == (1500, lance.dataset(uri).version)
    check(followed, uri)
    rename(uri, id="key", id2="id")
    run_job(followed, "catchup")
    check(followed, uri)
    rename(uri, vec="vec2")
    with pytest.raises(InvalidUsageError, match="no column vec"):
        run_job(followed, "catchup")
    wider = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1500 * 32, np.float32)), 32)
    lance.dataset(uri).add_columns(pa.table({"vec": wider}).to_reader())
    with pytest.raises(InvalidUsageError, match="vectors of 32 dimensions"):
        run_job(followed, "catchup")
    check_sound(followed)


@pytest.mark.long
@pytest.mark.parametrize("rebuild", [False, True])
def test_columns_that_have_their_names_back_after_a_part_was_read(
    followed: str, table: tuple[str, list[str]], vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch, *, rebuild: bool
) -> None:
    """The index has some vectors of the other column by then, at rows whose files did not change."""
    uri, _ = table
    more = data(np.arange(5000, 6500), vectors[2000:3500]).rename_columns(["id2", "vec2"])
    lance.dataset(uri).add_columns(more.to_reader())
    run_job(followed, "catchup")
    rename(uri, vec="was", vec2="vec")
    commit, parts = catchup._commit, iter(range(9))

    def killed(*given: Any) -> Any:
        if next(parts):
            raise InterruptedError
        return commit(*given)

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(catchup, "_commit", killed)
        patch.setattr(catchup, "_BUILD_BYTES", 0)
        run_job(followed, "catchup", max_rows=400, rebuild=rebuild)
    rename(uri, vec="vec2", was="vec")
    assert run_job(followed, "catchup").to_json()["inserted"] > 0
    check(followed, uri)


@pytest.mark.sampled(1)
def test_a_catch_up_of_max_rows_is_one_commit(followed: str, table: tuple[str, list[str]]) -> None:
    run_job(followed, "catchup")
    before = View(followed).epoch
    rows = lance.dataset(table[0]).to_table(limit=400)
    ids = pa.array(np.arange(7000, 7400))
    lance.write_dataset(rows.set_column(0, rows.schema.field("id"), ids), table[0], mode="append")
    assert run_job(followed, "catchup", max_rows=400).to_json()["inserted"] == 400
    assert View(followed).epoch == before + 1


@pytest.mark.sampled(1)
def test_a_table_that_was_replaced_by_one_of_fewer_versions_is_behind(
    followed: str, table: tuple[str, list[str]]
) -> None:
    """The supervisor catches up by that metric: otherwise the rows of the old table would be found until then."""
    uri, _ = table
    for one in range(3):
        lance.dataset(uri).delete(f"id = {one}")
    run_job(followed, "catchup")
    rows, stable = lance.dataset(uri).to_table(), lance.dataset(uri).has_stable_row_ids
    shutil.rmtree(uri)
    lance.write_dataset(rows, uri, enable_stable_row_ids=stable)
    assert run_job(followed, "inspect").to_json()["backlog"]["versions_behind"] == 1
    assert run_job(followed, "catchup").decision == "unusable"


@pytest.mark.parametrize("table", ["key"], indirect=True)
def test_a_key_that_is_negative_is_refused(followed: str, table: tuple[str, list[str]], vectors: np.ndarray) -> None:
    """A search answers -1 where there is no row."""
    uri, _ = table
    lance.write_dataset(data([-1], vectors[:1]), uri, mode="append")
    with pytest.raises(InvalidUsageError, match="has id -1"):
        run_job(followed, "catchup")
    lance.dataset(uri).update({"id": "NULL"}, where="id = -1")
    with pytest.raises(InvalidUsageError, match="has no id") as refused:
        run_job(followed, "catchup")
    assert "Remove these rows" in refused.value.remedy
    assert len(View(followed).live_rows()) == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--column", "none", "--key", "id"], "no column none"), (["--column", "vec"], "no stable row ids"),
     (["--column", "vec", "--key", "vec"], "no int64 column vec"), (["--column", "id"], "no column id of vectors")],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(
    folder: str, tmp_path: Path, vectors: np.ndarray, options: list[str], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = str(tmp_path / "rows.lance")
    lance.write_dataset(data(np.arange(9), vectors[:9]), uri)
    done = run_here(capfd, "init", folder, "--table", uri, *options)
    assert done.code == 2
    assert why in done.err
    assert not os.path.exists(folder)


@pytest.mark.sampled(1)
def test_a_restore_that_is_not_noticed_loses_no_row(
    followed: str, table: tuple[str, list[str]], vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: rows are compared by their vectors, and not by the numbers of versions."""
    uri, _ = table
    run_job(followed, "catchup")
    ids = np.arange(9000, 9010)
    lance.write_dataset(data(ids, vectors[3000:3010]), uri, mode="append")
    run_job(followed, "catchup")
    restored(uri)
    lance.write_dataset(data(ids, vectors[3100:3110]), uri, mode="append")
    with monkeypatch.context() as patch:
        patch.setattr(source, "check_history", lambda *_: None)
        assert run_job(followed, "catchup").decision == "caught_up"
    check(followed, uri)


@pytest.mark.sampled(1)
def test_planted_a_version_that_is_ahead_of_its_rows(
    followed: str, table: tuple[str, list[str]], vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, _ = table
    run_job(followed, "catchup")
    lance.write_dataset(data(np.arange(9000, 9010), vectors[3000:3010]), uri, mode="append")
    monkeypatch.setattr(source, "changed_fragments", lambda *_: [])
    run_job(followed, "catchup")
    with pytest.raises(AssertionError):
        check(followed, uri)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("harm", ["missing", "damaged", "nested", "folder"])
def test_an_index_that_does_not_know_its_table_any_more(
    followed: str, vectors: np.ndarray, harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run_job(followed, "catchup")
    path = os.path.join(followed, source.FOLLOW)
    os.rename(path, f"{followed}.{source.FOLLOW}")
    if harm == "folder":
        os.mkdir(path)
    elif harm != "missing":
        with open(path, "wb") as file:
            file.write(b"\xff" * 20 if harm == "damaged" else b"[" * 200_000)
    assert run_job(followed, "verify").to_json()["counts"] == {"follow_damaged": 1}
    for job in ("catchup", "inspect"):
        with pytest.raises(TableCorruptError, match=r"follow\.json") as error:
            run_job(followed, job)
        assert error.value.remedy.startswith("Put follow.json of any copy of this folder in its place")
    checked = run_here(capfd, "check", "--nagios", followed)
    assert (checked.code, checked.out.partition(" | ")[0]) == (2, "MEMWAL CRITICAL - 1 part blocked")
    with lm_diskann.open(followed) as index, pytest.raises(TableCorruptError, match=r"follow\.json"):
        index.insert([1], vectors[:1])
    shutil.rmtree(f"{followed}/view")
    report = run_job(followed, "repair", apply=True)
    assert report.exit_code == 9
    assert "publish the view" in report.describe()
    if harm == "folder":
        os.rmdir(path)
    os.replace(f"{followed}.{source.FOLLOW}", path)
    assert run_job(followed, "verify").decision == "healthy"
    assert run_job(followed, "catchup").decision == "unchanged"


@pytest.mark.sampled(1)
def test_inspect_without_the_followed_table(followed: str, table: tuple[str, list[str]]) -> None:
    uri, key = table
    run_job(followed, "catchup")
    rows = f"column vec of {uri} by {'key id' if key else 'stable row ids'}: version 1; "
    assert f"{rows}0 versions behind." in run_job(followed, "inspect").describe()
    shutil.rmtree(uri)
    report = run_job(followed, "inspect")
    assert f"{rows}The table that the index follows was not found" in report.describe()
    assert "versions_behind" not in report.to_json()["backlog"]
    with pytest.raises(TableNotFoundError):
        run_job(followed, "catchup")
    assert run_job(followed, "merge").exit_code == 0
