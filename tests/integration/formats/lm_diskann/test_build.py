"""Where searches of a built graph begin."""

from __future__ import annotations

import numpy as np

from memwal_ops.formats import lm_diskann


def test_each_cluster_has_an_entry_point(folder: str) -> None:
    """Else no path may lead to one: all links of its nodes may stay in it. Random nodes would miss 60 of these 300."""
    random = np.random.default_rng(4)
    vectors = np.repeat(random.normal(size=(300, 16)) * 9, 10, axis=0) + random.normal(size=(3000, 16)) / 9
    lm_diskann.create(folder, dimension=16, R=8, L=40)
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(3000), vectors)
        entries = index.view.entries(index.epoch)
        assert {*(entries // 10).tolist()} == {*range(300)}
        found, _ = index.search(vectors, k=1, L=20)
        assert (found[:, 0] == np.arange(3000)).mean() > 0.99
