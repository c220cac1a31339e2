"""Let each program write, read and maintain a table in turns with our jobs: ``make neighbours``."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwal_ops import run_job
from memwal_ops.errors import MemwalOpsError
from tests.campaigns.clients.environments import NoEnvironmentError, python_of
from tests.campaigns.neighbours import oracle
from tests.campaigns.neighbours.program import vector_of
from tests.support.gc_options import AT_ONCE
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.campaigns.neighbours.program import Rows

PROGRAM = Path(__file__).with_name("program.py")
PYLANCE = "pylance==14.0.2"
CONFLICTS = ("conflict", "retry", "Too many concurrent writers")


@dataclass(frozen=True)
class Neighbour:
    """A program with its release.

    Attributes:
        release: what is installed.
        program: its name in :mod:`program`.
        more: what is installed beside it.
        columns: those of keys and of texts, in the table.
        text: the text of a row in the table.
        options: of our steps, as the page says to configure them.
        python: of which its package needs at least that release, beside ours.
        own_fault: words of an error by which it fails on generations that it wrote wrongly, ours or not.
    """

    release: str
    program: str
    more: tuple[str, ...] = ()
    columns: tuple[str, str] = ("id", "text")
    text: Callable[[str, str], str] = lambda _, text: text
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    own_fault: str | None = None

    @property
    def name(self) -> str:
        """Both, for a person."""
        package, number = self.release.split()
        return f"{self.program} {number}" if self.program.startswith(package) else f"{self.program}, {self.release}"


# Lance 9 cannot read a generation in whose key index it put replayed rows twice; without us, until it is drained.
_TWICE = "RowAddrTreeMap::from_sorted_iter"
_LANCEDB = ("0.37.1", "0.38.0", "0.39.0", "0.40.0")
NEIGHBOURS = (
    Neighbour("lance-context 0.6.7", "lance-context generic", own_fault=_TWICE),
    Neighbour("lance-context 0.6.7", "lance-context rollout", columns=("id", "problem_id"), own_fault=_TWICE),
    Neighbour(
        "lance-context 0.6.7", "lance-context context", columns=("external_id", "text_payload"), own_fault=_TWICE
    ),
    # Its optimize() retrains one of several segments, and fails from then on: test_neighbours.py.
    Neighbour("lancedb 0.36.0", "lancedb", options={"catchup": {"max_segments": 1}}),
    *(Neighbour(f"lancedb {number}", "lancedb") for number in _LANCEDB),
    Neighbour("lancedb 0.40.0", "lancedb log"),
    Neighbour(
        "langchain-lancedb 0.1.0",
        "langchain-lancedb",
        ("lancedb==0.40.0", "pyarrow"),
        text=lambda key, text: f"{key} {text}",
    ),
    Neighbour("duckdb 1.5.5", "duckdb", ("duckdb-extension-lance==1.5.5", "pyarrow")),
    Neighbour("lance-ray 0.5.0", "lance-ray", (PYLANCE,)),
    Neighbour("daft-lance 0.6.0", "daft-lance", ("daft==0.7.26", PYLANCE, "pandas")),
    Neighbour("datafusion 54.0.0", "datafusion", (PYLANCE, "polars")),
    Neighbour("polars 2.1.0", "polars", (PYLANCE,)),
    Neighbour("lancedb-ray 0.1.1", "lancedb-ray", ("lancedb==0.40.0", PYLANCE), python="3.12"),
    Neighbour("lance-csr 0.3.1", "lance-csr", ("pylance==13.0.0",), python="3.12"),
    Neighbour("lancecli 0.1.2", "lancecli", (PYLANCE,)),
    Neighbour("lance-namespace 0.13.0", "lance-namespace directory", (PYLANCE,)),
    Neighbour("lance-namespace 0.13.0", "lance-namespace rest", (PYLANCE,)),
)
ELSEWHERE = {
    "the server of lance-context": "its package for Python has none",
}
"""Programs that are not run, with the reason."""


class ProgramError(Exception):
    """A call that the program answers with an error."""


class Process:
    """A program that runs on a folder, in its own environment."""

    def __init__(self, python: str, program: str, folder: Path) -> None:
        """Start it."""
        self._errors = (folder / "stderr").open("w")
        self._process = subprocess.Popen(
            [python, str(PROGRAM), program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, env={**os.environ, "PYTHONPATH": "", "RAY_raylet_start_wait_time_s": "300"},
        )  # fmt: skip

    def call(self, method: str, *arguments: Any) -> Any:
        """The result of a call.

        Raises:
            ProgramError: it answers with an error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ProgramError(f"{method}: its process ended, {Path(self._errors.name).read_text()[-1000:]}")
        error, result = json.loads(line)
        if error is not None:
            raise ProgramError(f"{method}: {error}")
        return result

    def has(self, method: str) -> bool:
        """Whether the program has a call."""
        return bool(self.call("has", method))

    def retried(self, method: str, *arguments: Any) -> int:
        """Call again after conflicts, as its user would; how often."""
        for times in range(30):
            try:
                self.call(method, *arguments)
            except ProgramError as error:
                if not any(word in str(error) for word in CONFLICTS):
                    raise
            else:
                return times
        raise ProgramError(f"{method}: 30 conflicts")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


