"""Determine which generations have been merged for a given time, also after the versions that show it were expired.

A reader that keeps a version of the base open reads region manifests anew (lancedb's default handle does). Timeline of
the loss that this prevents: a process opens version 5; generation 3 is merged as version 6; version 5 is expired, and
generation 3 is taken off its region's list. The process reads version 5, which has no row of generation 3, and a list
without it: the rows are missing, without an error. So a generation stays on the list until the version that merged it
is older than such a reader.

Versions are expired earlier than that. So gc records the progress of the newest version now and then, as an object
whose time, by the store's clock, is an upper bound of when all of that was merged. Progress only rises, unless a
version is restored or the index is made again; then what was recorded before is dropped: by gc, by an expiry before it
deletes such a version, and by each commit that raises progress. Timeline without the last: version 5 is recorded; 40
days later version 3 is restored as 6, which a reader keeps open; a merge publishes 7, and pylance's clean-up deletes 6:
nothing shows any more that generation 3 is needed. A merge by another program drops no record: if the clean-up then
comes before the next run of gc, that is not noticed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime, timedelta

    from memwal_ops.formats.lance.retention.live_versions import LiveVersions
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta, Store

PROGRESS_FOLDER = "_mem_wal_ops/progress"
_NAME = re.compile(rf"{PROGRESS_FOLDER}/([0-9]{{20}})\.json", re.ASCII)
# How many records there are per drain_after. A generation is drained at most that part of it later.
_RECORDS = 32


class Record(NamedTuple):
    """A record of progress. Records are ordered by version."""

    version: int
    meta: ObjectMeta


def merged_before(store: Store, retention: LiveVersions, moment: datetime) -> Mapping[UUID, int]:
    """Per region the last generation that was merged, and covered by the indexes that search, at that time or before.

    A lower bound: what neither a version nor a record shows counts as merged later. A listing, and a request.

    Args:
        moment: by the store's clock.
    """
    merged = dict(retention.progress_at(moment))
    recorded = recorded_before(store, retention.newest, moment) or {}
    for region_id, generation in recorded.items():
        merged[region_id] = max(generation, merged.get(region_id, 0))
    return merged


def recorded_before(store: Store, newest: int, moment: datetime) -> Mapping[UUID, int] | None:
    """What the records alone show of that; None if there are none, as gc never ran with ``--apply``.

    Args:
        newest: the table's newest version; a record of a later one is not of this table.
        moment: by the store's clock.
    """
    records = _records(store)
    before = [record for record in records if record.meta.last_modified <= moment and record.version <= newest]
    return _read(store, before[-1]) if before else {} if records else None


def record_progress(
    store: Store, retention: LiveVersions, now: datetime, drain_after: timedelta, check: Callable[[], None]
) -> None:
    """Record the newest version's progress, unless a young record exists, and drop those that are outdated.

    Args:
        now: by the store's clock.
        drain_after: how long a generation has to be merged before it is taken off the list.
        check: called right before something is written; raises if the table was replaced.
    """
    records = drop_overtaken(store, retention)
    progress = retention.progress_at(None)
    is_due = not records or (
        records[-1].version < retention.newest and now - records[-1].meta.last_modified >= drain_after / _RECORDS
    )
    if progress and is_due:
        merged = {str(region_id): generation for region_id, generation in sorted(progress.items())}
        document = {"version": retention.newest, "merged": merged}
        check()
        store.put_if_absent(f"{PROGRESS_FOLDER}/{retention.newest:020}.json", encode_record(document))
    outdated = [record.meta.path for record in records if record.meta.last_modified <= now - drain_after][:-1]
    if outdated:
        store.delete_many(outdated)


def drop_overtaken(store: Store, retention: LiveVersions) -> list[Record]:
    """Delete all records if a later version has less progress than the newest of them, or there is no later version.

    Called before such a version is expired: nothing else shows that its readers need a generation that is recorded.

    Returns:
        Those that remain, ascending.
    """
    records = _records(store)
    if not records:
        return []
    newest = records[-1]
    if newest.version <= retention.newest and not retention.is_below(_read(store, newest), after=newest.version):
        return records
    store.delete_many([record.meta.path for record in records])
    return []


def drop_contradicted(table: Table, merged: Mapping[UUID, int]) -> None:
    """Delete all records if the newest has more than a version that follows it; called before progress is raised on it.

    One listing; where there are records, one more request.
    """
    records = _records(table.store)
    if not records or records[-1].version > table.version:
        return  # of a version that is newer than this one: the commit that follows is lost
    if any(merged.get(region_id, 0) < generation for region_id, generation in _read(table.store, records[-1]).items()):
        table.store.delete_many([record.meta.path for record in records])


def _records(store: Store) -> list[Record]:
    named = ((_NAME.fullmatch(meta.path), meta) for meta in store.list(PROGRESS_FOLDER))
    return sorted((Record(int(match[1]), meta) for match, meta in named if match is not None), key=lambda item: item[0])


def _read(store: Store, record: Record) -> Mapping[UUID, int]:
    """What it records; nothing if it is damaged, or was deleted meanwhile. Refuses one of a later release."""
    try:
        merged = decode_record(store.get(record.meta.path), record.meta.path)["merged"]
        return dict(_checked(merged.items()))
    except (ObjectNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _checked(merged: Iterable[tuple[str, object]]) -> Iterable[tuple[UUID, int]]:
    for region_id, generation in merged:
        if not isinstance(generation, int) or isinstance(generation, bool):
            raise TypeError(generation)
        yield UUID(region_id), generation
