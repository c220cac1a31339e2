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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import lance
import pyarrow as pa
from packaging.version import Version

from benchmarks import gc, merge, plain, requests, snapshot, verify, zeppelin
from benchmarks.markdown import head, row
from benchmarks.server import BUCKET, counting_server
from benchmarks.workload import Shape, make
from memwal_ops import run_job
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


class Figure(NamedTuple):
    """What is measured: ours beside another way, or, with None, alone; ``unit`` of both."""

    name: str
    ours: float
    other: float | None = None
    unit: str = "s"

    @property
    def value(self) -> float:
        """The ratio, or ours alone."""
        return round(self.ours if self.other is None else self.ours / self.other, 3)


def of_requests() -> Iterator[Figure]:
    """Requests of jobs on every kind of table that is kept in a store: the fewest of some rounds."""
    rounds = [dict(_requests()) for _ in range(_ROUNDS)]
    yield from (Figure(f"{_REQUESTS}{name}", min(one[name] for one in rounds), unit="") for name in rounds[0])


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


def of_merges() -> Iterator[Figure]:
    """A merge against reading its input and writing its output once, and against what users write."""
    for name, shape in (
        ("merge", Shape(base=500_000, regions=4, generations=5, rows=10_000)),
        ("merge of 380,000 rows onto 1M", Shape(base=1_000_000, regions=4, generations=5, rows=19_000)),
    ):
        with _folder() as folder:
            table = Path(folder, "t.lance")
            make(str(table), shape)
            best = _best(partial(_merged, table), ("floor", "ours", "today"), ("cpu", "peak_mib"))
        yield Figure(f"{name} / floor: processor", best["ours", "cpu"], best["floor", "cpu"])
        yield Figure(f"{name} / floor: peak memory", best["ours", "peak_mib"], best["floor", "peak_mib"], "MiB")
        yield Figure(f"{name} / merge_insert: processor", best["ours", "cpu"], best["today", "cpu"])


def _merged(table: Path, way: str) -> Mapping[str, float]:
    return merge.run(way, table)


def of_plain_tables() -> Iterator[Figure]:
    """``maintain --apply`` against the script that users write."""
    with _folder() as folder:
        table = f"{folder}/t.lance"
        plain.make(table, fragments=200, versions=100)
        time.sleep(plain.OLDER_THAN.total_seconds() + 1)

        def run(way: str) -> Mapping[str, float]:
            found = plain.in_child(way, shutil.copytree(table, f"{folder}/copy.lance"))
            shutil.rmtree(f"{folder}/copy.lance")
            assert not found["failed"], found
            return found

        best = _best(run, ("script", "ours"), ("cpu", "peak", "written"))
    for figure, name, unit in (
        ("cpu", "processor", "s"),
        ("peak", "peak memory", "B"),
        ("written", "written bytes", "B"),
    ):
        yield Figure(f"maintain of a plain table / script: {name}", best["ours", figure], best["script", figure], unit)


_IMPORT = "import lance"
_COMPACTS = "import lance, sys; lance.dataset(sys.argv[1]).optimize.compact_files()"
_CLEANS = "import lance, sys, datetime; lance.dataset(sys.argv[1]).cleanup_old_versions(datetime.timedelta(0))"
_EXPIRES = ("expire", "--apply", "--older-than", "0s", "--allow-unsafe")


def of_commands() -> Iterator[Figure]:
    """Whole commands against importing pylance: also where there is nothing to do."""
    with _folder() as folder:
        nothing, small, log = (f"{folder}/{name}.lance" for name in ("nothing", "small", "log"))
        lance.write_dataset(pa.table({"id": range(100)}), nothing)
        _fragments(small, 20, 400, indexed=True)
        make(log, Shape(base=20_000, regions=1, generations=1, rows=1_000))
        ours: dict[str, tuple[str, ...]] = {
            "merge --help": ("merge", "--help"),
            "--version": ("--version",),
            **{f"{job} (nothing to do)": (job, nothing) for job in ("inspect", "compact", "expire")},
            "compact of 20 fragments with a BTREE": ("compact", small),
            "maintain of 20 fragments with a BTREE": ("maintain", small, "--apply"),
            "maintain of a table with a log": ("maintain", log, "--apply"),
        }
        ways = {name: ["-m", "memwal_ops", *command] for name, command in ours.items()}
        best = _commands(ways | {_IMPORT: ["-c", _IMPORT], _COMPACTS: ["-c", _COMPACTS, small]})
    yield from (Figure(f"{name} / import lance: processor", best[name], best[_IMPORT]) for name in ours)
    name = "compact of 20 fragments with a BTREE"
    yield Figure(f"{name} / compact_files: processor", best[name], best[_COMPACTS])


