"""The loop: inputs into a decoder, in a process of its own that is watched from outside.

What must never happen is bad for the process in which it happens: an endless loop, an allocation of
all memory, an abort in native code. So inputs run in a child, which writes each one into a shared file
before it tries it; the parent process notices that it hangs or dies, and knows the input.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.campaigns.fuzz.decoder import Decoder

LONGEST_SECONDS = 3.0
HANG_SECONDS = 20.0
MAX_BYTES = 512 << 20
_ADDRESS_SPACE = 3 << 30
_SHRINK_SECONDS = 5.0
_MOST_FAILURES = 20
_HEAD = struct.Struct("<QQ")
_ROOM = 4 << 20
# What takes no processor time either, or never came to its first input.
_SLEEP_SECONDS = 900.0
_NOT_STARTED = (2**64 - 1, 0)


@dataclass(frozen=True)
class Failure:
    """An input that a decoder does not stand: the shortest of those that fail in the same way.

    ``ended``: it stood still or ended the process, which no code around a native library can catch.
    """

    decoder: str
    what: str
    data: bytes
    ended: bool = False

    def __str__(self) -> str:
        literal = repr(self.data)
        return (
            f"{self.decoder}: {self.what}\n  input ({len(self.data)} bytes): {literal}\n"
            f'  replay: python -m tests.campaigns.fuzz --replay {self.decoder} "$INPUT"   with INPUT as printed above'
        )


@dataclass(frozen=True)
class Rate:
    """How many inputs a decoder took, how many of them it accepted, and in which time."""

    decoder: str
    inputs: int
    accepted: int
    seconds: float

    def __str__(self) -> str:
        speed = self.inputs / max(self.seconds, 1e-9)
        return (
            f"{self.decoder:32} {self.inputs:9,} inputs {speed:9,.0f}/s   {self.accepted / self.inputs:6.1%} accepted"
        )


def trouble(decoder: Decoder, data: bytes) -> tuple[str, bool]:
    """What is wrong with how a decoder takes an input ("": nothing), and whether it accepted it."""
    before = _peak()
    started = time.process_time()
    try:
        decoder.run(data)
        found, accepted = "", True
    except decoder.refuses:
        found, accepted = "", False
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        found, accepted = f"{type(error).__name__} at {_place(error)}: {str(error)[:200]}", False
    seconds, grown = time.process_time() - started, _peak() - before
    if not found and grown > MAX_BYTES:
        found = f"takes {grown >> 20} MiB of memory"
    if not found and seconds > LONGEST_SECONDS:
        found = f"takes {seconds:.1f} s"
    return found, accepted


def _peak() -> int:
    """The most memory that this process ever took; the system's ``ru_maxrss`` begins with its parent's."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        status = file.read(4096)
    return int(status.partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def _place(error: BaseException) -> str:
    """The last line of ours that the error passed, which tells one failure from another."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "memwal_ops/" in frame.filename or frame.filename.endswith("decoders.py"):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "nowhere"


def shrink(decoder: Decoder, data: bytes, what: str) -> bytes:
    """A shorter input that fails at the same place; as short as five seconds allow."""
    kind = what.partition(": ")[0]
    until = time.process_time() + _SHRINK_SECONDS

    def fails(candidate: bytes) -> bool:
        return trouble(decoder, candidate)[0].partition(": ")[0] == kind

    size = max(1, len(data) // 2)
    while size:
        at = 0
        while at < len(data) and time.process_time() < until:
            candidate = data[:at] + data[at + size :]
            if fails(candidate):
                data = candidate
            else:
                at += size
        size //= 2
    for at in range(len(data)):
        candidate = data[:at] + b"0" + data[at + 1 :]
        if data[at : at + 1] != b"0" and time.process_time() < until and fails(candidate):
            data = candidate
    return data


def fuzz_here(
    decoder: Decoder, inputs: int, seed: int, *, first: int = 0, announce: Callable[[int, bytes], None] | None = None
) -> tuple[Rate, list[Failure]]:
    """Run inputs ``first`` to ``inputs`` in this process."""
    failures: dict[str, Failure] = {}
    accepted = 0
    for real in decoder.seeds:  # what is loaded once is not the first input's
        trouble(decoder, real)
    started = time.perf_counter()
    for number in range(first, inputs):
        data = decoder.input(random.Random(f"{seed}/{decoder.name}/{number}"))
        if announce is not None:
            announce(number, data)
        what, good = trouble(decoder, data)
        accepted += good
        if what.startswith("takes") and what.endswith(" s"):
            what, _ = trouble(decoder, data)  # once more: it may have been the machine
        if what:
            kind = what.partition(": ")[0] if not what.startswith("takes") else what.split(" ")[-1]
            known = failures.get(kind)
            if known is None:
                data = shrink(decoder, data, what) if not what.startswith("takes") else data
                what = trouble(decoder, data)[0] or what
            if known is None or len(data) < len(known.data):
                failures[kind] = Failure(decoder.name, what, data)
            if len(failures) >= _MOST_FAILURES:
                break
    seconds = time.perf_counter() - started
    return Rate(decoder.name, max(1, inputs - first), accepted, seconds), list(failures.values())


def fuzz(
    plan: Mapping[str, int],
    seed: int,
    *,
    jobs: int = 2,
    module: str = "tests.campaigns.fuzz.decoders",
    hang_seconds: float = HANG_SECONDS,
) -> tuple[list[Rate], list[Failure]]:
    """Run a number of inputs per decoder, in ``jobs`` processes at a time.

    Args:
        plan: inputs per decoder of ``module``.
        seed: the same gives the same inputs.
        jobs: processes at a time.
        module: where the decoders are registered.
        hang_seconds: after so much processor time without another input, a process is killed.
    """
    groups: list[list[str]] = [[] for _ in range(jobs)]
    # One after the other by size to whoever has least: close enough to an even load.
    for at, name in enumerate(sorted(plan, key=lambda one: -plan[one])):
        groups[at % jobs].append(name)
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda group: _watch(group, plan, seed, module, hang_seconds), filter(None, groups)))
    return [one for rates, _ in outcomes for one in rates], [one for _, found in outcomes for one in found]


def _watch(
    group: Sequence[str], plan: Mapping[str, int], seed: int, module: str, hang_seconds: float
) -> tuple[list[Rate], list[Failure]]:
    """Keep a child at work until the group is done; a new one goes on behind the input that ended the last."""
    rates: list[Rate] = []
    failures: list[Failure] = []
    waiting = [(name, 0) for name in group]
    with tempfile.NamedTemporaryFile() as shared:
        shared.truncate(_ROOM)
        with mmap.mmap(shared.fileno(), _ROOM) as view:
            while waiting:
                work = [(name, first, plan[name]) for name, first in waiting]
                ended, results = _child(work, seed, module, shared.name, view, hang_seconds)
                for kind, value in results:
                    if kind == "rate":
                        rates.append(Rate(**value))
                        waiting.pop(0)
                    else:
                        failures.append(Failure(value["decoder"], value["what"], bytes.fromhex(value["data"])))
                if not waiting:
                    break
                name = waiting[0][0]
                number, size = state = _HEAD.unpack_from(view)
                assert state != _NOT_STARTED, f"no process for {name}: {ended}"
                failures.append(Failure(name, ended, view[_HEAD.size : _HEAD.size + size], ended=True))
                if sum(one.decoder == name for one in failures) >= _MOST_FAILURES:
                    waiting.pop(0)
                else:
                    waiting[0] = (name, number + 1)
    return rates, failures


def _child(
    work: object, seed: int, module: str, shared: str, view: mmap.mmap, hang_seconds: float
) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """One process until it ends or stands still: how it ended, and what it said."""
    command = [sys.executable, "-m", "tests.campaigns.fuzz.harness", module, shared, str(seed), json.dumps(work)]
    # Files, not pipes: a native library that panics a thousand times would fill a pipe, and stand still.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        _HEAD.pack_into(view, 0, *_NOT_STARTED)
        child = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, "RUST_BACKTRACE": "0"})
        hung = _hangs(child, view, hang_seconds)
        out.seek(0)
        results = [json.loads(line) for line in out.read().splitlines()]
        err.seek(max(0, err.seek(0, os.SEEK_END) - 1000))
        said = " ".join(err.read().decode(errors="replace").split())[-300:]
    if hung:
        return f"does not end within {hang_seconds:.0f} s", results
    return f"ended the process ({child.returncode}): {said}", results


def _hangs(child: subprocess.Popen[bytes], view: mmap.mmap, hang_seconds: float) -> bool:
    """Wait for the end; kills what stands still, and says whether it did.

    By the processor time that it takes: a process that the machine does not let work does not stand still.
    """
    watched = psutil.Process(child.pid)
    seen, spent, since = _HEAD.unpack_from(view), 0.0, time.monotonic()
    while True:
        try:
            child.wait(0.2)
        except subprocess.TimeoutExpired:
            state, times = _HEAD.unpack_from(view), watched.cpu_times()
            now = times.user + times.system
            if state != seen:
                seen, spent, since = state, now, time.monotonic()
            elif time.monotonic() - since > _SLEEP_SECONDS or (state != _NOT_STARTED and now - spent > hang_seconds):
                child.kill()
                child.wait()
                return True
        else:
            return False


def main() -> None:
    """The child: decoders one after the other, results as JSON lines."""
    module, shared, seed, work = sys.argv[1:]
    decoders = __import__(module, fromlist=["DECODERS"]).DECODERS
    with open(shared, "r+b") as file, mmap.mmap(file.fileno(), _ROOM) as view:

        def announce(number: int, data: bytes) -> None:
            size = min(len(data), _ROOM - _HEAD.size)
            _HEAD.pack_into(view, 0, number, size)
            view[_HEAD.size : _HEAD.size + size] = data[:size]

        announce(0, b"")
        for at, (name, first, inputs) in enumerate(json.loads(work)):
            decoder: Decoder = decoders[name]
            for real in decoder.seeds:
                trouble(decoder, real)
            if at == 0:  # after the first ones, when libraries have taken what they take
                now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (now + _ADDRESS_SPACE, now + _ADDRESS_SPACE))
            rate, failures = fuzz_here(decoder, inputs, seed=int(seed), first=first, announce=announce)
            for failure in failures:
                say = {"decoder": failure.decoder, "what": failure.what, "data": failure.data.hex()}
                print(json.dumps(["failure", say]), flush=True)
            print(json.dumps(["rate", asdict(rate)]), flush=True)
            announce(0, b"")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
