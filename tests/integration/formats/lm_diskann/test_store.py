"""The tables of the store, and that a small change touches little."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import duckdb
import numpy as np
import pytest

from memwal_ops import run_job
from memwal_ops.errors import TableCorruptError
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import merging
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_sound, partly_merged

TABLES = {
    "lmd_metadata", "lmd_delta_blocks", "lmd_slots", "lmd_free_nodes", "lmd_lookup", "lmd_tombstoned_nodes",
    "lmd_backlink_overflow", "lmd_entry_points", "lmd_codebooks", "lmd_sweep_list", "lmd_heal_list", "lmd_followed",
    "lmd_graph_sample",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.req("S2-004", "S2-014", "S2-023", "S2-026", "S2-039", "S2-055", "S2-056", "S2-085", "S2-086")
def test_what_a_deletion_and_an_insert_write(folder: str, vectors: np.ndarray) -> None:
    lm_diskann.create(folder, dimension=16, R=16, L=60)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(2000), vectors[:2000])
        index.delete([7])
        deleted = index.epoch
        index.insert([7], vectors[2000:2001])
        inserted = index.epoch
    with duckdb.connect(f"{folder}/diskann_store.duckdb", read_only=True) as store:
        assert {one for (one,) in store.execute("SELECT table_name FROM duckdb_tables()").fetchall()} == TABLES
        assert not store.execute("SELECT * FROM duckdb_indexes()").fetchall(), "kept in memory while the store is open"
        assert store.execute("SELECT * FROM lmd_tombstoned_nodes").fetchall() == [(7, deleted)]
        assert store.execute("SELECT node_id, reason, since_epoch FROM lmd_sweep_list").fetchall() == [
            (7, "tombstoned", deleted)
        ]
        found = store.execute("SELECT node_id, added_epoch, removed_epoch FROM lmd_lookup WHERE row_id = 7 ORDER BY 1")
        assert found.fetchall() == [(7, deleted - 1, deleted), (2000, inserted, None)]
        rows = store.execute("SELECT node_id, version, commit_epoch, origin_txn, is_tombstone FROM lmd_delta_blocks")
        deltas = {(node, epoch): (version, origin, dead) for node, version, epoch, origin, dead in rows.fetchall()}
    assert [key for key in deltas if key[1] == deleted] == [(7, deleted)], "one block"
    touched = [key for key in deltas if key[1] == inserted]
    assert 0 < len(touched) <= 2 * 16 * 16
    assert len({deltas[key][1] for key in touched}) == 1
    view = View(folder)
    for (node, epoch), (version, origin, dead) in deltas.items():
        block = view.block(node, epoch)
        assert block is not None
        assert (block["version"], block["origin_txn"], block["creation_epoch"]) == (version, origin, epoch)
        assert block["tombstoned"] == dead
    before = view.block(7, deleted - 1)
    assert before is not None
    assert not before["tombstoned"]


@pytest.mark.sampled(1)
@pytest.mark.req("S2-080", "S2-090")
@pytest.mark.parametrize("reader", [False, True])
def test_a_merge_moves_what_somebody_can_read(
    folder: str, vectors: np.ndarray, reader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_MAX_SUPERSEDED_BYTES", 0)
    lm_diskann.create(folder, dimension=16, R=16, L=60)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1500), vectors[:1500])
        index.insert(np.arange(1500, 1520), vectors[1500:1520])
        before = index.epoch
    with lm_diskann.open(folder, read_only=True) if reader else nullcontext() as reading:
        with lm_diskann.open(folder) as index:
            index.insert(np.arange(1520, 1540), vectors[1520:1540])
            deltas, slots = index.view.delta_blocks, index.view.state.slot_count
            [newest] = index.writable().columns("SELECT count(DISTINCT node_id) FROM lmd_delta_blocks")
            assert index.merge() == deltas
            assert deltas > int(newest[0])
            assert index.view.state.slot_count - slots == (deltas if reader else int(newest[0]))
        if reading is not None:
            found, _ = reading.search(vectors[1500:1540], k=1, as_of=before)
            assert (found[:20, 0] == np.arange(1500, 1520)).all()
            assert (found[20:, 0] < 1520).all()
    check_sound(folder)


@pytest.mark.long
def test_no_pandas_is_imported(folder: str) -> None:
    """Arrow imports it where it is installed, as soon as it is given a Python or numpy object: 40 MiB and 0.2 s."""
    work = (
        "import sys, numpy as np\n"
        "from memwal_ops.formats import lm_diskann\n"
        "with lm_diskann.create(sys.argv[1], dimension=16, R=16) as index:\n"
        "    index.insert(np.arange(500), np.random.default_rng(1).random((500, 16), np.float32))\n"
        "    index.delete([7])\n"
        "    assert index.merge()\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", work, folder], check=True, env={**os.environ, "PYTHONPATH": ""})


@pytest.fixture(scope="module")
def built(template: str, vectors: np.ndarray) -> str:
    partly_merged(template, vectors)
    return template


@pytest.fixture
def made(built: str, folder: str) -> str:
    return shutil.copytree(built, folder)


def harm(folder: str, sql: str) -> None:
    with duckdb.connect(f"{folder}/diskann_store.duckdb") as store:
        store.execute(sql)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("next_node_id", 4_000_000_000), ("next_node_id", 1 << 40), ("next_node_id", 341), ("next_node_id", "NULL"),
        ("slot_count", 1 << 40), ("epoch", (1 << 63) - 1), ("retained_from", 1 << 63), ("live", (1 << 64) - 1),
    ],
)  # fmt: skip
def test_numbers_that_no_index_can_have(made: str, name: str, value: int | str) -> None:
    """Before memory is allocated for so many nodes."""
    harm(made, f"UPDATE lmd_metadata SET {name} = {value}")
    for job in ("verify", "merge", "catchup", "compact", "gc", "repair"):
        with pytest.raises(TableCorruptError, match=name):
            run_job(made, job, **({"apply": True} if job in {"gc", "repair"} else {}))


def test_ids_of_reclaimed_nodes_are_no_damage(folder: str, vectors: np.ndarray) -> None:
    """No table has them any more."""
    lm_diskann.create(folder, dimension=16, R=8, L=30)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(900), vectors[:900])
        index.delete(np.arange(900))
    for job in ("merge", "catchup", "gc", "gc"):
        run_job(folder, job, apply=True)
    with duckdb.connect(f"{folder}/diskann_store.duckdb", read_only=True) as store:
        assert store.execute("SELECT next_node_id FROM lmd_metadata").fetchall() == [(900,)]
        assert store.execute("SELECT count(*) FROM lmd_slots").fetchall() == [(0,)]
    check_sound(folder)
    shutil.rmtree(f"{folder}/view")
    with lm_diskann.open(folder) as index:
        index.insert([7], vectors[:1])
    check_sound(folder)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("check", "table", "sql"),
    [
        ("wrong_block", "lmd_slots", "UPDATE lmd_slots SET node_id = 1099511627776 WHERE node_id = 10"),
        ("entry_point_dead", "lmd_entry_points", "INSERT INTO lmd_entry_points VALUES (9223372036854775813, 1, NULL)"),
        ("slot_beyond_end", "lmd_free_nodes", "INSERT INTO lmd_free_nodes VALUES (9223372036854775813, 3, 1, 1)"),
    ],
)
def test_nodes_and_slots_beyond_the_end(made: str, check: str, table: str, sql: str) -> None:
    harm(made, sql)
    assert check in run_job(made, "verify").to_json()["counts"]
    with pytest.raises(TableCorruptError, match=table):
        run_job(made, "merge")


def test_slots_beyond_what_a_file_can_have(made: str) -> None:
    harm(made, "UPDATE lmd_slots SET slot = 9223372036854775813 WHERE node_id = 10")
    assert "slot_beyond_end" in run_job(made, "verify").to_json()["counts"]


def test_overflowed_backlinks_of_nodes_beyond_63_bits(made: str) -> None:
    harm(made, "INSERT INTO lmd_backlink_overflow VALUES (9223372036854775813, 3)")
    assert run_job(made, "verify").to_json()["counts"] == {"overflow_without_flag": 1}


@pytest.mark.parametrize("left", [0, 100, 4096, 12_288, 0.5, 0.99])
def test_a_truncated_store_is_damaged_and_not_a_full_disk(made: str, left: float) -> None:
    path = f"{made}/diskann_store.duckdb"
    size = os.path.getsize(path)
    os.truncate(path, int(size * left) if left < 1 else int(left))
    was = os.path.getsize(path)
    for act in (lambda: run_job(made, "verify"), lambda: lm_diskann.snapshot(made, f"{made}.copy")):
        with pytest.raises(TableCorruptError) as caught:
            act()
        assert "Restore a copy of it" in caught.value.remedy
    assert os.path.getsize(path) == was
    with lm_diskann.open(made, read_only=True) as reader:
        assert len(reader) == 340
