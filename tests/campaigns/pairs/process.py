"""Run programs of rows, one after another, each in a folder of its own; what happens is told on stdout as JSON lines.

``python -m tests.campaigns.pairs.process`` reads ``{"row": ..., "seed": ..., "steps": ...}`` lines. The process that
started it knows by the last ``step`` at what it ended, where it ended by a signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance

from tests.campaigns.pairs import planted

planted.install(os.environ.get("PAIRS_PLANTED"))

from memwal_ops.errors import MemwalOpsError
from tests.campaigns.pairs import damage, formats, readers
from tests.campaigns.pairs.buckets import offer_store
from tests.campaigns.pairs.expected import why_refused
from tests.campaigns.pairs.oracle import Oracle, Wrong
from tests.campaigns.pairs.rows import program_of, run_of
from tests.campaigns.pairs.scripts import BASE_ROWS, OURS, SHORT, Program, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    Tell = Callable[..., None]

CLIENTS = {"pylance 10": "pylance 10.0.0", "pylance 7": "pylance 7.0.0", "lancedb 0.40": "lancedb 0.40.0"}


class Run:
    """One program, in the current folder."""

    def __init__(self, program: Program, seed: str, tell: Tell) -> None:
        self.program, self.row, self.tell = program, program.row, tell
        self.names: dict[str, Any] = {}
        self.refused: dict[str, int] = {}
        self.chance = random.Random(seed)

    @property
    def uri(self) -> str:
        return str(self.names["URI"])

    def execute(self, source: str) -> Any:
        return formats.execute(self.names, source)

    def run(self) -> None:
        """Make the table, go through the history, ask the oracle after each step."""
        offer_store(self.row)
        self.execute(self.program.imports)
        self.execute(OURS)
        try:
            self._make()
        except MemwalOpsError as error:
            # A writer of ours that refuses a table by name, before it has a row.
            self._refusal("create", error)
            return
        older = readers.OlderReader(self.uri, self._texts())
        for why in older.why:
            self.tell(refused="older reader", by=why[:200])
        for number, step in enumerate(self.program.steps):
            self.tell(step=step.name, source=step.source)
            self._step(step, number)
        self.tell(step=f"older reader {older.release}", source="")
        older.check(self.uri, self._texts())
        if self.row["damage"] != "none":
            self.tell(step="damage", source="")
            damage.check(self)

    def _make(self) -> None:
        head = [*self.program.head]
        if (release := CLIENTS.get(self.row["writer"])) is not None and (python := readers.client(release)) is not None:
            portable = len(head) if release.startswith("pylance") else 0
            if portable:
                self.tell(step="made by a client", source="")
                text = "\n".join([self.program.imports, *head])
                done = subprocess.run([python, "-c", text], capture_output=True, text=True, check=False)
                if done.returncode == 0:
                    head = []
                else:  # it lacks an option or a type: the pinned release makes this table
                    shutil.rmtree(self.names["ROOT"], ignore_errors=True)
        for source in head:
            self.tell(step="make", source=source)
            self.execute(source)
        oracle = self.oracle = Oracle(self.names["rows"], self.row, self._keys())
        history = self.row["history"]
        oracle.model.x = {"dropped": "", "renamed": "y"}.get(history, "x")
        value = None if history in {"dropped", "added_again"} else 0
        oracle.model.base = {k: (0, value) for k in range(BASE_ROWS) if k not in self.program.deleted}
        oracle.check_base(self.uri)
        for source in self.program.made:
            self.tell(step="make", source=source)
            self.execute(source)
        if self.row["place"] != "root":
            root = self.names["ROOT"]
            oracle.keep("root", lambda: lance.dataset(root))
        self._hold()

    def _texts(self) -> readers.Found:
        """What a reader of the base must get of the columns ``t`` and ``w``."""
        return sorted((f"name{k:04d} s{w}", w) for k, (w, _) in self.oracle.model.base.items())

    def _hold(self) -> None:
        uri, oracle = self.uri, self.oracle
        version = lance.dataset(uri).version
        kind = self.row["holder"]
        if kind == "tag":
            self.execute(f"lance.dataset(URI).tags.create('kept', {version})")
            oracle.keep("tag", lambda: lance.dataset(uri, version=version))
        elif kind == "hold":
            self._command(f"command(['hold', URI, '--version', '{version}'])")
            oracle.keep("hold", lambda: lance.dataset(uri, version=version))
        elif kind == "handle":
            opened = lance.dataset(uri)
            oracle.keep("handle", lambda: opened)
        elif kind == "branch":
            self.execute("lance.dataset(URI).create_branch('held')")
            oracle.keep("branch", lambda: lance.dataset(uri + "/tree/held"))

    def _keys(self) -> list[str]:
        return ["id", "part"] if "+" in self.row["key"] else ["id"]

    def _command(self, source: str) -> int:
        try:
            self.execute(source)
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    def _step(self, step: Step, number: int) -> None:
        oracle = self.oracle
        if not step.is_job:
            if step.columns and oracle.model.log:
                return
            try:
                self.execute(step.source)
            except (MemwalOpsError, Exception) as error:
                if isinstance(error, MemwalOpsError):
                    self._refusal(f"writer {step.name}", error)
                self.tell(refused=step.name, by=f"{type(error).__name__}: {error}"[:200])
                oracle.check_base(self.uri)
                return
            oracle.model.apply(step)
        else:
            self._job(step)
        oracle.check_base(self.uri)
        # Short: the log's rows after each second step, all answers after each fourth and the last.
        whole = not SHORT or number == len(self.program.steps) - 1 or number % 4 == 3
        if whole or number % 2:
            oracle.check_strong(self.uri, number, whole=whole)
        if whole:
            oracle.check_queries(self.uri, number)
        if step.is_job:
            oracle.check_kept()

    def _job(self, step: Step) -> None:
        oracle = self.oracle
        if "command(" in step.source:
            code = self._command(step.source)
            if code in {1, 20}:
                raise Wrong(f"{step.name} exit {code}", step.source)
            if code and step.name != "scan":
                raise Wrong(f"{step.name} exit {code}", step.source)
            return
        try:
            report = self.execute(step.source)
        except MemwalOpsError as error:
            if error.exit_code == 20:
                try:
                    self.execute(step.source)
                except MemwalOpsError as again:
                    if again.exit_code == 20:
                        raise Wrong(f"{step.name} 20", str(again)) from again
            self._refusal(step.name, error)
            if step.name == "erase":
                self._either(step)
            return
        except Exception as error:
            raise Wrong(f"{step.name} raises {type(error).__name__}", str(error)[:400]) from error
        if step.name == "erase" and step.effect:
            self._either(step, gone=report.exit_code == 0)
            if report.decision == "erased":
                damage.scan_for(self.uri, self._planted(step))
        if report.exit_code:
            self._refused(step.name, report.decision, report.exit_code, report.describe())
        if step.name.startswith("verify"):
            errors = [one for one in report.to_json()["findings"] if one["severity"] == "error"]
            if errors:
                raise Wrong(f"verify finds {errors[0]['check']}", str(errors[0])[:500])
        oracle.check_statement(step.name, report, self.uri)

    def _planted(self, step: Step) -> list[bytes]:
        """Texts and vectors that the row of a key ever had; no other row has one of them."""
        ks = {k for k, _ in step.effect}
        written = {(k, w) for one in self.program.steps for k, w in one.effect if k in ks and w is not None and w > 0}
        made = self.oracle.make([(k, w, 0) for k, w in sorted(written | {(k, w) for k in ks for w in (0, 9)})])
        vectors = made["v"].combine_chunks().flatten().to_numpy().reshape(made.num_rows, -1)
        return [f"name{k:04d} s".encode() for k in ks] + [vector.tobytes() for vector in vectors]

    def _either(self, step: Step, *, gone: bool = False) -> None:
        """A row that is being erased is gone, or may be."""
        model = self.oracle.model
        there = {*self.oracle._by_key(self.oracle.base(self.uri), with_x=False)}
        keys = self.oracle._keys(k for k, _ in step.effect)
        for k, key in keys.items():
            if gone or key not in there:
                model.base.pop(k, None)
                if gone or k not in model.unflushed:  # erase says that such a row waits for its writer
                    model.log.pop(k, None)

    def _refusal(self, name: str, error: MemwalOpsError) -> None:
        if not error.remedy and error.exit_code != 2:
            raise Wrong(f"{name} without a remedy", str(error))
        self._refused(name, error.reason, error.exit_code, f"{error} {error.remedy}")

    def _refused(self, name: str, reason: str, code: int, text: str) -> None:
        if why_refused(self.row, name, reason, text) is None:
            raise Wrong(f"{name} refuses {reason} ({code})", text[:1500])


def run_program(program: Program, seed: str, tell: Tell) -> None:
    """Run in a folder that goes afterwards; raises :class:`Wrong`, or what the oracle did not expect."""
    folder = tempfile.mkdtemp(prefix="pairs-")
    before = os.getcwd()
    os.chdir(folder)
    try:
        run_of(program.row, Run)(program, seed, tell).run()
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Read rows, tell what they came to."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")
        out.flush()

    for line in sys.stdin:
        asked = json.loads(line)
        program = program_of(asked["row"], asked["seed"])
        if (kept := asked.get("kept")) is not None:
            program.steps = [program.steps[at] for at in kept if at < len(program.steps)]
        started = time.process_time()
        outcome: dict[str, Any] = {"outcome": "ok", "kind": "", "text": ""}
        try:
            with (
                open(os.devnull, "w") as nowhere,
                contextlib.redirect_stdout(nowhere),
                contextlib.redirect_stderr(nowhere),
            ):
                run_program(program, asked["seed"], tell)
        except Wrong as wrong:
            outcome = {"outcome": "wrong", "kind": wrong.kind, "text": str(wrong)}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            import traceback

            where = traceback.extract_tb(error.__traceback__)[-1]
            kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}"
            outcome = {"outcome": "error", "kind": kind, "text": traceback.format_exc()[-1500:]}
        tell(**outcome, seconds=round(time.process_time() - started, 2))


if __name__ == "__main__":
    main()
