"""Import entry points of other packages in a child process first, and report those that cannot be imported.

An import runs code of another package. If it ends the process (``sys.exit(0)``, ``os._exit(0)``, a crash), never
returns, or prints on stdout, the process itself cannot report that: a check would exit with 0 and an empty output,
which monitoring takes for healthy. So a child imports each entry point once, and this process only those that passed.

The child is this module: ``python -P -m memwal_ops.import_probe LOADER NAME=VALUE...``.
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

_TIMEOUT_SECONDS = 30.0
_MAX_READ_BYTES, _SHOWN = 4096, 80
_faults: dict[tuple[str, EntryPoint], str | None] = {}


def import_faults(entries: Iterable[EntryPoint], loader: str) -> Mapping[EntryPoint, str]:
    """Return the entry points that cannot be imported, each with the reason as a sentence.

    Each is probed once per process, with a timeout of 30 seconds.

    Args:
        entries: entry points of other packages.
        loader: ``module:function`` of this package, which loads an entry point and raises if it is invalid.
    """
    entries = [*entries]
    left = [entry for entry in entries if (loader, entry) not in _faults]
    while left:
        results, exit_text = _run_child(left, loader)
        for entry, fault in zip(left, results, strict=False):
            _faults[loader, entry] = fault
        left = left[len(results) :]
        if left:
            # The child exited or hung while it imported the first one without a result; another child probes the rest.
            culprit = left.pop(0)
            _faults[loader, culprit] = _sentence(culprit, exit_text)
    return {entry: fault for entry in entries if (fault := _faults[loader, entry]) is not None}


def _run_child(entries: list[EntryPoint], loader: str) -> tuple[list[str | None], str]:
    """Return a child's results for the first entries (None: no fault), and why it exited."""
    command = [sys.executable, "-P", "-m", __name__, loader, *(f"{entry.name}={entry.value}" for entry in entries)]
    # The child imports from the same places as this process.
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
    # A file, not a pipe: a process that the package left behind would keep a pipe open.
    with tempfile.TemporaryFile() as results:
        child = subprocess.Popen(  # noqa: S603 - this module, by this interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=results,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )
        try:
            code = child.wait(_TIMEOUT_SECONDS)
            exit_text = (
                f"it ends the process (exit code {code})" if code >= 0 else f"it crashes ({signal.Signals(-code).name})"
            )
        except subprocess.TimeoutExpired:
            exit_text = f"it did not return within {_TIMEOUT_SECONDS:g} s"
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # including what the packages started
            child.wait()
        results.seek(0)
        return [json.loads(line) for line in results if line.endswith(b"\n")], exit_text


def _sentence(entry: EntryPoint, why: str) -> str:
    return f"The entry point {entry.name!r} ({entry.value}) cannot be loaded: {why}."


def _probe(entry: EntryPoint, load: Any) -> str | None:
    try:
        load(entry)
    except Exception as error:  # noqa: BLE001 - code of another package
        return str(error)
    except BaseException as error:  # noqa: BLE001 - SystemExit must not end the child
        return _sentence(entry, f"it raises {error!r}")
    sys.stdout.flush()
    os.lseek(1, 0, os.SEEK_SET)
    text = os.read(1, _MAX_READ_BYTES).decode(errors="replace").strip()
    os.ftruncate(1, 0)
    os.lseek(1, 0, os.SEEK_SET)
    return _sentence(entry, f"it prints {text[:_SHOWN]!r} on stdout, which belongs to results") if text else None


def main() -> None:
    """Import the entry points in the arguments; print for each one line of JSON on stdout: its fault, or null."""
    load = resolve_name(sys.argv[1])
    sys.modules[load.__module__].skip_import_probe()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results, tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 1)
        for argument in sys.argv[2:]:
            name, _, value = argument.partition("=")
            fault = _probe(EntryPoint(name, value, ""), load)
            results.write(json.dumps(fault) + "\n")
            results.flush()
        # Threads and exit handlers of a package must not delay the exit.
        os._exit(0)


if __name__ == "__main__":
    main()
