"""Write the changes of a pass: the winners' rows as new fragments, superseded rows as deletion vectors.

Nothing written here is visible: the files have names that no version mentions until the commit. The payload streams
from the generations to the base, a batch at a time; memory never holds all of it.

Also what is built of an index by parts, on other machines; and dictionaries that are written anew: pylance keeps one as
it is, also values that no row has any more; an erasure has them written again, with the values in use alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from lance.fragment import FragmentMetadata, RowIdSequence, write_fragments

from memwal_ops import errors
from memwal_ops.formats.lance.engines.merge.collapse import BlockedRegionsError, Winners
from memwal_ops.formats.lance.files import blobs, datasets, version_files
from memwal_ops.formats.lance.generations.projection import Node, nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from uuid import UUID

    import numpy.typing as npt
    from lance.optimize import RewriteResult

    from memwal_ops.formats.lance.engines.merge.locate import Superseded
    from memwal_ops.formats.lance.generations.generation import Generation
    from memwal_ops.formats.lance.indexes.index_arguments import IndexArguments
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import DeleteReport
    from memwal_ops.storage.locations import Location


Figures = dict[str, "Mapping[str, float]"]
"""Per stage: seconds, tasks, lost attempts and seconds of executors."""


@dataclass(frozen=True, slots=True)
class IndexParts:
    """A new segment of an index, to be built from the rows of some fragments.

    Attributes:
        arguments: how it is built. If segments are to be merged, with centroids and codebook, or ``trained``.
        sizes: the fragments that it will cover, with the bytes of their data files.
        replaced: the segments that it replaces.
        trained: whether centroids and codebook are trained first, by rows of the whole table, and then shared.
        divisible: whether segments of parts can be merged into one; if not, one task builds it.
    """

    arguments: IndexArguments
    sizes: Mapping[int, int]
    replaced: frozenset[UUID]
    trained: bool = False
    divisible: bool = True

    @property
    def bytes(self) -> int:
        """Size of the data files of the fragments."""
        return sum(self.sizes.values())


def dictionary_columns(schema: pa.Schema) -> list[str]:
    """The columns with a dictionary anywhere in them."""
    return [field.name for field in schema if _has_dictionary(field.type)]


def _has_dictionary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind)) or any(
        _has_dictionary(kind.field(at).type) for at in range(kind.num_fields if pa.types.is_nested(kind) else 0)
    )


def dictionaries_of(array: pa.Array, name: str) -> Iterator[tuple[str, pa.DictionaryArray]]:
    """The arrays with a dictionary in a column, each with the path to it."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        yield name, array
    elif pa.types.is_struct(kind):
        for child in kind:
            yield from dictionaries_of(array.field(child.name), f"{name}.{child.name}")
    elif _has_dictionary(kind):
        for at, child in enumerate([array.keys, array.items] if pa.types.is_map(kind) else [array.values]):
            yield from dictionaries_of(child, f"{name}.{at}")


