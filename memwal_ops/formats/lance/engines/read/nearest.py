"""Search by vector: the base table and each generation by its own index, and the rows in memory (S0-205).

Each source returns its nearest rows. Rows that were written again or deleted since are dropped, and the source is
searched for more until enough are live, or it has no others. So no live row is missing because of a stale one.

A merge puts rows into new fragments, which the base's index covers only after the next catch-up. Until then the merged
generations, which are kept for it, have these rows in indexes of their own (S0-201, S0-219).
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from memwal_ops import errors
from memwal_ops.formats.lance.engines.merge.locate import newest_rows, with_keys
from memwal_ops.formats.lance.engines.read.lookup import condition_of, last_keys
from memwal_ops.formats.lance.engines.read.opened import BASE, Opened, in_memory, pruned
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, ROW_ID, STORE_ERRORS, lance_errors
from memwal_ops.formats.lance.files.version_files import read_version_manifest
from memwal_ops.formats.lance.generations.generation import Generation, GenerationRef, named
from memwal_ops.formats.lance.generations.projection import TOMBSTONE, conformed
from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex, base_indexes, coverage
from memwal_ops.formats.lance.indexes.index_faults import base_scanner
from memwal_ops.formats.lance.wire.memwal_index import merge_progress
from memwal_ops.formats.lance.wire.version_manifest import encode_row_ids, fragments_of
from memwal_ops.storage.api import results_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    from numpy.typing import NDArray

    from memwal_ops.formats.lance.engines.read.unmerged import RegionRead, Unmerged
    from memwal_ops.formats.lance.table import Table


DISTANCE = "_distance"
_METRIC = "l2"
_CONCURRENT = 8
_MAX_BYTES = 64 << 20
_LIMIT_GROWTH = 4
_MAX_VERSIONS = 64
_NUMBER = "__memwal_ops_number"


@dataclass(frozen=True)
class VectorQuery:
    """The parameters of a search.

    Attributes:
        column: of vectors.
        vector: of the column's length.
        k: how many rows, at least 1.
        condition: SQL; only rows that meet it count.
        nprobes: partitions of an index to search; None: Lance's default.
        refine_factor: ``k`` times this number of candidates of a quantized index are compared exactly; None: ``k`` of
            them if there are several sources, since quantized distances cannot be compared with exact ones.
    """

    column: str
    vector: Sequence[float] | pa.Array
    k: int
    condition: str | None = None
    nprobes: int | None = None
    refine_factor: int | None = None


class _Source(Protocol):
    """Rows that are searched together."""

    name: str

    def search(self, k: int, without: NDArray[np.uint64]) -> pa.Table:
        """The ``k`` nearest but those with these row ids, in the base's columns, ``_distance`` and ``_rowid``."""

    def live(self, found: pa.Table) -> pa.Table:
        """Those of the rows that are live."""


def nearest(unmerged: Unmerged, query: VectorQuery, opened: Opened) -> pa.Table:
    """The ``k`` live rows that are nearest to a vector, with ``_distance``, the nearest first.

    Raises:
        InvalidUsageError: no such column, ``k`` below 1.
        StorageError: a vector of another length, or the store failed.
    """
    sources = _sources(unmerged, query, opened)
    answers = results_of(lambda source: _live(source, query.k), sources, threads=_CONCURRENT)
    names = [*unmerged.table.schema.names, DISTANCE]
    kind = answers[0].select(names).schema
    rows = pa.concat_tables([conformed(answer.select(names), kind) for answer in answers])
    return rows.take(pc.sort_indices(rows, [(DISTANCE, "ascending")])).slice(0, query.k)


def nearest_plan(unmerged: Unmerged, query: VectorQuery, opened: Opened) -> str:
    """The plan of :func:`nearest`: which index is used for which source."""
    filters = [
        f"bf[{region.region_id}][gen={ref.generation}]" for region in unmerged.regions for ref in region.flushed[::-1]
    ]
    condition = "" if query.condition is None else f", filter=[{query.condition}]"
    lines = [
        f"GlobalLimitExec: limit={query.k}",
        f"  SortExec: order_by=[{DISTANCE} ASC]",
        f"    FilterStaleExec: bloom_filters=[{', '.join(filters)}]",
        f"      UnionExec{pruned(unmerged)}",
    ]
    names = [source.name for source in _sources(unmerged, query, opened)]
    return "\n".join([*lines, *(f"        KNNExec: {name}, k={query.k}{condition}" for name in names)])


