"""Read and write tables with the MemWAL index of Lance 0.31 to 1.x, and change its states as its specification does.

``read(uri)`` reads the base and what is not merged; ``MemWalWriter(uri, region)`` is the one writer of a region. The
functions are the transitions, on plain values: each takes the MemWALs of a version (:func:`mem_wals`) and returns a
:class:`Change`. docs/legacy-memwal.md explains the jobs for such tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.registry import open_table
from memwal_ops.errors import NotALanceTableError
from memwal_ops.formats.lance.legacy import writer as _writer
from memwal_ops.formats.lance.legacy.index import legacy_entry, mem_wals_of
from memwal_ops.formats.lance.legacy.reading import LegacyReader
from memwal_ops.formats.lance.legacy.states import (
    Change,
    Other,
    advance,
    append_entry,
    conflicts,
    covered_version,
    create,
    disorder,
    flush,
    merge,
    seal,
    set_owner,
    trim,
)
from memwal_ops.formats.lance.options import MergeOptions
from memwal_ops.formats.lance.table import Table
from memwal_ops.formats.lance.wire.legacy_index import MemWal, MemWalId, State

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

__all__ = [
    "Change",
    "LegacyReader",
    "MemWal",
    "MemWalId",
    "MemWalWriter",
    "Other",
    "State",
    "advance",
    "append_entry",
    "conflicts",
    "covered_version",
    "create",
    "disorder",
    "flush",
    "mem_wals",
    "merge",
    "read",
    "seal",
    "set_owner",
    "trim",
]


class MemWalWriter(_writer.LegacyRegionWriter):
    """The one writer of a region of the table at a URI."""

    def __init__(
        self,
        uri: str | os.PathLike[str],
        region: str,
        owner_id: str | None = None,
        *,
        storage_options: Mapping[str, str] | None = None,
        **places: str,
    ) -> None:
        """Claim the region; see :class:`memwal_ops.formats.lance.legacy.writer.LegacyRegionWriter`."""
        super().__init__(_open(uri, storage_options), region, owner_id, **places)


def read(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None, **options: Any
) -> LegacyReader:
    """Read a legacy table with what is not merged: ``read(uri).scan(columns, filter).to_table()``.

    Args:
        uri: the table; the newest version is read.
        storage_options: as :func:`memwal_ops.open_table` takes them.
        **options: ``primary_key``, ``flushed_means``, ``mem_table``, ``wal_reader``, as the job ``merge`` has them.

    Raises:
        InvalidUsageError: another option.
        MemwalOpsError: as :func:`memwal_ops.open_table`, or the table is of another layout.
    """
    return LegacyReader(_open(uri, storage_options), MergeOptions.read(options))


def mem_wals(uri: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None) -> tuple[MemWal, ...]:
    """The MemWALs of a legacy table's newest version. Raises as :func:`read`."""
    return mem_wals_of(_open(uri, storage_options))


def _open(uri: str | os.PathLike[str], storage_options: Mapping[str, str] | None) -> Table:
    table = open_table(uri, storage_options)
    if not isinstance(table, Table) or table.log.exists:
        raise NotALanceTableError(
            f"{table.location.uri} is not a table with the legacy MemWAL index.",
            remedy="memwal_ops.memwal reads and writes tables with today's index.",
        )
    legacy_entry(table)  # a plain table is refused
    return table
