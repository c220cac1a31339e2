"""Check the models of the protocols in docs/models with spin: none has an error, but with each planted bug.

``python -m tools.models [MODEL ...]``; needs spin and a C compiler.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/models"
_PLANTED = re.compile(r"^ \*   (\d+)  ", re.MULTILINE)
_STATES = re.compile(r"^ *(\d+) states, stored", re.MULTILINE)
_ERRORS = re.compile(r"errors: (\d+)")
_MEMORY_MB, _DEPTH, _SECONDS = 2000, 200_000, 900


@dataclass(frozen=True)
class Check:
    """The check of one model.

    Attributes:
        bug: the planted bug; 0: none.
        errors: how many spin found; it stops at the first one.
        states: distinct states that it stored.
        seconds: how long the search took.
        steps: of the counterexample, as spin prints them; empty if there is none.
    """

    bug: int
    errors: int
    states: int
    seconds: float
    steps: str

    @property
    def as_expected(self) -> bool:
        """Whether a planted bug was found, or nothing where none is planted."""
        return bool(self.errors) == bool(self.bug)


def missing() -> str | None:
    """What has to be installed before a model can be checked; None: nothing."""
    absent = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found; on Debian: apt install spin gcc" if absent else None


def bugs(model: Path) -> tuple[int, ...]:
    """The planted bugs of a model, as its first comment lists them."""
    return tuple(int(number) for number in _PLANTED.findall(model.read_text()))


def check(model: Path, bug: int = 0) -> Check:
    """Search all states of a model.

    Raises:
        RuntimeError: the search did not end within its memory and its time.
        subprocess.CalledProcessError: the model does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model, folder)
        _run(folder, "spin", "-a", f"-DBUG={bug}", model.name)
        _run(
            folder,
            "gcc",
            "-O2",
            "-w",
            "-DSAFETY",
            "-DCOLLAPSE",
            "-DNOFAIR",
            f"-DMEMLIM={_MEMORY_MB}",
            "-o",
            "pan",
            "pan.c",
        )
        started = time.monotonic()
        out = _run(folder, "./pan", f"-m{_DEPTH}")
        seconds = time.monotonic() - started
        errors, states = _ERRORS.search(out), _STATES.search(out)
        if errors is None or states is None or "max search depth too small" in out or "out of memory" in out:
            raise RuntimeError(f"The search of {model.name} with bug {bug} did not end:\n{out}")
        steps = _run(folder, "spin", "-t", "-p", "-g", f"-DBUG={bug}", model.name) if int(errors[1]) else ""
        return Check(bug, int(errors[1]), int(states[1]), seconds, steps)


def _run(folder: str, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_SECONDS)
    return done.stdout


def main() -> None:
    """Check the models that are named, or all."""
    if (lacking := missing()) is not None:
        sys.exit(f"The models are not checked: {lacking}.")
    failed = 0
    for model in [FOLDER / f"{name}.pml" for name in sys.argv[1:]] or sorted(FOLDER.glob("*.pml")):
        for bug in (0, *bugs(model)):
            found = check(model, bug)
            failed += not found.as_expected
            what = f"bug {bug}" if bug else "no bug"
            outcome = "an error" if found.errors else "no error"
            verdict = "" if found.as_expected else "   UNEXPECTED"
            print(
                f"{model.stem}, {what}: {outcome}, {found.states:,} states, {found.seconds:.1f} s{verdict}", flush=True
            )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
