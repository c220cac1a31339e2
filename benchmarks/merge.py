"""The merge against today's way and against the floor: ``python -m benchmarks.merge`` (``make bench``).

Every figure is taken from the same table copied anew, each way in a process of its own, the ways in
turn, so that a slow moment of the machine meets all of them. Ratios are what counts; the absolute
seconds belong to the machine. Prints a Markdown page, which ``benchmarks/README.md`` is made of.
"""

from __future__ import annotations

import argparse
import json
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
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.ways", way, str(copy), *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(template: Path, runs: int, *, slow: bool = True) -> dict[str, dict[str, Any]]:
    """Median seconds and largest peak of each way over ``runs`` rounds (today's way: one round)."""
    rounds: dict[str, list[dict[str, Any]]] = {"ours": [], "floor": [], "today": []}
    for number in range(runs + 1):
        for way in ("floor", "ours"):
            result = run(way, template)
            if number:  # the first round warms the page cache
                rounds[way].append(result)
    if slow:
        rounds["today"].append(run("today", template))
    return {
        way: {
            "seconds": statistics.median(one["seconds"] for one in results),
            "peak_mib": max(one["peak_mib"] for one in results),
            "phases": results[-1].get("phases"),
        }
        for way, results in rounds.items()
        if results
    }


def table_line(label: str, result: dict[str, dict[str, Any]]) -> str:
    """One Markdown row; today's way is left out where it would take too long."""
    ours, floor, today = result["ours"], result["floor"], result.get("today")
    seconds = ratio = peak = ""
    if today is not None:
        seconds, peak = f"{today['seconds']:.2f} s", f"{today['peak_mib']:.0f} MiB"
        ratio = f"**{today['seconds'] / ours['seconds']:.1f}**"
    return (
        f"| {label} | {floor['seconds']:.2f} s | {ours['seconds']:.2f} s | {seconds} | "
        f"**{ours['seconds'] / floor['seconds']:.2f}** | {ratio} | {ours['peak_mib']:.0f} MiB | {peak} |"
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
    bases: tuple[int, ...]
    if arguments.short:
        base, bases, rows, counts, backlogs = 20_000, (2_000, 20_000), 500, (1, 2), (1, 3)
    else:
        base, bases, rows, counts, backlogs = 2_000_000, (200_000, 2_000_000, 8_000_000), 20_000, (10, 40), (10, 100)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        at = Path(folder)
        main_shape = Shape(base=base, rows=rows)
        print(f"## Speed: {main_shape}\n\n{HEAD}")
        make(str(at / "main.lance"), main_shape)
        result = compare(at / "main.lance", arguments.runs)
        print(table_line("the issue's workload", result))
        print(f"\nPhases of the last run, seconds: `{json.dumps(result['ours']['phases'])}`")

        print(f"\n## Growth with generations (4 regions, {base:,} base rows)\n\n{HEAD}")
        for count in (counts[0] // 4 or 1, *counts):
            shape = Shape(base=base, generations=count, rows=rows)
            make(str(at / f"g{count}.lance"), shape)
            print(table_line(f"{4 * count} generations", compare(at / f"g{count}.lance", 3, slow=count <= counts[0])))
            shutil.rmtree(at / f"g{count}.lance")

        print(f"\n## Growth with the base (40 generations of {rows:,})\n\n{HEAD}")
        for size in bases:
            make(str(at / f"b{size}.lance"), Shape(base=size, rows=rows))
            print(table_line(f"{size:,} base rows", compare(at / f"b{size}.lance", 3, slow=size <= base)))
            shutil.rmtree(at / f"b{size}.lance")

        print("\n## Memory with `--max-bytes 64MiB` (one region)\n\n| backlog | passes | peak |\n|---|---|---|")
        for count in backlogs:
            make(str(at / f"m{count}.lance"), Shape(base=base // 10, regions=1, generations=count, rows=rows))
            one = run("ours", at / f"m{count}.lance", str(64 * _MIB))
            print(f"| {count} generations of {rows:,} rows | {one['passes']} | {one['peak_mib']:.0f} MiB |")
            shutil.rmtree(at / f"m{count}.lance")


if __name__ == "__main__":
    main()
