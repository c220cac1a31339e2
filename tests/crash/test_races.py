"""Processes that are killed with -9 and started again, for the collectors' soak; all others are in tests/soak."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.tables.workload import Workload

if TYPE_CHECKING:
    import random

    from lance.mem_wal import ShardWriter


class Restless:
    """One process of tests.crash.restless, started again each time it was killed."""

    def __init__(self, what: str, uri: str, rng: random.Random) -> None:
        self.what, self.uri, self.rng = what, uri, rng
        self.said = Path(f"{uri}.{what}-{rng.randrange(1 << 30)}.stderr")
        self.start()

    def start(self) -> None:
        seed = str(self.rng.randrange(1 << 30))
        with self.said.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.restless", self.what, self.uri, seed],
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        # Long enough to get past the imports, short enough to die within every kind of step.
        self.dies_at = time.monotonic() + self.rng.uniform(1.0, 3.0)

    def tend(self) -> None:
        if self.process.poll() is not None:
            text = self.said.read_text()[-3000:]
            raise AssertionError(f"{self.what} ended by itself with {self.process.returncode}:\n{text}")
        if time.monotonic() > self.dies_at:
            self.kill()
            self.start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Patient(Workload):
    """Opens its writers again where a clean-up took the version from under them; nothing is written by then."""

    def writer(self, region: str) -> ShardWriter:
        while True:
            try:
                return super().writer(region)
            except OSError as error:
                if "Not found" not in str(error):
                    raise
