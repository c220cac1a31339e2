"""Check row ids and vectors, convert vectors to the stored form, and train codebooks that approximate them.

Vectors of a cosine index are stored with length 1. A codebook is PQ as in the paper, or two bit planes (ternary), in
one common form: ``base`` plus one part per byte of a vector's code, so one kernel computes both.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Set as AbstractSet
from math import isqrt
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lm_diskann.errors import IndexCorruptError
from memwal_ops.formats.lm_diskann.kernels.reading import Codebook

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from memwal_ops.formats.lm_diskann.wire import Parameters


_NO_NUMBERS = "cUSMm"  # complex numbers, text, times
MAX_LENGTH = 1e18
"""The maximum length of a vector of an l2 index: squared distances of longer ones do not fit into float32."""


def lengths(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """The length of each vector, [n]; not finite where one of its values is not."""
    squares: NDArray[np.float64] = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares)


def storable(norms: NDArray[np.float64], metric: str) -> NDArray[np.bool_]:
    """Which vectors an index can have, by their lengths: [n]."""
    return np.isfinite(norms) & (norms > 0) if metric == "cosine" else norms <= MAX_LENGTH


def stored(parameters: Parameters, given: ArrayLike, *, one: bool = False) -> NDArray[np.float32]:
    """Vectors as the index stores them, [n, d]; with ``one``, a single one may be given as [d].

    Raises ``InvalidUsageError``: another shape, or a vector that the index cannot have.
    """
    try:
        values = np.asarray(given)
        if values.dtype.kind in _NO_NUMBERS:  # numpy would drop imaginary parts, and parse text
            raise TypeError(f"these are {values.dtype}")
        if values.dtype == np.float32:
            vectors = values if values.flags.c_contiguous else values.copy()
        else:
            with np.errstate(over="ignore"):  # what does not fit is infinite, and refused below
                vectors = np.array(values, np.float32, order="C", copy=None)
    except (TypeError, ValueError) as error:
        raise InvalidUsageError(f"Vectors must be real numbers: {error}.") from error
    if one and vectors.ndim == 1:
        vectors = vectors[None]
    if vectors.ndim != 2 or vectors.shape[1] != parameters.dimension:  # noqa: PLR2004 - rows and columns
        wanted = f"float32 [n, {parameters.dimension}]"
        raise InvalidUsageError(f"Vectors must be {wanted}; these are {list(vectors.shape)}.")
    far = lengths(vectors)
    fit = storable(far, parameters.metric)
    if not fit.all():
        bad = np.flatnonzero(~fit)
        rule = "above 0: a zero has no direction" if parameters.metric == "cosine" else f"at most {MAX_LENGTH:g}"
        raise InvalidUsageError(
            f"Vector {bad[0]} of {len(vectors)} has the length {far[bad[0]]:g}, which must be finite and {rule}. "
            "Leave it out, or scale all vectors."
        )
    return (vectors / far[:, None]).astype(np.float32) if parameters.metric == "cosine" else vectors


def writable(array: NDArray[Any]) -> NDArray[Any]:
    """The array, or a copy of one that is read-only: for which compiled code would be compiled again."""
    return array if array.flags.carray else array.copy()


def whole(name: str, given: Any) -> int:
    """A whole number. Raises ``InvalidUsageError``."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)
    except TypeError as error:
        raise InvalidUsageError(f"{name} must be a whole number, not {given!r}.") from error


def real(name: str, given: Any) -> float:
    """A number. Raises ``InvalidUsageError``."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise InvalidUsageError(f"{name} must be a number, not {given!r}.")
    return float(given)


def integers(given: ArrayLike | Iterable[int]) -> NDArray[np.int64]:
    """Row ids as int64 [n]. Raises ``InvalidUsageError``."""
    rows = np.asarray([*given] if isinstance(given, AbstractSet | Iterator) else given)
    if rows.ndim != 1 or (len(rows) and rows.dtype.kind not in "iu"):
        raise InvalidUsageError(f"Row ids must be integers, [n]; these are {rows.dtype} {list(rows.shape)}.")
    if rows.dtype.kind == "u" and len(rows) and int(rows.max()) > np.iinfo(np.int64).max:
        raise InvalidUsageError("Row ids must be below 2**63.")
    return np.ascontiguousarray(rows, np.int64)


def ascending(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The different ones, ascending; the array itself if it is so: to sort 50,000 takes longer than a search."""
    return rows if bool((rows[1:] > rows[:-1]).all()) else np.unique(rows)


def row_ids_of(given: ArrayLike | Iterable[int]) -> NDArray[np.int64]:
    """Row ids that an index can have, int64 [n]. Raises ``InvalidUsageError``."""
    rows = integers(given)
    if len(rows) and int(rows.min()) < 0:
        raise InvalidUsageError("Row ids must not be negative: -1 means none.")
    return rows


SAMPLE = 10_000
"""The maximum number of vectors on which a codebook is trained, as in the paper."""
_ROUNDS = 12
_VALUES = 256
_ZERO_BELOW = 0.61  # in standard deviations: the best ternary quantizer of a normal distribution


def train(parameters: Parameters, vectors: NDArray[np.float32]) -> Codebook:
    """Train a codebook on at most :data:`SAMPLE` of these vectors [n, d]."""
    random = np.random.default_rng(0)
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
    """Decode a codebook. Raises ``TableCorruptError``: the length does not match the parameters."""
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


def entry_points(live: int) -> int:
    """The number of entry points of a graph with that many live rows: eight times its square root, at least 4.

    A search compares all of them with the query, and begins at the nearest: if the rows form clusters, there may be no
    links between them, so there must be an entry point in each.
    """
    return min(live, max(4, 8 * isqrt(live)))
