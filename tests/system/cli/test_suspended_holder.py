"""A process that is suspended while it has a lock: commands are busy after their wait, and name it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.run_cli import run_process
from tests.support.zeppelin.namespace import NamespaceUnderTest

if TYPE_CHECKING:
    from collections.abc import Iterator

HOLDER = """
import sys
from memwal_ops.storage.local import lock_within
with open(sys.argv[1], "r+b") as file:
    assert lock_within(file.fileno(), 0) is None
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def namespace(tmp_path: Path) -> NamespaceUnderTest:
    made = NamespaceUnderTest(str(tmp_path / "ns"))
    made.write()
    return made


@pytest.fixture
def suspended(namespace: NamespaceUnderTest) -> Iterator[subprocess.Popen[str]]:
    lock = Path(namespace.uri, "_mem_wal_ops/swap.lock")
    lock.touch()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "locked\n"
            process.send_signal(signal.SIGSTOP)
            yield process
        finally:
            process.kill()


def limited(command: list[str]) -> list[str]:
    return ["timeout", "300", *command]


def test_a_merge_names_the_process_that_keeps_it(
    namespace: NamespaceUnderTest, suspended: subprocess.Popen[str]
) -> None:
    refused = run_process("merge", namespace.uri, "--wait", "1s", "--lease-ttl", "1s", wrap=limited)
    assert refused.code == 57, refused.err
    assert f"kill -CONT {suspended.pid}" in refused.err
    suspended.kill()
    suspended.wait()
    done = run_process("merge", namespace.uri, "--wait", "1m", wrap=limited)  # until the refused one's lease expired
    assert done.code == 0, done.err
    assert namespace.read() == namespace.expected()
