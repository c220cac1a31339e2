"""One cell, step by step: ``python -m tests.campaigns.faults JOB --point N --fault lost-answer --layout shard``.

Without a point: the points of the job, each with the faults that differ there.
"""

from __future__ import annotations

import argparse
import tempfile

from tests.campaigns.faults.cells import DELAY, Cell, Matrix
from tests.campaigns.faults.jobs import JOBS, OTHERS
from tests.campaigns.faults.plan import Fault, pylance_points
from tests.campaigns.faults.tables import LAYOUTS


def main() -> None:
    """Print the trail of a cell, or the points of a job; a cell that fails ends with its traceback."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--point", type=int, help="its number, from 1 on")
    parser.add_argument("--fault", choices=[*Fault], default=Fault.BESIDE, type=Fault)
    parser.add_argument("--other", choices=[*OTHERS, DELAY], default="writer", help="who works beside it")
    parser.add_argument("--layout", choices=LAYOUTS, default="shard")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder, pylance_points():
        matrix = Matrix(folder)
        if asked.point is None:
            for number, point in enumerate(matrix.trail(JOBS[asked.job], asked.layout), 1):
                marks = "  (one of many)" if point.inner else "" if not point.nested else "  (inside pylance)"
                print(f"{number:4} {'*' if point.effect else ' '} {point.name}{marks}: {', '.join(point.faults)}")
            print("* changes files")
            return
        other = asked.other if asked.fault is Fault.BESIDE else ""
        plan = matrix.run(Cell(asked.job, asked.layout, asked.point, asked.fault, other))
        for number, point in enumerate(plan.trail, 1):
            print(f"{number:4} {point.name}{f'  <- {asked.fault} {other}' if number == asked.point else ''}")
        print(plan.outcome)


if __name__ == "__main__":
    main()
