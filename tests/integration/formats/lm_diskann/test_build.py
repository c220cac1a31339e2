"""Where searches of a built graph begin, and what is linked."""

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


def test_a_row_in_the_middle_of_a_cluster_is_not_the_only_neighbour(folder: str) -> None:
    """By the rule of the paper it is: it excludes all others, has links to a few of them, and the rest is hardly found.

    An implementation in numpy, without codes, found 0.89 of the nearest, and 60 % of the rows themselves; keeping at
    least 8 links, 0.99 and 97 %.
    """
    random = np.random.default_rng(4)
    centres = random.normal(size=(7, 200)) * 9
    vectors = np.concatenate([centres, np.tile(centres, (199, 1)) + random.normal(size=(1393, 200))])
    lm_diskann.create(folder, dimension=200, R=24, metric="cosine")
    with lm_diskann.open(folder) as index:
        index.insert(np.arange(1100), vectors[:1100])
        index.insert(np.arange(1100, 1400), vectors[1100:])
        found, _ = index.search(vectors, k=1)
        assert (found[:, 0] == np.arange(1400)).mean() > 0.95
