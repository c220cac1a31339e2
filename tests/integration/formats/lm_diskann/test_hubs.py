"""Many rows whose only neighbour is one node: more than it can have links to."""

from __future__ import annotations

import numpy as np
import pytest

from memwal_ops import run_job
from memwal_ops.formats import lm_diskann
from tests.support.lm_diskann.folders import check_sound


@pytest.mark.long
@pytest.mark.parametrize("links", [8, 16])
def test_rows_around_equal_ones_are_all_found(folder: str, vectors: np.ndarray, links: int) -> None:
    """A codebook of equal vectors distinguishes nothing, and each new row finds the same one to link to."""
    lm_diskann.create(folder, dimension=16, R=links, L=60)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1100), np.zeros((1100, 16)))
        index.insert(np.arange(2000, 2300), vectors[:300])
        found, _ = index.search(vectors[:300], k=1, L=2000)
        assert found[:, 0].tolist() == [*range(2000, 2300)]
        index.delete(np.arange(2000, 2300, 3))
    run_job(folder, "catchup")
    # By the L of the index, which is too small here; with a large one all are found, as above.
    findings = run_job(folder, "verify", deep=True).to_json()["findings"]
    assert {one["check"] for one in findings} <= {"index_recall_low"}
    check_sound(folder)
