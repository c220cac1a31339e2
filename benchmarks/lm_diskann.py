"""An index folder beside other indexes of the same vectors: ``python -m benchmarks.lm_diskann --rows 100000``.

Each library builds, searches, changes and lives through rounds of churn in processes of its own, on one thread; what it
takes is CPU time. Searches are one query at a time, at rising effort; the row of a library is the least effort at
which recall@10 is 0.95. Memory is what the process has beyond the one that has loaded the same modules. Libraries that
are not installed are left out, and named. Prints Markdown, and with ``--charts`` writes those of the docs.

Churn: a third of the vectors is built of, then the oldest tenth is replaced by the next in each round, each library
doing what it is to do after changes. Still: in random order. Drift: group by group, by the nearest of 20 of them. Every
20th vector is a query while rows around it in that order are there.

With ``--data glosses``, real embeddings, made here (``benchmarks/real_vectors.py`` tells of what); with ``--vectors``,
those of a file, such as ``sift_base.fvecs`` (``benchmarks/vector_files.py``). Without ``--queries``, the last 300
vectors are the queries, and the 2,000 before are inserted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.lm_diskann_ways import WAYS, Ours, Way
from benchmarks.markdown import head, row
from benchmarks.real_vectors import BESIDE, WORDNET, glosses
from benchmarks.vector_files import VectorFileError, Vectors, read, records
from benchmarks.vectors import K, clustered, curved, recall_of, truth

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

QUERIES, FRESH, ENOUGH = 300, 2_000, 0.95
SHARE, GROUPS, HELD = 10, 20, 20
DATA = {"clustered": clustered, "curved": curved}
_HOUR = 3600
_THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "LANCE_CPU_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS")


# -- the processes


def _rss() -> float:
    """Resident memory, MiB."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def _loaded(folder: str, name: str) -> NDArray[Any]:
    return np.load(f"{folder}/{name}.npy")  # type: ignore[no-any-return]


def _way(name: str, folder: str) -> Way:
    way = WAYS[name].make()
    way.dimension = int(np.load(f"{folder}/vectors.npy", mmap_mode="r").shape[1])
    return way


def _bytes(folder: str) -> int:
    return sum(os.path.getsize(f"{base}/{name}") for base, _, names in os.walk(folder) for name in names)


def warm(name: str, folder: str) -> None:
    """Do all once with a few rows: what it compiles is kept."""
    way, vectors = WAYS[name].make(), clustered(np.random.default_rng(1), 1_600)
    way.build(folder, vectors[:1_500])
    way.open(folder, read_only=False)
    way.insert(np.arange(1_500, 1_600), vectors[1_500:])
    way.delete(np.arange(100))
    way.settle()
    way.search(vectors[:1], way.efforts[0])


def build(name: str, folder: str) -> dict[str, Any]:
    """Build from all vectors."""
    way, vectors = _way(name, folder), _loaded(folder, "vectors")
    before, busy = _bytes(folder), time.process_time()
    way.build(folder, vectors)
    took = time.process_time() - busy
    return {"cpu": took, "disk": (_bytes(folder) - before) / 2**20, "version": version(WAYS[name].package)}


def search(name: str, folder: str) -> dict[str, Any]:
    """Search at rising effort; all efforts, for the curve."""
    way, queries, nearest = _way(name, folder), _loaded(folder, "queries"), _loaded(folder, "truth")
    module = WAYS[name].module
    __import__({"memwal_ops": "memwal_ops.formats.lm_diskann.library"}.get(module, module))
    idle = bare = _rss()
    if isinstance(way, Ours):
        way.bare(folder)
        bare = _rss()
    way.open(folder)
    way.search(queries[:1], way.efforts[0])
    curve = []
    for effort in way.efforts:
        before = way.reads() if isinstance(way, Ours) else (0, 0)
        began = time.process_time()
        found = [way.search(query[None], effort) for query in queries]
        took = time.process_time() - began
        said: dict[str, Any] = {"effort": effort, "recall": recall_of(found, nearest), "rate": len(queries) / took,
                "memory": _rss() - idle, "bare": bare - idle, "batch": _batch(way, queries, effort)}  # fmt: skip
        if isinstance(way, Ours):
            after = way.reads()
            said |= {"blocks": (after[0] - before[0]) / QUERIES / 2, "read": (after[1] - before[1]) / QUERIES / 2}
        curve.append(said)
        if said["recall"] > 0.9995:  # noqa: PLR2004 - more effort finds no more
            break
    return {"curve": curve}


