"""Fetch a heartbeat URL after each success (a dead man's switch), and notify systemd (sd_notify(3)).

Best effort: nothing waits for either, and a failure changes nothing.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from urllib.parse import quote, urlsplit

from memwal_ops.log import get_logger
from memwal_ops.supervisor.http.client import failure_text, fetch
from memwal_ops.text import printable

_MAX_QUEUED = 100


class Heartbeat:
    """Fetches URLs, those of each server on a thread of its own. ``on_result`` gets ``succeeded`` or ``failed``.

    ``fault``: why the last heartbeat was not received; empty: it was.
    """

    def __init__(self, on_result: Callable[[str], None]) -> None:
        self._on_result = on_result
        self._waiting: dict[str, queue.Queue[tuple[str, float]]] = {}
        self.fault = ""

    def beat(self, url: str, table: str, job: str, timeout: float) -> None:
        """Fetch a URL soon; dropped if too many of its server are queued already."""
        server = urlsplit(url).netloc
        if server not in self._waiting:
            self._waiting[server] = queue.Queue(_MAX_QUEUED)
            # A daemon: the exit must not wait for it.
            threading.Thread(target=self._work, args=(server,), name="heartbeat", daemon=True).start()
        try:
            self._waiting[server].put_nowait((url.format(table=quote(table, safe=""), job=job), timeout))
        except queue.Full:
            self._on_result("failed")

    def close(self, timeout: float) -> None:
        """Fetch what is queued, for at most ``timeout`` seconds, and drop the rest."""
        ends = time.monotonic() + timeout
        for waiting in self._waiting.values():
            with waiting.all_tasks_done:
                left = max(0.0, ends - time.monotonic())
                waiting.all_tasks_done.wait_for(partial(_is_done, waiting), left)
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()

    def _work(self, server: str) -> None:
        waiting = self._waiting[server]
        while True:
            self._fetch(*waiting.get())
            waiting.task_done()

    def _fetch(self, url: str, timeout: float) -> None:
        try:
            fetch(url, timeout, redirects=True)
        except Exception as error:  # noqa: BLE001 - whatever another server does
            # The URL is not logged: it often contains its only secret.
            self.fault = failure_text(error, url)
            get_logger(__name__).warning("heartbeat_failed", error=self.fault)
            self._on_result("failed")
        else:
            self.fault = ""
            self._on_result("succeeded")


def _is_done(waiting: queue.Queue[tuple[str, float]]) -> bool:
    return not waiting.unfinished_tasks


class SystemdNotifier:
    """Sends the service's state to systemd. Does nothing if systemd did not start the service."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.is_on = self._address.startswith(("/", "@"))
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
        if not self.is_on:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        text = "\n".join(printable(line.replace("\n", " ")) for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.sendto(text.encode(), address)
        except OSError:
            return  # the service does not depend on it
