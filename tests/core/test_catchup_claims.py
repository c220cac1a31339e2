"""How far an index covers what was merged, told by the fragments of the versions that stand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lance

from memwal_ops import open_table
from memwal_ops.core.catchup_claims import covered_generations
from memwal_ops.jobs import merge
from tests.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


def test_a_fragment_that_came_and_went_does_not_lead_in_a_circle(tmp_path: Path) -> None:
    """Of two uncovered fragments the older one is gone again, and many versions stand behind both."""
    made = Workload(3, regions=1, base_rows=30).create(str(tmp_path / "t.lance"))
    for _ in range(2):
        made.put([40, 41, 42])
        made.flush()
        merge.apply(open_table(made.uri), merge.MergeOptions())
    for number in range(12):
        lance.dataset(made.uri).update_config({"of-the-owner": str(number)})
    table = open_table(made.uri)
    standing = [
        [fragment.fragment_id for fragment in lance.dataset(made.uri, version=one).get_fragments()] for one in (4, 5)
    ]
    assert standing == [[0, 1, 2, 3], [0, 1, 2, 4]], "the premise: one fragment came, and went as the next one came"
    assert covered_generations(table) == {"id_idx": dict.fromkeys(table.index.merged_generations, 0)}
