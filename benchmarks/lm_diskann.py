"""An index folder beside other indexes of the same vectors: ``python -m benchmarks.lm_diskann --rows 100000``.

Each library builds, and then searches in a process of its own, one query at a time on one thread, at rising effort;
the row of a library is the least effort at which recall@10 is 0.95. Memory is what the process has beyond the one that
has loaded the same modules. Libraries that are not installed are left out, and named. Prints Markdown.

With ``--data glosses``, real embeddings, made here (``benchmarks/real_vectors.py`` says of what); with ``--vectors``,
those of a file, such as ``sift_base.fvecs``. The last 300 vectors are the queries, and the 2,000 before are inserted.
"""
# ruff: noqa: D102, PLC0415 - the ways have one protocol, and each imports its own library

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.markdown import head, row
from benchmarks.real_vectors import WORDNET, glosses, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

DIMENSION, CLUSTERS, QUERIES, K, ENOUGH = 128, 1000, 300, 10, 0.95
_THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "LANCE_CPU_THREADS", "RAYON_NUM_THREADS")


def clustered(random: np.random.Generator, count: int, dimension: int = DIMENSION) -> NDArray[np.float32]:
    """Gaussians around 1,000 centres."""
    centres = np.random.default_rng(1).normal(size=(CLUSTERS, dimension))
    near = centres[random.integers(0, CLUSTERS, count)]
    return (near + random.normal(size=near.shape) * 0.7).astype(np.float32)


def curved(random: np.random.Generator, count: int) -> NDArray[np.float32]:
    """A curved sheet of 16 dimensions: no clusters, low intrinsic dimension."""
    fixed = np.random.default_rng(2)
    first, second = fixed.normal(size=(16, 64)) / 4, fixed.normal(size=(64, DIMENSION)) / 8
    return np.asarray(np.tanh(random.normal(size=(count, 16)) @ first) @ second * 8, np.float32)


DATA = {"clustered": clustered, "curved": curved}


