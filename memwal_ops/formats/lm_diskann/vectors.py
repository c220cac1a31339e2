"""Check row ids and vectors, and convert vectors to the stored form: those of a cosine index have length 1."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters

_NO_NUMBERS = "cUSMm"  # complex numbers, text, times
MAX_LENGTH = 1e18
"""The maximum length of a vector of an l2 index: squared distances of longer ones do not fit into float32."""


def lengths(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """The length of each vector, [n]; not finite where one of its values is not."""
    squares: NDArray[np.float64] = np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)
    return np.sqrt(squares)


def storable(found: NDArray[np.float64], metric: str) -> NDArray[np.bool_]:
    """Which vectors an index can have, by their lengths: [n]."""
    return np.isfinite(found) & (found > 0) if metric == "cosine" else found <= MAX_LENGTH


def stored(parameters: Parameters, given: ArrayLike, *, one: bool = False) -> NDArray[np.float32]:
    """Vectors as the index stores them, [n, d]; with ``one``, a single one may be given as [d].

    Raises:
        InvalidUsageError: another shape, or a vector that the index cannot have.
    """
    try:
        found = np.asarray(given)
        if found.dtype.kind in _NO_NUMBERS:  # numpy would drop imaginary parts, and parse text
            raise TypeError(f"these are {found.dtype}")
        if found.dtype == np.float32:
            vectors = found if found.flags.c_contiguous else found.copy()
        else:
            with np.errstate(over="ignore"):  # what does not fit is infinite, and refused below
                vectors = np.array(found, np.float32, order="C", copy=None)
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
