"""Find what writers left in the logs: entries with acknowledged rows that are in no generation, and their ages.

Only a writer flushes them. A writer that died and does not come back leaves them there: they are durable, and not in
the base table.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.generations.wal import last_wal_entry, wal_entry_path
from memwal_ops.formats.lance.regions.listed_log import ListedLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.formats.lance.generations.backlog import Backlog
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_CONCURRENT_READS = 8
# Entries by which writers claim have no rows. Whether the first entries are such ones is read once the log is quiet:
# until then the next flush counts them.
_QUIET, _MAX_CLAIMS = timedelta(minutes=10), 8


@dataclass(frozen=True, slots=True)
class Unflushed:
    """What the logs have that no generation has.

    Attributes:
        entries: how many entries; of a log that was quiet for 10 minutes, those from the first one with rows on.
        oldest: when the oldest of them was written.
        newest: when the newest entry was written, flushed or not; None: there is none.
    """

    entries: int = 0
    oldest: datetime | None = None
    newest: datetime | None = None


def read_unflushed(table: Table, backlog: Backlog) -> Unflushed:
    """Read the ends of all logs of a backlog.

    Requests: none for a table whose log was listed (:func:`listed_log`), else 2 to 4 for each region. And of a log that
    is quiet, the first entries that are not flushed.
    """
    manifests = [region.manifest for region in backlog.regions.values()]
    with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
        found = [*pool.map(lambda manifest: _of_region(table, manifest), manifests)]
    return Unflushed(
        sum(one.entries for one in found),
        min(_times(one.oldest for one in found), default=None),
        max(_times(one.newest for one in found), default=None),
    )


def _times(times: Iterable[datetime | None]) -> list[datetime]:
    return [one for one in times if one is not None]


def _of_region(table: Table, manifest: RegionManifest) -> Unflushed:
    store, layout, region_id = table.store, table.layout_of(manifest.region_id), manifest.region_id
    head = store.head_of_page if isinstance(store, ListedLog) else store.head
    flushed = manifest.replay_after_wal_id or 0
    last = last_wal_entry(store, region_id, flushed, manifest.wal_id_last_seen, layout, head)

    def written(entry: int) -> datetime | None:
        meta = head(wal_entry_path(region_id, entry, layout)) if entry else None
        return None if meta is None else meta.last_modified

    newest = written(last)
    first = flushed + 1
    if newest is not None and datetime.now(UTC) - newest >= _QUIET:
        while first <= min(last, flushed + _MAX_CLAIMS) and not _has_rows(table, manifest, first):
            first += 1
    return Unflushed(max(0, last - first + 1), written(first) if first <= last else None, newest)


def _has_rows(table: Table, manifest: RegionManifest, entry: int) -> bool:
    """Whether an entry has rows, or cannot be read."""
    layout = table.layout_of(manifest.region_id)
    try:
        return layout.entry_rows(table.store, wal_entry_path(manifest.region_id, entry, layout)) > 0
    except (InvalidFormatError, ObjectNotFoundError):
        return True
