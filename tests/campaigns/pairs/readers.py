"""The oldest releases of pylance that read a table: what they read before our jobs, they read after them."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tests.campaigns.pairs.oracle import Wrong

#: The oldest first. Each takes what it reads of a table's base, by no index: text and number of the write of each row.
RELEASES = ("pylance 7.0.0", "pylance 10.0.0")
READER = """
import json, sys, lance
for line in sys.stdin:
    try:
        table = lance.dataset(json.loads(line)).scanner(columns=["t", "w"], use_scalar_index=False).to_table()
        found = sorted(zip(table["t"].to_pylist(), table["w"].to_pylist()))
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"[:400]
    print(json.dumps(found), flush=True)
"""
Found = list[tuple[str, int]]


def client(release: str) -> str | None:
    """The Python of an older release, where there is an environment of it already."""
    folder = os.environ.get("CLIENT_ENVIRONMENTS") or f"{tempfile.gettempdir()}/memwal-ops-clients"
    home = Path(folder, release.replace(" ", "-"))
    return str(home / "bin" / "python") if (home / "ready").exists() else None


@cache
def _process(release: str) -> subprocess.Popen[str] | None:
    python = client(release)
    if python is None:
        return None
    return subprocess.Popen(
        [python, "-c", READER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "RUST_LOG": "off"},
    )  # fmt: skip


def read_by(release: str, uri: str) -> Found | str | None:
    """The rows; why it does not read them; None where there is no such release."""
    process = _process(release)
    if process is None or "://" in uri:
        return None
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(uri) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        _process.cache_clear()
        return f"it ended with {process.wait()}"
    found = json.loads(line)
    return found if isinstance(found, str) else [(text, number) for text, number in found]


class OlderReader:
    """The oldest release that reads a table as it was made.

    Attributes:
        release: its name; None: there is none here, or none reads it.
        why: what each older one said.
    """

    def __init__(self, uri: str, rows: Found) -> None:
        """Ask one after the other."""
        self.release, self.why = None, list[str]()
        for release in RELEASES:
            found = read_by(release, uri)
            if found == rows:
                self.release = release
                return
            self.why.append(f"{release}: {found if isinstance(found, str) else 'other rows' if found else 'not here'}")

    def check(self, uri: str, rows: Found) -> None:
        """Raise unless it reads these rows now."""
        if self.release is None:
            return
        found = read_by(self.release, uri)
        if found != rows:
            what = found if isinstance(found, str) else f"{len(found or ())} rows, and not {len(rows)}"
            raise Wrong("older reader", f"{self.release} reads it no more: {what}")
