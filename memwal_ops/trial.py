"""Load entry points of other packages in a separate process first, and report those that cannot be loaded.

An import runs code of another package. If it ends the process (``sys.exit(0)``, ``os._exit(0)``, a crash), never
returns, or prints on stdout, the process itself cannot report that: a check would exit with 0 and an empty output,
which monitoring takes for healthy. So a child loads each entry point once; this process loads what the child survived.

The child is this module: ``python -P -m memwal_ops.trial LOADER NAME=VALUE...``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import EntryPoint
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SECONDS = 30.0
_MOST_READ, _SHOWN = 4096, 80
_tried: dict[tuple[str, EntryPoint], str | None] = {}


def faults(entries: Iterable[EntryPoint], loader: str) -> Mapping[EntryPoint, str]:
    """Return the entry points that cannot be loaded, each with the reason as a sentence.

    Each is tried once per process, within 30 seconds.

    Args:
        entries: entry points of other packages.
        loader: ``module:function`` of this package, which loads an entry point and raises if it is invalid.
    """
    entries = [*entries]
    left = [entry for entry in entries if (loader, entry) not in _tried]
    while left:
        answers, ended = _child(left, loader)
        for entry, fault in zip(left, answers, strict=False):
            _tried[loader, entry] = fault
        left = left[len(answers) :]
        if left:
            # The child ended or hung while it loaded the first one without an answer; another child tries the rest.
            culprit = left.pop(0)
            _tried[loader, culprit] = _sentence(culprit, ended)
    return {entry: fault for entry in entries if (fault := _tried[loader, entry]) is not None}


def _child(entries: list[EntryPoint], loader: str) -> tuple[list[str | None], str]:
    """Return a child's results for the first entries (None: no fault), and how it ended."""
    command = [sys.executable, "-P", "-m", __name__, loader, *(f"{entry.name}={entry.value}" for entry in entries)]
    # The child imports from the same places as this process.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
    # A file, not a pipe: a process that the package left behind would keep a pipe open.
    with tempfile.TemporaryFile() as answers:
        child = subprocess.Popen(  # noqa: S603 - this module, by this interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=answers,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
        try:
            code = child.wait(_SECONDS)
            ended = (
                f"it ends the process (exit code {code})" if code >= 0 else f"it crashes ({signal.Signals(-code).name})"
            )
        except subprocess.TimeoutExpired:
            ended = f"it did not return within {_SECONDS:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # including what the packages started
            child.wait()
        answers.seek(0)
        return [json.loads(line) for line in answers if line.endswith(b"\n")], ended


def _sentence(entry: EntryPoint, why: str) -> str:
    return f"The entry point {entry.name!r} ({entry.value}) cannot be loaded: {why}."


def _try(entry: EntryPoint, load: Any) -> str | None:
    try:
        load(entry)
    except Exception as error:  # noqa: BLE001 - code of another package
        return str(error)
    except BaseException as error:  # noqa: BLE001 - SystemExit must not end the child
        return _sentence(entry, f"it raises {error!r}")
    sys.stdout.flush()
    os.lseek(1, 0, os.SEEK_SET)
    text = os.read(1, _MOST_READ).decode(errors="replace").strip()
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)
    return _sentence(entry, f"it prints {text[:_SHOWN]!r} on stdout, which belongs to results") if text else None


def main() -> None:
    """Load the entry points in the arguments; print for each one line of JSON on stdout: its fault, or null."""
    load = resolve_name(sys.argv[1])
    sys.modules[load.__module__].without_trial()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers, tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        for argument in sys.argv[2:]:
            name, _, value = argument.partition("=")
            fault = _try(EntryPoint(name, value, ""), load)
            answers.write(json.dumps(fault) + "\n")
            answers.flush()
        # Threads and exit handlers of a package must not delay the exit.
        os._exit(0)


if __name__ == "__main__":
    main()
