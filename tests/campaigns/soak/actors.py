"""Processes that are started, watched, killed and started again, each by its own id."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.campaigns.soak import writer
from tests.campaigns.soak.account import Account, note
from tests.campaigns.soak.jobs import COMMANDS

if TYPE_CHECKING:
    from tests.campaigns.soak.place import Place

_ROOT = str(Path(__file__).parents[3])
_LOOK_EVERY = 0.3
_TAIL = 6000


class UnexpectedEndError(AssertionError):
    """A process ended by itself as it must not."""


def spawn(arguments: list[str], out: Path, err: Path) -> subprocess.Popen[bytes]:
    """A process, the first of its own group, that finds this project wherever it is started."""
    paths = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "RUST_LOG": os.environ.get("SOAK_RUST_LOG", "off")}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        return subprocess.Popen(arguments, stdout=stdout, stderr=stderr, env=environment, cwd=_ROOT, process_group=0)


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL, also to one that is stopped, and to a command that it may have started; wait."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Actor:
    """One place in the cast: whatever stands in it is killed at random, and followed by the next one.

    Args:
        lives: shortest and longest life, seconds.
        mortal: how many of all are killed; the others live until they end.
    """

    def __init__(
        self, place: Place, account: Account, rng: random.Random, kind: str, lives: tuple[float, float], mortal: float
    ) -> None:
        self.place, self.account, self.rng, self.kind, self.lives, self.mortal = (
            place, account, rng, kind, lives, mortal,
        )  # fmt: skip
        self.stem = f"{kind.replace(' ', '-')}-{rng.randrange(1 << 30)}"
        self.begin()

    def arguments(self) -> list[str]:
        """What is started next."""
        raise NotImplementedError

    def ended(self, code: int) -> None:
        """Judge one that ended by itself."""
        raise self.unexpected(code)

    def begin(self) -> None:
        """The next one, at once."""
        self.out, self.err = (Path(self.place.folder) / f"{self.stem}.{what}" for what in ("out", "err"))
        self.process = spawn(self.arguments(), self.out, self.err)
        self.watched = psutil.Process(self.process.pid)
        now = time.monotonic()
        self.dies_at = now + self.rng.uniform(*self.lives) if self.rng.random() < self.mortal else float("inf")
        self.looks_at = now + _LOOK_EVERY

    def tend(self) -> None:
        """Look, kill, start again."""
        code = self.process.poll()
        now = time.monotonic()
        if code is not None:
            self.ended(code)
            self.begin()
        elif now > self.dies_at:
            self.look()
            end(self.process)
            self.account.kills[self.kind] += 1
            self.killed()
            self.begin()
        elif now > self.looks_at:
            self.look()
            self.looks_at = now + _LOOK_EVERY

    def killed(self) -> None:
        """One more was killed."""

    def look(self) -> None:
        """At its memory."""
        try:
            self.account.seen(self.kind, self.watched.memory_info().rss)
        except psutil.Error:
            return  # it ended a moment ago

    def stop(self) -> None:
        """No more of these; not counted as a kill."""
        end(self.process)

    def unexpected(self, code: int) -> UnexpectedEndError:
        """The error that says so, with what it said."""
        said = "\n".join(path.read_text(errors="replace")[-_TAIL:] for path in (self.out, self.err))
        return UnexpectedEndError(f"{self.kind} ended by itself with {code}: {self.arguments()}\n{said}")


class Endless(Actor):
    """A loop or a reader: it never ends by itself."""

    def __init__(self, *others: object, module: str, what: tuple[str, ...] = ()) -> None:
        self._module, self._what = module, what
        super().__init__(*others)  # type: ignore[arg-type]

    def arguments(self) -> list[str]:
        return [
            sys.executable, "-m", self._module, *self._what, self.place.folder, str(self.rng.randrange(1 << 30)),
        ]  # fmt: skip


class Command(Actor):
    """A command line, as an operator's timer would start it."""

    _line: list[str]

    def arguments(self) -> list[str]:
        self._line = COMMANDS[self.kind](self.place, self.rng)
        return self._line

    @property
    def name(self) -> str:
        """The subcommand."""
        return self._line[3]

    def killed(self) -> None:
        note(self.place.folder, self.name, "killed")

    def ended(self, code: int) -> None:
        if code not in {0, *self.place.lost_races}:
            raise self.unexpected(code)
        document = json.loads(self.out.read_bytes())
        if code and "error" in document:
            note(self.place.folder, self.name, document["error"]["reason"])
            return
        deleted = document.get("deleted", {}).get("objects", 0)
        note(self.place.folder, self.name, document.get("decision", "looked"), deleted=deleted)

    def unexpected(self, code: int) -> UnexpectedEndError:
        said = "\n".join(path.read_text(errors="replace")[-_TAIL:] for path in (self.out, self.err))
        return UnexpectedEndError(f"{' '.join(self._line)} ended with {code}:\n{said}")


class Writer(Actor):
    """The writer of one region; now and then it is stalled, and another one takes over before it wakes."""

    def __init__(self, *others: object, region: int) -> None:
        self.region, self.incarnation = region, 0
        self.stalled: tuple[subprocess.Popen[bytes], float] | None = None
        super().__init__(*others)  # type: ignore[arg-type]

    def arguments(self) -> list[str]:
        return [
            sys.executable, "-m", "tests.campaigns.soak.writer",
            self.place.folder, str(self.region), str(self.incarnation),
        ]  # fmt: skip

    def begin(self) -> None:
        self.incarnation += 1
        self.stem = f"writer-{self.region}-{self.incarnation % 2}"
        super().begin()

    def ended(self, code: int) -> None:
        said = {0: "closed", writer.FENCED: "fenced", writer.FAILED: "failed"}.get(code)
        local = "://" not in self.place.uri
        # Only another writer fences, and only a network makes a write fail.
        if said is None or (local and code != 0):
            raise self.unexpected(code)
        note(self.place.folder, "writer", said)

    def stall(self, seconds: float) -> None:
        """Stop it in the middle of whatever it does, and let another one claim its region.

        Only one that has written: a writer that stalls before its claim would claim when it resumes.
        """
        ledger = self.place.ledger(self.region)
        if self.stalled is not None or not any(seq >> 16 == self.incarnation for seq in ledger.tried):
            return
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGSTOP)
        self.stalled = (self.process, time.monotonic() + seconds)
        self.begin()

    def tend(self) -> None:
        super().tend()
        if self.stalled is None:
            return
        process, wakes_at = self.stalled
        now = time.monotonic()
        if now > wakes_at:
            process.send_signal(signal.SIGCONT)
            # It finds out with its next write.
            code = process.poll()
            if code is not None:
                # 0: it was closing its region, and had flushed, when it was stopped.
                if code not in {0, writer.FENCED, *((writer.FAILED,) if "://" in self.place.uri else ())}:
                    raise UnexpectedEndError(f"a stalled writer of region {self.region} woke and ended with {code}")
                self.account.fenced += code == writer.FENCED
                self.stalled = None
            elif now > wakes_at + 30:
                end(process)
                note(self.place.folder, "writer", "woke, and was killed")
                self.stalled = None

    def stop(self) -> None:
        super().stop()
        if self.stalled is not None:
            end(self.stalled[0])
