"""The store of a soak on S3, as processes: ``python -m tests.campaigns.soak.stand_in server|proxy FOLDER ...``.

The proxy fails at random, as networks and stores do; SIGUSR1 ends the faults. Both write where they
listen into the folder, the proxy also what it did.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.s3_server import start_server

_EVERY = 0.2
LONGEST_STALL = 3.0
# How much of all faults each kind is.
_KINDS = {
    "500": 2, "503 SlowDown": 3, "reset": 2, "reset after success": 3, "500 after success": 1, "answer cut": 1,
    "stall": 2,
}  # fmt: skip


@dataclass
class RandomProxy(FaultyProxy):
    """Each request fails with probability ``rate``."""

    rate: float = 0.0
    rng: random.Random = field(default_factory=random.Random)
    faulted: Counter[str] = field(default_factory=Counter)
    requests: int = 0

    def note(self, method: str, path: str) -> None:
        self.requests += 1

    def next_fault(self, method: str, path: str) -> Fault | None:
        if self.rng.random() >= self.rate:
            return None
        kind = self.rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        if kind == "answer cut" and method != "GET":
            kind = "reset after success"
        self.faulted[kind] += 1
        match kind:
            case "500":
                return Fault(method, path, "before", 500)
            case "503 SlowDown":
                return Fault(method, path, "before", 503, "SlowDown")
            case "reset":
                return Fault(method, path, "before")
            case "reset after success":
                return Fault(method, path, "after", stall=self.rng.choice([0.0, 0.2]))
            case "500 after success":
                return Fault(method, path, "after", 500)
            case "answer cut":
                return Fault(method, path, "cut")
            case _:
                return Fault(method, path, "late", stall=self.rng.uniform(0.3, LONGEST_STALL))

    def said(self) -> str:
        """For the page."""
        return json.dumps({"endpoint": self.endpoint, "requests": self.requests, "faults": dict(self.faulted)})


def _write(path: Path, text: str) -> None:
    """Atomically, for pollers."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def _wait(parent: int) -> None:
    """Until the parent process has ended."""
    while os.getppid() == parent:
        time.sleep(_EVERY)


def server(folder: str) -> None:
    """Moto's S3."""
    parent = os.getppid()
    running = start_server()
    host, port = running.get_host_and_port()
    _write(Path(folder) / "server.json", json.dumps({"endpoint": f"http://{host}:{port}"}))
    _wait(parent)


def proxy(folder: str, target: str, seed: str, rate: str) -> None:
    """The way to it, or to another store, which compares by itself."""
    parent = os.getppid()
    with RandomProxy(target, patience=60.0, quoted_tags="forwarded", rng=random.Random(int(seed))) as running:
        running.rate = float(rate)

        def quiet(*_: object) -> None:
            running.rate = 0.0

        signal.signal(signal.SIGUSR1, quiet)
        while os.getppid() == parent:
            _write(Path(folder) / "proxy.json", running.said())
            time.sleep(_EVERY)


if __name__ == "__main__":
    {"server": server, "proxy": proxy}[sys.argv[1]](*sys.argv[2:])
