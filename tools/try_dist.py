"""Install a wheel into an empty environment, away from the repository, and use it as its first user would.

With ``--python``, by other interpreters; for one that this machine has not, and for other processors, the packages
are only resolved: pip finds a built one of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tools.licenses import licenses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parent.parent
SERVICE_SECONDS = 10.0
_PATIENCE = 120.0
_PROCESSORS = ("x86_64", "aarch64")
# Of glibc 2.28, as in RHEL 8 and Debian 10: wheels for an older one run there, too.
_GLIBC = range(5, 29)
# The names of all commands, with their words; run in the environment.
_COMMANDS = """
import click
from memwal_ops.cli.main import cli
def walk(words, command, context):
    if isinstance(command, click.Group):
        print(' '.join(words))
        for name in command.list_commands(context):
            walk((*words, name), command.get_command(context, name), context)
    else:
        print(' '.join(words))
with click.Context(cli) as context:
    walk((), cli, context)
"""


class Installed:
    """A virtual environment that has the wheel, and a folder in which its commands run.

    Attributes:
        home: the folder; ``HOME``, caches and temporary files are below it.
    """

    def __init__(self, python: str, wheel: Path, home: Path, constraints: Path) -> None:
        """Make the environment and install the wheel.

        Raises:
            SystemExit: pip cannot install it.
        """
        self.home, self._wheel, self._constraints = home, wheel.resolve(), constraints.resolve()
        self.venv = home / "venv"
        subprocess.run([python, "-m", "venv", str(self.venv)], check=True)
        self.install("")

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.venv / "bin/python")

    def install(self, extra: str) -> None:
        """Install the wheel, with an extra such as ``[lm-diskann]``."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["-c", str(self._constraints), f"{self._wheel}{extra}"]
        done = subprocess.run(command, cwd=self.home, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")

    @property
    def environ(self) -> dict[str, str]:
        """The environment of a user who has nothing else: no PYTHONPATH, no settings."""
        temporary = self.home / "tmp"
        temporary.mkdir(exist_ok=True)
        path = f"{self.venv}/bin:/usr/local/bin:/usr/bin:/bin"
        return {"PATH": path, "HOME": str(self.home), "TMPDIR": str(temporary), "LANG": "C.UTF-8", "RUST_LOG": "off"}

    def run(self, *words: str, code: int = 0) -> str:
        """Run a program of the environment; return its output.

        Raises:
            SystemExit: its exit code is not ``code``.
        """
        done = subprocess.run(
            words, cwd=self.home, env=self.environ, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode != code:
            sys.exit(f"{' '.join(words)}: exit code {done.returncode}, not {code}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr


def try_all(found: Installed, demos: Sequence[Sequence[str]]) -> None:
    """Use an installation: help, doctor, files, the demo of each format, a LanceDB folder, a service."""
    place = found.run(found.python, "-c", "import memwal_ops; print(memwal_ops.__file__)").strip()
    if not Path(place).is_relative_to(found.venv):
        sys.exit(f"The package is imported from {place}, which is not the installed one.")
    _try_help(found)
    found.run("memwal-ops", "doctor")
    found.run("memwal-ops", "config", "files", "--to", "files")
    for name in ("files/configs/one-table.yaml", "files/configs/fleet.yaml"):
        found.run("memwal-ops", "config", "check", name)
    for words in demos:
        shown = found.run("memwal-ops", "demo", *words)
        print(f"demo {' '.join(words)}: {len(shown.splitlines())} lines")
    _try_folder(found)
    _try_service(found)


def demos_of(found: Installed) -> list[list[str]]:
    """Return the options of the demo of each format and layout that the base packages can do."""
    shown = found.run("memwal-ops", "demo", "--help")
    formats, layouts = (
        re.sub(r"\s", "", re.search(rf"--{name} \[([^]]*)\]", shown)[1]).split("|")  # type: ignore[index]  # there
        for name in ("format", "layout")
    )
    plain = [["--format", name] for name in formats if name not in {"lance", "lm_diskann", "zeppelin"}]
    return [*plain, *(["--layout", name] for name in layouts)]


def _try_help(found: Installed) -> None:
    paths = [line.split() for line in found.run(found.python, "-c", _COMMANDS).splitlines()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shown = [*pool.map(lambda words: found.run("memwal-ops", *words, "--help"), paths)]
    for words, text in zip(paths, shown, strict=True):
        if not text.startswith(f"Usage: {' '.join(['memwal-ops', *words])}"):
            sys.exit(f"memwal-ops {' '.join(words)} --help prints: {text}")
    manual = found.venv / "share/man/man1/memwal-ops.1"
    if shutil.which("man"):
        found.run("man", "--warnings", "-E", "UTF-8", "-l", str(manual))
    print(f"--help of {len(paths)} commands, and {manual.stat().st_size:,} bytes of man page")


def _try_folder(found: Installed) -> None:
    """Maintain a folder of tables with three commands, as the README does."""
    found.run("memwal-ops", "demo", "--no-merge", "--dir", "database")
    (table,) = (found.home / "database").glob("*.lance")
    found.run("memwal-ops", "scan", "--database", "database")
    found.run("memwal-ops", "maintain", str(table))
    found.run("memwal-ops", "verify", str(table))
    print("scan, maintain, verify: a folder is maintained")


def _try_service(found: Installed) -> None:
    """Run the service for ten seconds on a table with a backlog; read its pages meanwhile."""
    found.run("memwal-ops", "demo", "--no-merge", "--dir", "served")
    (table,) = (found.home / "served").glob("*.lance")
    config = found.home / "memwal.yaml"
    config.write_text(f"state_dir: state\nhttp: {{port: 0}}\ntables: [{{name: orders, uri: {table}}}]\n")
    begun = time.monotonic()
    with _running(found, config) as base:
        while not _merged(base):
            if time.monotonic() - begun > _PATIENCE:
                sys.exit("The service merged nothing.")
            time.sleep(0.2)
        time.sleep(max(0.0, SERVICE_SECONDS - (time.monotonic() - begun)))
        pages = ("/", "/tables/orders", "/healthz", "/readyz", "/metrics", "/api/v1/status")
        sizes = {page: len(_fetch(base, page)) for page in pages}
    print(f"a service, {time.monotonic() - begun:.0f} s, merged a table; its pages: {sizes}")


@contextlib.contextmanager
def _running(found: Installed, config: Path) -> Iterator[str]:
    """A service; yields the URL of its pages, and expects that SIGTERM ends it well."""
    log = found.home / "service.log"
    with log.open("wb") as file:
        command = ["memwal-ops", "run", "--config", str(config)]
        process = subprocess.Popen(
            command, cwd=found.home, env=found.environ, stderr=file, executable=str(found.venv / "bin/memwal-ops")
        )
    try:
        yield f"http://127.0.0.1:{_port(process, log)}"
        process.send_signal(signal.SIGTERM)
        if process.wait(_PATIENCE):
            sys.exit(f"The service ended with exit code {process.returncode}.\n{log.read_text()}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    begun = time.monotonic()
    while process.poll() is None and time.monotonic() - begun < _PATIENCE:
        for line in log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event["event"] == "ready":
                    return int(event["http"])
        time.sleep(0.1)
    sys.exit(f"The service is not ready.\n{log.read_text()}")


def _merged(base: str) -> bool:
    (table,) = json.loads(_fetch(base, "/api/v1/status"))["tables"]
    return bool(table["jobs"]["merge"]["last_outcome"] == "succeeded")


def _fetch(base: str, page: str) -> bytes:
    with urllib.request.urlopen(f"{base}{page}", timeout=_PATIENCE) as answer:
        content: bytes = answer.read()
    return content


def interpreter(version: str) -> str | None:
    """Return the path of a Python of that version that runs here; None if there is none."""
    places = [shutil.which(f"python{version}"), shutil.which("python3"), sys.executable]
    places += sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")))
    for place in filter(None, places):
        command = [place, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return place
    return None


def resolve(wheel: Path, version: str, processor: str, constraints: Path) -> None:
    """Let pip find a built package of each dependency, for a Python and a Linux that need not be here."""
    platforms = [f"manylinux_2_{minor}_{processor}" for minor in _GLIBC] + [f"manylinux2014_{processor}"]
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--disable-pip-version-check"]
        command += ["--ignore-installed", "--only-binary=:all:", "--python-version", version]
        command += [word for platform in platforms for word in ("--platform", platform)]
        command += [
            "--implementation",
            "cp",
            "--target",
            target,
            "-c",
            str(constraints),
            f"{wheel}[lm-diskann,reader,zeppelin]",
        ]
        subprocess.run(command, check=True)
    print(f"Python {version} on Linux, {processor}: all packages exist")


def main() -> None:
    """Entry of ``make dist`` after the build, and of ``make dist-pythons``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path, help="the folder of make dist")
    parser.add_argument("--python", action="append", default=[], metavar="3.N", help="(repeatable) [default: this one]")
    given = parser.parse_args()
    (wheel,) = given.dist.glob("*.whl")
    constraints = ROOT / "constraints.txt"
    for version in given.python:
        for processor in _PROCESSORS:
            resolve(wheel, version, processor, constraints)
    for version in given.python or ["{}.{}".format(*sys.version_info)]:
        python = interpreter(version)
        if python is None:
            print(f"Python {version} is not on this machine: its packages were resolved, and nothing was run.")
            continue
        print(f"Python {version}: {python}")
        with tempfile.TemporaryDirectory(prefix="memwal-ops-try-") as name:
            found = Installed(python, wheel, Path(name), constraints)
            licenses(found.python, (ROOT / "NOTICE").read_text(encoding="utf-8"), given.dist, wheel.stem)
            demos = demos_of(found)
            try_all(found, demos)
            extras = {"lm_diskann": "lm-diskann", "zeppelin": "zeppelin"}
            for kind in extras:
                found.run("memwal-ops", "demo", "--format", kind, code=58)
            found.install(f"[{','.join(extras.values())},reader]")
            for kind in extras:
                found.run("memwal-ops", "demo", "--format", kind)
            print("demo of lm_diskann and zeppelin: each needs its extra, which is installed")


if __name__ == "__main__":
    main()
