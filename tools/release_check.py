"""Walk the checklist of a release, and keep what each step found: ``make release-check``.

Each step is a command; its output is in ``build/release-check/STEP.log``, its result in a table,
``build/release-check.md``. The exit code is 0 only if each step passed on this commit, or was skipped with a reason.
Results of the same commit stay, so that a run continues where the last one ended:

    --only STEP         these steps alone (repeatable), also if they passed before
    --from STEP         this one and those after it
    --skip STEP=REASON  do not run it; the table has the reason (repeatable)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
_GOOD = {"passed", "skipped"}
_NOTE = 300
_OUTCOMES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Step:
    """One entry of the checklist: a command, run in the repository."""

    name: str
    command: tuple[str, ...]
    what: str


STEPS = (
    Step("tree", (sys.executable, "-m", "tools.release_check", "--tree"), "all is committed, with a changelog"),
    Step("lint", ("make", "lint"), "style, types, layers, generated files"),
    Step("test", ("make", "test"), "what a change must pass"),
    Step("campaigns", ("make", "campaigns"), "random, exhaustive and long runs, Spark"),
    Step("airflow", ("make", "test-airflow"), "a whole Airflow"),
    Step("neighbours", ("make", "neighbours"), "other programs on the same tables, by turns"),
    Step("stores", ("make", "test", "PYTEST_ARGS=-m real_store"), "Azurite and Ceph RGW, which it fetches"),
    Step("dist", ("make", "dist"), "the archives, and the wheel in an empty environment"),
    Step("pythons", ("make", "dist-pythons"), "the wheel by Python 3.11 to 3.13, on two processors"),
    Step("site", ("make", "site"), "the documentation, without a dead link"),
    Step("audit", ("make", "audit"), "no known vulnerability in a pinned package"),
    Step("models", ("make", "models"), "the models of the protocols, and their planted bugs"),
    Step("mutate", ("make", "mutate", "MUTANTS=10", "LEAST=50"), "a sample of mutants of the code that decides"),
    Step(
        "figures", ("make", "figures", "AGAINST=release"), "no figure worse by more than 15 % than the last release's"
    ),
)
# On a disk, as users' tables are: other runs of the tests write to memory.
_DISK = {"TMPDIR": tempfile.gettempdir()}
# The words of this target, which make hands down: ONLY is another thing for mutate and neighbours.
_OURS = {"MAKEFLAGS", "MAKEOVERRIDES", "ONLY", "FROM", "SKIP"}
_ENVIRONMENT = {"test": _DISK, "campaigns": _DISK, "stores": {"MEMWAL_OPS_REAL_STORES": "1"}}


@dataclass(frozen=True)
class Result:
    """What became of a step: ``passed``, ``failed`` or ``skipped``, and the last words of its output, or the reason."""

    outcome: str
    note: str = ""
    code: int | None = None
    seconds: float | None = None


class Checklist:
    """The steps, and their results on one commit, in a folder.

    Attributes:
        results: of each step that ended, by name.
    """

    def __init__(self, steps: Sequence[Step], folder: Path, commit: str, changed: str = "") -> None:
        """Take up the results that an earlier run on the same commit kept, unless something changed since."""
        self.steps, self._folder = steps, folder
        self._commit = f"{commit} with changes" if changed else commit
        self._file = folder / "release-check/results.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        same = kept.get("commit") == commit and not changed
        self.results = {name: Result(**one) for name, one in kept["results"].items()} if same else {}

    def run(self, chosen: Iterable[Step], skipped: Mapping[str, str]) -> None:
        """Run steps one after the other; one that fails stops no other."""
        for step in chosen:
            print(f"{step.name}: {step.what} ...", flush=True)
            reason = skipped.get(step.name)
            found = self._ran(step) if reason is None else Result("skipped", reason)
            print(f"{step.name}: {found.outcome}. {found.note}", flush=True)
            self.results[step.name] = found
            self._keep()

    def _ran(self, step: Step) -> Result:
        log, begun = self._file.with_name(f"{step.name}.log"), time.monotonic()
        inherited = {name: value for name, value in os.environ.items() if name not in _OURS}
        with log.open("wb") as out:
            done = subprocess.run(
                step.command, cwd=ROOT, env={**inherited, **_ENVIRONMENT.get(step.name, {})},
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        note = last_words(log.read_text(errors="replace"))
        outcome = "failed" if done.returncode or _is_empty(note) else "passed"
        return Result(outcome, note, done.returncode, time.monotonic() - begun)

    def _keep(self) -> None:
        results = {name: asdict(one) for name, one in self.results.items()}
        self._file.write_text(json.dumps({"commit": self._commit, "results": results}, indent=1))
        (self._folder / "release-check.md").write_text(self.page(), encoding="utf-8")

    def page(self) -> str:
        """The table of all steps, as Markdown."""
        lines = [f"# Checklist of {__version__}, commit {self._commit}", "", "| step | result | minutes | |"]
        lines.append("|---|---|---|---|")
        for step in self.steps:
            one = self.results.get(step.name, Result("not run"))
            minutes = "" if one.seconds is None else f"{one.seconds / 60:.1f}"
            note = one.note.replace("|", "\\|")
            lines.append(f"| {step.name}: {step.what} | {one.outcome} | {minutes} | {note} |")
        return "\n".join(lines) + "\n"

    def is_good(self, steps: Iterable[Step]) -> bool:
        """Whether each of these passed, or was skipped."""
        return all(step.name in self.results and self.results[step.name].outcome in _GOOD for step in steps)


def last_words(output: str) -> str:
    """The last line of an output that says something; make's own last words are not its."""
    lines = (_OUTCOMES.sub("", line).strip() for line in output.splitlines())
    found = [line for line in lines if line and not re.match(r"make(\[\d+\])?: ", line)]
    return found[-1][:_NOTE] if found else ""


