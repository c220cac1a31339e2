"""Compare the rows of generations with the base table, where another program merges it, too.

Such a program (lance-context) upserts generations into the base, and takes them off the region's list, without progress
in the MemWAL index. Two things can go wrong, and the rows that can still be read show both: it dropped what it did not
merge; or it read generations before a merge of ours, and put them over newer rows after it. Timeline of the latter:
theirs reads generation 1; ours merges 1 and 2; theirs upserts 1: the base has the older value of each key in both.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.documents import document
from memwal_ops.errors import (
    DrainedElsewhereError,
    InvalidFormatError,
    MemwalOpsError,
    ObjectNotFoundError,
    UnsupportedFeatureError,
    WalCorruptError,
)
from memwal_ops.formats.lance.commit.commit import CommitLostError
from memwal_ops.formats.lance.engines.merge.locate import MAX_LOOKUPS, chunks_with_keys
from memwal_ops.formats.lance.files.blobs import holds_blobs
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, has_sql_literals, is_one_of, lance_errors
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.generations.generation import STORE_ERRORS, generation_ref, open_generation
from memwal_ops.formats.lance.generations.generation_files import read_region_contents
from memwal_ops.formats.lance.generations.projection import TOMBSTONE
from memwal_ops.formats.lance.generations.wal import last_wal_entry, wal_entry_path
from memwal_ops.formats.lance.indexes.index_faults import VersionWriter
from memwal_ops.formats.lance.jobs.merge import publish_progress
from memwal_ops.formats.lance.log.memtable import build_indexes, generation_indexes
from memwal_ops.formats.lance.log.region_columns import region_columns
from memwal_ops.formats.lance.log.region_files import WalEntry, put_generation, read_entry
from memwal_ops.formats.lance.log.region_log import LoggedColumns, read_shard_entry
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.formats.lance.wire.region_manifest import MERGED_ELSEWHERE, FlushedGeneration, RegionRecord, mark_of
from memwal_ops.text import counted, span_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    import lance

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.generations.backlog import Backlog, BlockedRegion
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionManifest

_MAX_ROWS, _MAX_BYTES = 2_000_000, 256 << 20
_EARLIER_VERSIONS = 16
_MOST_SEEN = 256
# By table, its version, region, and version of its manifest: neither changes.
_SEEN: dict[tuple[str, int, UUID, int], tuple[str, ...]] = {}
_SHOWN = 5
_Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one generation in the order of their writes: in the columns of the base, and whether each is a delete."""

    generation: int
    rows: pa.Table
    deletes: Sequence[bool]
    entry: int | None = None


