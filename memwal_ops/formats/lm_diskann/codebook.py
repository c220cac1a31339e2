"""Train, encode and decode codebooks: PQ as in the paper, or two bit planes (ternary), in one common form.

Both approximate a vector by ``base`` plus one part per byte of its code, so one kernel computes both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memwal_ops.formats.lm_diskann.errors import IndexCorruptError
from memwal_ops.formats.lm_diskann.kernels.memory import Codebook

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters

SAMPLE = 10_000
"""The maximum number of vectors on which a codebook is trained, as in the paper."""
_ROUNDS = 12
_VALUES = 256
_ZERO_BELOW = 0.61  # in standard deviations: the best ternary quantizer of a normal distribution


def train(parameters: Parameters, vectors: NDArray[np.float32], seed: int = 0) -> Codebook:
    """Train a codebook on at most :data:`SAMPLE` of these vectors [n, d]."""
    random = np.random.default_rng(seed)
    if len(vectors) > SAMPLE:
        vectors = vectors[random.choice(len(vectors), SAMPLE, replace=False)]
    return _pq(parameters, vectors, random) if parameters.quantizer == "pq" else _ternary(parameters, vectors)


def empty(parameters: Parameters) -> Codebook:
    """The placeholder for the codebook of an index that has none yet."""
    bytes_ = parameters.code_bytes
    starts, widths = _ranges(parameters)
    parts = np.zeros((bytes_, _VALUES, max(widths)), np.float32)
    return Codebook(np.zeros(parameters.dimension, np.float32), starts, widths, parts, np.zeros(0, np.float32))


def encode(book: Codebook) -> NDArray[np.uint8]:
    """Encode a codebook: base, parts, threshold, as float32; all sizes follow from the parameters."""
    return np.concatenate([book.base.ravel(), book.parts.ravel(), book.threshold.ravel()]).astype("<f4").view(np.uint8)


def decode(data: NDArray[np.uint8], parameters: Parameters) -> Codebook:
    """Decode a codebook.

    Raises:
        TableCorruptError: the length does not match the parameters.
    """
    starts, widths = _ranges(parameters)
    shape = (parameters.code_bytes, _VALUES, int(max(widths)))
    kept = 0 if parameters.quantizer == "pq" else parameters.dimension
    parts = int(np.prod(shape))
    if len(data) != 4 * (parameters.dimension + parts + kept):
        raise IndexCorruptError(f"The codebook has {len(data)} bytes, which does not match the index's parameters.")
    values = np.array(np.ascontiguousarray(data).view("<f4"), np.float32)
    at = parameters.dimension
    return Codebook(values[:at], starts, widths, values[at : at + parts].reshape(shape), values[at + parts :])


def _ranges(parameters: Parameters) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The first dimension and the number of dimensions of the part of each byte of a code."""
    count, dimension = parameters.code_bytes, parameters.dimension
    if parameters.quantizer == "pq":
        edges = np.arange(count + 1) * dimension // count
        return edges[:-1].astype(np.int32), np.diff(edges).astype(np.int32)
    starts = np.tile(np.arange(count // 2) * 8, 2)
    return starts.astype(np.int32), np.minimum(8, dimension - starts).astype(np.int32)


def _pq(parameters: Parameters, vectors: NDArray[np.float32], random: np.random.Generator) -> Codebook:
    """k-means of each range of dimensions; an empty cluster gets a random vector."""
    book = empty(parameters)
    for byte, (start, width) in enumerate(zip(book.starts, book.widths, strict=True)):
        points = np.ascontiguousarray(vectors[:, start : start + width])
        centres = points[random.choice(len(points), _VALUES, replace=len(points) < _VALUES)].copy()
        for _ in range(_ROUNDS):
            nearest = np.argmin((centres**2).sum(1)[None, :] - 2 * (points @ centres.T), axis=1)
            counts = np.bincount(nearest, minlength=_VALUES)
            for at in range(width):
                sums = np.bincount(nearest, weights=points[:, at], minlength=_VALUES)
                centres[:, at] = np.where(counts, sums / np.maximum(counts, 1), centres[:, at])
            lost = np.flatnonzero(counts == 0)
            centres[lost] = points[random.choice(len(points), len(lost))]
        book.parts[byte, :, :width] = centres
    return book


def _ternary(parameters: Parameters, vectors: NDArray[np.float32]) -> Codebook:
    book = empty(parameters)
    mean = vectors.mean(0)
    off = np.abs(vectors - mean)
    threshold = (_ZERO_BELOW * vectors.std(0)).astype(np.float32)
    beyond = off > threshold
    scale = (off * beyond).sum(0) / np.maximum(beyond.sum(0), 1)
    half = parameters.code_bytes // 2
    bits = (np.arange(_VALUES)[:, None] >> np.arange(8)) & 1
    for byte, (start, width) in enumerate(zip(book.starts, book.widths, strict=True)):
        sign = 1 if byte < half else -1
        book.parts[byte, :, :width] = sign * bits[:, :width] * scale[start : start + width]
    return book._replace(base=mean.astype(np.float32), threshold=threshold)
