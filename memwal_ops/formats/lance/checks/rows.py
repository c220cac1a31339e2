"""Check rows (``--deep``): all decode, keys and row ids are there once, key files of generations have theirs."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops import errors
from memwal_ops.core.verification import Inconsistency, Severity, finding_of
from memwal_ops.formats.lance.answers.asked_index import Pinned, RowReader
from memwal_ops.formats.lance.files.blobs import lance_rows
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, undecodable
from memwal_ops.formats.lance.files.named_files import RESTORE_DEEP, Damage
from memwal_ops.formats.lance.generations.generation_files import MERGE_IT
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, required_columns
from memwal_ops.formats.lance.regions import key_files
from memwal_ops.formats.lance.retention.damage import shown_files
from memwal_ops.formats.lance.wire.names import region_folder
from memwal_ops.formats.lance.wire.version_manifest import STABLE_ROW_IDS
from memwal_ops.storage.export_file import NotExportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Store

_PAGE = errors.runbook(errors.DuplicateKeysError.exit_code) or ""
_TABLE_PAGE = errors.runbook(errors.TableCorruptError.exit_code) or ""
_REGION, _STOPS = "_region", "Merges stop before it; readers fail."
_MAX_BYTES = 64 << 20
_FILES_PAGE = errors.runbook(errors.GenerationCorruptError.exit_code) or ""
_MISSED = "Other programs miss rows by it, and return older ones. Reads of memwal-ops do not use it; nor do merges."
_TWICE = "Clients on Lance up to 12 cannot scan the region's rows while it lists the generation."
_UNUSED = "Reads of memwal-ops do without it, and are slower; other programs fail."


def check_values(table: Table, reader: RowReader) -> Iterator[Inconsistency]:
    """Each fragment of the base decodes. Bytes of blobs are not read; changed bytes that decode are not noticed."""
    pinned = Pinned(table.dataset, table.location.uri)
    for name, why in chain.from_iterable(reader.each(pinned, [*pinned.fragments], _undecodable)):
        place, fails = shown_files(table)[name], "Scans of the newest version fail."
        yield Inconsistency(Severity.ERROR, "base_file", place, why, fails, RESTORE_DEEP, _TABLE_PAGE)


def _undecodable(pinned: Pinned, fragments: Sequence[int]) -> list[tuple[str, str]]:
    return [found for one in fragments for found in undecodable(pinned.dataset, pinned.fragments[one])]


def check_keys(table: Table, columns: Sequence[str], reader: RowReader) -> Iterator[Inconsistency]:
    """No key is NULL or a duplicate."""
    repeated = reader.repeated_keys(table, columns)
    if repeated.marked:
        yield Inconsistency(
            Severity.ERROR, "null_keys", "the base table", f"{repeated.marked:,} key values are NULL.",
            "No merge can update or delete these rows.", "Give them keys, or delete them.", _PAGE,
        )  # fmt: skip
    if repeated.values:
        yield Inconsistency(
            Severity.ERROR, "duplicate_keys", "the base table",
            f"{repeated.values:,} keys are in it more than once ({repeated.rows:,} rows).",
            "Readers get them twice; a merge replaces all of them by one.",
            "Delete the duplicates by row id.", _PAGE,
        )  # fmt: skip


def check_row_ids(table: Table, reader: RowReader) -> Iterator[Inconsistency]:
    """In a table with stable row ids, no two rows have the same id, and none has one at or above the next id."""
    if not table.manifest.manifest.reader_feature_flags & STABLE_ROW_IDS:
        return
    repeated = reader.repeated_row_ids(table)
    twice, next_id = repeated.rows - repeated.values, table.manifest.manifest.next_row_id
    for number, place, what, consequence in (
        (twice, "the base table",
         f"The row id sequences of its fragments overlap: {twice:,} rows have the id of another row.",
         "Indexes and readers that look rows up by id get the wrong ones."),
        (repeated.marked, "the newest version",
         f"{repeated.marked:,} rows have ids from {next_id:,} on, the next id to be assigned.",
         "Rows that are appended get the same ids."),
    ):  # fmt: skip
        remedy = "Restore an earlier version (dataset.restore()), or copy the rows into a new table."
        if number:
            yield Inconsistency(Severity.ERROR, "row_ids", place, what, consequence, remedy, _TABLE_PAGE)


def _check_required(table: Table, generation: Generation) -> Iterator[Inconsistency]:
    """No row of a generation, but tombstones, is NULL in a column that must have a value."""
    names = [name for name in required_columns(table.schema) if name not in table.primary_key]
    if not names:
        return
    selected = generation.selected(names)
    alive = f"{TOMBSTONE} IS NOT TRUE" if generation.projection.has_tombstones else None
    try:
        for batch in selected.read_rows(max_bytes=_MAX_BYTES, condition=alive):
            for _ in selected.projected(batch, max_bytes=_MAX_BYTES, references=False):
                pass
    except errors.MemwalOpsError as error:
        yield finding_of(error, "generation_rows", generation.ref.folder, _STOPS)


def check_generation_rows(table: Table, opened: Mapping[UUID, Sequence[Generation]]) -> Iterator[Inconsistency]:
    """Every unmerged generation reads, has no NULL key, fits its key files, and shares no key with another region.

    Memory: the key columns of all unmerged generations.
    """
    parts: list[pa.Table] = []
    for number, region_id in enumerate(sorted(opened)):
        for generation in opened[region_id]:
            try:
                rows = generation.read_keys()
                deque(generation.read_rows(max_bytes=_MAX_BYTES), maxlen=0)  # the other columns may be damaged alone
            except errors.MemwalOpsError as error:
                about = f"{region_id}/{generation.ref.generation}"
                yield finding_of(error, "generation_rows", generation.ref.folder, _STOPS, about=about)
                continue
            yield from _check_required(table, generation)
            yield from check_key_files(table.store, generation, rows.drop_columns([TOMBSTONE]))
            keys = rows.select(range(len(table.primary_key)))
            nulls = sum(column.null_count for column in keys.columns)
            if nulls:
                yield Inconsistency(
                    Severity.ERROR, "null_keys", generation.ref.folder, f"{nulls:,} key values are NULL.",
                    "Merges refuse the generation.", "Ask the writer's owner; the rows are in the log.", _PAGE,
                )  # fmt: skip
            if generation.ref.rows is not None and generation.ref.rows != generation.physical_rows:
                yield Inconsistency(
                    Severity.INFO, "row_count", generation.ref.folder,
                    f"It has {generation.physical_rows:,} rows; the region's manifest records {generation.ref.rows:,}.",
                    "Budgets of merges are estimated wrongly.", "None.",
                )  # fmt: skip
            parts.append(keys.append_column(_REGION, pa.repeat(pa.scalar(number, pa.int64()), keys.num_rows)))
    if len(opened) < 2 or not parts:  # noqa: PLR2004 - one region shares with no other
        return
    keys = pa.concat_tables(parts)
    counts = keys.group_by(keys.column_names[:-1]).aggregate([(_REGION, "count_distinct"), (_REGION, "min")])
    shared = counts.filter(pa.compute.greater(counts[f"{_REGION}_count_distinct"], 1))
    if shared.num_rows:
        region = sorted(opened)[shared[f"{_REGION}_min"][0].as_py()]
        yield Inconsistency(
            Severity.ERROR, "shared_keys", region_folder(region),
            f"{shared.num_rows:,} keys are unmerged in this region and in another one.",
            "Which row is newer is unknown: merges of both stop.",
            "Route each key to one region; see the page for rows that were written already.", _PAGE,
        )  # fmt: skip


def check_indexes(damages: Iterable[Damage], about: str, *, deep: bool) -> Iterator[Inconsistency]:
    """Findings of the damaged index files of a generation; ``deep``: :func:`check_key_files` reads the key index."""
    for damage in damages:
        if not (deep and damage.path.endswith(key_files.KEY_INDEX_PAGES)):
            yield Inconsistency(
                Severity.ERROR, "generation_index", damage.path, f"It is damaged: {damage.why}.", _UNUSED,
                damage.remedy, _FILES_PAGE, about=about,
            )  # fmt: skip


def check_sampled_filter(table: Table, generation: Generation) -> Iterator[Inconsistency]:
    """The bloom filter decodes, and has a sample of the generation's keys."""
    path = f"{generation.ref.folder}/{key_files.BLOOM_FILTER}"
    kinds = [table.schema.field(name).type for name in table.primary_key]
    try:
        bloom = key_files.read_bloom_filter(table.store, generation.ref.folder, kinds)
        if bloom is not None and (missed := generation.unknown_to(bloom, kinds)):
            yield _lacks("key_filter", path, missed, "of a sample")
    except NotExportedError:
        return
    except errors.InvalidFormatError as error:
        yield finding_of(error, "key_filter", path, f"{_UNUSED} {MERGE_IT}")


