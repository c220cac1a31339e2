"""The libraries that an index folder is compared with, each behind the same few calls, on one thread."""
# ruff: noqa: D102, PLC0415 - the ways have one protocol, and each imports its own library

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.vectors import K

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

GRAPH = (10, 20, 30, 50, 75, 100, 150, 200, 400)


class Way:
    """One library."""

    efforts: tuple[int, ...] = GRAPH
    dimension = 0

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        """Build from all vectors, and save below the folder."""
        raise NotImplementedError

    def open(self, folder: str, *, read_only: bool = True) -> None:
        """Load what was saved."""
        raise NotImplementedError

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        """The rows nearest to one query, [1, d]."""
        raise NotImplementedError

    def batch(self, queries: NDArray[np.float32], effort: int) -> Any:
        """The rows nearest to each of many queries, [m, k], in one call."""
        raise NotImplementedError

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """More rows, durable or not as the library has it."""
        raise NotImplementedError

    def delete(self, rows: NDArray[np.int64]) -> None:
        """Rows that searches don't return any more."""
        raise NotImplementedError

    def update(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """Other vectors of the same rows."""
        self.delete(rows)
        self.insert(rows, vectors)

    def settle(self) -> None:
        """What the library is to run now and then after changes."""


class Ours(Way):
    """This suite's index folder: on disk, durable, with a block cache of its default size."""

    efforts = (30, 50, 75, 100, 150, 200, 300, 500)

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        from memwal_ops.formats import lm_diskann

        lm_diskann.create(f"{folder}/vectors.lmd", dimension=vectors.shape[1])
        with lm_diskann.open(f"{folder}/vectors.lmd") as index:
            index.insert(np.arange(len(vectors)), vectors)

    def open(self, folder: str, *, read_only: bool = True) -> None:
        from memwal_ops.formats import lm_diskann

        self.path = f"{folder}/vectors.lmd"
        self.index = lm_diskann.open(self.path, read_only=read_only)

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        return self.batch(query, effort)[0]

    def batch(self, queries: NDArray[np.float32], effort: int) -> Any:
        return self.index.search(queries, k=K, L=effort)[0]

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.insert(rows, vectors)

    def delete(self, rows: NDArray[np.int64]) -> None:
        self.index.delete(rows)

    def update(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.insert(rows, vectors)

    def settle(self) -> None:
        from memwal_ops import run_job
        from memwal_ops.formats import lm_diskann

        self.index.close()
        for job in ("catchup", "merge", "compact", "gc"):
            run_job(self.path, job, apply=True)
        self.index = lm_diskann.open(self.path)

    def bare(self, folder: str) -> None:
        """Search an empty index."""
        from memwal_ops.formats import lm_diskann

        with lm_diskann.create(f"{folder}/bare.lmd", dimension=self.dimension) as index:
            index.search(np.zeros((1, self.dimension), np.float32))

    def reads(self) -> tuple[int, int]:
        """Blocks that searches asked for, and those of them that came from the file."""
        asked, read = self.index.view.counts[3:5].tolist()
        return asked, read


class Hnswlib(Way):
    """hnswlib: M = 32, ef_construction = 200; all in memory. A new row takes the place of a deleted one."""

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        import hnswlib

        index = hnswlib.Index("l2", vectors.shape[1])
        index.init_index(len(vectors), M=32, ef_construction=200, allow_replace_deleted=True)
        index.add_items(vectors, np.arange(len(vectors)), num_threads=1)
        index.save_index(f"{folder}/hnswlib")

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        import hnswlib

        self.index, self.free = hnswlib.Index("l2", self.dimension), 0
        self.index.load_index(f"{folder}/hnswlib", allow_replace_deleted=True)
        self.index.set_num_threads(1)

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        return self.batch(query, effort)[0]

    def batch(self, queries: NDArray[np.float32], effort: int) -> Any:
        self.index.set_ef(effort)
        return self.index.knn_query(queries, k=K)[0]

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        short = len(rows) - self.free
        if short > 0:
            self.index.resize_index(self.index.get_max_elements() + short)
        self.free = max(0, -short)
        self.index.add_items(vectors, rows, replace_deleted=True)

    def delete(self, rows: NDArray[np.int64]) -> None:
        for one in rows.tolist():
            self.index.mark_deleted(one)
        self.free += len(rows)

    def update(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.add_items(vectors, rows)


class FaissHnsw(Way):
    """faiss, IndexHNSWFlat: M = 32, efConstruction = 200; all in memory. It cannot delete."""

    def make(self, vectors: NDArray[np.float32]) -> Any:
        import faiss

        index = faiss.IndexHNSWFlat(vectors.shape[1], 32)
        index.hnsw.efConstruction = 200
        index.add(vectors)
        return index

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        import faiss

        faiss.omp_set_num_threads(1)
        faiss.write_index(self.make(vectors), f"{folder}/{type(self).__name__}")

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        import faiss

        faiss.omp_set_num_threads(1)
        self.index = faiss.read_index(f"{folder}/{type(self).__name__}")

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        return self.batch(query, effort)[0]

    def batch(self, queries: NDArray[np.float32], effort: int) -> Any:
        self.index.hnsw.efSearch = effort
        return self.index.search(queries, K)[1]

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        assert rows[0] == self.index.ntotal
        self.index.add(vectors)


class FaissIvfPq(FaissHnsw):
    """faiss, IVF with 32 bytes of PQ, no re-ranking; all in memory."""

    efforts = (1, 2, 4, 8, 16, 32, 64, 128)

    def make(self, vectors: NDArray[np.float32]) -> Any:
        import faiss

        lists, dimension = int(4 * len(vectors) ** 0.5), vectors.shape[1]
        index = faiss.IndexIVFPQ(faiss.IndexFlatL2(dimension), dimension, lists, 32, 8)
        index.train(vectors[: lists * 64])
        index.add(vectors)
        return index

    def batch(self, queries: NDArray[np.float32], effort: int) -> Any:
        self.index.nprobe = effort
        return self.index.search(queries, K)[1]

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.add_with_ids(vectors, rows)

    def delete(self, rows: NDArray[np.int64]) -> None:
        self.index.remove_ids(rows)


class Usearch(Way):
    """usearch: connectivity 32, expansion_add 200; all in memory."""

    def _new(self, dimension: int) -> Any:
        from usearch.index import Index

        return Index(ndim=dimension, metric="l2sq", dtype="f32", connectivity=32, expansion_add=200)

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        index = self._new(vectors.shape[1])
        index.add(np.arange(len(vectors)), vectors, threads=1)
        index.save(f"{folder}/usearch")

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        self.index = self._new(self.dimension)
        self.index.load(f"{folder}/usearch")

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        self.index.expansion_search = effort
        return self.index.search(query[0], K, threads=1).keys

    def batch(self, queries: NDArray[np.float32], effort: int) -> Any:
        self.index.expansion_search = effort
        return self.index.search(queries, K, threads=1).keys

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.add(rows, vectors, threads=1)

    def delete(self, rows: NDArray[np.int64]) -> None:
        self.index.remove(rows)


class DiskAnn(Way):
    """Microsoft's DiskANN on disk, in Rust: R = 64, L = 100 of the build, PQ of 32 bytes; it does not change."""

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        import diskannpy

        os.makedirs(f"{folder}/diskann", exist_ok=True)
        diskannpy.build_disk_index(vectors, "l2", f"{folder}/diskann", 100, 64, 4.0, 1, num_of_pq_chunks=32)

    def open(self, folder: str, *, read_only: bool = True) -> None:
        import diskannpy

        if not read_only:
            raise NotImplementedError
        self.index = diskannpy.StaticDiskIndex(f"{folder}/diskann", 1, 1)

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        return self.index.search(query[0], K, effort).identifiers.astype(np.int64)

    def batch(self, queries: NDArray[np.float32], effort: int) -> Any:
        return self.index.batch_search(queries, K, effort, 1).identifiers


class DuckdbVss(Way):
    """DuckDB's vss: HNSW with M = 32, ef_construction = 200, in a file of which the index is loaded into memory."""

    def _connect(self, folder: str) -> None:
        import duckdb
        import duckdb_extension_vss

        base = os.path.dirname(duckdb_extension_vss.__file__)
        [extension] = [
            f"{folder}/{name}" for folder, _, names in os.walk(base) for name in names if name.startswith("vss.")
        ]
        options: dict[str, Any] = {"allow_unsigned_extensions": True, "threads": 1}
        self.store = duckdb.connect(f"{folder}/vss.duckdb", config=options)
        self.store.execute(f"LOAD '{extension}'")
        self.store.execute("SET hnsw_enable_experimental_persistence = true")
        to = f"array_distance(vec, $1::FLOAT[{self.dimension}])"
        self.nearest = f"SELECT row FROM vectors ORDER BY {to} LIMIT {K}"

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        self.dimension = vectors.shape[1]
        self._connect(folder)
        self.store.execute(f"CREATE TABLE vectors (row BIGINT, vec FLOAT[{self.dimension}])")
        self.insert(np.arange(len(vectors)), vectors)
        self.store.execute(
            "CREATE INDEX near ON vectors USING HNSW (vec) "
            "WITH (metric = 'l2sq', ef_construction = 200, M = 32, M0 = 64)"
        )
        self.store.close()

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        self._connect(folder)
        plan = self.store.execute(f"EXPLAIN {self.nearest}", [[0.0] * self.dimension]).fetchall()
        assert "HNSW_INDEX_SCAN" in str(plan), plan

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        self.store.execute(f"SET hnsw_ef_search = {effort}")
        return self.store.execute(self.nearest, [query[0].tolist()]).fetchnumpy()["row"]

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.store.register("fresh", table(rows, vectors))
        self.store.execute("INSERT INTO vectors SELECT row, vec FROM fresh")
        self.store.unregister("fresh")

    def delete(self, rows: NDArray[np.int64]) -> None:
        self.store.execute(f"DELETE FROM vectors WHERE row IN ({', '.join(map(str, rows.tolist()))})")

    def settle(self) -> None:
        self.store.execute("PRAGMA hnsw_compact_index('near')")


def table(rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> Any:
    """A table of rows and vectors."""
    import pyarrow as pa

    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
    return pa.table({"row": pa.array(rows), "vec": column})


class LancePq(Way):
    """A Lance table with IVF_PQ, re-ranked by the vectors of the table; on disk."""

    efforts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)

    def index(self, rows: int) -> dict[str, Any]:
        return {"index_type": "IVF_PQ", "num_partitions": max(4, int(rows**0.5)), "num_sub_vectors": 32}

    def near(self, effort: int) -> dict[str, Any]:
        return {"nprobes": effort, "refine_factor": 5}

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        import lance

        dataset = lance.write_dataset(table(np.arange(len(vectors)), vectors), f"{folder}/{type(self).__name__}.lance")
        dataset.create_index("vec", metric="l2", **self.index(len(vectors)))

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        import lance

        self.dataset = lance.dataset(f"{folder}/{type(self).__name__}.lance")

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        near = {"column": "vec", "q": query[0], "k": K, **self.near(effort)}
        return self.dataset.to_table(columns=["row", "_distance"], nearest=near)["row"].to_numpy()

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        import lance

        self.dataset = lance.write_dataset(table(rows, vectors), self.dataset.uri, mode="append")
        self.dataset.optimize.optimize_indices()

    def delete(self, rows: NDArray[np.int64]) -> None:
        self.dataset.delete(f"row IN ({', '.join(map(str, rows.tolist()))})")

    def settle(self) -> None:
        from datetime import timedelta

        self.dataset.optimize.compact_files()
        self.dataset.optimize.optimize_indices()
        self.dataset.cleanup_old_versions(older_than=timedelta(0))


class LanceHnsw(LancePq):
    """A Lance table with IVF_HNSW_SQ: m = 32, ef_construction = 200, partitions of up to 65,536 rows; on disk."""

    efforts = GRAPH[1:]  # refined, so that it searches for twice as many

    def index(self, rows: int) -> dict[str, Any]:
        parts = -(-rows // 65_536)
        return {"index_type": "IVF_HNSW_SQ", "num_partitions": parts, "m": 32, "ef_construction": 200}

    def near(self, effort: int) -> dict[str, Any]:
        return {"nprobes": 64, "ef": effort, "refine_factor": 2}


@dataclass(frozen=True)
class Library:
    """A way: the module and the package that it needs, its effort, and the folder of packages apart, if it has one."""

    make: Callable[[], Way]
    module: str
    package: str
    effort: str
    apart: str = ""


WAYS: dict[str, Library] = {
    "memwal-ops": Library(Ours, "memwal_ops", "memwal-ops", "L"),
    "hnswlib": Library(Hnswlib, "hnswlib", "hnswlib", "ef"),
    "usearch": Library(Usearch, "usearch", "usearch", "expansion"),
    "faiss HNSW": Library(FaissHnsw, "faiss", "faiss-cpu", "efSearch"),
    "faiss IVF_PQ": Library(FaissIvfPq, "faiss", "faiss-cpu", "nprobe"),
    "DiskANN": Library(DiskAnn, "diskannpy", "diskannpy-rust", "L"),
    "DuckDB vss": Library(DuckdbVss, "duckdb_extension_vss", "duckdb-extension-vss", "ef", "vss"),
    "Lance IVF_PQ": Library(LancePq, "lance", "pylance", "nprobes"),
    "Lance IVF_HNSW_SQ": Library(LanceHnsw, "lance", "pylance", "ef"),
}
