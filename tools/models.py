"""Check the models of the protocols in docs/models with spin: none has an error, but with each planted bug.

``python -m tools.models [--traces] [MODEL ...]``; needs spin and a C compiler. ``--traces`` writes the shortest
counterexample of each planted bug to docs/models/traces.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/models"
TRACES = FOLDER / "traces"
_PLANTED = re.compile(r"^ \*   (\d+)  (?:\(([A-Z])\) )?(.+)", re.MULTILINE)
_PART = re.compile(r"^ \*   ([A-Z])  ", re.MULTILINE)
_STEP = re.compile(r" *(\d+):\tproc +(\d+) \((\w+):1\) \S+:\d+ \(state \d+\)\t\[")
_VALUE = re.compile(r"\t\t(\S+) = (\d+)")
_STATES = re.compile(r"^ *(\d+) states, stored", re.MULTILINE)
_ERRORS = re.compile(r"errors: (\d+)")
_SAFETY, _LIVENESS = ["-DSAFETY", "-DNOFAIR"], ["-DNFAIR=3"]
_AGAIN = "from here on again and again"
_CYCLE_DEPTHS = (60, 125, 4000)  # of a counterexample: the first within which there is one
_AT_ONCE = 2
_MEMORY_MB, _DEPTH, _SECONDS = 4000, 200_000, 3600


@dataclass(frozen=True)
class Bug:
    """A planted bug: its number, the part of the model that has it ("": there are no parts), and a sentence."""

    number: int
    part: str
    what: str


@dataclass(frozen=True)
class Check:
    """The check of one model.

    Attributes:
        bug: the planted bug; None: none.
        errors: how many spin found; it stops at the first one.
        states: distinct states that it stored.
        seconds: how long the search took.
        steps: of the counterexample, one a line; empty if there is none.
    """

    bug: Bug | None
    errors: int
    states: int
    seconds: float
    steps: str

    @property
    def as_expected(self) -> bool:
        """Whether a planted bug was found, or nothing where none is planted."""
        return bool(self.errors) == (self.bug is not None)


def missing() -> str | None:
    """What has to be installed before a model can be checked; None: nothing."""
    absent = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found; on Debian: apt install spin gcc" if absent else None


def bugs(model: Path) -> tuple[Bug, ...]:
    """The planted bugs of a model, as its first comment lists them."""
    return tuple(Bug(int(number), part, what) for number, part, what in _PLANTED.findall(model.read_text()))


def parts(model: Path) -> tuple[str, ...]:
    """The parts in which a model is searched, as its first comment lists them; ("",): as a whole."""
    return tuple(_PART.findall(model.read_text())) or ("",)


def check(model: Path, part: str = "", bug: Bug | None = None, *, short: bool = False) -> Check:
    """Search all states of a part of a model; for a planted bug, breadth first: the shortest counterexample.

    A part with a formula of temporal logic (``ltl``) is searched for cycles that violate it, under weak fairness; the
    counterexample is not the shortest.

    Args:
        model: its file.
        part: one of its parts.
        bug: what to plant.
        short: within the lower bounds that a model may define for ``SHORT``.

    Raises:
        RuntimeError: the search did not end within its memory and its time.
        subprocess.CalledProcessError: the model does not compile.
    """
    defined = [f"-DBUG={bug.number if bug else 0}", *([f"-DPART_{part}"] if part else []), *["-DSHORT"][: int(short)]]
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model, folder)
        liveness = "ltl " in _run(folder, "spin", "-a", *defined, model.name)
        options = _LIVENESS if liveness else [*_SAFETY, *["-DBFS"][: int(bug is not None)]]
        _run(folder, "gcc", "-O2", "-w", "-DCOLLAPSE", f"-DMEMLIM={_MEMORY_MB}", *options, "-o", "pan", "pan.c")
        asked = ["-w26"] if bug is None and not short else []  # 512 MiB: the largest search has 51 million states
        asked += [*(["-a", "-f"] if liveness else []), *([] if "\ninit " in model.read_text() else ["-E"])]
        started = time.monotonic()
        for depth in _CYCLE_DEPTHS if liveness and bug else (_DEPTH,):
            out = _run(folder, "./pan", f"-m{depth}", *asked)
            errors, states = _ERRORS.search(out), _STATES.search(out)
            if errors is not None and int(errors[1]):
                break
        seconds = time.monotonic() - started
        if (
            errors is None
            or states is None
            or (bug is None and "max search depth too small" in out)
            or "out of memory" in out
        ):
            raise RuntimeError(f"The search of {model.name} with bug {bug} did not end:\n{out}")
        steps = _steps(_run(folder, "spin", "-t", "-p", "-g", *defined, model.name)) if int(errors[1]) else ""
        return Check(bug, int(errors[1]), int(states[1]), seconds, steps)


def _steps(printed: str) -> str:
    """A counterexample: for each step its process, and the global variables that it changed ("-": none)."""
    values: dict[str, str] = {}
    steps: list[tuple[str, str, dict[str, str]]] = []
    for line in printed.splitlines():
        if "START OF CYCLE" in line and steps:
            steps.append(("", "", {"": _AGAIN}))
        elif (step := _STEP.match(line)) is not None:
            if not steps or steps[-1][:2] != (step[1], step[2]):
                steps.append((step[1], step[2], {"": step[3]}))
        elif steps and (value := _VALUE.match(line)) is not None and values.get(value[1], "0") != value[2]:
            values[value[1]] = steps[-1][2][value[1]] = value[2]
    lines = [
        f"{what.pop('')} {who}".rstrip() + ": " + (", ".join(map(" = ".join, what.items())) or "-")
        for _, who, what in steps
    ]
    return "".join(f"{line}\n" for line in (_shown(lines) if "START OF CYCLE" in printed else _once(lines)))


def _once(lines: list[str]) -> list[str]:
    return [line for at, line in enumerate(lines) if at == 0 or line != lines[at - 1]]


def _shown(lines: list[str]) -> list[str]:
    """Of a history without end, the steps that change something, without pairs of them that are repeated."""
    shown: list[str] = []
    for line in lines:
        if not line.endswith(": -") or line.startswith(_AGAIN):
            shown.append(line)
        if len(shown) > 3 and shown[-4:-2] == shown[-2:]:  # noqa: PLR2004 - two pairs
            del shown[-2:]
    return shown


def _run(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return done.stdout


def write_trace(model: Path, found: Check) -> None:
    """Write the counterexample of a planted bug, below the sentence that the model has for it."""
    if found.bug is not None:
        TRACES.mkdir(exist_ok=True)
        text = f"{model.stem}, bug {found.bug.number}: {found.bug.what}.\n\n{found.steps}"
        (TRACES / f"{model.stem}-{found.bug.number:02}.txt").write_text(text)


def main() -> None:
    """Check the models that are named, or all: two searches at once."""
    if (lacking := missing()) is not None:
        sys.exit(f"The models are not checked: {lacking}.")
    names = [name for name in sys.argv[1:] if name != "--traces"]
    searches: list[tuple[Path, str, Bug | None]] = []
    for model in [FOLDER / f"{name}.pml" for name in names] or sorted(FOLDER.glob("*.pml")):
        searches += [(model, part, None) for part in parts(model)]
        searches += [(model, bug.part, bug) for bug in bugs(model)]
    failed = 0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for (model, part, bug), found in zip(searches, pool.map(lambda one: check(*one), searches), strict=True):
            failed += not found.as_expected
            if "--traces" in sys.argv:
                write_trace(model, found)
            what = f"bug {bug.number}" if bug else f"part {part}" if part else "all"
            outcome = "an error" if found.errors else "no error"
            verdict = "" if found.as_expected else "   UNEXPECTED"
            print(
                f"{model.stem}, {what}: {outcome}, {found.states:,} states, {found.seconds:.1f} s{verdict}", flush=True
            )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
