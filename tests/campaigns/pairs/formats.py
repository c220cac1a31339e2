"""What rows of Zeppelin namespaces and of index folders share: how their steps run, what commands may say, and damage.

Programs and steps are those of :mod:`scripts`; the model of what must be read is a dictionary.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import MemwalOpsError
from tests.campaigns.pairs.buckets import offer_store
from tests.campaigns.pairs.damage import WAYS, remedies
from tests.campaigns.pairs.oracle import Wrong

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tests.campaigns.pairs.scripts import Program, Step

    #: The job, the reason of the error or the decision, words of its text, of which rows, and why that is right.
    Refusal = tuple[str, str, str, Callable[[Mapping[str, str]], bool], str]


def execute(names: dict[str, Any], source: str) -> Any:
    """Run lines; the value where they are one expression."""
    try:
        compiled = compile(source, "row", "eval")
    except SyntaxError:
        exec(compile(source, "row", "exec"), names)
        return None
    return eval(compiled, names)


class FormatRun:
    """One program, in the current folder. A format brings its oracle.

    Attributes:
        program: what runs.
        names: of the program.
        kept: how each kept revision is read, and what it must read as.
    """

    refusals: tuple[Refusal, ...] = ()
    jobs: Mapping[str, str]

    def __init__(self, program: Program, seed: str, tell: Callable[..., None]) -> None:
        self.program, self.row, self.tell = program, program.row, tell
        self.names: dict[str, Any] = {}
        self.chance = random.Random(seed)
        self.kept: dict[str, tuple[Callable[[], Any], Any]] = {}
        self.tolerant = False
        self.content: Any = {}
        self.followed: set[tuple[str, ...]] = set()

    @property
    def uri(self) -> str:
        return str(self.names["URI"])

    # What a format brings.

    def begin(self) -> None:
        """Take what is there into the model, and what a holder keeps."""
        raise NotImplementedError

    def wrote(self, step: Step) -> None:
        """A step of a writer was carried out."""
        raise NotImplementedError

    def check(self, number: int) -> None:
        """Compare all answers with the model."""
        raise NotImplementedError

    def check_statement(self, step: Step, report: Any) -> None:
        """Count again what a report says."""
        raise NotImplementedError

    def refused_erase(self, step: Step) -> None:
        """A row that was being erased may be gone: take what is there into the model."""
        raise NotImplementedError

    def reads(self) -> bool | None:
        """Whether it reads as the model has it; None where it does not read."""
        raise NotImplementedError

    def release(self) -> None:
        """Close what a holder has open."""

    # What they share.

    def run(self) -> None:
        """Make the table, go through the history, ask the oracle after each step."""
        offer_store(self.row)
        self.execute(self.program.imports)
        for source in (*self.program.head, *self.program.made):
            self.tell(step="make", source=source)
            self.execute(source)
        try:
            self.begin()
            self.check(0)
            for number, step in enumerate(self.program.steps, 1):
                self.tell(step=step.name, source=step.source)
                self.step(step, number)
            self.release()
            if self.row["damage"] == "every":
                if wrong := [*self.every_damage()]:
                    raise Wrong(wrong[0].kind, "\n".join(str(one)[:600] for one in wrong))
            elif self.row["damage"] != "none":
                self.damage()
        finally:
            self.release()

    def execute(self, source: str) -> Any:
        return execute(self.names, source)

    def step(self, step: Step, number: int) -> None:
        """Run one, and look at everything."""
        if step.name in self.jobs:
            self.job(step)
        else:
            self.execute(step.source)
            self.wrote(step)
        self.check(number)
        for name, (opened, rows) in self.kept.items():
            try:
                found = opened()
            except Exception as error:
                raise Wrong(f"kept {name} gone", f"{type(error).__name__}: {error}"[:300]) from error
            if found != rows:
                raise Wrong(f"kept {name} changed", f"{found!s:.300} and not {rows!s:.300}")

    def attempt(self, source: str) -> tuple[str, int, str, Any]:
        """What a command came to: decision or reason, exit code, text, and the report."""
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                report = self.execute(source)
        except MemwalOpsError as error:
            if not error.remedy and error.exit_code not in {2, 3}:
                raise Wrong("no remedy", f"{error.reason}: {error}") from error
            return error.reason, error.exit_code, f"{error} {error.remedy}", None
        except SystemExit as ended:
            return "exit", int(ended.code or 0), said.getvalue(), None
        except Exception as error:
            raise Wrong(f"raises {type(error).__name__}", f"{source}: {error!s:.500}") from error
        text = report.describe() if hasattr(report, "describe") else said.getvalue()
        return str(getattr(report, "decision", "")), int(getattr(report, "exit_code", 0)), text, report

    def job(self, step: Step) -> None:
        """Run one of ours: no exit code 1, no 20 that stays, no refusal without a reason; what it says is true."""
        decision, code, text, report = self.attempt(step.source)
        if code == 20:
            decision, code, text, report = self.attempt(step.source)
        if code in {1, 20}:
            raise Wrong(f"{step.name} exit {code}", text[:1500])
        if step.name == "erase" and decision != "erased":
            self.refused_erase(step)
        if code and not self.is_right(step.name, decision, text):
            found = json.dumps(report.to_json().get("findings", ()))[:600] if report else ""
            raise Wrong(f"{step.name} refuses {decision} ({code})", f"{text[:1200]} {found}")
        if report is not None:
            self.check_statement(step, report)

    def is_right(self, name: str, reason: str, text: str) -> bool:
        """Whether there is a reason to refuse."""
        return any(
            re.fullmatch(names, name) and re.fullmatch(reasons, reason) and re.search(words, text) and of(self.row)
            for names, reasons, words, of, _ in self.refusals
        )

    # Damage.

    def files(self, root: Path) -> list[Path]:
        """All that a listing finds, but for locks: nobody reads what is in them."""
        return sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".lock")

    def kinds(self) -> dict[str, list[Path]]:
        """Files by the pattern of their paths."""
        root, found = Path(self.uri), dict[str, list[Path]]()
        for path in self.files(root):
            found.setdefault(kind_of(path.relative_to(root)), []).append(path)
        return found

    def damage(self) -> None:
        """Damage a file of a kind that is drawn first, run some commands."""
        kind = self.chance.choice(sorted(self.kinds()))
        names = [*self.jobs]
        self.chance.shuffle(names)
        self.damage_one(kind, self.row["damage"], (self.row["job"], *names[:7], "verify_deep"))

    def every_damage(self) -> Iterator[Wrong]:
        """Damage a file of each kind in each way, run all commands; what was wrong, of each."""
        root, content, whole = Path(self.uri), dict(self.content), Path("whole")
        shutil.copytree(root, whole)
        for kind, way in product(sorted(self.kinds()), WAYS):
            shutil.rmtree(root)
            shutil.copytree(whole, root)
            self.content, self.followed = dict(content), set()
            names = [*self.jobs]
            self.chance.shuffle(names)
            try:
                self.damage_one(kind, way, names)
            except Wrong as wrong:
                yield wrong

    def damage_one(self, kind: str, way: str, jobs: Iterable[str]) -> None:
        """Damage a file, run commands and the remedies that they tell, and compare what reads.

        At last, the file comes back from a backup: all must be there then, unless a command already repaired it.
        """
        root, kinds = Path(self.uri), self.kinds()
        path = self.chance.choice(kinds[kind])
        backup = path.read_bytes()
        name = path.relative_to(root).as_posix()
        source = f"F = sorted(pathlib.Path(URI).glob({kind!r}))[{sorted(root.glob(kind)).index(path)}]"
        source += "\n" + self.other(way, kind, kinds, path)
        self.execute(source)
        self.tell(step=f"damage {kind}", source=source, harm=source)
        other = self.is_other(name, way)
        self.tolerant = other or self.is_earlier(name, way)
        healed = self.reads()
        for job in jobs:
            source = self.job_source(job)
            self.tell(step=f"{job} with {way} {kind}", source=source)
            decision, code, text, _ = self.attempt(source)
            if is_unnamed(code, name, text) and self.attempt(source)[1] in {1, 20}:
                raise Wrong(f"{job} is not named: {way} {kind}", f"{decision} {text[:800]}")
            now = self.reads()
            if healed and not now and not other:
                raise Wrong(f"reads no more: {way} {kind}", f"{name} after {job}: {decision}")
            if job == "verify_deep" and decision == "healthy" and not now and not self.tolerant:
                raise Wrong(f"healthy and does not read: {way} {kind}", f"{name} reads {now}")
            after = self.follow(text, code, f"{way} {kind}", name)
            if now and not after and not other:
                raise Wrong(f"reads no more after a remedy: {way} {kind}", text[:800])
            healed = healed or after
        if (other or self.reads() is None) and self.comes_back(name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(backup)
            if other:
                self.attempt(self.job_source("catchup_rebuild"))
            if not self.reads():
                raise Wrong(f"does not read with its backup: {way} {kind}", f"{name} reads {self.reads()}")

    def follow(self, text: str, code: int, what: str, path: str) -> bool | None:
        """Run each command that a text tells, and the page of its error, once, to its end; whether it reads then.

        One that is no command for this table, or fails without a name, is no remedy.
        """
        for words in remedies(text, code, self.uri, self.followed):
            self.tell(step=f"remedy {words[0]} with {what}", source=f"command({words!r})")
            _, code, said, _ = self.attempt(f"command({words!r})")
            if code == 2 or is_unnamed(code, path, said):
                raise Wrong(f"remedy {words[0]} ends with {code}: {what}", f"{said[:900]} after {text[:600]}")
        return self.reads()

    def other(self, way: str, kind: str, kinds: Mapping[str, list[Path]], path: Path) -> str:
        """The source that damages ``F``, also with a file of its kind here, or of another table."""
        if way == "other_file":
            others = [one for one in kinds[kind] if one != path]
            others = others or [one for of in kinds.values() for one in of if one != path]
            chosen = self.chance.choice(others).relative_to(self.uri).as_posix()
            return f"OTHER = pathlib.Path(URI, {chosen!r})\n{WAYS[way]}"
        if way == "other_table":
            made = self.make_other()
            found = sorted(one for one in self.files(made) if kind_of(one.relative_to(made)) == kind)
            return f"F.write_bytes(pathlib.Path({str(found[0])!r}).read_bytes())" if found else WAYS[way]
        return WAYS[way]

    def is_earlier(self, name: str, way: str) -> bool:
        """Whether the damage made it what it was at an earlier time: nothing in its files differs then."""
        return False

    def is_other(self, name: str, way: str) -> bool:
        """Whether it is another table's by that file, and a job may find that out and say it."""
        return False

    def comes_back(self, name: str) -> bool:
        """Whether a backup's file may be put in its place alone, whatever was written since."""
        return True

    def make_other(self) -> Path:
        """Another table of the same shape, with other rows."""
        raise NotImplementedError

    def job_source(self, name: str) -> str:
        """A job's source, with options that delete nothing but what a job always may."""
        raise NotImplementedError


def is_unnamed(code: int, path: str, text: str) -> bool:
    """Whether it is no error that says what is wrong.

    By runbooks/errors/20-storage.md, a file of ours that is damaged is 20, by its name.
    """
    return code == 1 or (code == 20 and not (path.startswith("_mem_wal_ops/") and path in text))


def kind_of(path: Path) -> str:
    """A path as a pattern, without what a writer made up: ULIDs, UUIDs, digits."""
    return re.sub(r"[0-9A-Z]{20,}|[0-9a-f-]{32,}|[0-9]+", "*", path.as_posix())