def _sources(unmerged: Unmerged, query: VectorQuery, opened: Opened) -> list[_Source]:
    """The base first, then each region from the newest rows to the oldest."""
    table = unmerged.table
    if query.column not in table.schema.names:
        raise errors.InvalidUsageError(f"{table.location.uri} has no column {query.column}.")
    if query.k < 1:
        raise errors.InvalidUsageError(f"k is {query.k}; it must be at least 1.")
    index = _index_of(table, query.column)
    staleness = Staleness(unmerged, opened)
    several = any(region.flushed or region.memory is not None for region in unmerged.regions)
    search = _Search(
        query, _metric(table, index), query.refine_factor or (1 if several and index is not None else None)
    )
    bridging = _bridging(unmerged, query, index, opened)
    base = _Base(table, search, staleness, index, bridged=bridging is not None)
    sources: list[_Source] = [base]
    refs = [generation.ref for generation in bridging or ()]
    merged = [
        replace(region, memory=None, flushed=tuple(ref for ref in refs if ref.region_id == region.region_id))
        for region in unmerged.regions
    ]
    rewritten = Staleness(replace(unmerged, regions=tuple(merged)), opened)
    for region, merged_region in zip(unmerged.regions, merged, strict=True):
        if region.memory is not None:
            sources.append(_Memory(table, search, region, region.memory))
        generations = opened.generations(table, region.flushed[::-1])
        sources += [_Generation(search, staleness, region, generation, table) for generation in generations]
        sources += [
            _Bridge(base, _Generation(search, rewritten, merged_region, generation, table))
            for generation in (bridging or ())[::-1]
            if generation.ref.region_id == region.region_id
        ]
    return [source for source in sources if not isinstance(source, _Generation) or source.has_column]


def _live(source: _Source, k: int) -> pa.Table:
    seen, parts, live, limit = np.empty(0, np.uint64), [], 0, k
    while True:
        rows = source.search(limit, seen)
        parts.append(source.live(rows))
        live += parts[-1].num_rows
        if live >= k or rows.num_rows < limit:
            return pa.concat_tables(parts)
        seen = np.concatenate([seen, rows.column(ROW_ID).to_numpy()])
        limit *= _LIMIT_GROWTH


@dataclass(frozen=True)
class _Search:
    """How a source is searched."""

    query: VectorQuery
    metric: str
    refine_factor: int | None

    def of(self, column: str, k: int, *, use_index: bool = True) -> dict[str, Any]:
        """The ``nearest`` argument for Lance's scanner."""
        given = {"column": column, "q": self.query.vector, "k": k, "metric": self.metric, "use_index": use_index}
        more = {"nprobes": self.query.nprobes, "refine_factor": self.refine_factor if use_index else None}
        return given | {name: value for name, value in more.items() if value is not None}


def _lists(*, without: NDArray[np.uint64] | None = None, only: NDArray[np.uint64] | None = None) -> dict[str, Any]:
    """The arguments by which a scan leaves out rows, or has no others, by their ``_rowid``."""
    lists = {
        "row_addr_allowlist": only,
        "row_addr_blocklist": without if without is not None and len(without) else None,
    }
    return {name: encode_row_ids(ids) for name, ids in lists.items() if ids is not None}