@dataclass
class Walk:
    """One table that a program and our jobs share.

    Attributes:
        faults: what was wrong, in order.
        seen: decisions of our jobs, and conflicts of the program, by how often.
    """

    neighbour: Neighbour
    python: str
    folder: Path
    rows: Rows = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)
    held: Rows | None = None
    _next: int = 0

    def run(self, turns: int, seed: object) -> None:
        """Take turns; stop at the first fault."""
        self._random = random.Random(f"{seed} {self.neighbour.name}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._uri = str(self.folder / "t.lance")
        self._program = Process(self.python, self.neighbour.program, self.folder)
        try:
            rows = self._new(400)
            self._program.call("create", rows)
            self.rows |= rows
            for turn in range(turns):
                self._turn(turn)
                self.faults = [f"turn {turn}: {fault}" for fault in self.faults]
                if self.faults:
                    return
            self._end()
        except (ProgramError, MemwalOpsError) as error:
            self.faults.append(f"{type(error).__name__}: {error}")
        finally:
            self._program.close()

    def _turn(self, turn: int) -> None:
        program = self._program
        if turn % 4 == 0 and program.has("hold"):
            program.call("hold")
            self.held = dict(self.rows)
        jobs = threading.Thread(target=self._ours)  # while it writes
        jobs.start()
        self._write()
        jobs.join()
        both = [*([self._theirs] if program.has("maintain") else []), self._ours]
        if turn % 3 == 2:  # at once
            jobs = threading.Thread(target=self._ours)
            jobs.start()
            both[0]()
            jobs.join()
        for one in both if turn % 2 else reversed(both):
            one()
        self._check()

    def _theirs(self) -> None:
        self._count("maintain conflicts", self._program.retried("maintain"))

    def _write(self) -> None:
        program, old = self._program, self._random.sample(sorted(self.rows), 12)
        changed = dict.fromkeys(old[:8], f"changed {self._next}")
        if program.has("append"):
            self._call("append", new := self._new(10))
            self.rows |= new
        if program.has("put"):
            self._call("put", new := self._new(10) | changed)
            self.rows |= new
        if program.has("delete"):
            self._call("delete", old[8:])
            for key in old[8:]:
                del self.rows[key]

    def _call(self, method: str, argument: Any) -> None:
        self._count(f"{method} conflicts", self._program.retried(method, argument))

    def _count(self, what: str, times: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + times

    def _new(self, count: int) -> Rows:
        numbers = range(self._next, self._next + count)
        self._next += count
        return {f"k{number:05d}": f"written {number}" for number in numbers}

    def _ours(self) -> None:
        try:
            report = run_job(self._uri, "maintain", apply=True, **self.neighbour.options).to_json()
        except MemwalOpsError as error:
            self.faults.append(f"maintain: {type(error).__name__}: {error}")
            return
        for step in report["steps"]:
            self._count(f"{step['step']} {step['decision']}")
            if step.get("error"):
                self.faults.append(f"{step['step']}: {step['error']}")

    def _check(self) -> None:
        program, sample = self._program, self._random.sample(sorted(self.rows), 8)
        given = [*sample, f"k{self._next:05d}"]  # a key that no row has
        self._compare("read", self.rows, "its own scan")
        self._compare("find", {key: self.rows[key] for key in sample}, "its own search for keys", given)
        nearest = sample[:3] if program.has("nearest") else []
        self.faults += [
            f"its own search for vectors: {found} for {key}"
            for key in nearest if (found := program.call("nearest", key)) != key
        ]  # fmt: skip
        vectors = {key: vector_of(key) for key in nearest}
        self.faults += oracle.of_the_base(self._uri, self.neighbour.columns, self._texts(self.rows), given, vectors)
        if self.held is not None:
            self._compare("held", self.rows if program.has("live") else self.held, "its open handle")
        self._ask("inspect")
        self._ask("verify")

    def _compare(self, method: str, rows: Rows, where: str, *given: object) -> None:
        """What it reads, unless a generation of its own keeps it from that."""
        own = self.neighbour.own_fault
        try:
            self.faults += oracle.differences(self._program.call(method, *given), self._texts(rows), where)
        except ProgramError as error:
            if own is None or own not in str(error) or not oracle.key_indexes_with_rows_twice(self._uri):
                raise
            self._count(f"{method}: {own}")

    def _texts(self, rows: Rows) -> Rows:
        return {key: self.neighbour.text(key, text) for key, text in rows.items()}

    def _ask(self, job: str, **options: Any) -> None:
        report = run_job(self._uri, job, **options)
        if report.exit_code:
            self.faults.append(f"{job}: {report.decision}: {report.describe()}")

    def _end(self) -> None:
        """All files that no version needs go, and what is left is right."""
        self.held = None
        run_job(self._uri, "expire", apply=True, older_than=timedelta(0), keep=1, allow_unsafe=True)
        run_job(self._uri, "gc", AT_ONCE, apply=True)
        self._check()
        self._ask("verify", deep=True)
        self._ask("verify", answers=True)


def walked(neighbour: Neighbour, folder: Path, turns: int, seed: object = CAMPAIGN_SEED) -> Walk:
    """One walk.

    Raises:
        NoEnvironmentError: the program cannot be installed here.
    """
    walk = Walk(neighbour, python_of(neighbour.release, *neighbour.more, version=neighbour.python), folder)
    walk.run(turns, seed)
    return walk


def main() -> int:
    """Walk all, or those whose names contain a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="a word of the program's name; several times: these")
    given = parser.parse_args()
    turns, bad = env_number("NEIGHBOUR_TURNS", 20), 0
    for neighbour in NEIGHBOURS:
        if given.only and not any(word in neighbour.name for word in given.only):
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            try:
                walk = walked(neighbour, Path(home, "n"), turns)
            except NoEnvironmentError as error:
                _say(f"{neighbour.name}: skipped: {error}")
                bad += 1
                continue
        bad += bool(walk.faults)
        outcome = "; ".join(walk.faults) or f"right, {len(walk.rows)} rows"
        _say(f"{neighbour.name}: {turns} turns, {time.monotonic() - begun:.0f} s: {outcome}; {walk.seen}")
    for name, reason in ELSEWHERE.items():
        _say(f"{name}: not run: {reason}")
    return int(bad > 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
