"""Damage: any file that a listing finds, in each way; and what commands may do then.

The rule: what is wrong is named; no process ends by a signal; what reads is never deleted, while the newest version
cannot be read; and no command calls a table healthy that pylance cannot read.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memwal_ops import errors
from memwal_ops.errors import MemwalOpsError
from tests.campaigns.pairs.buckets import mirror
from tests.campaigns.pairs.dimensions import JOBS
from tests.campaigns.pairs.oracle import Wrong
from tests.campaigns.pairs.scripts import SHORT, job_source
from tests.support.runbook import commands

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.campaigns.pairs.process import Run

#: Reads versions of a table, whatever happens to it: a file that is damaged may end a process by a signal.
READER = """
import hashlib, json, sys, lance
for line in sys.stdin:
    uri, version = json.loads(line)
    try:
        rows = lance.dataset(uri, version=version).scanner(use_scalar_index=False).to_table()
        found = hashlib.sha256(repr(sorted(map(repr, rows.to_pylist()))).encode()).hexdigest()
    except BaseException as error:
        found = None
    print(json.dumps(found), flush=True)
"""
HEALTHY = {"healthy", "nothing_to_repair"}
#: A command that a text tells about this table; flags follow, of which these have values.
_REMEDY = re.compile(r"memwal-ops ([a-z]+) (?:URI|/\S+)(?=((?: \S+){0,9}))")
_VALUES = {
    "--migrate-codebook": 2, "--index": 1, "--version": 1, "--region": 1, "--max-bytes": 1, "--older-than": 1,
    "--where": 1, "--to": 1, "--primary-key": 1, "--ttl": 1, "--note": 1, "--wait": 1, "--engine": 1, "--undo": 1,
    "--max-generations": 1, "--flushed-means": 1, "--column": 1, "--keep": 1, "--table": 1,
}  # fmt: skip
_ROOT = Path(__file__).parents[3]
_PAGE = re.compile(r"runbooks/errors/[\w-]+\.md")
#: Commands that make another table, or need a path or what an operator knows.
_ELSEWHERE = {"migrate", "snapshot", "init", "adopt", "hold", "erase", "why"}


class Reader:
    """pylance, in a process of its own."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def read(self, uri: str, version: int | None = None) -> str | None:
        """A digest of all rows; None where they cannot be read."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env={**os.environ, "RUST_LOG": "off"},
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([uri, version]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._process = None
            return None
        found = json.loads(line)
        return found if found is None else str(found)


READER_PROCESS = Reader()


def versions(uri: str) -> list[int]:
    """Those that are listed."""
    names = [path.stem for path in Path(uri, "_versions").glob("*.manifest") if path.stem.isdigit()]
    return sorted(int(name) if len(name) < 20 else 2**64 - 1 - int(name) for name in names)


def files(uri: str) -> list[Path]:
    """All of a table, but those of its branches, of holders and of ours."""
    kept = {"tree", "_refs", "_mem_wal_ops"}
    found = (path for path in Path(uri).rglob("*") if path.is_file())
    return sorted(path for path in found if not kept & {*path.relative_to(uri).parts[:-1]})


def kind_of(uri: str, path: Path) -> str:
    """Folder and suffix, without what is made up by a writer."""
    parts = path.relative_to(uri).parts
    return f"{parts[0]}/{'manifest/' if 'manifest' in parts[:-1] else ''}{path.suffix or path.name}"


#: Source of each way, of the file ``F``.
WAYS = {
    "missing": "F.unlink()",
    "empty": "F.write_bytes(b'')",
    "half": "F.write_bytes(F.read_bytes()[: F.stat().st_size // 2])",
    "bit_start": "B = bytearray(F.read_bytes()); B[:1] = bytes(one ^ 4 for one in B[:1]); F.write_bytes(B)",
    "bit_middle": "B = bytearray(F.read_bytes()); N = len(B) // 2; B[N:N + 1] = bytes(one ^ 4 for one in B[N:N + 1]); "
    "F.write_bytes(B)",
    "bit_end": "B = bytearray(F.read_bytes()); B[-1:] = bytes(one ^ 4 for one in B[-1:]); F.write_bytes(B)",
    "other_file": "F.write_bytes(OTHER.read_bytes())",
    "other_table": "B = F.read_bytes(); F.write_bytes(bytes(one ^ 0x55 for one in B[:-16]) + B[-16:])",
}


def harm(run: Run, way: str) -> tuple[str, str, str]:
    """Damage a file of a kind that is drawn first. Returns the kind, the path, and the source."""
    uri, chance = run.uri, run.chance
    kinds: dict[str, list[Path]] = {}
    for path in files(uri):
        kinds.setdefault(kind_of(uri, path), []).append(path)
    kind = chance.choice(sorted(kinds))
    number = chance.randrange(len(kinds[kind]))
    path = kinds[kind][number]
    top, suffix = kind.split("/")[0], path.suffix or path.name
    listed = (
        sorted(one for one in Path(uri, top).rglob(f"*{suffix}") if one.is_file())
        if path.parent != Path(uri)
        else [path]
    )
    source = f"F = sorted(pathlib.Path(URI, {top!r}).rglob('*{suffix}'))[{listed.index(path)}]"
    if path.parent == Path(uri):
        source = f"F = pathlib.Path(URI, {path.name!r})"
    if way == "other_file":
        others = [one for one in kinds[kind] if one != path] or [one for one in files(uri) if one != path]
        other = chance.choice(others).relative_to(uri)
        source += f"; OTHER = pathlib.Path(URI, {str(other)!r})"
    source += "\n" + WAYS[way]
    run.execute(source)
    return kind, str(path.relative_to(uri)), source


def check(run: Run) -> None:
    """Damage the table of a run, run all commands, and compare what reads."""
    uri, way = run.uri, run.row["damage"]
    whole, backup, pages = READER_PROCESS.read(uri), Path("backup.lance").absolute(), dict[str, None]()
    shutil.copytree(uri, backup)
    kind, path, source = harm(run, way)
    run.tell(step=f"damage {kind}", source=source, harm=source)
    before = {version: READER_PROCESS.read(uri, version) for version in versions(uri)}
    newest, followed = READER_PROCESS.read(uri), set[tuple[str, ...]]()
    names = [*JOBS]
    run.chance.shuffle(names)
    for name in (run.row["job"], *names[: 3 if SHORT else 7], "verify_deep"):
        source = job_source(run.row, name)
        run.tell(step=f"{name} with {way} {kind}", source=source)
        decision, code, text = attempt(run, source)
        pages |= dict.fromkeys([errors.runbook(code) or "", *_PAGE.findall(text)])
        if code == 1:
            raise Wrong(f"{name} is not named: {way} {kind}", decision)
        for words in remedies(text, code, uri, followed):
            run.tell(step=f"remedy {words[0]} with {way} {kind}", source=f"command({words!r})")
            _, code, said = attempt(run, f"command({words!r})")
            # An undo is refused once a remedy before it changed the same again: it would lose that.
            if code == 1 or (code == 2 and "--undo" not in words):
                raise Wrong(f"remedy {words[0]} ends with {code}: {way} {kind}", f"{said[:900]} after {text[:600]}")
        healthy = name == "verify_deep" and decision == "healthy"
        if healthy and ((way in {"missing", "empty", "half"} and newest != whole) or READER_PROCESS.read(uri) is None):
            raise Wrong(f"healthy and does not read: {way} {kind}", path)
    after = {version: READER_PROCESS.read(uri, version) for version in versions(uri)}
    if newest is None:
        lost = [version for version, rows in before.items() if rows is not None and after.get(version) != rows]
        if lost:
            raise Wrong(f"deleted what reads: {way} {kind}", f"versions {lost} of {[*before]} after {path}")
    if newest is not None and newest == whole and (now := READER_PROCESS.read(uri)) is None:
        raise Wrong(f"reads no more: {way} {kind}", f"{path}; {newest} {now}")
    from_backup(run, path, backup, pages)


def from_backup(run: Run, path: str, backup: Path, pages: Iterable[str]) -> None:
    """Restore the file as the pages of the errors say, if it is named still: then the table reads, and it is not."""
    *_, text = attempt(run, "run_job(URI, 'verify', deep=True)")
    if READER_PROCESS.read(run.uri) is not None and "/".join(Path(path).parts[:3]) not in text:
        return
    for page in filter(None, pages):
        filled = backup_lines((_ROOT / page).read_text(), run.uri, path, str(backup))
        for line in filled:
            run.tell(step=f"backup by {page}", source=line)
            done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False)
            if done.returncode:
                raise Wrong(f"backup by {page} ends with {done.returncode}", f"{line}: {done.stderr[-400:]}")
        if not filled:
            continue
        if Path(run.uri, path).read_bytes() != (backup / path).read_bytes():
            raise Wrong(f"backup by {page} restores another file", f"{path}: {filled}")
        if READER_PROCESS.read(run.uri) is None:
            raise Wrong(f"does not read with its backup: {page}", f"{path}: {filled}")
        *_, text = attempt(run, "run_job(URI, 'verify', deep=True)")
        if path in text:
            raise Wrong(f"verify names it with its backup: {page}", text[:900])


def backup_lines(page: str, uri: str, path: str, backup: str) -> list[str]:
    """The lines of a page that bring a file of a table back, with its names put in."""
    parts = Path(path).parts
    known = {"URI": uri, "BACKUP": backup, "FILE": parts[-1], "REGION": "".join(parts[1:2])}
    known["GENERATION"] = "/".join(parts[1:3])
    found = []
    for line in commands(page):
        filled = re.sub(r"\$([A-Z]+)", lambda name: known.get(name[1], name[0]), line.partition(" #")[0].strip())
        words = shlex.split(filled)
        to = words[-1].removesuffix(".") if words else ""
        if {*words[:1]} & {"cp", "mkdir"} and f"{uri}/{path}/".startswith(to.rstrip("/") + "/"):
            found.append(filled)
    return found if any(backup in line for line in found) else []


def attempt(run: Run, source: str) -> tuple[str, int, str]:
    """What a command came to: the decision or reason, the exit code, and its text."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            report = run.execute(source)
    except MemwalOpsError as error:
        if not error.remedy and error.exit_code not in {2, 3}:
            raise Wrong("no remedy", f"{error.reason}: {error}") from error
        return error.reason, error.exit_code, f"{error} {error.remedy}"
    except SystemExit as ended:
        return "exit", int(ended.code or 0), said.getvalue()
    except Exception as error:
        raise Wrong(f"raises {type(error).__name__}", f"{source}: {error!s:.500}") from error
    text = report.describe() if hasattr(report, "describe") else said.getvalue()
    return str(getattr(report, "decision", "")), int(getattr(report, "exit_code", 0)), text


