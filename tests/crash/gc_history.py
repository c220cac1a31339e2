"""The simulation's witness and writers for the tests of this folder, and a collector that never stops."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import timedelta

from memwal_ops import open_table
from memwal_ops.jobs import expire, gc
from tests.crash.overtaken import Overtaken
from tests.sim.steps import IMMEDIATE, PATIENT
from tests.sim.witness import Witness
from tests.sim.writers import RegionTable, ShardTable

__all__ = ["IMMEDIATE", "PATIENT", "Overtaken", "RegionTable", "ShardTable", "Witness"]


def collect_for_ever(uri: str, grace: timedelta) -> None:
    """What a process does that is killed at any moment: ``python -m tests.crash.gc_history URI SECONDS``."""
    options = replace(IMMEDIATE, reader_grace=grace, orphan_min_age=2 * grace)
    while True:
        expire.apply(open_table(uri), expire.ExpireOptions(grace, 1))
        report = gc.apply(open_table(uri), options)
        if report.failed or report.faults:
            sys.exit(f"failed: {report.failed}, faults: {report.faults}")


if __name__ == "__main__":
    collect_for_ever(sys.argv[1], timedelta(seconds=float(sys.argv[2])))
