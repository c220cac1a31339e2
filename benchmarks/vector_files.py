"""Read vectors of the public data sets from files that lie beside: SIFT1M, GIST1M, Cohere-1M, those of ann-benchmarks.

.fvecs, .ivecs, .bvecs (a length before each vector), .fbin (one header), .npy, .parquet (a column of lists) and .hdf5
(ann-benchmarks: with queries and their true neighbours). Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as of
from pyarrow import parquet

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_LONGEST = 1 << 16
_RECORDS: dict[str, tuple[str, int]] = {".fvecs": ("<f4", 4), ".ivecs": ("<i4", 4), ".bvecs": ("u1", 1)}


class VectorFileError(ValueError):
    """A file that has no vectors."""


@dataclass(frozen=True)
class Vectors:
    """Vectors [n, d] of a file; queries and the rows nearest to them, where it has them."""

    base: NDArray[np.float32]
    queries: NDArray[np.float32] | None = None
    nearest: NDArray[np.int64] | None = None


def read(path: str, most: int | None = None) -> Vectors:
    """The first ``most`` vectors of a file.

    Raises:
        VectorFileError: it is not of one of the formats, or damaged.
    """
    kind = Path(path).suffix.lower()
    if kind not in _READERS:
        raise VectorFileError(f"{path} is none of {', '.join(_READERS)}.")
    if not Path(path).is_file():
        raise VectorFileError(f"There is no file {path}.")
    found = _READERS[kind](path, most)
    for array in (found.base, found.queries):
        if array is not None:
            _check(path, array)
    return found


def records(path: str, most: int | None = None) -> NDArray[Any]:
    """The rows of a .fvecs, .ivecs or .bvecs file, each of which begins with its length."""
    if Path(path).suffix.lower() not in _RECORDS:
        raise VectorFileError(f"{path} is none of {', '.join(_RECORDS)}.")
    kind, size = _RECORDS[Path(path).suffix.lower()]
    length = Path(path).stat().st_size
    if length < 4:  # noqa: PLR2004 - a length
        raise VectorFileError(f"{path} has {length} bytes: not even the length of a first vector.")
    raw = np.memmap(path, np.uint8, "r")
    dimension = int(raw[:4].view("<i4")[0])
    if not 1 <= dimension <= _LONGEST:
        raise VectorFileError(f"The first vector of {path} claims {dimension} values.")
    record = 4 + size * dimension
    if length % record:
        raise VectorFileError(
            f"{path} has {length} bytes, not a multiple of {record}, as vectors of {dimension} values take: "
            "it was cut off, or is of another format."
        )
    rows = raw.reshape(-1, record)[:most]
    lengths = np.ascontiguousarray(rows[:, :4]).view("<i4")[:, 0]
    if (wrong := np.flatnonzero(lengths != dimension)).size:
        raise VectorFileError(f"Vector {wrong[0]} of {path} claims {lengths[wrong[0]]} values, the first {dimension}.")
    return np.ascontiguousarray(rows[:, 4:]).view(kind)


def _recorded(path: str, most: int | None) -> Vectors:
    return Vectors(records(path, most).astype(np.float32))


def _fbin(path: str, most: int | None) -> Vectors:
    length = Path(path).stat().st_size
    count, dimension = np.fromfile(path, "<u4", 2).tolist() if length >= 8 else (0, 0)  # noqa: PLR2004 - the header
    if not 1 <= dimension <= _LONGEST or length != 8 + 4 * count * dimension:
        raise VectorFileError(f"{path} has {length} bytes, and claims {count} x {dimension} values of 4.")
    raw = np.memmap(path, "<f4", "r", 8, (count, dimension))
    return Vectors(np.array(raw[:most], np.float32))


def _npy(path: str, most: int | None) -> Vectors:
    try:
        return Vectors(np.array(np.load(path, mmap_mode="r")[:most], np.float32))
    except (ValueError, EOFError, IndexError, TypeError) as error:
        raise VectorFileError(f"{path} is no array of vectors: {error}") from error


def _parquet(path: str, most: int | None) -> Vectors:
    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise VectorFileError(f"{path} cannot be read as Parquet: {error}") from error
    lists = [field.name for field in file.schema_arrow if _is_vector(field.type)]
    if len(lists) != 1:
        raise VectorFileError(
            f"{path} must have one column of lists of floats, and has {', '.join(lists) or 'none'} among "
            f"{', '.join(file.schema_arrow.names)}."
        )
    parts: list[NDArray[np.float32]] = []
    left = file.metadata.num_rows if most is None else most
    for batch in file.iter_batches(columns=lists):
        column = batch.column(0).slice(0, left)
        if left <= 0:
            break
        left -= len(column)
        lengths = set(column.value_lengths().to_pylist())
        if len(lengths) > 1 or None in lengths:
            raise VectorFileError(f"The lists of {lists[0]} in {path} have different lengths, or are null.")
        parts.append(np.asarray(column.flatten(), np.float32).reshape(len(column), -1))
    if len({part.shape[1] for part in parts}) != 1:
        raise VectorFileError(f"{path} has no rows, or lists of different lengths.")
    return Vectors(np.concatenate(parts))


def _is_vector(kind: Any) -> bool:
    lists = of.is_list(kind) or of.is_large_list(kind) or of.is_fixed_size_list(kind)
    return bool(lists and of.is_floating(kind.value_type))


def _hdf5(path: str, most: int | None) -> Vectors:
    try:
        import h5py  # noqa: PLC0415 - optional
    except ImportError as error:
        raise VectorFileError(f"{path} needs the package h5py: pip install 'memwal-ops[bench]'.") from error
    try:
        with h5py.File(path, "r") as file:
            if "train" not in file or "test" not in file:
                raise VectorFileError(f"{path} has {', '.join(file) or 'nothing'}, not train and test.")
            base, queries = np.array(file["train"][:most], np.float32), np.array(file["test"], np.float32)
            whole = len(base) == len(file["train"]) and "neighbors" in file
            nearest = np.array(file["neighbors"], np.int64) if whole else None
            metric = file.attrs.get("distance", "euclidean")
    except OSError as error:
        raise VectorFileError(f"{path} cannot be read as HDF5: {error}") from error
    if metric == "angular":
        return Vectors(_of_length_1(base), _of_length_1(queries), nearest)
    if metric != "euclidean":
        raise VectorFileError(f"{path} is compared by {metric}, which is neither euclidean nor angular.")
    return Vectors(base, queries, nearest)


def _of_length_1(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.finfo(np.float32).tiny), np.float32)


def _check(path: str, array: NDArray[np.float32]) -> None:
    if array.ndim != 2 or 0 in array.shape:  # noqa: PLR2004 - rows and values
        raise VectorFileError(f"{path} has values of the shape {array.shape}, not [vectors, values].")
    wrong = np.flatnonzero(~np.isfinite(array).all(axis=1))
    if wrong.size:
        raise VectorFileError(f"Vector {wrong[0]} of {path} has a value that is not finite.")


_READERS: dict[str, Callable[[str, int | None], Vectors]] = {
    **dict.fromkeys(_RECORDS, _recorded),
    ".fbin": _fbin,
    ".npy": _npy,
    ".parquet": _parquet,
    ".hdf5": _hdf5,
    ".h5": _hdf5,
}