def of_large_tables() -> Iterator[Figure]:
    """Whole commands against pylance's functions, on tables that have many of something."""
    with _folder() as folder:
        for count in (1_000, 3_000):
            uri = f"{folder}/{count}.lance"
            for number in range(count):
                dataset = lance.write_dataset(pa.table({"id": range(50)}), uri, mode="append" if number else "create")
                if number % 50 == 0:
                    dataset.optimize.compact_files()
            yield _beside(f"expire of {count:,} versions / cleanup_old_versions", _EXPIRES, _CLEANS, uri)
        _fragments(f"{folder}/fragments.lance", 5_000, 200)
        _fragments(f"{folder}/columns.lance", 20, 200, columns=1_500)
        for name, file in (("5,000 fragments of 200 rows", "fragments"), ("1,500 columns", "columns")):
            yield _beside(f"compact of {name} / compact_files", ("compact",), _COMPACTS, f"{folder}/{file}.lance")


def _beside(name: str, command: tuple[str, ...], theirs: str, uri: str) -> Figure:
    job, *options = command
    best = _commands({"ours": ["-m", "memwal_ops", job, uri, *options], "theirs": ["-c", theirs, uri]})
    return Figure(f"{name}: processor", best["ours"], best["theirs"])


def of_answers() -> Iterator[Figure]:
    """What asking the indexes adds to a compaction and a run without work to opening a table, in this process."""
    with _folder() as folder:
        made, uri = f"{folder}/made.lance", f"{folder}/t.lance"
        _fragments(made, 20, 400, indexed=True)

        def run(answers: str) -> Mapping[str, float]:
            shutil.rmtree(uri, ignore_errors=True)
            shutil.copytree(made, uri)
            return {"cpu": _used(lambda: run_job(uri, "compact", answers=answers))}

        best = _best(run, ("sample", "off"), ("cpu",))
        idle = {
            "ours": lambda: run_job(made, "expire", older_than="7d"),
            "theirs": lambda: lance.dataset(made).versions(),
        }
        none = _best(lambda way: {"cpu": _used(idle[way])}, ("ours", "theirs"), ("cpu",))
    yield Figure(
        "compact of 8,000 rows, its index asked / not asked: processor", best["sample", "cpu"], best["off", "cpu"]
    )
    yield Figure(
        "expire without work, in a process / versions(): processor", none["ours", "cpu"], none["theirs", "cpu"]
    )


def _fragments(uri: str, count: int, rows: int, *, indexed: bool = False, columns: int = 1) -> None:
    """A table of fragments, indexed by its id."""
    ids = pa.array(range(count * rows))
    table = pa.table({"id": ids, **{f"c{number}": ids for number in range(1, columns)}})
    lance.write_dataset(table, uri, max_rows_per_file=rows, max_rows_per_group=rows)
    if indexed:
        lance.dataset(uri).create_scalar_index("id", "BTREE")


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="memwal-ops-")


def _used(act: Callable[[], object]) -> float:
    before = time.process_time()
    act()
    return time.process_time() - before


def _best(
    run: Callable[[str], Mapping[str, float]], ways: tuple[str, ...], figures: tuple[str, ...]
) -> dict[tuple[str, str], float]:
    """The least of each figure over some rounds, in which the ways run in turn: the least disturbed run."""
    rounds = [(way, run(way)) for _ in range(_RUNS) for way in ways]
    return {(way, one): min(found[one] for name, found in rounds if name == way) for way in ways for one in figures}


def _commands(ways: Mapping[str, list[str]]) -> dict[str, float]:
    """Processor seconds of each command of Python, each time on a fresh copy of the table that it names."""
    with _folder() as folder:

        def run(way: str) -> Mapping[str, float]:
            shutil.rmtree(folder, ignore_errors=True)
            copied = [shutil.copytree(one, f"{folder}/t.lance") if one.endswith(".lance") else one for one in ways[way]]
            return {"cpu": _processor_seconds([sys.executable, *copied])}

        best = _best(run, tuple(ways), ("cpu",))
        Path(folder).mkdir(exist_ok=True)
    return {way: best[way, "cpu"] for way in ways}


def _processor_seconds(command: list[str]) -> float:
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


SOURCES: tuple[Callable[[], Iterator[Figure]], ...] = (
    of_commands,
    of_large_tables,
    of_merges,
    of_plain_tables,
    of_answers,
    of_requests,
)


def measure() -> dict[str, float]:
    """All figures, by name; those beside another way are printed with what both took."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiled once, as where it is installed
    found = []
    head("ours / theirs, or the floor", "ours", "theirs", "ratio")
    for figure in (figure for source in SOURCES for figure in source()):
        found.append(figure)
        if figure.other is not None:
            row(
                figure.name,
                *(f"{one:,.3g} {figure.unit}" for one in (figure.ours, figure.other)),
                f"**{figure.value:.2f}**",
            )
            sys.stdout.flush()
    print()
    return {figure.name: figure.value for figure in found}


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