class _Base:
    """The base table, by its index. Rows without coverage are scanned, or found by indexes of merged generations."""

    def __init__(
        self, table: Table, search: _Search, staleness: Staleness, index: BaseIndex | None, *, bridged: bool
    ) -> None:
        self.table, self._search, self._staleness, self._bridged = table, search, staleness, bridged
        self.uncovered = frozenset[int]() if index is None else coverage(index.covered, table.manifest).uncovered
        behind = "" if not self.uncovered else ", uncovered=merged generations" if bridged else ", uncovered=flat"
        self.name = f"{BASE}, index={'flat' if index is None else index.name + behind}"

    def search(self, k: int, without: NDArray[np.uint64]) -> pa.Table:
        return self._nearest(k, without=without, fast_search=self._bridged)

    def uncovered_rows(self, keys: pa.Table) -> pa.Table:
        """The rows of keys that are in fragments which the index does not cover, with their distances."""
        names = keys.column_names
        with lance_errors("look up keys in", self.table.location.uri):
            rows = base_scanner(
                self.table, columns=names, filter=condition_of(keys, names), with_row_address=True, with_row_id=True
            ).to_table()
        rows = with_keys(rows, keys.cast(rows.select(names).schema), names)
        uncovered = np.isin(fragments_of(rows.column(ROW_ADDRESS).to_numpy()), [*self.uncovered])
        ids = rows.column(ROW_ID).to_numpy()[uncovered]
        return self._nearest(max(len(ids), 1), only=ids, use_index=False)

    def live(self, found: pa.Table) -> pa.Table:
        return found.filter(pa.array(~self._staleness.of_base(found)))

    def _nearest(
        self,
        k: int,
        *,
        without: NDArray[np.uint64] | None = None,
        only: NDArray[np.uint64] | None = None,
        fast_search: bool = False,
        use_index: bool = True,
    ) -> pa.Table:
        with lance_errors("search", self.table.location.uri):
            return base_scanner(
                self.table,
                nearest=self._search.of(self._search.query.column, k, use_index=use_index),
                filter=self._search.query.condition,
                prefilter=True,
                fast_search=fast_search,
                with_row_id=True,
                **_lists(without=without, only=only),
                blob_handling="all_binary",
            ).to_table()


class _Generation:
    """A generation, by its own index where it has one."""

    def __init__(
        self, search: _Search, staleness: Staleness, region: RegionRead, generation: Generation, table: Table
    ) -> None:
        self.generation, self._search, self._staleness = generation, search, staleness
        self.region, self._table = region, table
        query = search.query
        (column,) = generation.projection.select([query.column]).columns
        self._column = None if column.source is None else column.source.name
        if query.condition is not None and not generation.projection.is_plain:
            raise errors.UnsupportedFeatureError(
                f"{generation.ref} has other columns than the table: no search with a filter can be made in it.",
                remedy="Merge it, and search again; or search without a filter.",
            )
        self.index = None if self._column is None else _index_in(generation.dataset, self._column)
        self.name = f"{generation.ref.region_id}[gen={generation.ref.generation}], index={self.index or 'flat'}"

    @property
    def has_column(self) -> bool:
        """Whether it has vectors: a column that was added later is NULL in all of its rows."""
        return self._column is not None

    def search(self, k: int, without: NDArray[np.uint64]) -> pa.Table:
        generation = self.generation
        out = self._out()
        try:
            hits = self._scanned(k, without)
        except (errors.StorageError, errors.ObjectNotFoundError) as error:
            if self.index is None or isinstance(error, STORE_ERRORS):
                raise
            hits = self._scanned(k, without, use_index=False)  # the index may be damaged, and the rows intact
        parts = [out.empty_table()]
        for batch in hits.combine_chunks().to_batches():
            start = 0
            for part in generation.projected(batch, max_bytes=_MAX_BYTES, references=False):
                scanned = batch.slice(start, part.num_rows)
                rows = pa.Table.from_batches([part])
                for name in (DISTANCE, ROW_ADDRESS, ROW_ID):
                    rows = rows.append_column(name, scanned.column(name))
                parts.append(conformed(rows, out))
                start += part.num_rows
        return pa.concat_tables(parts)

    def live(self, found: pa.Table) -> pa.Table:
        return found.filter(pa.array(~self._staleness.of_generation(found, self.region, self.generation)))

    def _scanned(self, k: int, without: NDArray[np.uint64], *, use_index: bool = True) -> pa.Table:
        with lance_errors("search", self.generation.ref.folder):
            return self.generation.dataset.scanner(
                columns=[*self.generation.projection.source_columns, DISTANCE],
                nearest=self._search.of(self._column or "", k, use_index=use_index),
                filter=self._search.query.condition,
                prefilter=True,
                use_scalar_index=False,
                with_row_address=True,
                with_row_id=True,
                **_lists(without=without),
            ).to_table()

    def _out(self) -> pa.Schema:
        schema = self.generation.projection.with_blobs_as_bytes().schema
        added = {DISTANCE: pa.float32(), ROW_ADDRESS: pa.uint64(), ROW_ID: pa.uint64()}
        return pa.schema([*schema, *(pa.field(name, kind) for name, kind in added.items())])


