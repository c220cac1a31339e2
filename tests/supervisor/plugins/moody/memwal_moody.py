"""A job that does what jobs should not do: hangs, dies, leaks, fails, takes long."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import StoreUnavailableError
from memwal_ops.jobs.api import Job, Run

if TYPE_CHECKING:
    from memwal_ops.core.table import Table


@dataclass(frozen=True)
class MoodyOptions:
    mood: str = "good"
    seconds: float = 60.0
    marks: str = ""


@dataclass(frozen=True)
class MoodyReport:
    decision: str

    def to_json(self) -> dict[str, Any]:
        return {"decision": self.decision}


def plan(table: Table, options: MoodyOptions) -> MoodyReport:
    return MoodyReport("planned")


def apply(table: Table, options: MoodyOptions, run: Run) -> MoodyReport:
    ends = time.monotonic() + options.seconds
    leaked = []
    while time.monotonic() < ends:
        match options.mood:
            case "good":
                break
            case "steps":  # one step is a line that begins and ends; nobody may see half of one
                with open(options.marks, "a", encoding="utf-8") as marks:
                    marks.write("begin ")
                    marks.flush()
                    time.sleep(0.3)
                    marks.write("end\n")
                run.versions.append(len(run.versions) + 1)
                run.checkpoint()
            case "busy":  # alive, but never done
                run.progress()
                time.sleep(0.02)
            case "hangs":
                time.sleep(0.05)
            case "dies":
                os._exit(7)
            case "leaks":
                leaked.append(bytearray(os.urandom(1 << 20)) * 8)
                run.progress()
                time.sleep(0.02)
            case "fails":
                raise StoreUnavailableError("The store is in a bad mood.")
            case "breaks":
                raise RuntimeError("a bug")
    return MoodyReport("fine")


MOODY = Job(name="moody", options=MoodyOptions, plan=plan, apply=apply, every=timedelta(hours=1))
