"""The share of ``catchup`` that it spends on asking new index states: ``python -m benchmarks.guard`` (``--short``).

Narrow rows with a B-tree, a full-text and an IVF_PQ index; 1 % of them is appended, and caught up in a process of its
own. Counted is processor time, which other programs on the machine do not change much. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

import lance

from benchmarks.markdown import head, row
from benchmarks.plain import rows
from memwal_ops import run_job
from memwal_ops.formats.lance.jobs.catchup import update

_BATCH = 100_000


def make(uri: str, count: int) -> None:
    """A table of so many rows with its indexes, and 1 % of rows that they lack."""
    for first in range(0, count, _BATCH):
        mode = "append" if first else "create"
        lance.write_dataset(rows(first, min(_BATCH, count - first)), uri, mode=mode)
    dataset = lance.dataset(uri)
    dataset.create_scalar_index("id", "BTREE", name="by_id")
    dataset.create_scalar_index("text", "INVERTED", name="by_text")
    dataset.create_index("vector", "IVF_PQ", name="by_vector", num_partitions=max(8, count // 4096), num_sub_vectors=8)
    lance.write_dataset(rows(count, count // 100), uri, mode="append")


def child(uri: str) -> None:
    """Catch up, and print the processor seconds of the run, and of the guard in it, by index."""
    asking = vars(update)["compare_answers"]
    spent: dict[str, float] = {}

    def timed(table: Any, index: Any, *arguments: Any) -> Any:
        began = _cpu()
        compared = asking(table, index, *arguments)
        spent[index.type] = _cpu() - began
        return compared

    vars(update)["compare_answers"] = timed
    began = _cpu()
    report = run_job(uri, "catchup")
    whole = _cpu() - began
    assert report.decision == "caught_up", report.describe()
    print(json.dumps({"whole": whole, "guard": spent}))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """The table of benchmarks/README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="few rows, to see that it runs")
    parser.add_argument("--child", metavar="URI", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        print("## Asking before publishing: its share of catchup\n")
        head("rows", "catchup, CPU seconds", "of these asking", "BTREE", "INVERTED", "IVF_PQ")
        for count in (20_000,) if arguments.short else (200_000, 2_000_000):
            uri = f"{folder}/{count}.lance"
            make(uri, count)
            command = [sys.executable, "-m", "benchmarks.guard", "--child", uri]
            environment = {**os.environ, "RUST_LOG": "off"}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            found = json.loads(done.stdout)
            each = [f"{found['guard'][kind]:.2f}" for kind in ("BTree", "Inverted", "IVF_PQ")]
            share = sum(found["guard"].values()) / found["whole"]
            row(f"{count:,}", f"{found['whole']:.2f}", f"**{share:.1%}**", *each)


if __name__ == "__main__":
    main()
