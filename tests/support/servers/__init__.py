"""Real object stores on the loopback interface: Azurite (Azure Blob Storage) and Ceph RADOS Gateway (S3).

A plugin: ``pytest_plugins = ["tests.support.servers"]`` gives the fixtures ``azurite`` and ``rgw``, each started once
per test process when the first test asks for it, and ended with it. Both are packages that others publish, fetched by
npm and apt-get into a folder that stays:

* ``MEMWAL_OPS_REAL_STORES=1`` fetches what is missing (Azurite: npm, 150 MB; Ceph: Debian 12, 260 MB unpacked);
* without it, tests on a store whose packages are already there run, and the others are skipped, with the reason;
* ``MEMWAL_OPS_REAL_STORES=0`` skips all of them, ``-m "not real_store"`` does not even collect them;
* ``MEMWAL_OPS_STORES_CACHE`` is the folder, ``~/.cache/memwal-ops`` unless given.

Azurite starts in a second, RGW in about 20, so what runs on RGW is the contract and one tour of the jobs.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SWITCH = "MEMWAL_OPS_REAL_STORES"


@dataclass(frozen=True)
class RealStore:
    """A running server: the URI of an empty bucket, and the storage options that reach it."""

    uri: str
    options: Mapping[str, str]


class UnavailableError(Exception):
    """The server cannot be had here; the text says why."""


def cache() -> Path:
    """The folder in which fetched packages stay."""
    given = os.environ.get("MEMWAL_OPS_STORES_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memwal-ops"


def may_fetch(what: str) -> None:
    """Raise ``UnavailableError`` unless missing packages are to be fetched."""
    if os.environ.get(SWITCH) != "1":
        raise UnavailableError(f"{what} is not there; {SWITCH}=1 fetches it")


def run(*command: str | Path, log: Path, **options: object) -> None:
    """Run a command to its end, its output in ``log``; ``UnavailableError`` with the last of it where it fails."""
    with log.open("ab") as out:
        try:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out, **options)  # type: ignore[call-overload]
        except (OSError, subprocess.SubprocessError) as error:
            raise UnavailableError(f"{error}: {log.read_text(errors='replace')[-1000:]}") from error


@contextmanager
def process(*command: str | Path, log: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended at the end of the block, by force after half a minute."""
    with log.open("ab") as out:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, **options)  # type: ignore[call-overload]
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(30)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _provided(start: Callable[[Path], Iterator[RealStore]], folder: Path) -> Iterator[RealStore]:
    if os.environ.get(SWITCH) == "0":
        pytest.skip(f"{SWITCH}=0")
    running = contextmanager(start)(folder)
    try:
        store = running.__enter__()
    except UnavailableError as error:
        # Asked for by name, it must be there: a skip in CI would look like a pass.
        (pytest.fail if os.environ.get(SWITCH) == "1" else pytest.skip)(str(error))
    try:
        yield store
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStore]:
    """Azurite with an empty container."""
    from tests.support.servers.azurite_process import start

    yield from _provided(start, tmp_path_factory.mktemp("azurite"))


@pytest.fixture(scope="session")
def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStore]:
    """Ceph RADOS Gateway with an empty bucket."""
    from tests.support.servers.rgw_process import start

    yield from _provided(start, tmp_path_factory.mktemp("rgw"))
