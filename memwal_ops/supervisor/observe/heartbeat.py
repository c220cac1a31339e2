"""Fetch a heartbeat URL after each success, for services that alert when heartbeats stop (a dead man's switch).

Best effort: nothing waits for it, and a failure changes nothing.

Notify systemd (sd_notify(3)): send datagrams to the socket in NOTIFY_SOCKET, if it is set.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from memwal_ops.log import get_logger
from memwal_ops.supervisor.http.client import failure_text
from memwal_ops.text import printable
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


_MAX_QUEUED = 100


class Heartbeat:
    """Fetches URLs on a background thread. ``on_result`` gets ``succeeded`` or ``failed``."""

    def __init__(self, on_result: Callable[[str], None]) -> None:
        """Fetch nothing yet."""
        self._on_result = on_result
        self._waiting: queue.Queue[tuple[str, float]] = queue.Queue(_MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def beat(self, url: str, table: str, job: str, timeout: float) -> None:
        """Fetch a URL soon; dropped if too many are queued already."""
        if self._thread is None:
            # A daemon: the exit must not wait for a server that sends a byte now and then, and never finishes.
            self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((url.format(table=quote(table, safe=""), job=job), timeout))
        except queue.Full:
            self._on_result("failed")

    def close(self, timeout: float) -> None:
        """Fetch what is queued, for at most ``timeout`` seconds, and drop the rest."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, timeout)
        with suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()

    def _work(self) -> None:
        while True:
            self._fetch(*self._waiting.get())
            self._waiting.task_done()

    def _fetch(self, url: str, timeout: float) -> None:
        request = urllib.request.Request(url, headers={"User-Agent": f"memwal-ops/{__version__}"})  # noqa: S310 - the configuration allows http and https alone
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310 - see above
                response.read(1)
        except Exception as error:  # noqa: BLE001 - whatever another server does
            # The URL is not logged: it often contains its only secret.
            get_logger(__name__).warning("heartbeat_failed", error=failure_text(error, url))
            self._on_result("failed")
        else:
            self._on_result("succeeded")


class Notifier:
    """Sends the service's state to systemd. Does nothing if systemd did not start the service."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the environment."""
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        mine = environ.get("WATCHDOG_PID") in {None, str(os.getpid())}
        usec = environ.get("WATCHDOG_USEC", "")
        self.watchdog_seconds = int(usec) / 2e6 if usec.isdigit() and mine else None
        """The interval to send WATCHDOG: half of systemd's timeout; None if the unit has no watchdog."""

    def ready(self, status: str) -> None:
        """Report that the service has started, or has reloaded its configuration."""
        self._send("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """Set the line in ``systemctl status``."""
        self._send(f"STATUS={text}")

    def reloading(self) -> None:
        """Report that the configuration is being reloaded; call :meth:`ready` after it."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """Report that the service is stopping."""
        self._send("STOPPING=1", "STATUS=finishing the current steps")

    def watchdog(self) -> None:
        """Report that the service is alive."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        text = "\n".join(printable(line.replace("\n", " ")) for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.sendto(text.encode(), address)
        except OSError:
            return  # the service does not depend on it