def remedies(text: str, code: int, uri: str, followed: set[tuple[str, ...]]) -> Iterator[list[str]]:
    """The commands about a table that a text tells, and then those of the page of its error; each once."""
    name = errors.runbook(code) if code > 2 else None
    lines = commands((_ROOT / name).read_text()) if name else []
    lance = Path(uri, "_versions").exists()
    page = "".join(f" {line.partition(' #')[0].strip()}." for line in lines if lance or "# Lance alone" not in line)
    for job, rest in _REMEDY.findall(" ".join(text.split()) + re.sub(r'"\$([A-Z]+)"', r"\1", page)):
        left, flags = rest.split(), list[str]()
        while left and left[0].startswith("--"):
            more = 1 + _VALUES.get(left[0], 0)
            flags, left = flags + left[:more], left[more:]
        flags = [flag.strip(".,;:)'\"") for flag in flags]
        # One in capitals is to be filled in; a version that is given up is one that may read.
        known = job in _ELSEWHERE or "--version" in flags or any(re.fullmatch("[A-Z]{3,}", flag) for flag in flags)
        if not known and (job, *flags) not in followed:
            followed.add((job, *flags))
            yield [job, uri, *flags]


def scan_for(uri: str, planted: list[bytes]) -> None:
    """Raise where a file still has one of these, as it is."""
    for path in mirror(uri).rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            for value in planted:
                if value in data:
                    raise Wrong("erased value stays", f"{value!r} in {path.name}")
