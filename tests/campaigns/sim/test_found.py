"""What the simulation found, each as the shortest history that shows it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
import pytest

from memwal_ops import open_table
from memwal_ops.formats.lance.jobs import expire, merge
from memwal_ops.formats.lance.jobs.compact import job as compact
from memwal_ops.formats.lance.retention.schema_recorder import SCHEMA_FOLDER
from tests.campaigns.sim.driver import PASSING
from tests.campaigns.sim.history import run_histories
from tests.campaigns.sim.steps import Steps, make_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.table import Table

# Seeds of histories that failed, and what they found. Another way to draw makes other histories of them;
# then what they found is below, or next to the code that was fixed.
SEEDS = {
    17: "gc and catch-up looked for what an index covers in a circle, for ever",
    27: "the same",
    52: "a compaction began on a version that was expired since, and found no table",
}


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps]:
    made = Steps(make_table(str(tmp_path / "t.lance"), 6), random.Random(0))
    yield made
    made.close()


def _compact(table: Table) -> str:
    return compact.apply(table, compact.CompactOptions(1 << 20)).decision


def test_a_compaction_of_a_version_that_was_expired_since(steps: Steps) -> None:
    """It ended in "table not found"; the newest version is there to be compacted."""
    before = open_table(steps.uri)
    lance.dataset(steps.uri).update_config({"of-the-owner": "1"})
    expire.apply(open_table(steps.uri), expire.ExpireOptions(PASSING * 0, 1, allow_unsafe=True))
    assert _compact(before) == "compacted"
    steps.kinds |= {"expire", "compact"}
    steps.look()


def test_a_compaction_beside_a_restore(steps: Steps) -> None:
    """pylance calls that "incompatible" rather than a conflict; it is a lost race like any other."""
    before = open_table(steps.uri)
    lance.dataset(steps.uri, version=before.version).restore()
    steps.witness.restored.add(before.version + 1)
    assert _compact(before) == "compacted"
    steps.look()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("layout", [6, 7])
def test_a_field_of_a_merge_that_a_restore_took_back(tmp_path: Path, layout: int, *, recorded: bool) -> None:
    """Without the versions of the flush, and a record of them, merge refuses a reused field id; its remedy works."""
    steps = Steps(make_table(str(tmp_path / "t.lance"), layout), random.Random(0))
    steps._evolve(lambda dataset: dataset.add_columns(pa.field("dropped", pa.int32())))
    steps.take("burst")
    steps.do("flush")
    steps._evolve(lambda dataset: dataset.drop_columns(["dropped"]))
    before = steps._versions()[-1]
    merge.apply(open_table(steps.uri), merge.MergeOptions())
    expire.apply(open_table(steps.uri), expire.ExpireOptions(PASSING * 0, 2, allow_unsafe=True))
    lance.dataset(steps.uri, version=before).restore()
    steps.witness.restored.add(steps._versions()[-1])
    steps.made.evolve(lance.dataset(steps.uri))
    steps._evolve(lambda dataset: dataset.add_columns(pa.field("added", pa.int32())))
    if not recorded:
        shutil.rmtree(Path(steps.uri, SCHEMA_FOLDER))
        steps.witness.forget_times()
    refused = merge.apply(open_table(steps.uri), merge.MergeOptions()).blocked
    assert [fault.error.reason for fault in refused] == ([] if recorded else ["schema_projection"])
    steps._merge_all(steps.made)
    expire.apply(open_table(steps.uri), expire.ExpireOptions(PASSING * 0, 1, allow_unsafe=True))
    steps.kinds |= {"merge", "expire", "restore"}
    steps.look()
    steps.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_history_that_failed_once(tmp_path: Path, seed: int) -> None:
    assert run_histories([seed], str(tmp_path))["histories"] == 1, SEEDS[seed]