def with_values_in_use(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows, with dictionaries of the values that they have."""
    for batch in batches:
        columns = [_in_use(column) if _has_dictionary(column.type) else column for column in batch.columns]
        yield pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _in_use(array: pa.Array) -> pa.Array:
    array = array.take(pa.array(range(len(array)), pa.int64()))  # without an offset, and without what is not in use
    kind, is_null = array.type, array.is_null()
    if pa.types.is_dictionary(kind):
        encoded = array.dictionary_decode().dictionary_encode()
        return pa.DictionaryArray.from_arrays(
            encoded.indices.cast(kind.index_type), encoded.dictionary, ordered=kind.ordered
        )
    if pa.types.is_struct(kind):
        children = [_in_use(array.field(at)) for at in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=[*kind], mask=is_null)
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(array.offsets, _in_use(array.keys), _in_use(array.items), kind, mask=is_null)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_in_use(array.values), type=kind, mask=is_null)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return type(array).from_arrays(array.offsets, _in_use(array.values), type=kind, mask=is_null)
    return array


def with_new_dictionaries(
    table: Table, dataset: lance.LanceDataset, results: Iterable[RewriteResult]
) -> Iterator[RewriteResult]:
    """Write what tasks rewrote again, with the values in use alone; the files of before are deleted.

    ``table``: the version that the tasks were planned on. ``dataset``: opened. ``results``: those of the tasks.
    """
    result: Any  # the stub lacks its methods
    for result in results:
        document = json.loads(result.json())
        old = [
            f"{version_files.DATA_FOLDER}/{file['path']}" for one in document["new_fragments"] for file in one["files"]
        ]
        rows = _Rows(dataset, [int(one["id"]) for one in document["original_fragments"]])
        for fragment in document["new_fragments"]:
            with datasets.lance_errors("write the dictionaries of", table.location.uri):
                fragment["files"] = rows.write(int(fragment["physical_rows"]), table)
        table.guard.register(old)
        table.discard(old)
        yield type(result).from_json(json.dumps(document))


class _Rows:
    """The rows of fragments that are not deleted, in their order, as a task rewrites them."""

    def __init__(self, dataset: lance.LanceDataset, fragments: list[int]) -> None:
        parts = [part for number in fragments if (part := dataset.get_fragment(number)) is not None]
        self._dataset = dataset
        self._batches = dataset.scanner(fragments=parts, blob_handling="all_binary").to_batches()
        self._rest: pa.RecordBatch | None = None

    def write(self, count: int, table: Table) -> list[dict[str, Any]]:
        """Write so many of the next rows as a fragment of a table; return its files."""
        schema = self._dataset.schema
        made = write_fragments(
            pa.RecordBatchReader.from_batches(schema, with_values_in_use(self._next(count))),
            self._dataset,
            mode="append",
            max_rows_per_file=count,
            data_storage_version=self._dataset.data_storage_version,
            storage_options=datasets.lance_options(table.location),
        )
        if not isinstance(made, list) or len(made) != 1 or made[0].physical_rows != count:
            raise errors.InvariantViolatedError(f"Not exactly {count} rows were written again; nothing was published.")
        files: list[dict[str, Any]] = made[0].to_json()["files"]
        return files

    def _next(self, count: int) -> Iterator[pa.RecordBatch]:
        while count and (batch := self._rest or next(self._batches, None)) is not None:
            yield batch.slice(0, count)
            self._rest = batch.slice(count) if batch.num_rows > count else None
            count -= min(count, batch.num_rows)


_FRAGMENT_SHIFT = 32
_DATA_SUFFIX = ".lance"
# What Lance buffers of each column before it writes a page, unless a limit is given.
_WRITER_CACHE_PER_COLUMN = 8 << 20


@dataclass(frozen=True, slots=True)
class Rewrite:
    """The files of a pass. :meth:`operation` would make them part of the table."""

    new_fragments: tuple[FragmentMetadata, ...]
    updated_fragments: tuple[FragmentMetadata, ...]
    removed_fragment_ids: tuple[int, ...]
    field_ids: tuple[int, ...]

    def operation(self) -> lance.LanceOperation.Update:
        """The update, in terms of the version that it was computed at.

        All fields count as rewritten, so that no index counts as covering the new fragments: their
        rows are found by scanning until the index is caught up.
        """
        return lance.LanceOperation.Update(
            removed_fragment_ids=list(self.removed_fragment_ids),
            updated_fragments=list(self.updated_fragments),
            new_fragments=list(self.new_fragments),
            fields_modified=[],
            fields_for_preserving_frag_bitmap=list(self.field_ids),
            update_mode="rewrite_rows",
        )

    def written_files(self) -> list[str]:
        """Paths of the data and deletion files written for this pass, relative to the table's root."""
        data = [f"data/{file.path}" for fragment in self.new_fragments for file in fragment.files]
        deletions = [deletion_path(fragment) for fragment in self.updated_fragments]
        if None in deletions:
            raise errors.InvariantViolatedError("A fragment has no deletion vector after rows of it were deleted.")
        return [*data, *(path for path in deletions if path is not None)]


def rewrite(
    table: Table,
    generations: Sequence[Generation],
    winners: Winners,
    superseded: Superseded,
    max_bytes: int,
    on_rows: Callable[[int], None],
) -> Rewrite:
    """Write the new fragments and deletion vectors of a pass; ``max_bytes`` is the memory budget.

    Raises ``BlockedRegionsError``: a generation's rows cannot be read; ``InvariantViolatedError``: not exactly the
    winners were written; ``StorageError``: the store failed; what had been written is deleted.
    """
    target = BaseVersion(table.location, table.dataset)
    new_fragments = write_winners(target, generations, winners.upserts, superseded.row_ids, max_bytes, on_rows)
    updated: list[FragmentMetadata] = []
    removed: list[int] = []
    try:
        for fragment_id, remaining in _without(target, superseded.addresses):
            if remaining is None:
                removed.append(fragment_id)
            else:
                updated.append(remaining)
    except errors.MemwalOpsError:
        remove_files(table, Rewrite(tuple(new_fragments), tuple(updated), (), ()).written_files())
        raise
    return Rewrite(tuple(new_fragments), tuple(updated), tuple(removed), all_field_ids(table.dataset))


@dataclass(frozen=True, slots=True)
class BaseVersion:
    """The base version that files are written for. Each process opens its own handle."""

    location: Location
    dataset: lance.LanceDataset


def all_field_ids(dataset: lance.LanceDataset) -> tuple[int, ...]:
    """The ids of all fields, nested ones included."""
    return tuple(node.field_id for root in nodes(dataset) for node in _walk(root))


def write_winners(
    target: BaseVersion,
    generations: Sequence[Generation],
    upserts: Sequence[npt.NDArray[np.bool_]],
    row_ids: npt.NDArray[np.int64] | None,
    max_bytes: int,
    on_rows: Callable[[int], None],
) -> list[FragmentMetadata]:
    """Write the winning rows of ``generations`` as new fragments of the base.

    ``generations``: opened, in the order in which their rows are to be written. ``upserts``: per generation, a mask
    over its live rows in row order. ``row_ids``: for a table with stable row ids, over all generations' live rows: the
    id of the base row that this one replaces, or -1; None for other tables. ``max_bytes``: memory budget. ``on_rows``:
    called with the number of rows that were processed since the last call.
    Raises ``BlockedRegionsError``: a generation's rows cannot be read; ``InvariantViolatedError``: not exactly the
    winners were written.
    """
    if row_ids is None:
        fragments = _write(target, generations, upserts, max_bytes, on_rows)
    else:
        # A rewritten row keeps its stable row id (S3-056), a new row gets the next free one. A
        # fragment carries either kind only, so the two are written apart.
        bounds = np.cumsum([0, *(len(mask) for mask in upserts)])
        spans = list(pairwise(bounds))
        replaces = row_ids >= 0
        updates = [mask & replaces[start:end] for mask, (start, end) in zip(upserts, spans, strict=True)]
        inserts = [mask & ~replaces[start:end] for mask, (start, end) in zip(upserts, spans, strict=True)]
        kept = np.concatenate([row_ids[start:end][mask] for mask, (start, end) in zip(updates, spans, strict=True)])
        updated = _write(target, generations, updates, max_bytes, on_rows)
        position = 0
        for fragment in updated:
            ids = kept[position : position + fragment.physical_rows]
            fragment.row_id_meta = RowIdSequence(ids.tolist()).to_inline_metadata()
            position += fragment.physical_rows
        fragments = [*updated, *_write(target, generations, inserts, max_bytes, on_rows)]
    written = sum(fragment.physical_rows for fragment in fragments)
    wanted = sum(int(mask.sum()) for mask in upserts)
    if written != wanted:
        raise errors.InvariantViolatedError(
            f"{written} rows written for {wanted} winners; this pass was not published."
        )
    return fragments


def _write(
    target: BaseVersion,
    generations: Sequence[Generation],
    masks: Sequence[npt.NDArray[np.bool_]],
    max_bytes: int,
    on_rows: Callable[[int], None],
) -> list[FragmentMetadata]:
    if not any(bool(mask.any()) for mask in masks):
        return []
    failure: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        # An error raised inside the stream would come back as text through two language
        # boundaries; it is stored here and raised again on this side.
        for generation, mask in zip(generations, masks, strict=True):
            try:
                yield from _winning_batches(generation, mask, max_bytes, on_rows)
            except (errors.GenerationCorruptError, errors.SchemaProjectionError) as error:
                failure.append(BlockedRegionsError({generation.ref.region_id: (generation.ref.generation, error)}))
                raise
            except BaseException as error:
                failure.append(error)
                raise

    dataset = target.dataset
    reader = pa.RecordBatchReader.from_batches(blobs.written_schema(dataset.schema), batches())
    try:
        with datasets.lance_errors("write to", target.location.uri):
            fragments = write_fragments(
                reader,
                dataset,
                mode="append",
                data_storage_version=dataset.data_storage_version,
                data_cache_bytes=min(len(dataset.schema) * _WRITER_CACHE_PER_COLUMN, max(max_bytes // 8, 1)),
                storage_options=datasets.lance_options(target.location),
                # The region's writer accepted an external blob wherever it is.
                allow_external_blob_outside_bases=True,
            )
    except errors.MemwalOpsError as error:
        if failure:
            raise failure[0] from error
        raise
    assert isinstance(fragments, list)  # noqa: S101 - narrows pylance's union; True without return_transaction
    return fragments


def _winning_batches(
    generation: Generation, mask: npt.NDArray[np.bool_], max_bytes: int, on_rows: Callable[[int], None]
) -> Iterator[pa.RecordBatch]:
    """The generation's winning rows in the base's schema, in row order."""
    if not mask.any():
        on_rows(len(mask))
        return
    position = 0
    for batch in generation.read_rows(max_bytes=max_bytes):
        wins = mask[position : position + batch.num_rows]
        position += batch.num_rows
        on_rows(batch.num_rows)
        if wins.any():
            rows = batch if wins.all() else batch.filter(pa.array(wins))
            yield from generation.projected(rows, max_bytes=max_bytes)
    if position != len(mask):
        raise errors.InvariantViolatedError(
            f"{generation.ref} had {len(mask)} rows when its keys were read and {position} after."
        )


def delete_superseded(
    target: BaseVersion, addresses: npt.NDArray[np.uint64]
) -> tuple[list[FragmentMetadata], list[int]]:
    """Deletion vectors for the fragments that hold ``addresses`` (ascending).

    Returns the fragments with their new deletion vectors, and the ids of those of which no row is left.
    """
    changed = list(_without(target, addresses))
    return (
        [remaining for _, remaining in changed if remaining is not None],
        [fragment_id for fragment_id, remaining in changed if remaining is None],
    )


def _without(target: BaseVersion, addresses: npt.NDArray[np.uint64]) -> Iterator[tuple[int, FragmentMetadata | None]]:
    """Each fragment that holds ``addresses``, with its new deletion vector; None if no row is left of it."""
    if addresses.size == 0:
        return
    fragment_ids = (addresses >> np.uint64(_FRAGMENT_SHIFT)).astype(np.int64)
    ids, starts = np.unique(fragment_ids, return_index=True)
    for fragment_id, rows in zip(ids.tolist(), np.split(addresses, starts[1:]), strict=True):
        fragment = target.dataset.get_fragment(fragment_id)
        if fragment is None:
            raise errors.InvariantViolatedError(f"Fragment {fragment_id} is not in version {target.dataset.version}.")
        offsets = (rows & np.uint64(0xFFFF_FFFF)).tolist()
        with datasets.lance_errors("write a deletion vector to", target.location.uri):
            remaining = fragment.delete_rows(offsets)
        before = fragment.metadata
        left = 0 if remaining is None else remaining.num_rows
        is_counted = before.physical_rows and (before.deletion_file is None or before.deletion_file.num_deleted_rows)
        # pylance reads the deletion file again, and believes the store. Old releases did not record the numbers.
        if is_counted and left != before.num_rows - len(offsets):
            raise errors.StorageError(
                f"{len(offsets):,} of {before.num_rows:,} rows of fragment {fragment_id} of {target.location.uri} were "
                f"to be deleted, and {left:,} are left: its deletion file was read wrongly; nothing was published.",
                remedy="Run it again. If it happens again, the store returns wrong bytes.",
            )
        yield fragment_id, remaining


def deletion_path(fragment: FragmentMetadata) -> str | None:
    """Path of its deletion vector: ``_deletions/{fragment}-{read version}-{random id}`` (S3-041), if it has one."""
    deletion = fragment.deletion_file
    if deletion is None:
        return None
    suffix = "arrow" if deletion.file_type == "array" else "bin"
    return f"_deletions/{fragment.id}-{deletion.read_version}-{deletion.id}.{suffix}"


def remove_files(table: Table, files: Sequence[str]) -> DeleteReport:
    """Delete ``written_files`` that no version names, and the blobs next to them (``data/{file}/{number}.blob``)."""
    folders = [file.removesuffix(_DATA_SUFFIX) for file in files if file.endswith(_DATA_SUFFIX)]
    return table.discard([*files, *(blob.path for folder in folders for blob in table.store.list(folder))])


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from _walk(child)