def _is_empty(note: str) -> bool:
    """Whether pytest ran nothing: all tests were skipped."""
    return bool(re.search(r"\b\d+ skipped", note)) and not re.search(r"\b\d+ passed", note)


def faults_of_tree(changed: str, changelog: str, figures: Iterable[str], fleets: Iterable[str]) -> list[str]:
    """What a commit lacks to become a release.

    Args:
        changed: what git reports as changed.
        changelog: the text of CHANGELOG.md.
        figures: the names of the files of figures.
        fleets: the names of the archives of fleets.
    """
    section = re.search(rf"^## {re.escape(__version__)}\b.*?(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return [
        *(["not all is committed"] if changed.strip() else []),
        *([] if section and "\n- " in section[0] else [f"CHANGELOG.md has no section {__version__}, or an empty one"]),
        *([] if f"figures-{__version__}.json" in figures else [f"benchmarks has no figures-{__version__}.json"]),
        *(
            []
            if f"fleet-of-{__version__}.tar.gz" in fleets
            else [f"tests/system/releases has no fleet of {__version__}"]
        ),
    ]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _tree() -> int:
    faults = faults_of_tree(
        _git("status", "--porcelain"),
        (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
        [path.name for path in (ROOT / "benchmarks").iterdir()],
        [path.name for path in (ROOT / "tests/system/releases").iterdir()],
    )
    print("; ".join(faults) or f"{__version__} can be released from this commit")
    return int(bool(faults))


def main(words: Sequence[str] | None = None, steps: Sequence[Step] = STEPS, folder: Path = BUILD) -> int:
    """Entry of ``make release-check``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in steps]
    parser.add_argument("--only", action="append", choices=names, default=[], metavar="STEP", help="|".join(names))
    parser.add_argument("--from", dest="first", choices=names, metavar="STEP")
    parser.add_argument("--skip", action="append", default=[], metavar="STEP=REASON")
    parser.add_argument("--tree", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.tree:
        return _tree()
    skipped = {name: reason.strip() for name, _, reason in (one.partition("=") for one in given.skip)}
    for name, reason in skipped.items():
        if name not in names or not reason:
            parser.error(f"--skip {name}: name a step and the reason, as in --skip models=no-spin-here")
    checklist = Checklist(steps, folder, _git("rev-parse", "HEAD").strip(), _git("status", "--porcelain"))
    if given.only:
        chosen = [step for step in steps if step.name in given.only]
    elif given.first:
        chosen = list(steps[names.index(given.first) :])
    else:
        chosen = [step for step in steps if step.name in skipped or not checklist.is_good([step])]
    checklist.run(chosen, skipped)
    print(f"\n{checklist.page()}")
    return int(not checklist.is_good(chosen if given.only else steps))


if __name__ == "__main__":
    sys.exit(main())
