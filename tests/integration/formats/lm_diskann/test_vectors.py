"""Which vectors an index can have: the longest ones."""

from __future__ import annotations

import shutil

import numpy as np

from memwal_ops.formats import lm_diskann


def test_long_vectors_have_distances(folder: str) -> None:
    """The longest that are stored, and for cosine any: their squares would not fit into float32."""
    random = np.random.default_rng(3)
    vectors = random.normal(size=(1100, 16)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for metric, length in (("l2", 0.99e18), ("cosine", 1e38)):
        lm_diskann.create(folder, dimension=16, R=16, L=40, metric=metric)
        with lm_diskann.open(folder) as index:
            index.insert(np.arange(1100), vectors * np.float32(length))
            index.insert(np.arange(1100, 1200), -vectors[:100] * np.float32(length))
            found, distances = index.search(vectors * np.float32(length), k=2, L=100)
            assert np.isfinite(distances).all()
            assert (found[:, 0] == np.arange(1100)).mean() >= 0.99
        shutil.rmtree(folder)
