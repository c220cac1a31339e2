"""Which vectors an index can have, and how it stores them: those of a cosine index with length 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters

LONGEST = 1e18
"""The longest vector of an l2 index: squared distances between longer ones do not fit into float32."""


def lengths(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """The length of each vector, [n]; not finite where one of its values is not."""
    squares: NDArray[np.float64] = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares)


def storable(found: NDArray[np.float64], metric: str) -> NDArray[np.bool_]:
    """Which vectors an index can have, by their lengths: [n]."""
    return np.isfinite(found) & (found > 0) if metric == "cosine" else found <= LONGEST


def stored(parameters: Parameters, given: ArrayLike) -> NDArray[np.float32]:
    """Vectors as the index stores them, [n, d].

    Raises:
        InvalidUsageError: another shape, or a vector that the index cannot have.
    """
    vectors = np.array(given, np.float32, order="C", copy=None)
    if vectors.ndim != 2 or vectors.shape[1] != parameters.dimension:  # noqa: PLR2004 - rows and columns
        wanted = f"float32 [n, {parameters.dimension}]"
        raise InvalidUsageError(f"Vectors must be {wanted}; these are {list(vectors.shape)}.")
    found = lengths(vectors)
    bad = np.flatnonzero(~storable(found, parameters.metric))
    if len(bad):
        rule = "above 0: a zero has no direction" if parameters.metric == "cosine" else f"at most {LONGEST:g}"
        raise InvalidUsageError(
            f"Vector {bad[0]} of {len(vectors)} has the length {found[bad[0]]:g}, and it must be finite and {rule}. "
            "Leave it out, or scale all vectors. Nothing was changed."
        )
    return (vectors / found[:, None]).astype(np.float32) if parameters.metric == "cosine" else vectors
