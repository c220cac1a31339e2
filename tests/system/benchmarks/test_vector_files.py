"""Vectors of the public data sets are read from files of their usual formats; damaged ones are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from benchmarks.vector_files import VectorFileError, read, records

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

VECTORS = np.arange(24, dtype=np.float32).reshape(6, 4)


def save(path: Path, rows: NDArray[np.generic]) -> str:
    """A file of rows that begin with their length."""
    path.write_bytes(b"".join(np.int32(len(row)).tobytes() + row.tobytes() for row in rows))
    return str(path)


@pytest.mark.parametrize(("kind", "type_"), [("fvecs", np.float32), ("ivecs", np.int32), ("bvecs", np.uint8)])
def test_rows_that_begin_with_their_length(tmp_path: Path, kind: str, type_: type[np.generic]) -> None:
    path = save(tmp_path / f"sift.{kind}", VECTORS.astype(type_))
    assert (read(path).base == VECTORS).all()
    assert records(path).dtype == type_
    assert (read(path, 2).base == VECTORS[:2]).all()


def test_a_header_and_all_values(tmp_path: Path) -> None:
    path = tmp_path / "cohere.fbin"
    path.write_bytes(np.array(VECTORS.shape, np.uint32).tobytes() + VECTORS.tobytes())
    assert (read(str(path)).base == VECTORS).all()
    assert (read(str(path), 3).base == VECTORS[:3]).all()


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), 4), pa.large_list(pa.float32())])
def test_a_column_of_lists(tmp_path: Path, kind: pa.DataType) -> None:
    path = str(tmp_path / "train.parquet")
    table = pa.table({"id": np.arange(6), "emb": pa.array(VECTORS.tolist(), kind)})
    parquet.write_table(table, path, row_group_size=4)
    assert (read(path).base == VECTORS).all()
    assert (read(path, 5).base == VECTORS[:5]).all()


def test_a_file_of_ann_benchmarks(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path = str(tmp_path / "sift-128-euclidean.hdf5")
    with h5py.File(path, "w") as file:
        file["train"], file["test"], file["neighbors"] = VECTORS, VECTORS[:2], [[0, 1], [1, 0]]
        file.attrs["distance"] = "angular"
    found = read(path)
    assert found.queries is not None
    assert found.nearest is not None
    assert np.allclose(np.linalg.norm(found.base, axis=1), 1)
    assert found.queries.shape == (2, 4)
    assert found.nearest.tolist() == [[0, 1], [1, 0]]
    assert read(path, 3).nearest is None  # they are those of all rows


def test_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "made.npy", VECTORS)
    assert (read(str(tmp_path / "made.npy"), 4).base == VECTORS[:4]).all()


def damaged(folder: Path, what: str) -> str:
    """A file with one fault."""
    whole = save(folder / "whole.fvecs", VECTORS)
    data = bytearray((folder / "whole.fvecs").read_bytes())
    path = folder / f"{what}.fvecs"
    if what == "cut":
        data = data[:-1]
    elif what == "empty":
        data = data[:2]
    elif what == "another":
        data[20:24] = np.int32(3).tobytes()
    elif what == "negative":
        data[:4] = np.int32(-4).tobytes()
    elif what == "infinite":
        data[24:28] = np.float32(np.inf).tobytes()
    elif what == "header":
        path = folder / "header.fbin"
    elif what == "text":
        path = folder / "text.parquet"
    elif what == "columns":
        path = folder / "columns.parquet"
        parquet.write_table(pa.table({"id": [1], "text": ["a"]}), path)
        return str(path)
    elif what == "ragged":
        path = folder / "ragged.parquet"
        parquet.write_table(pa.table({"emb": [[1.0], [1.0, 2.0]]}), path)
        return str(path)
    elif what == "array":
        path = folder / "array.npy"
    else:
        return whole.replace("whole", what)
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cut", r"has 119 bytes, not a multiple of 20, .* it was cut off"),
        ("empty", "not even the length"),
        ("another", "Vector 1 of .* claims 3 values, the first 4"),
        ("negative", "claims -4 values"),
        ("infinite", "Vector 1 of .* not finite"),
        ("header", "has 120 bytes, and claims"),
        ("text", "cannot be read as Parquet"),
        ("columns", "one column of lists of floats, and has none among id, text"),
        ("ragged", "different lengths"),
        ("array", "is no array of vectors"),
        ("missing", "There is no file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, what: str, words: str) -> None:
    with pytest.raises(VectorFileError, match=words):
        read(damaged(tmp_path, what))


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VectorFileError, match="none of"):
        read(str(tmp_path / "vectors.txt"))
    with pytest.raises(VectorFileError, match="none of"):
        records(str(tmp_path / "nearest.npy"))


def test_a_damaged_file_of_ann_benchmarks_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.hdf5", "w") as file:
        file["data"] = VECTORS
    with pytest.raises(VectorFileError, match="has data, not train and test"):
        read(str(tmp_path / "other.hdf5"))
    (tmp_path / "text.hdf5").write_text("text")
    with pytest.raises(VectorFileError, match="cannot be read as HDF5"):
        read(str(tmp_path / "text.hdf5"))
