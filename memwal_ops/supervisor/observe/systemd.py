"""Notify systemd (sd_notify(3)): send datagrams to the socket in NOTIFY_SOCKET, if it is set."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from memwal_ops.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping


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
