"""The figures of a release that the next one is compared with: ``python -m benchmarks.figures``.

They are few and small ones of the other benchmarks: requests at the S3 stand-in, and ratios of processor seconds, peak
memory and written bytes to another way that ran in turn with ours. So they belong to the code and not to the machine;
none is a time. The less, the better, of each. ``figures-RELEASE.json`` beside this file has those of each release.

``--out FILE`` keeps them; with ``--against FILE`` the exit code is 1 if one is worse there, by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import lance
import pyarrow as pa
from packaging.version import Version

from benchmarks import gc, merge, plain, requests, snapshot, verify, zeppelin
from benchmarks.markdown import head, row
from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops.formats.lance.layouts import REGION, SHARD
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

HERE = Path(__file__).resolve().parent
WORSE = 0.15
# Requests: one or two more or less are log entries, as the clocks of writers tick. They are counted in several rounds.
_TICKS = 2
_ROUNDS = 3
# A first snapshot makes 10 or 15 requests, as the clock of the writer ended the log.
_VARIES = "snapshot"
_RUNS = 5
_REQUESTS = "requests: "


def of_requests() -> Iterator[tuple[str, float]]:
    """Requests of jobs on every kind of table that is kept in a store: the fewest of some rounds."""
    rounds = [dict(_requests()) for _ in range(_ROUNDS)]
    yield from ((name, min(one[name] for one in rounds)) for name in rounds[0])


def _requests() -> Iterator[tuple[str, float]]:
    with counting_server() as (options, counts):
        for command, table in requests.measured(options, counts):
            if command != _VARIES:
                yield f"{command}, {table}", counts.total()
        for regions in (1, 5):
            for step in gc.steps(f"s3://{BUCKET}/gc-{regions}.lance", options, counts, regions):
                yield f"gc: {step.name}, {regions} regions", sum(step.requests.values())
        for layout in (SHARD, REGION):
            yield f"snapshot of 100 regions, {layout.name}", snapshot.requests_of(options, counts, 100, layout)[0]
        yield "verify, 3 regions x 4 generations", verify.requests_of(options, counts, 3, 4)[0]
        for fragments, clusters, _rows in zeppelin.compacted(options, counts, 4):
            yield f"zeppelin merge, {fragments} fragments, {clusters} clusters", counts.total()


def of_merges() -> Iterator[tuple[str, float]]:
    """A merge against reading its input and writing its output once."""
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        table = Path(folder, "t.lance")
        make(str(table), Shape(base=500_000, regions=4, generations=5, rows=10_000))
        best = _best(lambda way: merge.run(way, table), ("floor", "ours"), ("cpu", "peak_mib"))
    yield "merge / floor: processor", best["ours", "cpu"] / best["floor", "cpu"]
    yield "merge / floor: peak memory", best["ours", "peak_mib"] / best["floor", "peak_mib"]


def of_plain_tables() -> Iterator[tuple[str, float]]:
    """``maintain --apply`` against the script that users write."""
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        table = f"{folder}/t.lance"
        plain.make(table, fragments=200, versions=100)
        time.sleep(plain.OLDER_THAN.total_seconds() + 1)

        def run(way: str) -> Mapping[str, float]:
            found = plain.in_child(way, shutil.copytree(table, f"{folder}/copy.lance"))
            shutil.rmtree(f"{folder}/copy.lance")
            assert not found["failed"], found
            return found

        best = _best(run, ("script", "ours"), ("cpu", "peak", "written"))
    for figure, name in (("cpu", "processor"), ("peak", "peak memory"), ("written", "written bytes")):
        yield f"maintain of a plain table / script: {name}", best["ours", figure] / best["script", figure]


def of_commands() -> Iterator[tuple[str, float]]:
    """What a command takes before it works, against importing pylance: also where there is nothing to do."""
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        uri = f"{folder}/t.lance"
        lance.write_dataset(pa.table({"id": range(100)}), uri)
        commands = [["merge", "--help"], ["--version"], *([job, uri] for job in ("inspect", "compact", "expire"))]
        ways = {command[0]: ["-m", "memwal_ops", *command] for command in commands}
        ways["lance"] = ["-c", "import lance"]
        best = _best(lambda way: {"cpu": _processor_seconds([sys.executable, *ways[way]])}, tuple(ways), ("cpu",))
    for first, *rest in commands:
        name = " ".join([first, *rest]).replace(uri, "(nothing to do)")
        yield f"{name} / import lance: processor", best[first, "cpu"] / best["lance", "cpu"]


def of_expiry() -> Iterator[tuple[str, float]]:
    """Whole commands that delete 1,000 versions, against pylance's clean-up."""
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder:
        made, uri = f"{folder}/made.lance", f"{folder}/t.lance"
        rows = pa.table({"id": range(50)})
        for number in range(1_000):
            dataset = lance.write_dataset(rows, made, mode="append" if number else "create")
            if number % 50 == 0:
                dataset.optimize.compact_files()
        theirs = "import lance, sys, datetime; lance.dataset(sys.argv[1]).cleanup_old_versions(datetime.timedelta(0))"
        ways = {
            "theirs": ["-c", theirs, uri],
            "ours": ["-m", "memwal_ops", "expire", uri, "--apply", "--older-than", "0s", "--allow-unsafe"],
        }

        def run(way: str) -> Mapping[str, float]:
            shutil.rmtree(uri, ignore_errors=True)
            shutil.copytree(made, uri)
            found = {"cpu": _processor_seconds([sys.executable, *ways[way]])}
            assert len(lance.dataset(uri).versions()) == 1, way
            return found

        best = _best(run, tuple(ways), ("cpu",))
    yield "expire of 1,000 versions / cleanup_old_versions: processor", best["ours", "cpu"] / best["theirs", "cpu"]


