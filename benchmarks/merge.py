"""The merge against today's way and against the floor: ``python -m benchmarks.merge`` (``make bench``).

Every figure is taken from the same table copied anew, each way in a process of its own, the ways in
turn, so that a slow moment of the machine meets all of them. Ratios are what counts; the absolute
seconds belong to the machine. Prints a Markdown page, which ``benchmarks/README.md`` is made of.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.workload import Shape, make

_MIB = 1 << 20


def run(way: str, template: Path, *arguments: str) -> dict[str, Any]:
    """One way on a fresh copy of the template."""
    with tempfile.TemporaryDirectory(dir=template.parent) as folder:
        copy = Path(folder) / "t.lance"
        shutil.copytree(template, copy)
        os.sync()  # the copy's dirty pages are not the work's
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.ways", way, str(copy), *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(template: Path, runs: int) -> dict[str, dict[str, Any]]:
    """Median seconds and largest peak of each way over ``runs`` rounds (today's way: one round)."""
    rounds: dict[str, list[dict[str, Any]]] = {"ours": [], "floor": [], "today": []}
    for number in range(runs + 1):
        for way in ("floor", "ours"):
            result = run(way, template)
            if number:  # the first round warms the page cache
                rounds[way].append(result)
    rounds["today"].append(run("today", template))
    return {
        way: {
            "seconds": statistics.median(one["seconds"] for one in results),
            "peak_mib": max(one["peak_mib"] for one in results),
            "phases": results[-1].get("phases"),
        }
        for way, results in rounds.items()
    }


def table_line(label: str, result: dict[str, dict[str, Any]]) -> str:
    """One Markdown row."""
    ours, floor, today = result["ours"], result["floor"], result["today"]
    return (
        f"| {label} | {floor['seconds']:.2f} s | {ours['seconds']:.2f} s | {today['seconds']:.2f} s | "
        f"**{ours['seconds'] / floor['seconds']:.2f}** | **{today['seconds'] / ours['seconds']:.1f}** | "
        f"{ours['peak_mib']:.0f} MiB | {today['peak_mib']:.0f} MiB |"
    )


HEAD = (
    "| workload | floor | memwal-ops | today | ours / floor | today / ours | our peak | today's peak |\n"
    "|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Make the tables, run the ways, print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a small workload, to see that it runs")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to make the tables (some GB)")
    arguments = parser.parse_args()
    short = arguments.short
    rows, base = (500, 20_000) if short else (20_000, 2_000_000)
    rounds = 1 if short else 3
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        at = Path(folder)
        shape = Shape(base=base, generations=2 if short else 10, rows=rows)
        print(f"## Speed: {shape}\n\n{HEAD}")
        half = Shape(base=base // 2, generations=1 if short else 5, rows=rows)
        measured(at, f"half: {half}", half, arguments.runs)
        phases = measured(at, "the workload", shape, arguments.runs)
        print(f"\nPhases of the last run, seconds: `{json.dumps(phases)}`")

        print(f"\n## Growth with generations ({base:,} base rows, {rows:,} rows a generation)\n\n{HEAD}")
        for regions, generations in ((1, 1), (2, 1)) if short else ((2, 5), (4, 10), (4, 40)):
            shape = Shape(base=base, regions=regions, generations=generations, rows=rows)
            measured(at, f"{regions * generations} generations", shape, rounds)

        print(f"\n## Growth with the base (40 generations of {rows:,})\n\n{HEAD}")
        for size in (2_000, 20_000) if short else (200_000, 2_000_000, 8_000_000):
            shape = Shape(base=size, generations=1 if short else 10, rows=rows)
            measured(at, f"{size:,} base rows", shape, rounds)

        print("\n## Memory with `--max-bytes 64MiB` (one region)\n\n| backlog | passes | peak |\n|---|---|---|")
        for generations in (1, 3) if short else (10, 100):
            shape = Shape(base=base // 10, regions=1, generations=generations, rows=rows)
            make(str(at / "t.lance"), shape)
            results = [run("ours", at / "t.lance", str(64 * _MIB)) for _ in range(rounds)]
            peak = sorted(one["peak_mib"] for one in results)[rounds // 2]
            print(f"| {generations} generations of {rows:,} rows | {results[0]['passes']} | {peak:.0f} MiB |")
            shutil.rmtree(at / "t.lance")


def measured(at: Path, label: str, shape: Shape, runs: int) -> Any:
    """Make the table, print its row, remove it; the phases of our last run."""
    make(str(at / "t.lance"), shape)
    result = compare(at / "t.lance", runs)
    print(table_line(label, result), flush=True)
    shutil.rmtree(at / "t.lance")
    return result["ours"]["phases"]


if __name__ == "__main__":
    main()
