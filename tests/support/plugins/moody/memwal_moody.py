"""A job that does what jobs should not do: hangs, dies, leaks, fails, takes long."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memwal_ops.core.job import JobSpec
from memwal_ops.core.options import Options, number, text
from memwal_ops.errors import MemwalOpsError, StoreUnavailableError

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.core.protocols import Table


class MoodyError(MemwalOpsError):
    """A job that refuses to work."""

    exit_code = 70
    reason = "mood"
    remedy = "Be kind to it."


@dataclass(frozen=True)
class MoodyOptions(Options):
    mood: str = text("good", help="The mood.")
    seconds: float = number(3600.0, help="How long; a test that waits for its end kills it before.")
    marks: str = text("", help="A file for marks.")


@dataclass(frozen=True)
class MoodyReport:
    decision: str
    exit_code: int = 0

    def describe(self) -> str:
        return self.decision

    def to_json(self) -> dict[str, Any]:
        return {"decision": self.decision}


def plan(table: Table, options: MoodyOptions, context: RunContext) -> MoodyReport:
    return MoodyReport("planned")


def apply(table: Table, options: MoodyOptions, run: RunContext) -> MoodyReport:
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
                run.revisions.append(len(run.revisions) + 1)
                run.checkpoint()
            case "busy":  # alive, but never done
                run.heartbeat()
                time.sleep(0.02)
            case "hangs":
                time.sleep(0.05)
            case "dies":
                os._exit(7)
            case "leaks":
                leaked.append(bytearray(os.urandom(1 << 20)) * 8)
                run.heartbeat()
                time.sleep(0.02)
            case "fails":
                raise StoreUnavailableError("The store is in a bad mood.")
            case "refuses":
                raise MoodyError("The mood is too bad.")
            case "breaks":
                raise RuntimeError("a bug")
    return MoodyReport("fine")


MOODY = JobSpec(
    name="moody", summary="Do what jobs should not do.", options=MoodyOptions, load="memwal_moody",
    every=timedelta(hours=1), in_maintain=False, pages={MoodyError.reason: "https://example.com/moods"},
)  # fmt: skip