def _best(
    run: Callable[[str], Mapping[str, float]], ways: tuple[str, ...], figures: tuple[str, ...]
) -> dict[tuple[str, str], float]:
    """The least of each figure over some rounds, in which the ways run in turn: the least disturbed run."""
    rounds = [(way, run(way)) for _ in range(_RUNS) for way in ways]
    return {(way, one): min(found[one] for name, found in rounds if name == way) for way in ways for one in figures}


def _processor_seconds(command: list[str]) -> float:
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


SOURCES: tuple[tuple[str, Callable[[], Iterator[tuple[str, float]]]], ...] = (
    (_REQUESTS, of_requests),
    ("", of_merges),
    ("", of_plain_tables),
    ("", of_commands),
    ("", of_expiry),
)


def measure() -> dict[str, float]:
    """All figures, by name."""
    return {f"{kind}{name}": round(value, 3) for kind, source in SOURCES for name, value in source()}


def regressions(then: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Name each figure that is worse than then by more than 15 %, or that is gone."""
    return [
        f"{name} {now[name] / old - 1:+.0%} ({old:g}, now {now[name]:g})" if name in now else f"{name} is not measured"
        for name, old in then.items()
        if name not in now or _is_worse(name, old, now[name])
    ]


def _is_worse(name: str, old: float, new: float) -> bool:
    least = _TICKS if name.startswith(_REQUESTS) else 0.0
    return new > old * (1 + WORSE) and new - old > least


def newest(folder: Path = HERE) -> Path:
    """The stored figures of the last release before this one; of this one, if it is the first."""
    found = {Version(path.stem.removeprefix("figures-")): path for path in folder.glob("figures-*.json")}
    this = Version(__version__)
    return found[max((one for one in found if one < this), default=this)]


def main() -> int:
    """Measure, print, keep, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the figures in this file")
    parser.add_argument("--against", help="a file of figures; 'release': those of the last release")
    given = parser.parse_args()
    then: dict[str, float] = {}
    if given.against:
        path = newest() if given.against == "release" else Path(given.against)
        then = json.loads(path.read_text())["figures"]
    now = measure()
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"release": __version__, "figures": now}, indent=1) + "\n")
    head("figure", "now", *(["then", "change"] if then else []))
    for name, value in now.items():
        old = then.get(name)
        row(
            name, f"{value:g}", *([f"{old:g}" if old else "", f"{value / old - 1:+.0%}" if old else ""] if then else [])
        )
    worse = regressions(then, now)
    if worse:
        print(f"worse by more than {WORSE:.0%}: {'; '.join(worse)}")
    elif then:
        print(f"\n{len(now)} figures, none worse by more than {WORSE:.0%} than those of {path.name}")
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
