"""What a search of an index folder on S3 by ranged reads would cost: ``python -m benchmarks.lm_diskann_s3``.

The graph is an object on a server on the loopback interface; each block that a search visits is a GET of its range,
counted there. Then the same searches by local reads: 1 to 8 blocks at a time, where a round cannot begin before the
one before has ended; and reads of 64 KiB and 1 MiB, each kept for the rest of the query, in the order of the file and
in one in which neighbours in the graph are near each other. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any, BinaryIO

import boto3
import numpy as np

from benchmarks.markdown import head, row
from benchmarks.server import BUCKET, counting_server
from benchmarks.vectors import K, clustered, recall_of, truth
from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann.kernels.distances import estimated, fill_table
from memwal_ops.formats.lm_diskann.kernels.reading import LINKS, ROW, VECTOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from memwal_ops.formats.lm_diskann.library import Index

WIDTHS, READS, ON_S3 = (1, 4, 8), (64 << 10, 1 << 20), 3


def search(
    index: Index, query: NDArray[np.float32], limit: int, width: int, get: Callable[[int], bytes]
) -> tuple[NDArray[np.int64], list[int], int]:
    """The nearest rows of a query, the nodes visited, and the rounds of requests."""
    lay, view = index.parameters.layout, index.view
    starts = view.starts(index.epoch)
    assert starts is not None
    table = np.empty((lay.code_bytes, 256), np.float32)
    rest = fill_table(view.book, query, table)
    far = ((starts.vectors - query) ** 2).sum(1)
    first = np.argsort(far)[: starts.most]
    found = {int(starts.nodes[at]): float(far[at]) for at in first}
    done: list[int] = []
    exact: dict[int, float] = {}
    rounds = 0
    while True:
        best = sorted(found, key=lambda node: found[node])[:limit]
        chosen = [node for node in best if node not in exact and node not in done][:width]
        if not chosen:
            break
        rounds += 1
        for node in chosen:
            done.append(node)
            block = np.frombuffer(get(node), np.uint8)
            vector = block.view("<f4")[VECTOR : VECTOR + lay.dimension]
            exact[int(block.view("<i8")[ROW])] = float(((vector - query) ** 2).sum())
            count = int(block.view("<u2")[LINKS])
            ids = block.view("<u4")[lay.at_ids // 4 :][:count].tolist()
            codes = block[lay.at_codes : lay.at_codes + count * lay.code_bytes].reshape(count, lay.code_bytes)
            for other, code in zip(ids, codes, strict=True):
                if other not in found:
                    found[other] = float(estimated(table, rest, code))
    return np.array(sorted(exact, key=lambda one: exact[one])[:K]), done, rounds


def near_each_other(index: Index, get: Callable[[int], bytes], nodes: int) -> NDArray[np.int64]:
    """A place for each node: from each that has none, its links that have none, breadth first."""
    lay, place, last = index.parameters.layout, np.full(nodes, -1, np.int64), 0
    for start in range(nodes):
        queue = [start]
        while queue and len(queue) < 64:  # noqa: PLR2004 - groups of about 1 MiB
            node = queue.pop(0)
            if place[node] >= 0:
                continue
            place[node], last = last, last + 1
            block = np.frombuffer(get(node), np.uint8)
            links = block.view("<u4")[lay.at_ids // 4 :][: int(block.view("<u2")[LINKS])].tolist()
            queue += [other for other in links[:8] if place[other] < 0]
    return place


def measure(index: Index, folder: str, vectors: NDArray[np.float32], queries: NDArray[np.float32], effort: int) -> None:
    """Print the count, and both tables."""
    size, slots = index.parameters.layout.block_size, index.view.source.slots
    nearest = truth(vectors, queries)
    with open(f"{folder}/graph.lmd", "rb") as graph:

        def local(node: int) -> bytes:
            graph.seek(int(slots[node]) * size)
            return graph.read(size)

        print(f"\n{_remote(index, graph, queries[:ON_S3], effort):.1f} GETs per query of the first {ON_S3}.")
        head("blocks at a time", "recall@10", "GETs per query", "KiB per query", "rounds per query")
        visited: list[list[int]] = []
        for width in WIDTHS:
            found = [search(index, query, effort, width, local) for query in queries]
            gets, rounds = float(np.mean([len(one[1]) for one in found])), float(np.mean([one[2] for one in found]))
            visited = visited or [one[1] for one in found]
            row(width, f"{recall_of((one[0] for one in found), nearest):.3f}", f"{gets:.0f}",
                f"{gets * size / 1024:,.0f}", f"{rounds:.0f}")  # fmt: skip
        orders = {"of the file": np.asarray(slots, np.int64)[: len(vectors)],
                  "neighbours together": near_each_other(index, local, len(vectors))}  # fmt: skip
        head("order of the blocks", "bytes of a read", "GETs per query", "KiB per query")
        for name, place in orders.items():
            for read in READS:
                gets = float(np.mean([len({int(place[node]) * size // read for node in one}) for one in visited]))
                row(name, f"{read // 1024:,} KiB", f"{gets:.0f}", f"{gets * read / 1024:,.0f}")


def _remote(index: Index, graph: BinaryIO, queries: NDArray[np.float32], effort: int) -> float:
    """GETs per query that the server counts."""
    size, slots = index.parameters.layout.block_size, index.view.source.slots
    with counting_server() as (options, counts):
        client: Any = boto3.client(
            "s3", endpoint_url=options["aws_endpoint"], region_name="us-east-1",
            aws_access_key_id=options["aws_access_key_id"], aws_secret_access_key=options["aws_secret_access_key"],
        )  # fmt: skip
        client.put_object(Bucket=BUCKET, Key="graph.lmd", Body=graph.read())

        def get(node: int) -> bytes:
            at = int(slots[node]) * size
            answer = client.get_object(Bucket=BUCKET, Key="graph.lmd", Range=f"bytes={at}-{at + size - 1}")
            return answer["Body"].read()  # type: ignore[no-any-return]

        before = counts["GET"]
        for query in queries:
            search(index, query, effort, 1, get)
        return (counts["GET"] - before) / len(queries)


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--effort", type=int, default=50, metavar="L")
    parser.add_argument("--searches", type=int, default=30)
    told = parser.parse_args()
    random = np.random.default_rng(3)
    vectors, queries = clustered(random, told.rows), clustered(random, told.searches)
    with tempfile.TemporaryDirectory() as base:
        with lm_diskann.create(f"{base}/made.lmd", dimension=128) as index:
            index.insert(np.arange(told.rows), vectors)
        with lm_diskann.open(f"{base}/made.lmd", read_only=True) as index:
            print(f"\n## On S3: {told.rows:,} x 128, L = {told.effort}, {told.searches} queries")
            measure(index, f"{base}/made.lmd", vectors, queries, told.effort)


if __name__ == "__main__":
    main()
