"""Write into Lance tables in the region layout of the MemWAL specification.

``create_mem_wal(uri, region_specs=[...])`` once; then ``RegionRouter(uri)`` if specs determine the region of a row, or
``RegionWriter(uri)`` for a region of one's own. The jobs of :mod:`memwal_ops` merge what they wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from memwal_ops.core.registry import open_table, uri_of_branch
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats.lance.engines.read.reader import Reader
from memwal_ops.formats.lance.engines.read.unmerged import CONSISTENCIES, Consistency
from memwal_ops.formats.lance.legacy.index import legacy_entry
from memwal_ops.formats.lance.legacy.reading import LegacyReader
from memwal_ops.formats.lance.log import create
from memwal_ops.formats.lance.log.memtable import WriterLimits
from memwal_ops.formats.lance.log.region_router import RegionRouter
from memwal_ops.formats.lance.log.region_writer import RegionWriter
from memwal_ops.formats.lance.options import MergeOptions
from memwal_ops.formats.lance.regions.specs import RegionField, RegionSpec
from memwal_ops.formats.lance.table import Table, open_lance_table
from memwal_ops.storage.catalogs import resolve
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

__all__ = ["RegionField", "RegionRouter", "RegionSpec", "RegionWriter", "WriterLimits", "create_mem_wal", "read"]


def create_mem_wal(
    uri: str | os.PathLike[str],
    region_specs: Sequence[RegionSpec] = (),
    maintained_indexes: Sequence[str] = (),
    *,
    storage_options: Mapping[str, str] | None = None,
    branch: str | None = None,
) -> None:
    """Create the MemWAL index of a Lance table; or add specs and maintained indexes to the one that it has.

    Args:
        uri: the table, as :func:`memwal_ops.open_table` takes it.
        region_specs: how its rows are routed to regions; none: writers choose their regions. One that is added gets the
            next id; before rows are written by it, the regions of earlier ones are sealed and merged.
        maintained_indexes: names of base indexes that writers mirror; the key's own is not listed.
        storage_options: as :func:`memwal_ops.open_table` takes them.
        branch: as :func:`memwal_ops.open_table` takes it.

    Raises:
        MemwalOpsError: as :func:`memwal_ops.formats.lance.log.create.create_mem_wal`.
    """
    location = resolve(uri if branch is None else uri_of_branch(uri, branch, storage_options), storage_options)
    create.create_mem_wal(
        location, open_store(location), region_specs=region_specs, maintained_indexes=maintained_indexes
    )


def read(
    uri: str | os.PathLike[str],
    consistency: Consistency = "strong",
    *,
    writer: RegionWriter | RegionRouter | None = None,
    storage_options: Mapping[str, str] | None = None,
    branch: str | None = None,
) -> Reader:
    """Read a table with what is not merged yet: ``read(uri).scan(columns, filter).to_table()``.

    Also ``.get(keys)``, ``.nearest(column, vector, k)``, ``.search(column, text, k)`` and ``.explain()``.
    A table with the legacy MemWAL index gives a reader that has ``scan`` alone: :func:`memwal_ops.legacy.read`.

    Args:
        uri: the table, as :func:`memwal_ops.open_table` takes it; the newest version is read.
        consistency: ``strong`` reads the regions' manifests and logs; ``manifests`` no logs; ``snapshot`` the regions
            as the index's snapshot has them. Rows that a writer has in memory only are read from ``writer``
            alone.
        writer: a writer of this process, whose rows in memory are read as well, whatever the consistency.
        storage_options: as :func:`memwal_ops.open_table` takes them.
        branch: as :func:`memwal_ops.open_table` takes it.

    Raises:
        InvalidUsageError: another consistency.
        NoMemWalIndexError: a plain table, which lance.dataset(uri) reads.
        MemwalOpsError: as :func:`memwal_ops.open_table`.
    """
    if consistency not in CONSISTENCIES:
        raise InvalidUsageError(f"Unknown consistency {consistency!r}; give one of {', '.join(CONSISTENCIES)}.")
    table = open_table(uri, storage_options, branch=branch)
    if isinstance(table, Table) and not table.log.exists:
        legacy_entry(table)  # a plain table is refused
        return cast("Reader", LegacyReader(table, MergeOptions()))
    lance_table = table if isinstance(table, Table) else open_lance_table(uri, storage_options, branch)
    return Reader(lance_table, consistency, writer)
