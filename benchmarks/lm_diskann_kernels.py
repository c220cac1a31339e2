"""The compiled distances of index folders beside kernels with SIMD: ``python -m benchmarks.lm_diskann_kernels``.

All are called from one compiled loop, so that calls cost the same: a query against vectors that are in the processor's
cache, and against vectors in random order. Then what a search consists of. Prints Markdown.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from benchmarks.markdown import head, row
from benchmarks.vectors import clustered
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.kernels.distances import estimated, fill_table, squared
from memwal_ops.formats.lm_diskann.vectors import entry_points

if TYPE_CHECKING:
    from collections.abc import Callable

# The module, its function, and whether it stores a double: void f(const float *, const float *, uint64_t, double *).
KERNELS = {"simsimd": ("simsimd", "simsimd_l2sq_f32"), "numkong": ("numkong._numkong", "nk_sqeuclidean_f32")}
CACHED, TIMES = 2_000, 9  # vectors


@numba.njit(nogil=True)
def _ours(vectors: Any, order: Any, query: Any) -> float:
    total = 0.0
    for at in order:
        total += squared(vectors[at], query)
    return total


def _compiled(module: str, name: str) -> Callable[[Any, Any, Any], float]:
    """The loop of :func:`_ours` with a function of a shared library."""
    spec = find_spec(module)
    assert spec is not None
    kernel = getattr(ctypes.CDLL(str(spec.origin)), name)
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    kernel.restype = None

    @numba.njit(nogil=True)
    def loop(vectors: Any, order: Any, query: Any) -> float:
        total, out = 0.0, np.zeros(1)
        first, wide, to, result = vectors.ctypes.data, vectors.shape[1], query.ctypes.data, out.ctypes.data
        for at in order:
            kernel(first + at * wide * 4, to, wide, result)
            total += out[0]
        return total

    return loop  # type: ignore[no-any-return]


def _least(call: Callable[[], Any]) -> float:
    """CPU seconds, the least of nine."""
    call()
    took = []
    for _ in range(TIMES):
        began = time.process_time_ns()
        call()
        took.append((time.process_time_ns() - began) / 1e9)
    return min(took)


def distances(rows: int) -> None:
    """Nanoseconds per distance, and how many times as fast as ours."""
    random = np.random.default_rng(3)
    there = {name: where for name, where in KERNELS.items() if find_spec(where[0].split(".", maxsplit=1)[0])}
    loops = {"ours": _ours, **{name: _compiled(*where) for name, where in there.items()}}
    head("values", "vectors", *(f"{name}, ns" for name in loops), *(f"{name}: times as fast" for name in there))
    for dimension in (128, 384, 768):
        vectors = random.normal(size=(rows, dimension)).astype(np.float32)
        for what, count in (("in the cache", CACHED), ("in random order", rows)):
            order = np.arange(CACHED).repeat(rows // CACHED) if count == CACHED else random.permutation(rows)
            query, sums, spent = vectors[0], {}, {}
            for name, loop in loops.items():
                sums[name] = loop(vectors, order, query)
                spent[name] = _least(partial(loop, vectors, order, query)) / len(order) * 1e9
            assert np.allclose(list(sums.values()), sums["ours"], rtol=1e-4), sums
            row(dimension, what, *(f"{one:.1f}" for one in spent.values()),
                *(f"{spent['ours'] / spent[name]:.2f}" for name in there))  # fmt: skip


def searches(rows: int, effort: int) -> None:
    """What a search takes, and the shares of exact and estimated distances, and of the table, in it."""
    random = np.random.default_rng(3)
    vectors, queries = clustered(random, rows), clustered(random, 200)
    with tempfile.TemporaryDirectory() as base, lm_diskann.create(f"{base}/made.lmd", dimension=128) as index:
        index.insert(np.arange(rows), vectors)
        index.search(queries, k=10, L=effort)
        before = int(index.view.counts[3])
        whole = _least(lambda: index.search(queries, k=10, L=effort)) / len(queries)
        read = (int(index.view.counts[3]) - before) / len(queries) / (TIMES + 1)
        book, links = index.view.book, index.parameters.links
        starts = entry_points(rows)
        table = np.empty((index.parameters.layout.code_bytes, 256), np.float32)
        filled = _least(lambda: _fill(book, queries, table)) / len(queries)
        codes = random.integers(0, 256, (5_000, table.shape[0]), np.uint8)
        code = _least(lambda: _estimate(table, codes)) / len(codes)
        one = _least(lambda: _ours(vectors, np.arange(5_000), queries[0])) / 5_000
    print(f"\nA search of {rows:,} x 128 at L = {effort}: {whole * 1e6:.0f} CPU us, {read:.0f} blocks.")
    head("part", "share of the search at most")
    row(f"exact distances of {read:.0f} blocks", f"{read * one / whole:.0%}")
    row(f"exact distances to {starts} entry points", f"{starts * one / whole:.0%}")
    row(f"estimated distances of {links} links per block", f"{read * links * code / whole:.0%}")
    row("table of the query", f"{filled / whole:.0%}")


@numba.njit(nogil=True)
def _fill(book: Any, queries: Any, table: Any) -> float:
    total = 0.0
    for at in range(queries.shape[0]):
        total += fill_table(book, queries[at], table)
    return total


@numba.njit(nogil=True)
def _estimate(table: Any, codes: Any) -> float:
    total = 0.0
    for at in range(codes.shape[0]):
        total += estimated(table, np.float32(0), codes[at])
    return total


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--effort", type=int, default=50, metavar="L")
    told = parser.parse_args()
    names = ["numba", *(name for name in KERNELS if find_spec(name))]
    print(f"\n## Distances: {', '.join(f'{name} {version(name)}' for name in names)}")
    distances(told.rows)
    searches(told.rows, told.effort)


if __name__ == "__main__":
    main()
