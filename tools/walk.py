"""Which modules and functions a run of a job enters: what a reader must open to follow it.

``python -m tools.walk merge URI`` runs the job on the table, as ``memwal-ops merge URI`` does, and prints the modules
of memwal_ops in the order in which they are first entered, each with the number of its functions that were called and
of the calls. What runs while a module is imported does not count, nor do lambdas, comprehensions and other processes.

A job that deletes only plans, unless ``--apply`` is given. ``--set keep=3`` gives an option.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memwal_ops
from memwal_ops.core.run import run_job

if TYPE_CHECKING:
    from types import CodeType, FrameType

_ROOT = str(Path(memwal_ops.__file__).parent)


@dataclass
class Walk:
    """Count entered modules and functions."""

    entered: dict[str, dict[CodeType, int]] = field(default_factory=dict)
    """Module to its functions, each with its number of calls, in the order of the first call."""
    _importing: threading.local = field(default_factory=threading.local)

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Note one event of the profiler."""
        code = frame.f_code
        if code.co_name == "<module>":
            change = {"call": 1, "return": -1}.get(event, 0)
            self._importing.depth = getattr(self._importing, "depth", 0) + change
        elif event == "call" and _is_function(code) and not getattr(self._importing, "depth", 0):
            functions = self.entered.setdefault(frame.f_globals["__name__"], {})
            functions[code] = functions.get(code, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """The totals, and each module in order of its first call."""
        steps: list[dict[str, Any]] = [
            {"module": module, "functions": len(functions), "calls": sum(functions.values())}
            for module, functions in self.entered.items()
        ]
        totals = {key: sum(step[key] for step in steps) for key in ("functions", "calls")}
        return {"modules": len(steps), **totals, "walk": steps}


def _is_function(code: CodeType) -> bool:
    """Whether it is a named function of memwal_ops: no body of a class, no lambda, no comprehension."""
    return (
        code.co_filename.startswith(_ROOT)
        and bool(code.co_flags & inspect.CO_OPTIMIZED)
        and not code.co_name.startswith("<")
    )


def walk(job: str, uri: str, *, apply: bool | None = None, **options: Any) -> Walk:
    """Run the job on the table, and count what it enters, in all threads of this process."""
    counted = Walk()
    threading.setprofile(counted)
    sys.setprofile(counted)
    try:
        run_job(uri, job, apply=apply, **options)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counted


def main() -> None:
    """Print the walk of a job on a table."""
    parser = argparse.ArgumentParser(prog="python -m tools.walk", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job")
    parser.add_argument("uri")
    parser.add_argument("--apply", action="store_true", help="let a job that deletes delete")
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of the job")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    options = dict(option.split("=", 1) for option in given.set)
    document = walk(given.job, given.uri, apply=True if given.apply else None, **options).to_json()
    if given.json:
        print(json.dumps(document))
        return
    for step in document["walk"]:
        print(f"{step['functions']:5} functions {step['calls']:7} calls  {step['module']}")
    print(f"{document['modules']} modules, {document['functions']} functions, {document['calls']} calls")


if __name__ == "__main__":
    main()
