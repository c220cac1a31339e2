"""Try the newest pylance of the registry in an environment of its own, and print what is new: ``make next-pylance``.

Printed: its release, the tests of ours that fail with it, the names and arguments that it adds or drops, and the
feature flags that it opens and the installed release does not. A release is allowed in by pyproject.toml once
nothing fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROOT = Path(__file__).parents[1]
_HOME = _ROOT / "build" / "next-pylance"
_TESTS = ("tests/unit", "tests/integration/contracts")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main() -> int:
    """Install, compare, test; the exit code is 1 if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", help="this release instead of the newest")
    parser.add_argument("--no-tests", action="store_true", help="compare only")
    given = parser.parse_args()
    python = _environment(given.release)
    pinned, found = _surface(sys.executable), _surface(python)
    for line in differences(pinned, found):
        _echo(line)
    if given.no_tests:
        return 0
    command = [python, "-m", "pytest", "-q", "-n", "2", "-m", "not s3", "-p", "no:cacheprovider", "-rfE", *_TESTS]
    done = _run(command, check=False)
    failed = failing(done.stdout)
    _echo(f"tests that fail with {found['release']}: {len(failed)}")
    for name in failed:
        _echo(f"  {name}")
    if done.returncode and not failed:
        _echo(done.stdout[-2000:])
    return int(done.returncode != 0)


def differences(pinned: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """What another release has that the pinned one does not, and the other way round, as lines."""
    yield f"pylance {found['release']}, beside {pinned['release']}, which is installed"
    before, after = pinned["names"], found["names"]
    for title, names in (("new", after.keys() - before.keys()), ("gone", before.keys() - after.keys())):
        yield f"{title} names: {len(names)}"
        yield from (f"  {name}{(after if title == 'new' else before)[name]}" for name in sorted(names))
    changed = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    yield f"changed signatures: {len(changed)}"
    yield from (f"  {name}: {before[name]} -> {after[name]}" for name in changed)
    flags = sorted({*found["flags"]} - {*pinned["flags"]}), sorted({*pinned["flags"]} - {*found["flags"]})
    yield f"feature flags that it opens: {', '.join(map(str, flags[0])) or 'no other ones'}"
    if flags[1]:
        yield f"feature flags that it does not open any more: {', '.join(map(str, flags[1]))}"


def failing(output: str) -> list[str]:
    """The tests that failed, from pytest's summary."""
    return sorted({match[1] for match in _FAILED.finditer(output)})


def _environment(release: str | None) -> str:
    """The Python of an environment with our dependencies and that release; made once, and brought up to date."""
    python = str(_HOME / "bin" / "python")
    if not Path(python).exists():
        _run([sys.executable, "-m", "venv", str(_HOME)])
        constraints = _HOME / "constraints.txt"
        lines = (_ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        constraints.write_text("".join(line for line in lines if not line.lower().startswith("pylance==")))
        _run([python, "-m", "pip", "install", "--quiet", "-c", str(constraints), f"{_ROOT}[dev]"])
    wanted = "pylance" if release is None else f"pylance=={release}"
    _run([python, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", wanted])
    return python


def _surface(python: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(_run([python, "-m", "tools.pylance_surface"]).stdout)
    return found


def _run(command: list[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "RUST_LOG": "off"}
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done


def _echo(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
