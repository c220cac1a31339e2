"""A table's month in minutes: ``python -m benchmarks.life`` (``--short`` to see that it runs).

30 days of rounds of appends, replaced and deleted rows, each followed by maintenance in one of four ways: none, what
pylance's documentation advises once a day, LanceDB's ``optimize()`` in each round, and our jobs by the triggers and
schedules of the service. Each way has a table of its own, of the same rows, on a server that counts requests and bytes,
and a process of its own. Retention periods are as long as those days are here. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.life.chart import chart
from benchmarks.life.month import Month, Place, lancedb_process, live, own_process
from benchmarks.life.report import print_months
from benchmarks.life.shapes import SHAPES, SHORT, Shape
from benchmarks.life.store import counting_store
from tests.campaigns.clients.environments import NoEnvironmentError, python_of

if TYPE_CHECKING:
    from collections.abc import Sequence

RELEASE = "lancedb 0.40.0"
NOTHING, PYLANCE, LANCEDB, OURS = "nothing", "pylance, daily", "optimize(), each round", "memwal-ops"
DAYS, ROUNDS = 30, 12


def main(arguments: Sequence[str] | None = None) -> None:
    """All tables, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="small tables, three days, without lancedb")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"of a day  [default: {ROUNDS}; short: 2]")
    parser.add_argument("--days", type=int, metavar="N", help=f"of the month  [default: {DAYS}; short: 3]")
    names = sorted({shape.name for shape in (*SHAPES, *SHORT)})
    parser.add_argument("--only", action="append", choices=names, help="only this table (repeatable)")
    every = [NOTHING, PYLANCE, LANCEDB, OURS]
    parser.add_argument("--way", action="append", choices=every, help="only this way (repeatable)")
    parser.add_argument("--lancedb", metavar="PYTHON", help=f"an interpreter that has it  [default: install {RELEASE}]")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="keep results; what is there does not run again")
    parser.add_argument("--charts", type=Path, metavar="FOLDER", help="write a chart for each table")
    told = parser.parse_args(arguments)
    days, a_day = told.days or (3 if told.short else DAYS), told.rounds or (2 if told.short else ROUNDS)
    processes = {name: one for name, one in ways(told).items() if not told.way or name in told.way}
    print(f"{days} days of {a_day} rounds each.")
    for shape in SHORT if told.short else SHAPES:
        if told.only and shape.name not in told.only:
            continue
        months = []
        for way, process in processes.items():
            if not shape.log or way != LANCEDB:  # it merges no log
                months.append(lived(told.results, shape, way, process, days, a_day))
        if len({month.rows for month in months if month.rows}) > 1:
            raise SystemExit(f"The ways have other rows: {[(month.way, month.rows) for month in months]}")
        print_months(shape, months)
        if told.charts:
            told.charts.mkdir(parents=True, exist_ok=True)
            (told.charts / f"life-{shape.slug}.svg").write_bytes(chart(months))


def ways(told: argparse.Namespace) -> dict[str, list[str]]:
    """The commands of the ways, in the order in which they are printed."""
    found = {NOTHING: [], PYLANCE: own_process("pylance"), LANCEDB: [], OURS: own_process("ours")}
    why = "--short"
    if told.lancedb or not told.short:
        try:
            found[LANCEDB] = lancedb_process(told.lancedb or python_of(RELEASE))
        except NoEnvironmentError as error:
            why = str(error)
    if not found[LANCEDB]:
        del found[LANCEDB]
        print(f"Without {RELEASE}: {why}.")
    return found


def lived(results: Path | None, shape: Shape, way: str, process: list[str], days: int, a_day: int) -> Month:
    """A month, or what an earlier run kept of it."""
    kept = None if results is None else results / f"{shape.name}, {way}, {days} x {a_day}.json"
    if kept is not None and kept.exists():
        return Month.from_json(kept.read_text())
    if shape.log and way == PYLANCE:
        process = own_process("pylance_log")
    with tempfile.TemporaryDirectory() as folder, counting_store(Path(folder)) as (store, options):
        month = live(Place(store, options), shape, way, process, days, a_day)
    print(f"{shape.name}, {way}: {dict(month.did)}", file=sys.stderr, flush=True)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(month.to_json())
    return month


if __name__ == "__main__":
    main()
