"""Make vectors, and compare what a search finds with the rows that are nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

DIMENSION, CLUSTERS, K = 128, 1000, 10


def centres(dimension: int = DIMENSION) -> NDArray[np.float64]:
    """The centres of :func:`clustered`."""
    return np.random.default_rng(1).normal(size=(CLUSTERS, dimension))


def clustered(random: np.random.Generator, count: int, dimension: int = DIMENSION) -> NDArray[np.float32]:
    """Gaussians around 1,000 centres."""
    near = centres(dimension)[random.integers(0, CLUSTERS, count)]
    return (near + random.normal(size=near.shape) * 0.7).astype(np.float32)


def curved(random: np.random.Generator, count: int) -> NDArray[np.float32]:
    """A curved sheet of 16 dimensions: no clusters, low intrinsic dimension."""
    fixed = np.random.default_rng(2)
    first, second = fixed.normal(size=(16, 64)) / 4, fixed.normal(size=(64, DIMENSION)) / 8
    return np.asarray(np.tanh(random.normal(size=(count, 16)) @ first) @ second * 8, np.float32)


def moved(random: np.random.Generator, count: int, dimension: int) -> NDArray[np.float32]:
    """Rows around two new centres."""
    centres = random.normal(size=(2, dimension)) * 5
    near = centres[random.integers(0, 2, count)]
    return (near + random.normal(size=near.shape) * 0.1).astype(np.float32)


def truth(vectors: NDArray[np.float32], queries: NDArray[np.float32]) -> NDArray[np.int64]:
    """The true nearest rows of each query, [m, k]."""
    norms = (vectors**2).sum(1)[None]
    parts = np.array_split(queries, max(1, len(queries) * len(vectors) // 30_000_000))
    return np.concatenate([np.argpartition(norms - 2 * part @ vectors.T, K, 1)[:, :K] for part in parts])


def recall_of(found: Iterable[NDArray[np.int64]], nearest: NDArray[np.int64]) -> float:
    """Recall@10: the mean share of the true nearest rows [m, 10] that were found for each query."""
    pairs = zip(found, nearest, strict=True)
    return float(np.mean([len({*one.tolist()} & {*other.tolist()}) / K for one, other in pairs]))