def _batch(way: Way, queries: NDArray[np.float32], effort: int) -> float | None:
    """Queries per CPU second if all are given at once."""
    began = time.process_time()
    try:
        way.batch(queries, effort)
    except NotImplementedError:
        return None
    return len(queries) / (time.process_time() - began)


def change(name: str, folder: str) -> dict[str, float | None]:
    """Insert 1,000 rows at once and ten times ten, delete 1,000, update 500: rows per CPU second; then the upkeep."""
    way, vectors = _way(name, folder), _loaded(folder, "fresh")
    first = len(np.load(f"{folder}/vectors.npy", mmap_mode="r"))
    half, tenth = len(vectors) // 2, len(vectors) // 200
    said: dict[str, float | None] = {}
    try:
        way.open(folder, read_only=False)
        way.insert(np.arange(first, first + tenth), vectors[:tenth])  # compiles, which is not to be timed
        began, at = time.process_time(), first + tenth
        way.insert(np.arange(at, at + half), vectors[tenth : tenth + half])
        said["many"], at = half / (time.process_time() - began), at + half
        began = time.process_time()
        for start in range(at - first, at - first + 10 * tenth, tenth):
            way.insert(np.arange(first + start, first + start + tenth), vectors[start : start + tenth])
        said["few"] = 10 * tenth / (time.process_time() - began)
        way.delete(np.arange(1))
        began = time.process_time()
        way.delete(np.arange(1, 2 * half, 2))
        said["delete"] = half / (time.process_time() - began)
        began = time.process_time()
        way.settle()
        said["settle"] = (time.process_time() - began) * 1000 / half
        began = time.process_time()
        way.update(np.arange(2, half, 2), vectors[-(half // 2 - 1) :])
        said["update"] = (half // 2 - 1) / (time.process_time() - began)
    except NotImplementedError:
        pass
    return said


def churn(name: str, folder: str) -> dict[str, Any]:
    """Replace the oldest tenth in each round: recall per round, at an effort that is enough before the first."""
    way, pool, held = _way(name, folder), _loaded(folder, "pool"), _loaded(folder, "held")
    count = len(_loaded(folder, "vectors"))
    step = count // SHARE
    way.build(folder, pool[:count])
    way.open(folder, read_only=False)
    effort, recall = 0, 0.0
    for effort in way.efforts:
        recall = _recall(way, pool[:count], 0, held, effort)
        if recall >= ENOUGH:
            break
    said, busy = [recall], 0.0
    for first in range(0, len(pool) - count - step + 1, step):
        began = time.process_time()
        way.delete(np.arange(first, first + step))
        way.insert(np.arange(first + count, first + count + step), pool[first + count : first + count + step])
        way.settle()
        busy += time.process_time() - began
        said.append(_recall(way, pool[first + step : first + step + count], first + step, held, effort))
    del way
    last, anew = len(said) * step - step, _way(name, folder)
    with tempfile.TemporaryDirectory(dir=folder) as other:
        np.save(f"{other}/vectors.npy", pool[last : last + count])
        anew.build(other, pool[last : last + count])
        anew.open(other)
        fresh = _recall(anew, pool[last : last + count], last, held, effort, moved=last)
        del anew
    return {"effort": effort, "recall": said, "anew": fresh, "cost": busy / (len(said) - 1) / step * 1000}


def _recall(
    way: Way, rows: NDArray[np.float32], first: int, held: NDArray[np.float32], effort: int, moved: int = 0
) -> float:
    """Recall@10 of the queries between the live rows; row ``i`` of the index is ``i + moved`` of the pool."""
    between = held[first // (HELD - 1) : (first + len(rows)) // (HELD - 1)]
    nearest = truth(rows, between) + first - moved
    return recall_of((np.asarray(way.search(one[None], effort)) for one in between), nearest)


def merge(name: str, folder: str) -> dict[str, float]:
    """Our merge of what the inserts left, beside reading it and writing and syncing the same bytes once."""
    del name
    import duckdb  # noqa: PLC0415 - only here

    from memwal_ops.formats.lm_diskann.library import Index  # noqa: PLC0415

    path = f"{folder}/vectors.lmd"
    with Index(path) as index:  # batches that are small enough not to go straight into the graph
        fresh, first = _loaded(folder, "fresh"), len(_loaded(folder, "vectors")) + FRESH
        for at in range(0, len(fresh) // 4, 10):
            index.insert(np.arange(first + at, first + at + 10), fresh[at : at + 10])
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
    assert merged == count > 0
    return {"blocks": count, "mib": size / 2**20, "floor": floor, "ours": took, "memory": _rss() - idle}


CHILDREN = {"warm": warm, "build": build, "search": search, "change": change, "churn": churn, "merge": merge}


class LeftOutError(Exception):
    """A library that did not do it, and why."""


def child(what: str, name: str, folder: str) -> Any:
    """Do it in a process of its own, with the packages that the library needs.

    Raises:
        LeftOutError: it failed.
    """
    environment = {**os.environ, "RUST_LOG": "off", **dict.fromkeys(_THREADS, "1")}
    if WAYS[name].apart:
        environment["PYTHONPATH"] = os.pathsep.join([str(BESIDE / WAYS[name].apart), os.environ.get("PYTHONPATH", ".")])
    command = [sys.executable, "-m", "benchmarks.lm_diskann", "--child", what, name, folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=_HOUR)
    except subprocess.TimeoutExpired:
        raise LeftOutError(f"{name}: {what} did not end within an hour.") from None
    if done.returncode:
        raise LeftOutError(f"{name}: {what} failed: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


# -- the tables


def compare(folder: str, kind: str, arrays: Arrays, ways: list[str]) -> dict[str, list[tuple[float, float]]]:
    """All libraries on one set of vectors; recall and queries per CPU second by library."""
    rows, dimension = arrays.vectors.shape
    for name in ("vectors", "queries", "truth", "fresh"):
        np.save(f"{folder}/{name}.npy", getattr(arrays, name))
    print(f"\n## {rows:,} x {dimension}, {kind}")
    head("index", "version", "build, CPU s", "at", "recall@10", "queries per CPU second", f"{QUERIES} in one call",
         "memory, MiB", "disk, MiB")  # fmt: skip
    blocks, curves, built = "", {}, []
    for name in ways:
        try:
            made, curve = child("build", name, folder), child("search", name, folder)["curve"]
        except LeftOutError as error:
            print(f"{error}", file=sys.stderr)
            continue
        built.append(name)
        curves[name] = [(one["recall"], one["rate"]) for one in curve]
        found = next((one for one in curve if one["recall"] >= ENOUGH), curve[-1])
        batch = "" if found["batch"] is None else f"{found['batch']:,.0f}"
        row(name, made["version"], f"{made['cpu']:.1f}", f"{WAYS[name].effort} = {found['effort']}",
            f"{found['recall']:.3f}", f"{found['rate']:,.0f}", batch, f"{found['memory']:,.0f}",
            f"{made['disk']:,.0f}")  # fmt: skip
        if "blocks" in found:
            blocks = f"Blocks per query: {found['blocks']:.0f} asked for, {found['read']:.0f} read from the file. "
            blocks += f"An empty index takes {found['bare']:.0f} MiB: compiled code, and LLVM, which loads it."
    print(f"\n{blocks}")
    head("index", "inserts per CPU second, 1,000 at once", "10 at once", "deletes per CPU second", "updates",
         "upkeep, CPU ms per deleted row")  # fmt: skip
    for name in built:
        try:
            said = child("change", name, folder)
        except LeftOutError as error:
            print(f"{error}", file=sys.stderr)
            continue
        row(name, *(_number(said.get(one)) for one in ("many", "few", "delete", "update")),
            f"{said['settle']:.2f}" if "settle" in said else "")  # fmt: skip
    if "memwal-ops" in built:
        said = child("merge", "memwal-ops", folder)
        head("merge of", "floor", "ours", "ours / floor", "memory, MiB")
        row(f"{said['blocks']:,} blocks, {said['mib']:.0f} MiB", f"{said['floor']:.2f} s", f"{said['ours']:.2f} s",
            f"**{said['ours'] / said['floor']:.2f}**", f"{said['memory']:.0f}")  # fmt: skip
    return curves


def _number(found: float | None) -> str:
    return "" if found is None else f"{found:,.0f}"


def churned(kind: str, vectors: NDArray[np.float32], ways: list[str]) -> dict[str, list[float]]:
    """All libraries through the rounds; recall per round by library."""
    if kind == "drift":
        centres = vectors[np.random.default_rng(5).choice(len(vectors), GROUPS, replace=False)]
        group = np.argmin((centres**2).sum(1)[None] - 2 * vectors @ centres.T, axis=1)
        vectors = vectors[np.argsort(group, kind="stable")]
    among = np.arange(len(vectors)) % HELD == HELD - 1
    pool, held = vectors[~among], vectors[among]
    count = len(pool) // 3 // SHARE * SHARE
    rounds, curves = 2 * SHARE, {}
    pool = pool[: count + rounds * count // SHARE]
    print(f"\n## Churn, {kind}: {rounds} rounds, a tenth of {count:,} x {pool.shape[1]} each")
    head("index", "at", "recall@10 before", f"after {rounds // 2}", f"after {rounds}", "least", "built anew",
         "CPU ms per replaced row")  # fmt: skip
    for name in ways:
        with tempfile.TemporaryDirectory() as folder:
            for what, array in (("vectors", pool[:count]), ("pool", pool), ("held", held)):
                np.save(f"{folder}/{what}.npy", array)
            try:
                said = child("churn", name, folder)
            except LeftOutError as error:
                if "NotImplementedError" not in str(error):
                    print(f"{error}", file=sys.stderr)
                continue
        recall = curves[name] = said["recall"]
        row(name, f"{WAYS[name].effort} = {said['effort']}", f"{recall[0]:.3f}", f"{recall[rounds // 2]:.3f}",
            f"{recall[-1]:.3f}", f"{min(recall):.3f}", f"{said['anew']:.3f}", f"{said['cost']:.2f}")  # fmt: skip
    return curves


# -- the vectors


class Arrays:
    """Vectors to build of, queries, the rows nearest to them, and vectors to insert."""

    def __init__(self, vectors: NDArray[np.float32], queries: NDArray[np.float32], fresh: NDArray[np.float32]) -> None:
        """With the truth of these."""
        self.vectors, self.queries, self.fresh = vectors, queries, fresh
        self.truth = truth(vectors, queries)


def made(kind: str, rows: int) -> Arrays:
    """Synthetic vectors."""
    random = np.random.default_rng(3)
    return Arrays(DATA[kind](random, rows), DATA[kind](random, QUERIES), DATA[kind](random, FRESH))


def split(found: Vectors, rows: int | None) -> Arrays:
    """Vectors of real data: without queries of their own, the last are these; those before are inserted.

    Raises:
        VectorFileError: they are too few, or the file's neighbours are not the nearest.
    """
    base, queries = found.base, found.queries
    if queries is not None and queries.shape[1] != base.shape[1]:
        raise VectorFileError(f"Queries have {queries.shape[1]} values, vectors {base.shape[1]}.")
    rest = FRESH if queries is not None else FRESH + QUERIES
    base = base if rows is None else base[: rows + rest]
    if len(base) < 2 * rest:
        raise VectorFileError(f"{len(base):,} vectors are too few: at least {2 * rest:,} are needed.")
    if queries is None:
        return Arrays(base[:-rest], base[-QUERIES:], base[-rest:-QUERIES])
    if found.nearest is not None and len(base) == len(found.base):
        _compare(base, queries[:QUERIES], found.nearest)
    return Arrays(base[:-FRESH], queries[:QUERIES], base[-FRESH:])


def _compare(base: NDArray[np.float32], queries: NDArray[np.float32], nearest: NDArray[np.int64]) -> None:
    """The file's neighbours are those that are nearest here, or the recall of another distance would be printed."""
    if len(nearest) < len(queries) or nearest.shape[1] < K:
        raise VectorFileError(f"There are {nearest.shape[1]} neighbours of {len(nearest)} queries: too few.")
    same = recall_of(list(truth(base, queries)), nearest[: len(queries), :K])
    if same < 0.99:  # noqa: PLR2004 - ties
        raise VectorFileError(f"Only {same:.0%} of the neighbours in the file are nearest: these are other vectors.")


def from_files(vectors: str, queries: str | None, nearest: str | None, rows: int | None) -> Arrays:
    """Vectors of files.

    Raises:
        VectorFileError: one is damaged, or they do not belong together.
    """
    whole = nearest is not None
    found = read(vectors, None if whole or rows is None else rows + FRESH + QUERIES)
    if queries is not None:
        given = None if nearest is None else records(nearest).astype(np.int64)
        found = Vectors(found.base, read(queries).base, given)
    elif whole:
        raise VectorFileError("--nearest is of --queries, which are not given.")
    return split(found, rows)


def _installed(wanted: list[str]) -> Iterator[str]:
    for name in wanted:
        library = WAYS[name]
        there = (BESIDE / library.apart / library.module).is_dir() if library.apart else False
        if there or find_spec(library.module) is not None:
            yield name
        else:
            print(f"{name}: {library.package} is not installed, left out.", file=sys.stderr)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000])
    parser.add_argument("--data", nargs="+", default=[*DATA], choices=[*DATA, "glosses"])
    parser.add_argument("--vectors", metavar="FILE", help=".fvecs, .bvecs, .fbin, .npy, .parquet or .hdf5, no --data")
    parser.add_argument("--queries", metavar="FILE", help="the queries of --vectors")
    parser.add_argument("--nearest", metavar="FILE", help="an .ivecs file: the rows nearest to --queries; compared")
    parser.add_argument("--wordnet", metavar="DIR", default=WORDNET, help="its glosses are embedded")
    parser.add_argument("--ways", nargs="+", choices=[*WAYS], default=[*WAYS])
    parser.add_argument("--churn", type=int, default=0, metavar="N", help="also rounds of churn, of N of the vectors")
    parser.add_argument("--charts", metavar="DIR", help="write the charts of the last data there")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.child:
        what, name, folder = told.child
        print(json.dumps(CHILDREN[what](name, folder)))
        return
    ways = [*_installed(told.ways)]
    if "memwal-ops" in ways:
        with tempfile.TemporaryDirectory() as folder:
            child("warm", "memwal-ops", folder)
    print(f"Python {platform.python_version()}, numpy {np.__version__}, numba {version('numba')}.")
    try:
        for kind, arrays in _data(told):
            measure(kind, arrays, ways, told)
    except VectorFileError as error:
        parser.error(str(error))


def _data(told: argparse.Namespace) -> Iterator[tuple[str, Arrays]]:
    if told.vectors:
        yield os.path.basename(told.vectors), from_files(told.vectors, told.queries, told.nearest, told.rows[0])
        return
    for rows in told.rows:
        for kind in told.data:
            if kind == "glosses":
                yield kind, split(Vectors(glosses(rows + FRESH + QUERIES, told.wordnet)), rows)
            else:
                yield kind, made(kind, rows)


def measure(kind: str, arrays: Arrays, ways: list[str], told: argparse.Namespace) -> None:
    """All tables of one set of vectors, and its charts."""
    from benchmarks.charts import curve_chart, rounds_chart  # noqa: PLC0415 - not in the processes that are measured

    with tempfile.TemporaryDirectory() as folder:
        curves = compare(folder, kind, arrays, ways)
    if told.charts:
        Path(told.charts, "vectors-recall.svg").write_bytes(curve_chart(curves))
    if not told.churn:
        return
    for what in ("still", "drift"):
        recall = churned(what, arrays.vectors[: told.churn], [name for name in ways if name in curves])
        if told.charts:
            Path(told.charts, f"vectors-churn-{what}.svg").write_bytes(rounds_chart(recall))


if __name__ == "__main__":
    main()
