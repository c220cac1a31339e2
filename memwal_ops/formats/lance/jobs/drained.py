"""Compare the rows of generations with the base table, where another program merges it, too.

Such a program (lance-context) upserts generations into the base, and takes them off the region's list, without progress
in the MemWAL index. Two things can go wrong, and the rows that can still be read show both: it dropped what it did not
merge; or it read generations before a merge of ours, and put them over newer rows after it. Timeline of the latter:
theirs reads generation 1; ours merges 1 and 2; theirs upserts 1: the base has the older value of each key in both.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from memwal_ops import errors
from memwal_ops.core.commit_retry import CommitRetry
from memwal_ops.core.documents import document
from memwal_ops.formats.lance.commit.commit import CommitLostError, CommitNote, publish_progress
from memwal_ops.formats.lance.engines.merge.locate import MAX_LOOKUPS, chunks_with_keys
from memwal_ops.formats.lance.files import blobs, datasets, version_files
from memwal_ops.formats.lance.generations.backlog import Backlog, BlockedRegion, read_backlog
from memwal_ops.formats.lance.generations.generation import generation_ref, open_generation
from memwal_ops.formats.lance.generations.generation_files import read_region_contents
from memwal_ops.formats.lance.generations.projection import TOMBSTONE
from memwal_ops.formats.lance.generations.wal import last_wal_entry, wal_entry_path
from memwal_ops.formats.lance.log.memtable import build_indexes, generation_indexes
from memwal_ops.formats.lance.log.region_columns import region_columns
from memwal_ops.formats.lance.log.region_files import WalEntry, put_generation, read_entry
from memwal_ops.formats.lance.log.region_log import LoggedColumns, read_shard_entry
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory
from memwal_ops.formats.lance.wire import region_manifest
from memwal_ops.text import counted, span_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    import lance

    from memwal_ops.formats.lance.regions.manifests import Drop
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

_MAX_ROWS, _MAX_BYTES = 2_000_000, 256 << 20
_EARLIER_VERSIONS = 16
_MOST_SEEN = 256
# By table, the file of its version, and region manifest: a restored table reaches the same numbers again.
_SEEN: dict[tuple[str, ObjectMeta, region_manifest.RegionManifest], tuple[str, ...]] = {}
_SHOWN = 5
_Key = tuple[Any, ...]
_GONE: frozenset[bytes | None] = frozenset({None})


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one generation in the order of their writes: in the columns of the base, and whether each is a delete."""

    generation: int
    rows: pa.Table
    deletes: Sequence[bool]
    entry: int | None = None


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left of generations, in the order of writes; by generation when its manifest listed it.

    ``unread``: those that cannot be read, of which some rows are ``kept``: too many, damaged, or of other columns.
    """

    parts: list[_Part]
    flushed: Mapping[int, datetime]
    unread: tuple[int, ...]
    kept: bool


@dataclass(slots=True)
class _Write:
    """The newest write of a key that can be read: its place, its row (None: a delete), and the rows before it."""

    generation: int
    place: tuple[int, int]
    row: bytes | None
    older: set[bytes | None]


@dataclass(frozen=True, slots=True)
class DrainedRegion:
    """Generations of a region that another program dropped, and what shows whether they are in the base table.

    Attributes:
        keys: those whose newest write can be read, of which ``in_base`` are in the base table.
        missing: those that are not: they are listed again.
        unknown: those of which it cannot be told: an older write may have come after theirs, or is all that is left.
        unread: generations of which neither the folder nor all log entries can be read; ``doubt``: why they must not be
            recorded: rows exist; or no other program wrote the base from their flush to their drop. Timeline of the
            latter: it is put back from a backup older than our merge; gc had collected them; they are recorded.
        waiting: generations before them that are listed, and not merged.
        out_of_order: these were listed when the others were dropped: all keys are missing, as they are put over them.
        places: of the rows that are missing.
    """

    fault: BlockedRegion
    first: int
    last: int
    keys: int
    in_base: int
    missing: tuple[str, ...]
    unknown: tuple[str, ...]
    unread: tuple[int, ...]
    doubt: str
    waiting: int
    out_of_order: bool
    places: frozenset[tuple[int, int]]

    @property
    def adoptable(self) -> bool:
        """Whether no row is in doubt, and none must be merged first."""
        in_doubt = (self.unread or not self.missing) if self.out_of_order else self.waiting
        return not (self.unknown or self.doubt or in_doubt)

    def to_json(self) -> dict[str, object]:
        """The ``regions`` entry; of keys at most five."""
        drop = self.fault.drops[-1]
        return document(
            self,
            *("fault", "doubt", "places", "out_of_order"),
            region_id=self.fault.region_id,
            manifest_version=drop.version,
            dropped=drop.at,
            program=self.fault.program,
            missing=len(self.missing),
            unknown=len(self.unknown),
            missing_keys=self.missing[:_SHOWN],
            unknown_keys=self.unknown[:_SHOWN],
        )

    def describe(self, *, done: bool) -> str:
        """What was found, and what happens."""
        drop, region_id = self.fault.drops[-1], self.fault.region_id
        if self.waiting and not self.out_of_order:
            end = f"{counted(self.waiting, 'generation')} before them must be merged first: memwal-ops merge URI."
        elif not self.adoptable:
            end = (
                "Nothing is recorded: look at these keys. If the base has the right rows: memwal-ops adopt URI "
                f"--region {region_id} --as merged --up-to {self.last}."
            )
        elif self.missing:
            end = (
                f"These {'are' if done else 'would be'} listed again, as generation {self.first}. Once that is merged, "
                "the others can be recorded: merge --accept-drained does both."
            )
        else:
            end = f"They {'are' if done else 'would be'} recorded as merged up to generation {self.last}."
        return (
            f"region {region_id}: generations {span_text(self.first, self.last)}, dropped by version {drop.version} of "
            f"its manifest at {drop.at:%Y-%m-%d %H:%M:%S} UTC ({self.fault.program}). {self.found()} {end}"
        )

    def found(self) -> str:
        """What was found, as sentences."""
        keys = f"Of {counted(self.keys, 'key')} that can still be read, {self.in_base:,} are in the base table as"
        text = f"{keys} written last." if self.keys else "None of their rows can be read."
        if self.out_of_order:
            text += f" {counted(self.waiting, 'generation')} before them wait, and would be put over these."
        elif self.missing:
            text += f" {len(self.missing):,} are not: {_names(self.missing)}."
        if self.unknown:
            text += f" Of {len(self.unknown):,} it is unknown: {_names(self.unknown)}."
        if self.unread and self.keys:
            text += f" Unread: {counted(len(self.unread), 'generation')}."
        return text + self.doubt


def _names(keys: Sequence[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")


def compare(table: Table, fault: BlockedRegion) -> DrainedRegion:
    """What is left of the generations that ``fault.drops`` names, compared with this version of the base table."""
    region_id, first, last = fault.region_id, *(fault.drops[at].flushed.generation for at in (0, -1))
    left = _read(table, fault)
    writes, keys = _newest(table, left.parts)
    writes = {key: write for key, write in writes.items() if write.generation <= last}
    base = _rows_of(table, table.dataset, keys)
    wrong = {key: write for key, write in writes.items() if write.row not in base.get(key, _GONE)}
    doubted = {key for key, write in wrong.items() if base.get(key, _GONE) & write.older}
    older, unknown = doubted & base.keys(), set[_Key]()
    for version, moment in islice(table.history.line(table.version), 1, _EARLIER_VERSIONS):
        # What the base had since it was flushed is merged, whatever the table's users did to it since; unless an older
        # write came between. Timeline: the base has a row; generation 1 deletes its key, 2 puts the same row; theirs
        # merges 1, and drops both. Nor is it known within a tick of the store's clock (S3: a second), or in a copy:
        # the base has a row; users change it; generation 1 puts it again; theirs drops that.
        times = left.flushed.items()
        flushed = max((number for number, at in times if moment.copied or at <= moment.stored), default=0)
        surely = 0 if moment.copied else max((number for number, at in times if at < moment.stored), default=0)
        asked = {key for key in wrong.keys() - older - unknown if wrong[key].generation <= flushed}
        if not asked:
            break
        try:
            with datasets.lance_errors("read", table.location.uri):
                had = _rows_of(table, table.dataset.checkout_version(version), keys)
        except errors.MemwalOpsError:
            break  # it was expired meanwhile
        merged = {key for key in asked if wrong[key].row in had.get(key, _GONE)}
        unknown |= {key for key in merged if key in doubted or wrong[key].generation > surely}
        doubted |= {key for key in asked - merged if had.get(key, _GONE) & wrong[key].older}
        wrong = {key: write for key, write in wrong.items() if key not in merged - unknown}
    newest, before = table.region(region_id).latest(), table.index.merged_generations.get(region_id, 0)
    pending = [
        generation_ref(region_id, generation) for generation in newest.unmerged(before) if generation.generation < first
    ]
    in_base = len(writes) - len(wrong)
    if out_of_order := fault.out_of_order(pending):  # merged after them, those would put older rows over all of these
        wrong, unknown = writes, set()
    known = {key for key, write in wrong.items() if key in older or write.generation >= max(left.unread, default=0)}
    missing = known - unknown
    return DrainedRegion(
        fault=fault,
        first=first,
        last=last,
        keys=len(writes),
        in_base=in_base,
        missing=_texts(missing),
        unknown=_texts(wrong.keys() - missing),
        unread=left.unread,
        doubt=_doubt(table, left, fault.drops),
        waiting=len(pending),
        out_of_order=out_of_order,
        places=frozenset(wrong[key].place for key in missing),
    )


def _doubt(table: Table, left: _Left, drops: Iterable[Drop]) -> str:
    if left.kept:
        return " Rows are left that cannot be compared (many, damaged, or other columns)."
    for drop in drops:
        number, written = drop.flushed.generation, table.history.written_elsewhere
        if number in left.unread and not (number in left.flushed and written(left.flushed[number], drop.at)):
            return " No other program wrote the base table between their flush and their drop: is it from a backup?"
    return ""


def _texts(keys: Iterable[_Key]) -> tuple[str, ...]:
    return tuple(sorted(", ".join(map(str, key)) for key in keys))


def _read(table: Table, fault: BlockedRegion) -> _Left:
    region_id, first, last = fault.region_id, *(fault.drops[at].flushed.generation for at in (0, -1))
    flushes = table.region(region_id).flushes(first - 1, fault.drops[-1].version)
    ends = {number: entry for number, (entry, _) in flushes.items() if number <= last}
    start, end = ends.get(first - 1, 0 if first == 1 else None), ends.get(last, 0)
    logged: list[_Part] | None = None
    lost = 0
    comparable = not any(map(blobs.holds_blobs, table.schema))
    if comparable and start is not None and end > start:
        logged, lost = _logged(table, table.region(region_id).latest(), start + 1, ends)
    parts, unread, kept = logged or [], list[region_manifest.FlushedGeneration](), False
    for flushed in (drop.flushed for drop in fault.drops):
        copy = _folder(table, region_id, flushed) if comparable else None
        parts += [] if copy is None else [copy]
        whole = logged is not None and ends.get(flushed.generation - 1, 0 if flushed.generation == 1 else -1) >= lost
        unread += [flushed] if copy is None and not whole else []
    if unread:
        contents = read_region_contents(table.store, region_id, table.layout_of(region_id))
        wal, before = contents.wal, end if start is None else start
        whole = 0 < end - before == wal.up_to(end) - wal.up_to(before)
        kept = whole or any(flushed.path in contents.directories for flushed in unread)
    return _Left(
        sorted(parts, key=lambda part: (part.generation, part.entry is None)),
        {number: at for number, (_, at) in flushes.items()},
        tuple(flushed.generation for flushed in unread),
        kept,
    )


def _logged(
    table: Table, manifest: region_manifest.RegionManifest, first: int, ends: Mapping[int, int]
) -> tuple[list[_Part] | None, int]:
    """The rows of log entries behind the last that cannot be read, and that; None: too many, or of other columns.

    With those behind it, as of the number after: what they have of a key is newer, and waits, or will be flushed again.
    pylance's writers record some flushes late, so that a generation may have rows of an entry behind its end.
    """
    parts: list[_Part] = []
    size = rows = lost = 0
    last, region_id = max(ends), manifest.region_id
    layout = table.layout_of(region_id)
    flushed, seen = manifest.replay_after_wal_id, manifest.wal_id_last_seen
    for number in range(first, last_wal_entry(table.store, region_id, flushed, seen, layout) + 1):
        needed = number <= ends[last]
        try:
            in_log = layout.generations_in_log
            entry = read_entry(table.store, region_id, number) if in_log else read_shard_entry(table, region_id, number)
        except errors.WalCorruptError:
            entry = None
        if entry is None and needed:
            parts, lost = [], number
            continue
        size, rows = size + (entry.size if entry else 0), rows + (entry.rows.num_rows if entry else 0)
        if entry is None or size > _MAX_BYTES or rows > _MAX_ROWS:
            return (None if needed else parts), lost
        if entry.rows.num_rows:
            generation = min((listed for listed, end in ends.items() if end >= number), default=last + 1)
            part = _part(table, generation, entry.rows, number)
            if part is None:
                return (None if needed else parts), lost
            parts.append(part)
    return parts, lost


def _folder(table: Table, region_id: UUID, flushed: region_manifest.FlushedGeneration) -> _Part | None:
    """The rows of a folder that is left; None: it is gone, damaged, or too large."""
    ref = generation_ref(region_id, flushed)
    try:
        opened = open_generation(table, ref, SchemaHistory.of(table))
        if opened.physical_rows > _MAX_ROWS or opened.data_bytes > _MAX_BYTES:
            return None
        keys = opened.read_keys()
        batches = opened.read_rows(max_bytes=_MAX_BYTES)
        rows = [part for batch in batches for part in opened.projected(batch, max_bytes=_MAX_BYTES)]
    except errors.MemwalOpsError as error:
        if isinstance(error, datasets.STORE_ERRORS):
            raise
        return None
    if not rows:
        return None
    order = np.argsort(keys.column(datasets.ROW_ADDRESS).to_numpy())[:: -1 if opened.newest_row_first else 1]
    read = pa.Table.from_batches(rows).append_column(TOMBSTONE, keys.column(TOMBSTONE))
    return _part(table, flushed.generation, read.take(order))


def _part(table: Table, generation: int, rows: pa.Table, entry: int | None = None) -> _Part | None:
    """Rows as the base has them: a nullable column that was added since is NULL. None: they have other columns."""
    base = table.schema
    names = {*rows.column_names} - {TOMBSTONE}
    if not {*table.primary_key} <= names <= {*base.names}:
        return None
    try:
        columns = [
            rows.column(field.name).cast(field.type) if field.name in names else pa.nulls(rows.num_rows, field.type)
            for field in base
        ]
    except pa.ArrowException:
        return None
    deletes = rows.column(TOMBSTONE).to_pylist() if TOMBSTONE in rows.column_names else [False] * rows.num_rows
    return _Part(generation, pa.table(columns, base.names), deletes, entry)


def _newest(table: Table, parts: Sequence[_Part]) -> tuple[dict[_Key, _Write], pa.Table]:
    writes: dict[_Key, _Write] = {}
    for at, part in enumerate(parts):
        for number, (key, row, delete) in enumerate(zip(*_encoded(table, part.rows), part.deletes, strict=True)):
            before, newest = writes.get(key), None if delete else row
            older = set() if before is None else {*before.older, before.row}
            # A program that does not know deletes writes them as rows.
            older = (older | {row} if delete else older) - {newest}
            writes[key] = _Write(part.generation, (at, number), newest, older)
    keys = [part.rows.select([*table.primary_key]) for part in parts]
    return writes, pa.concat_tables(keys) if keys else table.schema.empty_table().select([*table.primary_key])


def _encoded(table: Table, rows: pa.Table) -> tuple[list[_Key], list[bytes]]:
    values = {name: datasets.plain(column) for name, column in zip(rows.column_names, rows.columns, strict=True)}
    keys = [*zip(*(values[name] for name in table.primary_key), strict=True)]
    texts = (repr(row).encode(errors="surrogatepass") for row in zip(*values.values(), strict=True))
    return keys, [hashlib.blake2b(text, digest_size=16).digest() for text in texts]


def _rows_of(
    table: Table, dataset: lance.LanceDataset, keys: pa.Table, among: frozenset[int] | None = None
) -> dict[_Key, set[bytes | None]]:
    """The digests of the rows that have one of these keys, in some fragments of a version. No index is asked."""
    digests: dict[_Key, set[bytes | None]] = {}
    if not keys.num_rows or not {*table.schema.names} <= {*dataset.schema.names}:
        return digests  # of other columns: an earlier version
    name, values = keys.column_names[0], keys.column(0)
    with datasets.lance_errors("read rows of", table.location.uri):
        fragments = (
            None
            if among is None
            else [fragment for fragment in dataset.get_fragments() if fragment.fragment_id in among]
        )
        scanner = partial(dataset.scanner, columns=[*table.schema.names], fragments=fragments, use_scalar_index=False)
        chunks: Iterable[pa.Table]
        if keys.num_columns == 1 and datasets.has_sql_literals(values) and "`" not in name:
            distinct = values.unique().to_pylist()
            some = (distinct[at : at + MAX_LOOKUPS] for at in range(0, len(distinct), MAX_LOOKUPS))
            chunks = (scanner(filter=datasets.is_one_of(name, looked_up)).to_table() for looked_up in some)
        else:
            chunks = chunks_with_keys(scanner().to_batches(), keys, keys.column_names, chunk_bytes=_MAX_BYTES)
        for rows in chunks:
            for key, row in zip(*_encoded(table, rows), strict=True):
                digests.setdefault(key, set()).add(row)
    return digests


def overwritten(table: Table, manifests: Iterable[region_manifest.RegionManifest]) -> dict[str, tuple[str, ...]]:
    """By region, keys of which the base table has an older row than the log, or the generations that it lists.

    Looked at where another program is known to merge this table, or wrote its newest version; there, of the fragments
    that it added. At most the newest 256 MiB of a region's log are read.
    """
    keys = {str(manifest.region_id): _overwritten(table, manifest) for manifest in manifests}
    return {region_id: older for region_id, older in keys.items() if older}


def _overwritten(table: Table, manifest: region_manifest.RegionManifest) -> tuple[str, ...]:
    region_id = manifest.region_id
    merged, fragments = table.index.merged_generations.get(region_id, 0), None
    if not merged or any(map(blobs.holds_blobs, table.schema)):
        return ()
    if region_manifest.MERGED_ELSEWHERE not in table.manifest.manifest.config and not (
        fragments := _added_by_others(table)
    ):
        return ()
    seen = None if table.file is None else (table.location.uri, table.file, manifest)
    if seen in _SEEN:
        return _SEEN[seen]
    parts = _merged_log(table, manifest, merged)
    if parts is None:
        listed = [generation for generation in manifest.flushed_generations if generation.generation <= merged]
        parts = [part for generation in listed if (part := _folder(table, region_id, generation)) is not None]
    writes, keys = _newest(table, parts)
    base = _rows_of(table, table.dataset, keys, fragments)
    known = {key: write for key, write in writes.items() if key in base and write.generation <= merged}
    older = (key for key, write in known.items() if write.row not in base[key] and base[key] & write.older)
    if len(_SEEN) >= _MOST_SEEN:
        _SEEN.clear()
    return _texts(older) if seen is None else _SEEN.setdefault(seen, _texts(older))


def _added_by_others(table: Table) -> frozenset[int]:
    """The fragments that the newest version added, if another program wrote it. One request."""
    written = version_files.VersionWriter.of(table.manifest)
    if written.ours or not written.writes or table.version - 1 not in table.history.listed():
        return frozenset()
    try:
        before = table.history.manifest(table.history.listed()[table.version - 1]).manifest
    except (errors.InvalidFormatError, errors.ObjectNotFoundError):
        return frozenset()
    now, known = table.manifest.manifest.fragments, {fragment.id for fragment in before.fragments}
    return frozenset(fragment.id for fragment in now if fragment.id not in known)


def _merged_log(table: Table, manifest: region_manifest.RegionManifest, merged: int) -> list[_Part] | None:
    """The rows of the newest log entries of merged generations; None: they are not known, or gone."""
    end, _ = table.region(manifest.region_id).flushes(merged, manifest.version).get(merged, (0, None))
    listed = read_region_contents(table.store, manifest.region_id, table.layout_of(manifest.region_id)).wal
    first, size = listed.up_to(end), 0
    if not end or not first or listed.ids[first - 1] != end:
        return None
    last = first
    while first and listed.ids[first - 1] == end - (last - first) and size < _MAX_BYTES // 2:
        first -= 1
        size += listed.size(first)
    parts, lost = _logged(table, manifest, listed.ids[first], {merged: end})
    return None if lost else parts


def list_again(table: Table, region: DrainedRegion) -> None:
    """Write the rows that are not in the base table as the first of the dropped generations, and list it.

    It has the newest write of each of their keys, so that none of the others has a newer one. Timeline if the others
    were listed as they were: the second was merged, and users changed its rows since: their changes are lost.

    Raises ``CommitLostError``: the region was changed meanwhile; ``UnsupportedFeatureError``: rows that our writer
    cannot store; ``WalCorruptError``: columns of the table were dropped and added again since the rows were put.
    """
    region_id, columns = region.fault.region_id, region_columns(table)
    known, layout = LoggedColumns(table, region_id, columns), table.layout_of(region_id)
    entries: list[pa.Table] = []
    for at, part in enumerate(_read(table, region.fault).parts):
        wanted = sorted(number for place, number in region.places if place == at)
        if not wanted:
            continue
        if part.entry is not None and not known.is_current(wal_entry_path(region_id, part.entry, layout)):
            raise errors.WalCorruptError(
                f"Columns of the table were changed since entry {part.entry} of the log was put."
            )
        deletes = pa.array([part.deletes[number] for number in wanted])
        rows = part.rows.take(wanted).append_column(TOMBSTONE, deletes)
        entries.append(rows.select(columns.schema.names).cast(columns.schema))
    rows = pa.concat_tables(entries)
    store, path = table.region(region_id), f"{secrets.token_hex(4)}_gen_{region.first}"
    newest = store.latest(checked=True)
    listed = region_manifest.FlushedGeneration(
        region.first, path, in_memory_bytes=rows.nbytes, physical_rows=rows.num_rows
    )
    generations = sorted((*newest.flushed_generations, listed), key=lambda flushed: flushed.generation)
    if len({flushed.generation for flushed in generations}) < len(generations):
        raise CommitLostError(f"Generation {region.first} of region {region_id} is listed again.")
    entry = WalEntry(region.first, newest.writer_epoch, rows, columns.ids, rows.nbytes)
    put_generation(table.store, table.location, region_id, path, [entry], columns, copied=True)
    build_indexes(table, generation_ref(region_id, listed).folder, generation_indexes(table, strict=False))

    def check() -> None:
        if table.newest().version != table.version:
            raise CommitLostError("The base table was changed meanwhile.")

    manifest = replace(newest.next(), flushed_generations=tuple(generations))
    if not store.commit(manifest, ours_if_equal=False, check=check):
        raise CommitLostError(f"Region {region_id} was changed meanwhile.")


def drained_regions(table: Table, backlog: Backlog) -> tuple[DrainedRegion, ...]:
    """The regions that are blocked by generations that another program dropped."""
    return tuple(compare(table, fault) for fault in backlog.blocked if fault.drops)


def merged_there(regions: Iterable[DrainedRegion]) -> dict[UUID, int]:
    """The progress that :func:`accept` records."""
    return {region.fault.region_id: region.last for region in regions if region.adoptable and not region.missing}


def accept(
    table: Table, region_ids: Iterable[UUID] | None, note: CommitNote
) -> tuple[Table, tuple[DrainedRegion, ...]]:
    """Record generations that another program merged and dropped; list again what is not in the base table.

    Of what is listed, progress is recorded by the merge of it, and by the next call of the others: killed at any line,
    the versions show the same.

    Raises ``CommitConflictError``: too many conflicts in a row.
    """
    retry = CommitRetry()
    while True:
        regions = [*drained_regions(table, read_backlog(table, region_ids))]
        progress = merged_there(regions)
        try:
            for at, region in enumerate(regions):
                if region.adoptable and region.missing:
                    try:
                        list_again(table, region)
                    except (errors.UnsupportedFeatureError, errors.WalCorruptError):  # they cannot be written again
                        regions[at] = replace(region, missing=(), unknown=region.missing)
            if progress:
                faults = {
                    region.fault.region_id: region.fault for region in regions if region.fault.region_id in progress
                }
                last = {region_id: fault.drops[-1].flushed for region_id, fault in faults.items()}
                records = {
                    key: region_manifest.RegionRecord(generation.generation, region_manifest.mark_of(generation.path))
                    for key, generation in last.items()
                }
                program = next(iter(faults.values())).program
                publish_progress(table, progress, records, note, {region_manifest.MERGED_ELSEWHERE: program})
                table = retry.landed(table)
        except CommitLostError as error:
            table = retry.conflict(table, error)
        else:
            return table, tuple(regions)
