"""What we wrote is used by pylance: by the pinned release, and by the oldest that writes our tables' regions.

The oldest is installed into an environment of its own (or named by ``MEMWAL_OPS_OLD_PYTHON``). What it
cannot do with a table that today's pylance alone wrote is not asked of it: a control tells.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from tests.support.tables import damage
from tests.support.tables.schemas import PRIMARY_KEY
from tests.system.releases.environments import python_with

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.long

OLDEST = "7.0.0"
USE = Path(__file__).parent / "use.py"
SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False, metadata=PRIMARY_KEY), pa.field("val", pa.float32())])


def base(uri: str, *, v1: bool = False) -> None:
    """300 rows, an index, a MemWAL."""
    rows = pa.Table.from_pylist([{"id": number, "val": number / 2} for number in range(300)], schema=SCHEMA)
    dataset = damage.make_v1_named_table(uri, rows) if v1 else lance.write_dataset(rows, uri)
    dataset.create_scalar_index("id", "BTREE")
    lance.dataset(uri).initialize_mem_wal()


def flush(uri: str) -> None:
    """Two generations: updates and new rows."""
    for generation in (1, 2):
        with lance.dataset(uri).mem_wal_writer("00000000-0000-4000-8000-000000000001") as writer:
            numbers = [*range(generation * 10, generation * 10 + 20), 1000 + generation]
            values = [{"id": number, "val": float(generation)} for number in numbers]
            writer.put(pa.Table.from_pylist(values, schema=SCHEMA))


def control(uri: str) -> None:
    """Today's pylance alone: a marked merge, an optimised index."""
    base(uri)
    rows = pa.Table.from_pylist([{"id": 5, "val": 1.0}, {"id": 2000, "val": 1.0}], schema=SCHEMA)
    builder = lance.dataset(uri).merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
    builder.mark_sstables_as_compacted([lance.mem_wal.CompactedSsTable("00000000-0000-4000-8000-000000000001", 1)])
    builder.execute(rows)
    lance.dataset(uri).optimize.optimize_indices()


def merged(uri: str) -> None:
    base(uri)
    flush(uri)
    assert merge.apply(open_table(uri), merge.MergeOptions(max_generations=1)).decision == "merged"


def merged_and_caught_up(uri: str) -> None:
    merged(uri)
    assert catchup.apply(open_table(uri), catchup.CatchupOptions()).decision == "caught_up"
    assert snapshot.apply(open_table(uri), snapshot.SnapshotOptions()).decision == "built"


def external_snapshot(uri: str) -> None:
    merged(uri)
    assert snapshot.apply(open_table(uri), snapshot.SnapshotOptions(0)).decision == "built"
    assert catchup.apply(open_table(uri), catchup.CatchupOptions()).decision == "caught_up"


def v1_names(uri: str) -> None:
    base(uri, v1=True)
    rows = pa.Table.from_pylist([{"id": 500, "val": 1.0}], schema=SCHEMA)
    lance.write_dataset(rows, uri, mode="append")
    assert snapshot.apply(open_table(uri), snapshot.SnapshotOptions()).decision == "built"
    assert catchup.apply(open_table(uri), catchup.CatchupOptions()).decision == "caught_up"


TABLES = [merged, merged_and_caught_up, external_snapshot, v1_names]


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the oldest release."""
    return python_with(OLDEST, tmp_path_factory.mktemp("oldest"), "MEMWAL_OPS_OLD_PYTHON")


def use(python: str, make: Callable[[str], None], folder: Path) -> dict[str, Any]:
    """Make a table and let a release use it."""
    uri = str(folder / f"{make.__name__}.lance")
    shutil.rmtree(uri, ignore_errors=True)
    make(uri)
    dataset = lance.dataset(uri)
    expected = {
        "rows": {row["id"]: row["val"] for row in dataset.to_table().to_pylist()},
        "versions": {
            one["version"]: lance.dataset(uri, version=one["version"]).count_rows() for one in dataset.versions()
        },
    }
    said = folder / f"{make.__name__}.json"
    said.write_text(json.dumps(expected))
    command = [python, str(USE), uri, str(said)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "RUST_LOG": "off"}, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("make", [control, *TABLES], ids=lambda make: make.__name__)
def test_by_the_pinned_release(tmp_path: Path, make: Callable[[str], None]) -> None:
    document = use(sys.executable, make, tmp_path)
    assert document["release"] == lance.__version__
    assert set(document["steps"].values()) == {"ok"}, document


def test_by_the_oldest_release(tmp_path: Path, oldest: str) -> None:
    """All that it can do with a table of today's pylance it can do with ours."""
    can = use(oldest, control, tmp_path)
    assert can["release"] == OLDEST
    assert can["steps"]["scan"] == can["steps"]["time_travel"] == "ok"
    for make in TABLES:
        found = use(oldest, make, tmp_path)
        for step, outcome in can["steps"].items():
            if outcome == "ok":
                assert found["steps"][step] == "ok", (make.__name__, step, found["steps"][step])


def test_after_it_was_used_the_run_continues(tmp_path: Path, oldest: str) -> None:
    """Old and new in turn: what 7.0 wrote into the table is merged, caught up and taken into the snapshot."""
    use(oldest, merged_and_caught_up, tmp_path)
    uri = str(tmp_path / "merged_and_caught_up.lance")
    before = open_table(uri)
    assert merge.apply(before, merge.MergeOptions()).decision == "merged"
    assert not catchup.apply(open_table(uri), catchup.CatchupOptions()).failures
    assert snapshot.apply(open_table(uri), snapshot.SnapshotOptions()).decision == "built"
    table = open_table(uri)
    assert all(
        table.index.merged_generations.get(region, 0) >= merged
        for region, merged in before.index.merged_generations.items()
    )
    assert lance.dataset(uri).to_table(filter="id = 5").to_pylist() == [{"id": 5, "val": 1.0}]