class _Bridge:
    """A merged generation. Its index finds rows of the base that the base's own index does not cover.

    The rows that it finds are looked up in the base, which has their current values, or no row. A row that a later
    merged generation has, too, is found there: here it would be found twice, by a vector that it has no more, in the
    place of one that is near.
    """

    def __init__(self, base: _Base, generation: _Generation) -> None:
        self._base, self._generation = base, generation
        self.name = f"{generation.name}, merged"

    def search(self, k: int, without: NDArray[np.uint64]) -> pa.Table:
        """See :class:`_Source`; the generation's rows."""
        return self._generation.search(k, without)

    def live(self, found: pa.Table) -> pa.Table:
        """See :class:`_Source`; the base's rows."""
        newest = self._generation.live(found)
        return self._base.live(self._base.uncovered_rows(newest.select([*self._base.table.primary_key])))


class _Memory:
    """Rows that no generation has, by an exhaustive comparison."""

    def __init__(self, table: Table, search: _Search, region: RegionRead, rows: pa.Table) -> None:
        self._search = search
        live = newest_rows(rows, [*table.primary_key])
        live = live.filter(pc.invert(live.column(TOMBSTONE))).select(table.schema.names)
        with named(region):
            self._rows = conformed(live, table.schema)
        self.name = f"{in_memory(region)}, index=flat"

    def search(self, k: int, without: NDArray[np.uint64]) -> pa.Table:
        query = self._search.query
        with tempfile.TemporaryDirectory(prefix="memwal-ops-") as folder, lance_errors("search", "rows in memory"):
            made = lance.write_dataset(self._rows, f"{folder}/rows")
            return made.scanner(
                nearest=self._search.of(query.column, k, use_index=False),
                filter=query.condition,
                prefilter=True,
                with_row_id=True,
                **_lists(without=without),
            ).to_table()

    def live(self, found: pa.Table) -> pa.Table:
        """See :class:`_Source`: each key once, as it was written last."""
        return found


def _bridging(
    unmerged: Unmerged, query: VectorQuery, index: BaseIndex | None, opened: Opened
) -> list[Generation] | None:
    """The merged generations whose indexes cover all that the base's does not; None: not needed, or not all exist."""
    if index is None or coverage(index.covered, unmerged.table.manifest).complete:
        return None
    refs = bridges(unmerged, index)
    if refs is None:
        return None
    try:
        generations = opened.generations(unmerged.table, refs)
    except (errors.GenerationMissingError, errors.GenerationCorruptError):
        return None  # collected meanwhile
    columns = [generation.projection.select([query.column]).columns[0].source for generation in generations]
    named = [
        source is not None and _index_in(generation.dataset, source.name) == index.name
        for generation, source in zip(generations, columns, strict=True)
    ]
    plain = query.condition is None or all(generation.projection.is_plain for generation in generations)
    return generations if all(named) and plain else None


def _index_of(table: Table, column: str) -> BaseIndex | None:
    known = {name: base_index for name, base_index in base_indexes(table).items() if base_index.is_vector}
    with lance_errors("read the indexes of", table.location.uri):
        names = [index.name for index in table.dataset.describe_indices() if index.field_names == [column]]
    return next((known[name] for name in names if name in known), None)


def _index_in(dataset: lance.LanceDataset, column: str) -> str | None:
    with lance_errors("read the indexes of", dataset.uri):
        own = [index for index in dataset.describe_indices() if index.field_names == [column]]
        return next((index.name for index in own if index.type_url.endswith("VectorIndexDetails")), None)


def _metric(table: Table, index: BaseIndex | None) -> str:
    """The metric of the base's index; l2 without one."""
    if index is None:
        return _METRIC
    with lance_errors("read the indexes of", table.location.uri):
        described = next(other for other in table.dataset.describe_indices() if other.name == index.name)
        recorded = (described.details or {}).get("metric_type")
        # Indexes of older releases do not describe it, and their statistics are costly.
        return str(recorded or table.dataset.stats.index_stats(index.name)["indices"][0]["metric_type"]).lower()