def check_key_files(store: Store, generation: Generation, keys: pa.Table) -> Iterator[Inconsistency]:
    """Every live row is in the bloom filter, and in the key index once, by its address; a missing file is none.

    Args:
        keys: its live rows: key columns, and ``_rowaddr``.
    """
    stored_keys = key_files.GenerationKeys.of([keys], keys.column_names[: keys.column_names.index(ROW_ADDRESS)])
    if not keys.num_rows or any(column.null_count for column in stored_keys.columns):
        return
    path = f"{generation.ref.folder}/{key_files.BLOOM_FILTER}"
    try:
        kinds = [column.type for column in stored_keys.columns]
        bloom = key_files.read_bloom_filter(store, generation.ref.folder, kinds)
        if bloom is not None and (missed := int(np.count_nonzero(~bloom.may_have(stored_keys.columns)))):
            yield _lacks("key_filter", path, missed)
    except errors.InvalidFormatError as error:
        yield finding_of(error, "key_filter", path, f"{_UNUSED} {MERGE_IT}")
    values = stored_keys.index_values
    path = f"{generation.ref.folder}/{key_files.KEY_INDEX_PAGES}"
    if values is None:
        return
    try:
        pages = lance_rows(store.get(path), "the key index")
        if missed := _not_indexed(pages, values, keys[ROW_ADDRESS]):
            yield _lacks("key_index", path, missed)
        if doubled := pages.num_rows - len(pages["ids"].unique()):
            what = f"It has {doubled:,} rows twice, as a writer of Lance 9 puts there what it replayed."
            yield Inconsistency(Severity.WARNING, "key_index", path, what, _TWICE, MERGE_IT, _FILES_PAGE)
    except errors.ObjectNotFoundError:
        pass
    except errors.InvalidFormatError as error:
        yield finding_of(error, "key_index", path, f"{_UNUSED} {MERGE_IT}")


def _lacks(check: str, path: str, missed: int, of: str = "of the generation") -> Inconsistency:
    what = f"It lacks the keys of {missed:,} rows {of}."
    return Inconsistency(Severity.ERROR, check, path, what, _MISSED, MERGE_IT, _FILES_PAGE)


def _not_indexed(pages: pa.Table, values: pa.Array, addresses: pa.ChunkedArray) -> int:
    """The number of rows that the key index does not have under their key and address.

    Raises ``InvalidFormatError``: the index has other columns, or values of another type.
    """
    try:
        stored = pages["values"].combine_chunks().cast(values.type)
        at = pc.index_in(addresses, value_set=pages["ids"].combine_chunks())
        same = pc.equal(_bits(stored.take(at.combine_chunks())), _bits(values))
    except (KeyError, pa.ArrowException) as error:
        raise errors.InvalidFormatError(f"The key index does not have the columns of one: {error}") from error
    return len(values) - int(pc.sum(same).as_py() or 0)


def _bits(values: pa.Array) -> pa.Array:
    return values.view(f"int{values.type.bit_width}") if pa.types.is_floating(values.type) else values
