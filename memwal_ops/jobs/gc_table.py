"""What may go beside the regions: external snapshots, what killed commits left, and strays."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.layout import MEM_WAL_FOLDER
from memwal_ops.core.leftovers import find_leftovers
from memwal_ops.core.snapshots import INDICES_FOLDER, decode_file
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.jobs.collectables import Gate, Item, Kind, unknown
from memwal_ops.storage.clock import CLOCK_FOLDER
from memwal_ops.storage.probe import PROBE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.jobs.gc_rules import Rules
    from memwal_ops.storage.api import ObjectMeta

_SNAPSHOT = re.compile(rf"{INDICES_FOLDER}/([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})/index\.lance")
_OPS_FOLDER = "_mem_wal_ops"
# Whoever makes a trial is done with it in seconds, and would take its loss for a store that forgets.
_TRIAL_AGE = timedelta(hours=1)
_REGION_COLUMNS = {"region_id", "shard_id"}


def table_items(rules: Rules) -> Iterator[Item]:
    """Everything that belongs to no region, streamed."""
    yield from snapshot_items(rules)
    yield from leftover_items(rules)
    yield from trial_items(rules)
    for path in rules.table.regions.strays:
        yield unknown(path, 0, f"this is no region; it was found in {MEM_WAL_FOLDER}/ and left alone")
    for path, why in rules.retention.unreadable.items():
        yield unknown(path, 0, f"this version cannot be read, so that everything that it may need is kept: {why}")


def snapshot_items(rules: Rules) -> Iterator[Item]:
    """Files of region snapshots; what else stands in ``_indices/`` is pylance's and not looked at."""
    for meta in rules.table.store.list(INDICES_FOLDER):
        match = _SNAPSHOT.fullmatch(meta.path)
        if match is not None:
            item = _snapshot_item(rules, meta, UUID(match[1]))
            if item is not None:
                yield item


def _snapshot_item(rules: Rules, meta: ObjectMeta, uuid: UUID) -> Item | None:
    gates: tuple[Gate, ...]
    if rules.retention.names_index(uuid):
        gates = (Gate(met=False, text="a version that may be opened names it"),)
    else:
        try:
            rows = decode_file(rules.table.store.get(meta.path))
        except ObjectNotFoundError:
            return None
        except InvalidFormatError as error:
            return unknown(meta.path, meta.size, f"this may be a region snapshot, but it cannot be read: {error}")
        if not _REGION_COLUMNS.intersection(rows.schema.names):
            return None
        gates = (
            Gate(met=True, text="a region snapshot that no version, tag or branch names"),
            rules.older("a commit may be under way: written", meta.last_modified, rules.options.orphan_min_age),
        )
    return Item(Kind.SNAPSHOT, meta.path, None, None, meta.size, 1, gates)


def leftover_items(rules: Rules) -> Iterator[Item]:
    """Detached manifests: ours, with their transaction files, and those of others."""
    for left in find_leftovers(rules.table):
        meta = left.manifest
        if left.job is None:
            why = "a detached version that memwal-ops did not make; whoever knows its number may open it"
            yield unknown(meta.path, meta.size, why)
            continue
        gates = (
            Gate(met=True, text=f"left by a {left.job} (run {left.run_id}) that was ended while it committed"),
            rules.older("a commit may be under way: written", meta.last_modified, rules.options.orphan_min_age),
        )
        if left.transaction is not None:
            file = rules.table.store.head(left.transaction)
            if file is not None:
                yield Item(Kind.LEFTOVER, left.transaction, None, None, file.size, 1, gates)
        yield Item(Kind.LEFTOVER, meta.path, None, None, meta.size, 1, gates)


def trial_items(rules: Rules) -> Iterator[Item]:
    """What jobs wrote to tell the store's time, or to try its conditional writes, and were killed over."""
    age = max(rules.options.orphan_min_age, _TRIAL_AGE)
    store = rules.table.store
    for folder in sorted({CLOCK_FOLDER, PROBE_FOLDER}.intersection(store.list_level(_OPS_FOLDER).directories)):
        for meta in store.list(folder):
            gates = (
                Gate(met=True, text="a job that was ended tried the store with it"),
                rules.older("a job may be at it: written", meta.last_modified, age),
            )
            yield Item(Kind.LEFTOVER, meta.path, None, None, meta.size, 1, gates)
