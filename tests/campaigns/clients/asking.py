"""Run :mod:`client` with another release."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CLIENT = Path(__file__).with_name("client.py")
SILENT = 40.0  # seconds without a line, after which a release counts as one that never returns

ENDED = "ended"
LAST = {"kinds": "", "write": "write", "use": "compact", "use-maintained": "compact"}
"""The last step of each command."""

Outcomes = dict[str, dict[str, str]]


def ask(python: str, command: str, folder: Path, kinds: Iterable[str] = ()) -> Outcomes:
    """What each step on each kind of table came to; a step that never returns ends its kind, and the next is asked."""
    found: Outcomes = {}
    left = _ask(python, command, folder, [*kinds], found)
    while left:
        left = _ask(python, command, folder, left, found)
    return found


def _ask(python: str, command: str, folder: Path, kinds: list[str], found: Outcomes) -> list[str]:
    """Kinds that are left, after the process hung or died."""
    process = subprocess.Popen(
        [python, str(CLIENT), command, str(folder), *kinds],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RUST_LOG": "off", "PYTHONPATH": ""},
    )
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: [*map(lines.put, process.stdout or ()), lines.put("")])
    reader.start()
    current = kinds[0] if kinds else ""
    try:
        while line := lines.get(timeout=SILENT):
            if line.startswith("["):
                current, step, outcome = json.loads(line)
                found.setdefault(current, {})[step] = outcome
        silent = False
    except queue.Empty:
        silent = True
        process.kill()
    code = process.wait()
    reader.join()
    process.stdout.close()
    if not silent and code == 0:
        return []
    done = kinds.index(current) if current in kinds else 0
    if LAST[command] in found.get(current, {}):
        done += 1  # the one after it
    if done < len(kinds):
        found.setdefault(kinds[done], {})[ENDED] = "it never returns" if silent else f"its process ended with {code}"
    return kinds[done + 1 :]
