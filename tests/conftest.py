"""What holds for every test: fixtures, and the order."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.samples import left_out
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.tables.writers import close_dropped
from tools.registrations import use_registrations

# Bytecode is kept, whatever the environment says: without it each test process, and each command that a test starts,
# compiles again what it imports, half a minute of processor time for the tests alone.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is imported and collected stays: to look through it for garbage, time and again, takes seconds of each process.
# Not so at its very end: libraries report what they think is leaked.
gc.disable()
atexit.register(gc.unfreeze)

# Every test tries its store: nothing is remembered, here or in processes that tests start, unless a test says where.
os.environ["MEMWAL_OPS_CACHE"] = ""

# Tests write many small files. In memory, where it has room and may hold programs, they take a fifth less processor
# time, and wait for no disk. A TMPDIR wins.
_MEMORY = "/dev/shm"
if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK):
    _room = os.statvfs(_MEMORY)
    if _room.f_bavail * _room.f_frsize > 6 << 30 and not _room.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)
_FOLDER = os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir()

# Runs by hand are recorded where a service of this user keeps its history: here, in a place of this process alone.
_STATE = os.path.join(_FOLDER, f"memwal-ops-tests-{os.getpid()}")
os.environ["XDG_STATE_HOME"] = _STATE
atexit.register(shutil.rmtree, _STATE, ignore_errors=True)

# As the tree has them, also where an installation is older.
use_registrations()

pytest_plugins = [
    "tests.support.s3_server",
    "tests.support.dynamodb_tables",
    "tests.support.spark",
    "tests.support.servers",
]

_TESTS = Path(__file__).parent
_PATH = os.environ.get("PYTHONPATH", "")
# An operator's installation has no pandas, which pyarrow imports wherever it finds it: a second of each process that
# a test starts. Spark's need it.
_WITHOUT_PANDAS = os.pathsep.join(filter(None, [_PATH, str(_TESTS / "support/as_installed")]))
_STARTED = pytest.StashKey[float]()

# How long an example takes is the machine's matter: 0.8 s were seen for one of 0.04 ms, on a machine that was busy.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What the tests before have left behind takes no time of this one."""
    from tests.support.spark import group_of  # its assertions are rewritten when it is loaded as a plugin

    close_dropped()
    if path := _PATH if group_of(item.nodeid).startswith("spark") else _WITHOUT_PANDAS:
        os.environ["PYTHONPATH"] = path
    else:
        os.environ.pop("PYTHONPATH", None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What ``-m`` leaves out as a whole is not even read: its imports take seconds."""
    folders = {_TESTS / "campaigns": "not campaign", _TESTS / "system/spark": "not spark"}
    return True if folders.get(collection_path, " ") in config.getoption("markexpr").split(" and ") else None


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.monotonic()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """How long it took, and the processor time of all its processes: what a busy machine does not change much."""
    minutes, seconds = divmod(round(time.monotonic() - config.stash[_STARTED]), 60)
    used = sum(os.times()[:4])
    terminalreporter.write_line(f"Took {minutes} min {seconds} s, {used:.0f} s of processor time.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what ``make test`` leaves to ``make campaigns``; the long ones run first, so that none ends alone.

    With LONG_PARTS=N only one part of N of the long tests and of those on Spark stays, with CAMPAIGN_PARTS=N one of the
    campaigns; the seed chooses which.
    """
    from tests.support.spark import group_of  # its assertions are rewritten when it is loaded as a plugin

    for item in items:
        if item.nodeid.startswith("tests/campaigns/"):
            item.add_marker("campaign")
        elif group_of(item.nodeid).startswith("spark"):
            item.add_marker("spark")
    for item in left_out(items, CAMPAIGN_SEED):
        item.add_marker("long")
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    others = {item for item in items if zlib.crc32(item.nodeid.encode()) % (n := _parts(item)) != CAMPAIGN_SEED % n}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def _parts(item: pytest.Item) -> int:
    """Of how many parts one runs, of the tests of its kind."""
    marked = {mark.name for mark in item.iter_markers()}
    if "campaign" in marked:
        return env_number("CAMPAIGN_PARTS", 1)
    return env_number("LONG_PARTS", 1) if marked & {"long", "spark"} else 1
