"""Set up the process of a command: its memory allocators, its signal handlers and what pylance prints.

A library must not change these in its host process; the command line does, before the first table is opened.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NoReturn

from memwal_ops.core import registry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from memwal_ops.core.protocols import Table


class Terminated(BaseException):
    """Raised on SIGTERM, by which systemd and Kubernetes stop a job."""

    exit_code = 128 + signal.SIGTERM


def prepare() -> None:
    """Make SIGTERM end a command as Ctrl-C does; have pylance leave centroids out of statistics, without a warning."""
    os.environ.setdefault("LANCE_INCLUDE_VECTOR_CENTROIDS", "false")
    signal.signal(signal.SIGTERM, _terminate)


def open_table(uri: str, storage_options: Mapping[str, str], *, job: str | None = None) -> Table:
    """Bound the allocators of the process, and open a table (:func:`memwal_ops.core.registry.open_table`).

    Raises:
        MemwalOpsError: as :func:`memwal_ops.core.registry.open_table`.
    """
    from memwal_ops.allocators import bound_allocators  # noqa: PLC0415 - imports pyarrow: not before a table is opened

    bound_allocators()
    return registry.open_table(uri, storage_options, job=job)


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise Terminated
