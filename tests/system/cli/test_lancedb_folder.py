"""As a new user: a LanceDB folder that was never maintained, ``scan``, and its configuration as a service."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest

from tests.support.run_cli import run_process
from tests.support.tables.plain import DIMENSION, PlainTable

QUERY = np.full(DIMENSION, 0.5, np.float32)


def by_pylance(folder: Path) -> None:
    """The same steps as below, without lancedb."""
    for number in range(3):
        made = PlainTable(str(folder / f"t{number}.lance")).create(rows=300, index=True)
        made.dataset.create_scalar_index("text", "INVERTED")
        made.dataset.create_index("vector", "IVF_PQ", num_partitions=2, num_sub_vectors=2)
        for at in range(12):
            made.append(20)
            made.update(at, text="word0 changed")
            made.delete(20 + at)
            made.upsert(50 + at, 600 + 20 * at)


def by_lancedb(folder: Path) -> None:
    """Many small appends, updates, deletes and upserts, by lancedb itself, after its indexes were built."""
    lancedb: Any = pytest.importorskip("lancedb", reason="lancedb is not installed; pylance makes the same tables")
    kinds: Any = pytest.importorskip("lancedb.index")
    database = lancedb.connect(str(folder))
    for number in range(3):
        table = database.create_table(f"t{number}", PlainTable.batch(range(300)))
        table.create_index("id", config=kinds.BTree())
        table.create_index("text", config=kinds.FTS())
        table.create_index("vector", config=kinds.IvfPq(num_partitions=2, num_sub_vectors=2))
        for at in range(12):
            table.add(PlainTable.batch(range(300 + 20 * at, 320 + 20 * at)))
            table.update(where=f"id = {at}", values={"text": "word0 changed"})
            table.delete(f"id = {20 + at}")
            merge = table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
            merge.execute(PlainTable.batch([50 + at, 600 + 20 * at]))


def answers(folder: Path) -> dict[str, Any]:
    """What the tables answer through each kind of index."""
    found = {}
    for path in sorted(folder.glob("*.lance")):
        dataset = lance.dataset(str(path))
        nearest = {"column": "vector", "q": QUERY, "k": 10, "nprobes": 2, "refine_factor": 50}
        found[path.stem] = {
            "rows": dataset.to_table(columns=["id", "text"]).sort_by("id"),
            "filter": ids(dataset.to_table(columns=["id"], filter="id >= 5 AND id < 330")),
            "words": ids(dataset.to_table(columns=["id"], full_text_query="word0")),
            "nearest": ids(dataset.to_table(columns=["id", "_distance"], nearest=nearest)),
        }
    return found


def by_lancedb_itself(folder: Path) -> dict[str, Any]:
    """The same through lancedb; nothing where it is not installed."""
    try:
        import lancedb  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return {}
    found = {}
    for path in sorted(folder.glob("*.lance")):
        table = lancedb.connect(str(folder)).open_table(path.stem)
        found[path.stem] = {
            "filter": ids(table.search().where("id >= 5 AND id < 330").limit(1000).to_arrow()),
            "words": ids(table.search("word0", query_type="fts").limit(1000).to_arrow()),
            "nearest": ids(table.search(QUERY).nprobes(2).refine_factor(50).limit(10).to_arrow()),
        }
    return found


def ids(rows: Any) -> list[int]:
    return sorted(rows["id"].to_pylist())


def weigh(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
@pytest.mark.parametrize("write", [by_pylance, by_lancedb])
def test_two_commands_and_a_week_later_it_is_small(tmp_path: Path, write: Any) -> None:
    folder = tmp_path / "db"
    write(folder)
    before, through_it = answers(folder), by_lancedb_itself(folder)
    heavy = weigh(folder)
    file = tmp_path / "memwal.yaml"
    for _ in range(2):
        shown = run_process("scan", "--database", str(folder), "--json")
        assert shown.code == 0, shown.err
        file.write_text(f"state_dir: {tmp_path}/state{time.time_ns()}\n{shown.document['configuration']}")
        done = run_process("run", "--once", "--json", "--config", str(file))
        assert done.code == 0, done.err
        assert answers(folder) == before
        assert by_lancedb_itself(folder) == through_it
        month_ago = time.time() - timedelta(days=30).total_seconds()
        for path in folder.rglob("*"):
            os.utime(path, (month_ago, month_ago))
    assert weigh(folder) < heavy
    for path in folder.glob("*.lance"):
        dataset = lance.dataset(str(path))
        assert len(dataset.get_fragments()) <= 3
        assert len(dataset.versions()) <= 3
        for index in dataset.describe_indices():
            assert dataset.stats.index_stats(index.name)["num_unindexed_rows"] == 0, index.name
