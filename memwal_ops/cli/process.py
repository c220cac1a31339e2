"""Set up the process of a command: its memory allocators, its signal handlers and what pylance prints.

A library must not change these in its host process; the command line does, before the first table is opened.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from types import FrameType
from typing import NoReturn

from memwal_ops.core import registry
from memwal_ops.core.protocols import Table


class Terminated(BaseException):
    """Raised on SIGTERM, by which systemd and Kubernetes stop a job."""

    exit_code = 128 + signal.SIGTERM


def prepare() -> None:
    """Make SIGTERM end a command as Ctrl-C does; set what pylance prints, where its user does not.

    It leaves centroids out of statistics, without a warning, and does not warn, at each load, of the old name that
    Lance 6 gave the details of a vector index: it reads and uses such an index all the same.
    """
    os.environ.setdefault("LANCE_INCLUDE_VECTOR_CENTROIDS", "false")
    os.environ.setdefault("LANCE_LOG", f"=warn/{_not_ending_with('table.VectorIndexDetails, ignoring it')}")
    signal.signal(signal.SIGTERM, _terminate)


def open_table(uri: str, storage_options: Mapping[str, str], *, job: str | None = None) -> Table:
    """Bound the allocators of the process, and open a table (:func:`memwal_ops.core.registry.open_table`).

    Raises ``MemwalOpsError``: as :func:`memwal_ops.core.registry.open_table`.
    """
    from memwal_ops.allocators import bound_allocators  # noqa: PLC0415 - imports pyarrow: not before a table is opened

    bound_allocators()
    return registry.open_table(uri, storage_options, job=job)


def _not_ending_with(text: str) -> str:
    """An expression for what ends otherwise: Rust has no lookahead, and LANCE_LOG is split at some characters."""
    codes = [f"\\x{ord(character):02x}" for character in text]
    return "|".join(f"[^{code}]{''.join(codes[at + 1 :])}$" for at, code in enumerate(codes))


def _terminate(_: int, __: FrameType | None) -> NoReturn:
    raise Terminated