def truth(vectors: NDArray[np.float32], queries: NDArray[np.float32]) -> NDArray[np.int64]:
    """The true nearest rows of each query, [m, k]."""
    norms = (vectors**2).sum(1)[None]
    parts = np.array_split(queries, max(1, len(queries) * len(vectors) // 30_000_000))
    return np.concatenate([np.argpartition(norms - 2 * part @ vectors.T, K, 1)[:, :K] for part in parts])


def recall_of(found: Iterable[NDArray[np.int64]], nearest: NDArray[np.int64]) -> float:
    """Recall@10: the mean share of the true nearest rows [m, 10] that were found for each query."""
    pairs = zip(found, nearest, strict=True)
    return float(np.mean([len({*one.tolist()} & {*other.tolist()}) / K for one, other in pairs]))


class Way(Protocol):
    """One library."""

    @property
    def efforts(self) -> tuple[int, ...]:
        """What to try, ascending."""

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        """Build from all vectors, and save below the folder."""

    def open(self, folder: str, *, read_only: bool = True) -> None:
        """Load what was saved."""

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        """The rows nearest to one query, [1, d]."""

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        """More rows, durable or not as the library has it."""


class Ours:
    """This suite's index folder: on disk, durable, with a block cache of its default size."""

    efforts = (30, 50, 75, 100, 150, 200, 300, 500)

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        from memwal_ops.formats import lm_diskann

        lm_diskann.create(f"{folder}/vectors.lmd", dimension=vectors.shape[1])
        with lm_diskann.open(f"{folder}/vectors.lmd") as index:
            index.insert(np.arange(len(vectors)), vectors)

    def open(self, folder: str, *, read_only: bool = True) -> None:
        from memwal_ops.formats import lm_diskann

        self.index = lm_diskann.open(f"{folder}/vectors.lmd", read_only=read_only)

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        return self.index.search(query, k=K, L=effort)[0][0]

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.insert(rows, vectors)

    def bare(self, folder: str) -> None:
        """Search an empty index."""
        from memwal_ops.formats import lm_diskann

        with lm_diskann.create(f"{folder}/bare.lmd", dimension=_dimension(folder)) as index:
            index.search(np.zeros((1, _dimension(folder)), np.float32))

    def reads(self) -> tuple[int, int]:
        """Blocks that searches asked for, and those of them that came from the file."""
        asked, read = self.index.view.counts[3:5].tolist()
        return asked, read


class Hnswlib:
    """hnswlib: M = 32, ef_construction = 200; all in memory."""

    efforts = (10, 20, 30, 50, 75, 100, 150, 200, 400)

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        import hnswlib

        self.index = hnswlib.Index("l2", vectors.shape[1])
        self.index.init_index(len(vectors) * 11 // 10, M=32, ef_construction=200)
        self.index.add_items(vectors, np.arange(len(vectors)))
        self.index.save_index(f"{folder}/hnswlib")

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        import hnswlib

        self.index = hnswlib.Index("l2", _dimension(folder))
        self.index.load_index(f"{folder}/hnswlib")
        self.index.set_num_threads(1)

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        self.index.set_ef(effort)
        return self.index.knn_query(query, k=K)[0][0]

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.resize_index(self.index.get_current_count() + len(rows))
        self.index.add_items(vectors, rows)


class FaissHnsw:
    """faiss, IndexHNSWFlat: M = 32, efConstruction = 200; all in memory."""

    efforts: tuple[int, ...] = (10, 20, 30, 50, 75, 100, 150, 200, 400)

    def make(self, vectors: NDArray[np.float32]) -> Any:
        import faiss

        index = faiss.IndexHNSWFlat(vectors.shape[1], 32)
        index.hnsw.efConstruction = 200
        index.add(vectors)
        return index

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        import faiss

        faiss.write_index(self.make(vectors), f"{folder}/{type(self).__name__}")

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        import faiss

        faiss.omp_set_num_threads(1)
        self.index = faiss.read_index(f"{folder}/{type(self).__name__}")

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        self.index.hnsw.efSearch = effort
        return self.index.search(query, K)[1][0]

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

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        self.index.nprobe = effort
        return self.index.search(query, K)[1][0]


class Usearch:
    """usearch: connectivity 32, expansion_add 200; all in memory."""

    efforts = (10, 20, 30, 50, 75, 100, 150, 200, 400)

    def _new(self, dimension: int) -> Any:
        from usearch.index import Index

        return Index(ndim=dimension, metric="l2sq", dtype="f32", connectivity=32, expansion_add=200)

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        index = self._new(vectors.shape[1])
        index.add(np.arange(len(vectors)), vectors)
        index.save(f"{folder}/usearch")

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        self.index = self._new(_dimension(folder))
        self.index.load(f"{folder}/usearch")

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        self.index.expansion_search = effort
        return self.index.search(query[0], K, threads=1).keys

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self.index.add(rows, vectors)


class Lance:
    """A Lance table with IVF_PQ, re-ranked by the vectors of the table; on disk."""

    efforts = (1, 2, 4, 8, 16, 32, 64)

    def build(self, folder: str, vectors: NDArray[np.float32]) -> None:
        import lance

        dataset = lance.write_dataset(self._table(np.arange(len(vectors)), vectors), f"{folder}/table.lance")
        parts = max(4, int(len(vectors) ** 0.5))
        dataset.create_index("vec", "IVF_PQ", metric="l2", num_partitions=parts, num_sub_vectors=32)

    def _table(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> Any:
        import pyarrow as pa

        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1])
        return pa.table({"row": pa.array(rows), "vec": column})

    def open(self, folder: str, *, read_only: bool = True) -> None:
        del read_only
        import lance

        self.dataset = lance.dataset(f"{folder}/table.lance")

    def search(self, query: NDArray[np.float32], effort: int) -> Any:
        near = {"column": "vec", "q": query[0], "k": K, "nprobes": effort, "refine_factor": 5}
        return self.dataset.to_table(columns=["row", "_distance"], nearest=near)["row"].to_numpy()

    def insert(self, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        import lance

        self.dataset = lance.write_dataset(self._table(rows, vectors), self.dataset.uri, mode="append")
        self.dataset.optimize.optimize_indices()


WAYS: dict[str, tuple[str, str, Callable[[], Way]]] = {
    "memwal-ops": ("memwal_ops", "L", Ours),
    "hnswlib": ("hnswlib", "ef", Hnswlib),
    "usearch": ("usearch", "expansion", Usearch),
    "faiss HNSW": ("faiss", "efSearch", FaissHnsw),
    "faiss IVF-PQ": ("faiss", "nprobe", FaissIvfPq),
    "Lance IVF_PQ": ("lance", "nprobes", Lance),
}


# -- the processes


def _rss() -> float:
    """Resident memory, MiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def _loaded(folder: str, name: str) -> NDArray[Any]:
    return np.load(f"{folder}/{name}.npy")  # type: ignore[no-any-return]


def _dimension(folder: str) -> int:
    return int(np.load(f"{folder}/queries.npy", mmap_mode="r").shape[1])


def build(name: str, folder: str) -> dict[str, float]:
    """Build from all vectors."""
    way, vectors = WAYS[name][2](), _loaded(folder, "vectors")
    before, began, busy = _bytes(folder), time.perf_counter(), time.process_time()
    way.build(folder, vectors)
    took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - busy}
    return took | {"disk": (_bytes(folder) - before) / 2**20}


def _bytes(folder: str) -> int:
    return sum(os.path.getsize(f"{base}/{name}") for base, _, names in os.walk(folder) for name in names)


def search(name: str, folder: str) -> dict[str, Any]:
    """Search at rising effort until the recall is enough."""
    way, queries, nearest = WAYS[name][2](), _loaded(folder, "queries"), _loaded(folder, "truth")
    __import__({"memwal_ops": "memwal_ops.formats.lm_diskann.library"}.get(WAYS[name][0], WAYS[name][0]))
    idle = bare = _rss()
    if isinstance(way, Ours):
        way.bare(folder)
        bare = _rss()
    way.open(folder)
    way.search(queries[:1], way.efforts[0])
    said: dict[str, Any] = {}
    for effort in way.efforts:
        before = way.reads() if isinstance(way, Ours) else (0, 0)
        began = time.process_time()
        found = [way.search(query[None], effort) for query in queries]
        took = time.process_time() - began
        recall = recall_of(found, nearest)
        said = {"effort": effort, "recall": recall, "rate": len(queries) / took, "memory": _rss() - idle,
                "bare": bare - idle}  # fmt: skip
        if isinstance(way, Ours):
            after = way.reads()
            said |= {"blocks": (after[0] - before[0]) / QUERIES, "read": (after[1] - before[1]) / QUERIES}
        if recall >= ENOUGH:
            break
    return said


def insert(name: str, folder: str) -> dict[str, float]:
    """1,000 rows at once, then 10 times 10."""
    way, vectors = WAYS[name][2](), _loaded(folder, "fresh")
    way.open(folder, read_only=False)
    first = len(np.load(f"{folder}/vectors.npy", mmap_mode="r"))
    way.insert(np.arange(first, first + 10), vectors[:10])  # compiles, which is not to be timed
    first, vectors, said = first + 10, vectors[10:], {}
    for label, size, times in (("many", 1000, 1), ("few", 10, 10)):
        began = time.perf_counter()
        for _ in range(times):
            way.insert(np.arange(first, first + size), vectors[:size])
            first, vectors = first + size, vectors[size:]
        said[label] = size * times / (time.perf_counter() - began)
    return said


def merge(name: str, folder: str) -> dict[str, float]:
    """Our merge of what the inserts left, beside reading it and writing and syncing the same bytes once."""
    del name
    import duckdb

    from memwal_ops.formats.lm_diskann.library import Index

    path = f"{folder}/vectors.lmd"
    began = time.perf_counter()
    with duckdb.connect(f"{path}/diskann_store.duckdb", read_only=True) as store:
        table = store.sql("SELECT data FROM lmd_delta_blocks").to_arrow_table()
    blocks = [chunk.buffers()[2] for chunk in table.column("data").chunks]
    with open(f"{folder}/floor", "wb") as file:
        file.writelines(blocks)
        file.flush()
        os.fsync(file.fileno())
    floor, size, count = time.perf_counter() - began, table.column("data").nbytes, len(table)
    del table, blocks
    with Index(path, overlay_bytes=0) as index:
        idle, began = _rss(), time.perf_counter()
        merged = index.merge()
        took = time.perf_counter() - began
    assert merged == count
    return {"blocks": count, "mib": size / 2**20, "floor": floor, "ours": took, "memory": _rss() - idle}


CHILDREN = {"build": build, "search": search, "insert": insert, "merge": merge}


def child(what: str, name: str, folder: str, *, threads: int | None = None) -> Any:
    """Do it in a process of its own."""
    environment = {**os.environ, **({} if threads is None else dict.fromkeys(_THREADS, str(threads)))}
    command = [sys.executable, "-m", "benchmarks.lm_diskann", "--child", what, name, folder]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


# -- the tables


def compare(folder: str, kind: str, arrays: Arrays, ways: list[str]) -> None:
    """All libraries on one set of vectors: those to build of, queries, and those to insert."""
    vectors, queries, fresh = arrays
    rows, dimension = vectors.shape
    for name, array in (
        ("vectors", vectors),
        ("queries", queries),
        ("truth", truth(vectors, queries)),
        ("fresh", fresh),
    ):
        np.save(f"{folder}/{name}.npy", array)
    del vectors, arrays
    print(f"\n## {rows:,} x {dimension}, {kind}")
    head("index", "build, s", "build, CPU s", "at", "recall@10", "queries per CPU second", "memory, MiB",
          "disk, MiB", "inserts per second, 1,000 at once", "10 at once")  # fmt: skip
    blocks = ""
    for name in ways:
        built, found = child("build", name, folder), child("search", name, folder, threads=1)
        more = child("insert", name, folder)
        row(name, f"{built['seconds']:.1f}", f"{built['cpu']:.1f}", f"{WAYS[name][1]} = {found['effort']}",
             f"{found['recall']:.3f}", f"{found['rate']:,.0f}", f"{found['memory']:,.0f}", f"{built['disk']:,.0f}",
             f"{more['many']:,.0f}", f"{more['few']:,.0f}")  # fmt: skip
        if "blocks" in found:
            blocks = f"Blocks per query: {found['blocks']:.0f} asked for, {found['read']:.0f} read from the file. "
            blocks += f"An empty index takes {found['bare']:.0f} MiB: compiled code, and LLVM, which loads it."
    if "memwal-ops" in ways:
        print(f"\n{blocks}")
        said = child("merge", "memwal-ops", folder)
        head("merge of", "floor", "ours", "ours / floor", "memory, MiB")
        row(f"{said['blocks']:,} blocks, {said['mib']:.0f} MiB", f"{said['floor']:.2f} s", f"{said['ours']:.2f} s",
             f"**{said['ours'] / said['floor']:.2f}**", f"{said['memory']:.0f}")  # fmt: skip


Arrays = tuple["NDArray[np.float32]", "NDArray[np.float32]", "NDArray[np.float32]"]
FRESH = 2_000


def made(kind: str, rows: int) -> Arrays:
    """Synthetic vectors."""
    random = np.random.default_rng(3)
    return DATA[kind](random, rows), DATA[kind](random, QUERIES), DATA[kind](random, FRESH)


def split(found: NDArray[np.float32], rows: int | None) -> Arrays:
    """Vectors of real data: the last are queries, and those before are inserted."""
    found = found if rows is None else found[: rows + FRESH + QUERIES]
    if len(found) <= 2 * (FRESH + QUERIES):
        sys.exit(f"{len(found)} vectors are too few.")
    return found[: -FRESH - QUERIES], found[-QUERIES:], found[-FRESH - QUERIES : -QUERIES]


def _installed() -> Iterator[str]:
    for name, (module, _, _) in WAYS.items():
        if find_spec(module) is None:
            print(f"{name}: not installed, left out.", file=sys.stderr)
        else:
            yield name


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--data", nargs="+", default=[*DATA], choices=[*DATA, "glosses"])
    parser.add_argument("--vectors", metavar="FILE", help="a .npy, .fvecs, .bvecs or .fbin file, instead of --data")
    parser.add_argument("--wordnet", metavar="DIR", default=WORDNET, help="its glosses are embedded")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS])
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        what, name, folder = told.child
        print(json.dumps(CHILDREN[what](name, folder)))
        return
    ways = told.ways or [*_installed()]
    if told.vectors:
        with tempfile.TemporaryDirectory() as folder:
            compare(folder, os.path.basename(told.vectors), split(read(told.vectors), told.rows[0]), ways)
        return
    for rows in told.rows:
        for kind in told.data:
            if kind == "glosses":
                arrays = split(glosses(rows + FRESH + QUERIES, told.wordnet), rows)
            else:
                arrays = made(kind, rows)
            with tempfile.TemporaryDirectory() as folder:
                compare(folder, kind, arrays, ways)


if __name__ == "__main__":
    main()