def bridges(unmerged: Unmerged, index: BaseIndex) -> tuple[GenerationRef, ...] | None:
    """The merged generations that have every row of the fragments that the index does not cover.

    None: there may be others, so these fragments have to be scanned: other commits than merges wrote rows to them,
    a generation was collected, or the versions that would show it no longer exist.
    """
    table = unmerged.table
    merged = _merged_into(table, coverage(index.covered, table.manifest).uncovered)
    if merged is None:
        return None
    listed = {region.region_id: {ref.generation: ref for ref in region.merged} for region in unmerged.regions}
    refs: list[GenerationRef] = []
    for region_id, (above, until) in merged.items():
        if region_id in unmerged.pruned:
            continue
        for number in range(above + 1, until + 1):
            ref = listed.get(region_id, {}).get(number)
            if ref is None:
                return None
            refs.append(ref)
    return tuple(refs)


def _merged_into(table: Table, fragments: frozenset[int]) -> Mapping[UUID, tuple[int, int]] | None:
    """Per region the progress before and after the merges that made these fragments; None: not known."""
    spans: dict[UUID, tuple[int, int]] = {}
    missing, version = set(fragments), table.manifest
    for number in range(table.version - 1, max(table.version - 1 - _MAX_VERSIONS, -1), -1):
        if not missing:
            break
        try:
            before = read_version_manifest(table.store, number, table.naming)
        except errors.ObjectNotFoundError:
            return None
        added = missing - {fragment.id for fragment in before.manifest.fragments}
        if added:
            old, new = merge_progress(before.indexes), merge_progress(version.indexes)
            risen = {region_id for region_id, progress in new.items() if progress > old.get(region_id, 0)}
            if not risen:
                return None
            for region_id in risen:
                until = spans.get(region_id, (0, new[region_id]))[1]
                spans[region_id] = (old.get(region_id, 0), until)
        missing -= added
        version = before
    return None if missing else spans


class Staleness:
    """Finds rows that were replaced. Bloom filters show which generations may have a newer row of a key.

    A filter has false positives for 1 key in 1,754: with 20 generations, dropping all its hits would drop one of a
    hundred live rows. So each hit is looked up, which makes the result exact.
    """

    def __init__(self, unmerged: Unmerged, opened: Opened) -> None:
        """Read the filters of all generations that are not merged."""
        self._table, self._opened = unmerged.table, opened
        self._regions = unmerged.regions
        refs = [ref for region in unmerged.regions for ref in region.flushed]
        self._filters = dict(zip(refs, opened.filters(self._table, refs), strict=True))

    def of_base(self, found: pa.Table) -> NDArray[np.bool_]:
        """Per row of the base whether a region has its key."""
        return self._written(found, [(region, 0) for region in self._regions])

    def of_generation(self, found: pa.Table, region: RegionRead, generation: Generation) -> NDArray[np.bool_]:
        """Per row of a generation, with ``_rowaddr``, whether it is not its key's newest one, or is a tombstone."""
        stale = self._written(found, [(region, generation.ref.generation)])
        keys = found.select([*self._table.primary_key])
        last = last_keys(generation, keys)
        newest = last.filter(pc.invert(last.column(TOMBSTONE))).column(ROW_ADDRESS)
        return stale | ~np.isin(found.column(ROW_ADDRESS).to_numpy(), newest.to_numpy())

    def _written(self, found: pa.Table, since: Iterable[tuple[RegionRead, int]]) -> NDArray[np.bool_]:
        """Per row whether its key is in memory, or in a generation above the given one of a region."""
        names = [*self._table.primary_key]
        keys = found.select(names).append_column(_NUMBER, pa.array(np.arange(found.num_rows)))
        stale = np.zeros(found.num_rows, bool)

        def mark(others: pa.Table) -> None:
            hits = with_keys(keys, others.select(names).cast(keys.select(names).schema), names)
            stale[hits.column(_NUMBER).to_numpy()] = True

        for region, above in since if found.num_rows else ():
            if region.memory is not None:
                mark(with_keys(region.memory, keys.select(names).cast(region.memory.select(names).schema), names))
            for ref in region.flushed:
                bloom = self._filters[ref]
                unresolved = keys.filter(pa.array(~stale))
                if ref.generation <= above or not unresolved.num_rows:
                    continue
                if bloom is not None:
                    columns = [column.combine_chunks() for column in unresolved.select(names).columns]
                    unresolved = unresolved.filter(pa.array(bloom.may_have(columns)))
                if unresolved.num_rows:
                    (generation,) = self._opened.generations(self._table, [ref])
                    mark(last_keys(generation, unresolved.select(names)))
        return stale
