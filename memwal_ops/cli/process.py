"""What only the owner of a process may set: its allocators and its signals.

A library must not do this to its host; the command line does, before the first table is opened.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

from memwal_ops.allocators import bound_allocators

if TYPE_CHECKING:
    from types import FrameType


class Terminated(BaseException):
    """SIGTERM came: systemd and Kubernetes stop a job this way."""

    exit_code = 128 + signal.SIGTERM


def prepare() -> None:
    """Bound what freed memory may hide in, and let SIGTERM end a command like Ctrl-C does."""
    bound_allocators()
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise Terminated
