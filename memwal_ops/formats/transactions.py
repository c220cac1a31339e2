"""Read the transaction of a version of a Lance table, for every format that asks what happened to one."""

from __future__ import annotations

from typing import Any


def read_transaction(table: Any, version: int) -> Any:
    """The transaction that created a version; None, or ``OSError`` or ``ValueError``, if it cannot be read."""
    from lance import LanceOperation  # noqa: PLC0415 - loads pylance: formats import this module before any table is opened

    # pylance 14 passes two of five values: without the others, a compaction that rewrote an index raises a TypeError.
    LanceOperation.RewrittenIndex.__init__.__defaults__ = ("", b"", 0)
    return table.read_transaction(version)
