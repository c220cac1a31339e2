"""systemd's notification protocol (sd_notify(3)): a datagram to the socket in NOTIFY_SOCKET, if there is one."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Notifier:
    """Tells systemd how the service is. Does nothing where systemd did not start it."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read the environment."""
        environ = os.environ if environ is None else environ
        self._address = environ.get("NOTIFY_SOCKET", "")
        mine = environ.get("WATCHDOG_PID") in {None, str(os.getpid())}
        usec = environ.get("WATCHDOG_USEC", "")
        self.watchdog_seconds = int(usec) / 2e6 if usec.isdigit() and mine else None
        """How often to send WATCHDOG: half of systemd's patience; None where it has no watchdog."""

    def ready(self, status: str) -> None:
        """Started, or reloaded."""
        self._send("READY=1", f"STATUS={status}")

    def status(self, text: str) -> None:
        """One line for ``systemctl status``."""
        self._send(f"STATUS={text}")

    def reloading(self) -> None:
        """A new configuration is being read; followed by :meth:`ready`."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        """On the way out."""
        self._send("STOPPING=1", "STATUS=finishing the steps in hand")

    def watchdog(self) -> None:
        """Still alive."""
        self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        text = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                out.sendto(text.encode(), address)
        except OSError:
            return  # nothing of ours depends on it
