"""Which generations an index covers, where compactions moved what it does not cover."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import UUID

import lance

from memwal_ops import open_table
from memwal_ops.formats.lance.indexes.snapshots import covered_generations
from memwal_ops.formats.lance.jobs import merge, snapshot
from memwal_ops.formats.lance.jobs.catchup import job as catchup
from memwal_ops.formats.lance.jobs.compact import job as compact
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


def test_uncovered_fragments_that_were_compacted_away(tmp_path: Path) -> None:
    """They stand in some versions only: neither in the older ones, nor in the newer ones."""
    made = Workload(1, regions=1, base_rows=12).create(str(tmp_path / "t.lance"))
    (region,) = made.regions

    def flush_and_merge(number: int) -> None:
        made.put([number])
        made.flush()
        merge.apply(open_table(made.uri), merge.MergeOptions())

    flush_and_merge(20)
    catchup.apply(open_table(made.uri), catchup.CatchupOptions())
    flush_and_merge(21)
    flush_and_merge(22)
    before = {one.fragment_id for one in lance.dataset(made.uri).get_fragments()}
    compact.apply(open_table(made.uri), compact.CompactOptions())
    assert max(before) not in {one.fragment_id for one in lance.dataset(made.uri).get_fragments()}
    for number in range(23, 29):
        flush_and_merge(number)
        snapshot.apply(open_table(made.uri), snapshot.SnapshotOptions())
    found = covered_generations(open_table(made.uri))
    assert found["id_idx"][UUID(region)] <= 1, "never more than what stood when it was built"