@dataclass(slots=True)
class _Write:
    """The newest write of a key that can be read: its place, its row (None: a delete), and the rows before it."""

    generation: int
    place: tuple[int, int]
    row: bytes | None
    older: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class DrainedRegion:
    """Generations of a region that another program dropped, and what shows whether they are in the base table.

    Attributes:
        first: the first of them; ``last``: the last.
        manifest_version: that dropped the last one, at ``dropped``.
        program: by the base version of that time.
        keys: those whose newest write can be read, of which ``in_base`` are in the base table.
        missing: those that are not: they are listed again.
        unknown: those of which it cannot be told: a later write may be in what cannot be read.
        unread: generations of which neither the folder nor all log entries are left.
        waiting: generations before them that are listed, and not merged.
        out_of_order: these were listed when the others were dropped: all keys are missing, as they are put over them.
        places: of the rows that are missing.
    """

    region_id: UUID
    first: int
    last: int
    manifest_version: int
    dropped: datetime
    program: str
    keys: int
    in_base: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    unread: tuple[int, ...]
    waiting: int = 0
    out_of_order: bool = False
    places: frozenset[tuple[int, int]] = frozenset()

    @property
    def adoptable(self) -> bool:
        """Whether no row is in doubt, and none must be merged first."""
        return not self.unknown and not (self.unread if self.out_of_order else self.waiting)

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry; of keys at most five."""
        shown = {"missing_keys": [*self.missing[:_SHOWN]], "unknown_keys": [*self.unknown[:_SHOWN]]}
        return document(self, "places", "out_of_order", missing=len(self.missing), unknown=len(self.unknown), **shown)

    def describe(self, answer: object = None, *, done: bool) -> str:
        """What was found, and what happens."""
        del answer
        begin = (
            f"region {self.region_id}: generations {span_text(self.first, self.last)}, dropped by version "
            f"{self.manifest_version} of its manifest at {self.dropped:%Y-%m-%d %H:%M:%S} UTC ({self.program})."
        )
        if self.waiting and not self.out_of_order:
            end = f"{counted(self.waiting, 'generation')} before them must be merged first: memwal-ops merge URI."
        elif not self.adoptable:
            end = (
                "Nothing is recorded: look at these keys. If the base has the right rows: memwal-ops adopt URI "
                f"--region {self.region_id} --as merged --up-to {self.last}."
            )
        elif self.missing:
            end = (
                f"These {'are' if done else 'would be'} listed again, as generation {self.first}. Once that is merged, "
                "the others can be recorded: merge --accept-drained does both."
            )
        else:
            end = f"They {'are' if done else 'would be'} recorded as merged up to generation {self.last}."
        return f"{begin} {self.found()} {end}"

    def found(self) -> str:
        """What was found, as sentences."""
        keys = counted(self.keys, "key")
        text = f"Of {keys} that can still be read, {self.in_base:,} are in the base table as written last."
        if not self.keys:
            text = "None of their rows can be read any more."
        if self.out_of_order:
            text += f" {counted(self.waiting, 'generation')} before them wait, and would be put over these."
        elif self.missing:
            text += f" {len(self.missing):,} are not: {_names(self.missing)}."
        if self.unknown:
            text += f" Of {len(self.unknown):,} it is unknown: {_names(self.unknown)}."
        if self.unread and self.keys:
            text += f" Unread: {counted(len(self.unread), 'generation')}."
        return text


def _names(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")


def compare(table: Table, fault: BlockedRegion) -> DrainedRegion:
    """What is left of the generations that ``fault.drops`` names, compared with this version of the base table."""
    first, last = fault.drops[0].flushed.generation, fault.drops[-1].flushed.generation
    parts, unread = _read(table, fault)
    writes, keys = _newest(table, parts)
    writes = {key: write for key, write in writes.items() if write.generation <= last}
    base = _rows_of(table, table.dataset, keys)
    wrong = {key: write for key, write in writes.items() if not _is_in(write, base.get(key, set()))}
    older = {key for key, write in wrong.items() if base.get(key, set()) & write.older}
    since = fault.drops[0].since
    earlier = sorted(table.history.listed().items(), reverse=True)
    for version, meta in [one for one in earlier if table.version - _EARLIER_VERSIONS <= one[0] < table.version]:
        asked = {key for key in wrong.keys() - older if wrong[key].row is not None}
        # A row that the base had since it was flushed is merged, whatever the table's users did to it since.
        if not asked or meta.last_modified < since:
            break
        try:
            with lance_errors("read", table.location.uri):
                had = _rows_of(table, table.dataset.checkout_version(version), keys)
        except MemwalOpsError:
            break  # it was expired meanwhile
        wrong = {key: write for key, write in wrong.items() if key not in asked or write.row not in had.get(key, set())}
    newest = table.region(fault.region_id).latest()
    before = table.index.merged_generations.get(fault.region_id, 0)
    pending = [generation_ref(fault.region_id, one) for one in newest.unmerged(before) if one.generation < first]
    waiting = len(pending)
    in_base = len(writes) - len(wrong)
    out_of_order = fault.out_of_order(pending)
    if out_of_order:  # merged after them, those would put their older rows over all of these
        wrong = writes
    missing = {key for key, write in wrong.items() if key in older or write.generation >= max(unread, default=0)}
    return DrainedRegion(
        fault.region_id,
        first,
        last,
        fault.drops[-1].version,
        fault.drops[-1].at,
        fault.program,
        len(writes),
        in_base,
        _texts(missing),
        _texts(wrong.keys() - missing),
        unread,
        waiting,
        out_of_order,
        frozenset(wrong[key].place for key in missing),
    )


def _is_in(write: _Write, base: set[bytes]) -> bool:
    return not base if write.row is None else write.row in base


def _texts(keys: Iterable[_Key]) -> tuple[str, ...]:
    return tuple(sorted(", ".join(map(str, key)) for key in keys))


def _read(table: Table, fault: BlockedRegion) -> tuple[list[_Part], tuple[int, ...]]:
    """What can be read of generations, in the order of writes, and which of them cannot be read."""
    numbers = [drop.flushed.generation for drop in fault.drops]
    if any(map(holds_blobs, table.schema)):
        return [], tuple(numbers)
    ends = table.region(fault.region_id).flushes(numbers[0] - 1, fault.drops[-1].version)
    start, end = ends.get(numbers[0] - 1, 0 if numbers[0] == 1 else None), ends.get(numbers[-1])
    logged: list[_Part] | None = None
    if start is not None and end is not None and end > start:
        known = {number: flushed for number, flushed in ends.items() if number <= numbers[-1]}
        logged = _logged(table, table.region(fault.region_id).latest(), start + 1, known)
    parts, unread = logged or [], list[int]()
    for drop in fault.drops:
        copy = _folder(table, fault.region_id, drop.flushed)
        parts += [] if copy is None else [copy]
        if copy is None and logged is None:
            unread.append(drop.flushed.generation)
    return sorted(parts, key=lambda part: (part.generation, part.entry is None)), tuple(unread)


def _logged(table: Table, manifest: RegionManifest, first: int, ends: Mapping[int, int]) -> list[_Part] | None:
    """The rows of log entries; None: not all up to the last end can be read, are too many, or of other columns.

    With those behind it, as of the number after: what they have of a key is newer, and waits, or will be flushed again.
    pylance's writers record some flushes late, so that a generation may have rows of an entry behind its end.
    """
    parts: list[_Part] = []
    size = rows = 0
    last, region_id = max(ends), manifest.region_id
    layout = table.layout_of(region_id)
    flushed, seen = manifest.replay_after_wal_id, manifest.wal_id_last_seen
    for number in range(first, last_wal_entry(table.store, region_id, flushed, seen, layout) + 1):
        needed = number <= ends[last]
        try:
            if layout.generations_in_log:
                entry = read_entry(table.store, region_id, number)
            else:
                entry = read_shard_entry(table, region_id, number)
        except WalCorruptError:
            entry = None
        size, rows = size + (entry.size if entry else 0), rows + (entry.rows.num_rows if entry else 0)
        if entry is None or size > _MAX_BYTES or rows > _MAX_ROWS:
            return None if needed else parts
        if entry.rows.num_rows:
            generation = min((one for one, end in ends.items() if end >= number), default=last + 1)
            part = _part(table, generation, entry.rows, number)
            if part is None:
                return None if needed else parts
            parts.append(part)
    return parts


def _folder(table: Table, region_id: UUID, flushed: FlushedGeneration) -> _Part | None:
    """The rows of a folder that is left; None: it is gone, damaged, or too large."""
    ref = generation_ref(region_id, flushed)
    try:
        opened = open_generation(table, ref, SchemaHistory.of(table))
        if opened.physical_rows > _MAX_ROWS or opened.data_bytes > _MAX_BYTES:
            return None
        keys = opened.read_keys()
        batches = opened.read_rows(max_bytes=_MAX_BYTES)
        rows = [part for batch in batches for part in opened.projected(batch, max_bytes=_MAX_BYTES)]
    except MemwalOpsError as error:
        if isinstance(error, STORE_ERRORS):
            raise
        return None
    order = np.argsort(keys.column(ROW_ADDRESS).to_numpy())
    if opened.newest_row_first:
        order = order[::-1]
    read = pa.Table.from_batches(rows).append_column(TOMBSTONE, keys.column(TOMBSTONE)) if rows else None
    return None if read is None else _part(table, flushed.generation, read.take(order))


def _part(table: Table, generation: int, rows: pa.Table, entry: int | None = None) -> _Part | None:
    """Rows as the base has them: a nullable column that was added since is NULL. None: they have other columns."""
    base = table.schema
    names = {*rows.column_names} - {TOMBSTONE}
    if not {*table.primary_key} <= names <= {*base.names}:
        return None
    try:
        columns = [
            rows.column(one.name).cast(one.type) if one.name in names else pa.nulls(rows.num_rows, one.type)
            for one in base
        ]
    except pa.ArrowException:
        return None
    deletes = rows.column(TOMBSTONE).to_pylist() if TOMBSTONE in rows.column_names else [False] * rows.num_rows
    return _Part(generation, pa.table(columns, base.names), deletes, entry)


def _newest(table: Table, parts: Sequence[_Part]) -> tuple[dict[_Key, _Write], pa.Table]:
    """The newest write of each key, and the keys as columns."""
    writes: dict[_Key, _Write] = {}
    for at, part in enumerate(parts):
        for number, (key, row, delete) in enumerate(zip(*_encoded(table, part.rows), part.deletes, strict=True)):
            before = writes.get(key)
            older = set() if before is None else before.older
            if before is not None and before.row is not None:
                older.add(before.row)
            # A program that does not know deletes writes them as rows.
            (older.add if delete else older.discard)(row)
            writes[key] = _Write(part.generation, (at, number), None if delete else row, older)
    keys = [part.rows.select([*table.primary_key]) for part in parts]
    return writes, pa.concat_tables(keys) if keys else table.schema.empty_table().select([*table.primary_key])


def _encoded(table: Table, rows: pa.Table) -> tuple[list[_Key], list[bytes]]:
    """The key and a digest of each row."""
    values = {
        name: (column.cast(f"int{column.type.bit_width}") if pa.types.is_temporal(column.type) else column).to_pylist()
        for name, column in zip(rows.column_names, rows.columns, strict=True)
    }
    keys = [*zip(*(values[name] for name in table.primary_key), strict=True)]
    texts = (repr(row).encode(errors="surrogatepass") for row in zip(*values.values(), strict=True))
    return keys, [hashlib.blake2b(text, digest_size=16).digest() for text in texts]


def _rows_of(
    table: Table, dataset: lance.LanceDataset, keys: pa.Table, among: frozenset[int] | None = None
) -> dict[_Key, set[bytes]]:
    """The digests of the rows that have one of these keys, in some fragments of a version. No index is asked."""
    found: dict[_Key, set[bytes]] = {}
    with lance_errors("read rows of", table.location.uri):
        fragments = None if among is None else [one for one in dataset.get_fragments() if one.fragment_id in among]
        for rows in _with_keys(dataset, [*table.schema.names], keys, fragments):
            for key, row in zip(*_encoded(table, rows), strict=True):
                found.setdefault(key, set()).add(row)
    return found


def _with_keys(
    dataset: lance.LanceDataset, names: list[str], keys: pa.Table, fragments: list[lance.LanceFragment] | None
) -> Iterator[pa.Table]:
    if not {*names} <= {*dataset.schema.names}:
        return  # of other columns: an earlier version
    first, values = keys.column_names[0], keys.column(0)
    if keys.num_columns == 1 and has_sql_literals(values) and "`" not in first:
        distinct = values.unique().to_pylist()
        for at in range(0, len(distinct), MAX_LOOKUPS):
            condition = is_one_of(first, distinct[at : at + MAX_LOOKUPS])
            yield dataset.scanner(
                columns=names, filter=condition, use_scalar_index=False, fragments=fragments
            ).to_table()
    elif keys.num_rows:
        batches = dataset.scanner(columns=names, fragments=fragments).to_batches()
        yield from chunks_with_keys(batches, keys, keys.column_names, chunk_bytes=_MAX_BYTES)


def overwritten(table: Table, manifest: RegionManifest) -> tuple[str, ...]:
    """Keys of a region of which the base table has an older row than the log, or the generations that it lists.

    Looked at where another program is known to merge this table, or wrote its newest version; there, of the fragments
    that it added. At most the newest 256 MiB of the log are read.
    """
    region_id = manifest.region_id
    merged, fragments = table.index.merged_generations.get(region_id, 0), None
    if not merged or any(map(holds_blobs, table.schema)):
        return ()
    if MERGED_ELSEWHERE not in table.manifest.manifest.config and not (fragments := _added_by_others(table)):
        return ()
    seen = table.location.uri, table.version, region_id, manifest.version
    if seen in _SEEN:
        return _SEEN[seen]
    parts = _merged_log(table, manifest, merged)
    if parts is None:
        listed = [one for one in manifest.flushed_generations if one.generation <= merged]
        parts = [part for one in listed if (part := _folder(table, region_id, one)) is not None]
    writes, keys = _newest(table, parts)
    base = _rows_of(table, table.dataset, keys, fragments)
    known = {key: write for key, write in writes.items() if key in base and write.generation <= merged}
    older = (key for key, write in known.items() if not _is_in(write, base[key]) and base[key] & write.older)
    if len(_SEEN) >= _MOST_SEEN:
        _SEEN.clear()
    return _SEEN.setdefault(seen, _texts(older))


def _added_by_others(table: Table) -> frozenset[int]:
    """The fragments that the newest version added, if another program wrote it. One request."""
    written = VersionWriter.of(table.manifest)
    if written.ours or not written.writes or table.version - 1 not in table.history.listed():
        return frozenset()
    try:
        before = table.history.manifest(table.history.listed()[table.version - 1]).manifest
    except (InvalidFormatError, ObjectNotFoundError):
        return frozenset()
    now, known = table.manifest.manifest.fragments, {fragment.id for fragment in before.fragments}
    return frozenset(fragment.id for fragment in now if fragment.id not in known)


def _merged_log(table: Table, manifest: RegionManifest, merged: int) -> list[_Part] | None:
    """The rows of the newest log entries of merged generations; None: they are not known, or gone."""
    end = table.region(manifest.region_id).flushes(merged, manifest.version).get(merged)
    listed = read_region_contents(table.store, manifest.region_id, table.layout_of(manifest.region_id)).wal
    first, size = listed.up_to(end or 0), 0
    if not end or not first or listed.ids[first - 1] != end:
        return None
    last = first
    while first and listed.ids[first - 1] == end - (last - first) and size < _MAX_BYTES // 2:
        first -= 1
        size += listed.size(first)
    return _logged(table, manifest, listed.ids[first], {merged: end})


def list_again(table: Table, fault: BlockedRegion, region: DrainedRegion) -> None:
    """Write the rows that are not in the base table as the first of the dropped generations, and list it.

    It has the newest write of each of their keys, so that none of the others has a newer one. Timeline if the others
    were listed as they were: the second was merged, and users changed its rows since: their changes are lost.

    Raises:
        CommitLostError: the region was changed meanwhile.
        UnsupportedFeatureError: rows that our writer cannot store.
        WalCorruptError: columns of the table were dropped and added again since the rows were put.
    """
    parts, _ = _read(table, fault)
    columns = region_columns(table)
    known = LoggedColumns(table, fault.region_id, columns)
    layout = table.layout_of(fault.region_id)
    entries: list[pa.Table] = []
    for at, part in enumerate(parts):
        wanted = sorted(number for place, number in region.places if place == at)
        if not wanted:
            continue
        if part.entry is not None and not known.is_current(wal_entry_path(fault.region_id, part.entry, layout)):
            raise WalCorruptError(f"Columns of the table were changed since entry {part.entry} of the log was put.")
        deletes = pa.array([part.deletes[number] for number in wanted])
        rows = part.rows.take(wanted).append_column(TOMBSTONE, deletes)
        entries.append(rows.select(columns.schema.names).cast(columns.schema))
    rows = pa.concat_tables(entries)
    store, path = table.region(fault.region_id), f"{secrets.token_hex(4)}_gen_{region.first}"
    newest = store.latest(checked=True)
    listed = FlushedGeneration(region.first, path, in_memory_bytes=rows.nbytes, physical_rows=rows.num_rows)
    generations = sorted((*newest.flushed_generations, listed), key=lambda flushed: flushed.generation)
    if len({flushed.generation for flushed in generations}) < len(generations):
        raise CommitLostError(f"Generation {region.first} of region {fault.region_id} is listed again.")
    entry = WalEntry(region.first, newest.writer_epoch, rows, columns.ids, rows.nbytes)
    put_generation(table.store, table.location, fault.region_id, path, [entry], columns, copied=True)
    build_indexes(table, generation_ref(fault.region_id, listed).folder, generation_indexes(table, strict=False))

    def check() -> None:
        if table.newest().version != table.version:
            raise CommitLostError("The base table was changed meanwhile.")

    if not store.commit(
        replace(newest.next(), flushed_generations=tuple(generations)), ours_if_equal=False, check=check
    ):
        raise CommitLostError(f"Region {fault.region_id} was changed meanwhile.")


def drained_regions(table: Table, backlog: Backlog) -> tuple[tuple[BlockedRegion, DrainedRegion], ...]:
    """The regions that are blocked by generations that another program dropped."""
    return tuple((fault, compare(table, fault)) for fault in backlog.blocked if fault.drops)


def as_accepted(table: Table, backlog: Backlog) -> tuple[Table, tuple[DrainedRegion, ...]]:
    """The table as it would be after :func:`accept`, for a plan; without what would be listed again."""
    regions = tuple(region for _, region in drained_regions(table, backlog))
    reached = {region.region_id: region.last for region in regions if region.adoptable and not region.missing}
    merged = {**table.index.merged_generations, **reached}
    return replace(table, memwal=replace(table.index, merged_generations=merged)), regions


def accept(
    table: Table, region_ids: Iterable[UUID] | None, note: CommitNote
) -> tuple[Table, tuple[DrainedRegion, ...]]:
    """Record generations that another program merged and dropped; list again what is not in the base table.

    Of what is listed, progress is recorded by the merge of it, and by the next call of the others: killed at any line,
    the versions show the same.

    Raises:
        CommitConflictError: too many conflicts in a row.
    """
    retry = CommitRetry()
    while True:
        found = drained_regions(table, read_backlog(table, region_ids))
        progress: dict[UUID, int] = {}
        records: dict[UUID, RegionRecord] = {}
        regions: list[DrainedRegion] = []
        try:
            for fault, region in found:
                regions.append(_listed(table, fault, region))
                if regions[-1].adoptable and not region.missing:
                    last = fault.drops[-1].flushed
                    progress[fault.region_id] = last.generation
                    records[fault.region_id] = RegionRecord(last.generation, mark_of(last.path))
            if progress:
                publish_progress(table, progress, records, note, {MERGED_ELSEWHERE: found[0][1].program})
                table = retry.landed(table)
        except CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return table, tuple(regions)


def _listed(table: Table, fault: BlockedRegion, region: DrainedRegion) -> DrainedRegion:
    """The region after what is missing was listed; of rows that cannot be written again, they are unknown."""
    if not region.adoptable or not region.missing:
        return region
    try:
        list_again(table, fault, region)
    except (UnsupportedFeatureError, WalCorruptError):
        return replace(region, missing=(), unknown=region.missing)
    return region


def with_rows(table: Table, faults: Iterable[BlockedRegion]) -> tuple[BlockedRegion, ...]:
    """The faults; those of generations that another program dropped say what was found of their rows."""
    return tuple(
        replace(fault, error=DrainedElsewhereError(f"{fault.error} {compare(table, fault).found()}"))
        if fault.drops
        else fault
        for fault in faults
    )
