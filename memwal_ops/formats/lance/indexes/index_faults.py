"""Find the scalar indexes that may lack rows of fragments that they claim to cover.

The fragments that an index claims are in the table's manifest, and commits change them without its files. An index of
row addresses is wrong from then on; a row that it does not find is taken for one that does not exist:

* A compaction with ``defer_index_remap`` leaves the addresses to readers, and a later one may lose rows
  (:func:`memwal_ops.formats.lance.wire.version_manifest.moved_later`).
* On tables with stable row ids, B-trees of version 1 (pylance 14) have addresses, those of version 0 have row ids.
  Releases 12 and 13 keep an index of version 1 and treat it as one of row ids: their compaction moves what it claims,
  and not what is in it.
* Zone maps and bloom filters always have addresses; up to release 12, compactions of such tables move their claims.

Two kinds of proof: :func:`known_faults` from manifests and small files, :func:`sampled_fault` by asking for rows.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from memwal_ops.core.export import exported_store
from memwal_ops.errors import IndexesBehindError, InvalidFormatError, MemwalOpsError, ObjectNotFoundError, StorageError
from memwal_ops.formats.lance.files.datasets import ROW_ADDRESS, has_sql_literals, is_one_of, lance_errors
from memwal_ops.formats.lance.files.version_files import VersionWriter
from memwal_ops.formats.lance.indexes.base_indexes import (
    BaseIndex,
    base_indexes,
    covered_by,
    index_folder,
    open_index_file,
)
from memwal_ops.formats.lance.wire import version_manifest
from memwal_ops.storage.api import concurrently
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import lance
    import pyarrow as pa

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest


class IndexUpgradeRefusedError(IndexesBehindError):
    """An update would upgrade an index. Releases that write the table do not maintain its new version."""

    reason = "index_upgrade_refused"
    remedy = (
        "Update it with the release that writes the table: dataset.optimize.optimize_indices(), in LanceDB "
        "table.optimize(). Once no older release writes it any more, run memwal-ops catchup URI --allow-upgrade, with "
        "--rebuild --index NAME if it answers wrongly."
    )


class DotProductIndexError(IndexesBehindError):
    """An update would make an index useless. It has product quantization and the metric dot."""

    reason = "dot_product_index"


def refusal(
    table: Table, index: BaseIndex, *, allow_upgrade: bool = False, anew: bool = False
) -> IndexesBehindError | None:
    """Why an index must not be updated, or with ``anew`` not built anew; None: it may be.

    Requests: those of its codebook, if it is a vector index; else those of
    :func:`memwal_ops.formats.lance.indexes.index_faults.known_faults`, if pylance would write another version of it.

    Raises:
        UnsupportedFeatureError, StorageError: see :func:`memwal_ops.formats.lance.indexes.codebook.read_codebook`.
    """
    older = None if allow_upgrade else refused_by(table, index)
    if older is not None:
        return IndexUpgradeRefusedError(
            f"Index {index.name} would get a version that releases before 14.0 do not maintain: they ignore it, drop "
            f"it, or make it lose rows. {older.release[:1].upper()}{older.release[1:]} wrote version {older.version} "
            "of the table."
        )
    emptied = index.covered.isdisjoint(fragment.id for fragment in table.manifest.manifest.fragments)
    return None if anew or emptied else dot_product_error(table, index)  # where all rows get new codes, it is right


def dot_product_error(table: Table, index: BaseIndex) -> DotProductIndexError | None:
    """The error for an index with product quantization and the metric dot; None for others. Raises: as above."""
    if not index.is_vector:
        return None
    from memwal_ops.formats.lance.indexes.codebook import read_codebook  # noqa: PLC0415 - of vector indexes alone

    if not any(read_codebook(table, entry).is_dot_product for entry in index.segments):
        return None
    return DotProductIndexError(
        f"Index {index.name} is {index.type} with the metric dot: rows that pylance adds to it hide all others.",
        remedy=f"Build it anew: memwal-ops catchup URI --index {index.name} --rebuild",
    )


# How many of the newest versions show which releases write the table.
_LAST_WRITERS = 32
_CONCURRENT_READS = 8
# Versions are immutable: by table, path, time and tag. A reader that follows a table reads each one once.
_KNOWN: dict[tuple[object, ...], VersionWriter] = {}
_MAX_KNOWN = 4096


def last_written(table: Table, *, concurrent: int = _CONCURRENT_READS) -> Iterator[VersionWriter]:
    """The newest versions, at most 32, from the newest on; a version that was read before is not read again.

    Requests: one for each version but the newest, as far as they are taken; up to ``concurrent`` are read ahead.
    """
    listed = table.listed.versions

    def known(version: int, manifest: VersionManifest | None = None) -> VersionWriter | None:
        file = listed.get(version)
        key = None if file is None else (table.location.uri, file.path, file.last_modified, file.e_tag)
        if manifest is None and key in _KNOWN:
            return _KNOWN[key]
        try:
            written = VersionWriter.of(manifest or table.history.manifest(listed[version]))
        except (ObjectNotFoundError, InvalidFormatError):
            return None  # expired, or damaged: verify reports that
        if len(_KNOWN) >= _MAX_KNOWN:
            _KNOWN.clear()
        if key is not None:
            _KNOWN[key] = written
        return written

    earlier = sorted((version for version in listed if version < table.version), reverse=True)[: _LAST_WRITERS - 1]
    newest = known(table.version, table.manifest)
    older = (written for _, written in concurrently(known, earlier, threads=concurrent))
    yield from (written for written in chain([newest], older) if written is not None)


def last_client(table: Table, *, within: int = _LAST_WRITERS) -> VersionWriter | None:
    """The newest version that the table's own writers wrote; None: none of the newest ``within`` is theirs.

    Requests: one for each newer version of ours.
    """
    newest = islice(last_written(table, concurrent=1), within)
    return next((client for client in newest if client.writes and not client.ours), None)


def last_writer(table: Table) -> str | None:
    """The release of the table's own writers, for people: ``lance 13.0.0, stable row ids``.

    None: none of the newest versions is theirs. Requests: as :func:`last_client`, at most 31.
    """
    client = last_client(table)
    if client is None:
        return None
    flags = table.manifest.manifest.reader_feature_flags
    features = [
        feature.name for feature in version_manifest.FEATURES if feature.flag & flags & version_manifest.SHOWN_FEATURES
    ]
    return ", ".join([client.release, *features])


_TREE = "BTree"
FRAGMENTS_IN = {"ZoneMap": "zonemap.lance", "BloomFilter": "bloomfilter.lance"}
_TREE_PAGES = "page_data.lance"
# The first release that maintains B-trees of addresses on tables with stable row ids
# (tests/integration/contracts/old_pylance.md); the pinned pylance makes each one that it updates such a B-tree.
_MAINTAINS_ADDRESSES = 14
# Of the newest fragments, and as many of the others. What an index lacks is a whole fragment, so that few rows of each
# show it; of a table with few fragments, 64 rows are looked up.
_SAMPLED_FRAGMENTS = 32
_ROWS_OF_EACH = 2
_ROWS_OF_ALL = 64
_SHOWN = 5
FIRST_FORMAT = "0.1"
"""The version of data files of Lance's first format ("legacy")."""


class IndexFault(NamedTuple):
    """Why an index must not be asked.

    Attributes:
        why: the reason, as a clause whose subject is the index.
        proven: whether it lacks rows for certain; otherwise it may.
    """

    why: str
    proven: bool


def known_faults(table: Table) -> Mapping[str, IndexFault]:
    """By name the indexes that may lack rows, as manifests and small files of indexes show it.

    Requests: one for each segment of a zone map or bloom filter. If the table has a B-tree of version 1: one for each
    of up to 32 versions, back to that in which it got it.
    """
    return table.once("index faults", lambda: _known_faults(table))


def _known_faults(table: Table) -> Mapping[str, IndexFault]:
    faults = {
        entry.name: IndexFault("is older than a compaction with defer_index_remap: pylance may lose rows of it", False)  # noqa: FBT003
        for entry in version_manifest.moved_later(table.manifest)
    }
    for index in base_indexes(table).values():
        fault = _stale(table, index) if index.type in FRAGMENTS_IN else _not_maintained(table, index)
        if fault is not None and (fault.proven or index.name not in faults):
            faults[index.name] = fault
    return faults


def base_scanner(table: Table, **options: Any) -> lance.LanceScanner:
    """A scanner of the base whose filter asks no index that may lack rows; options are those of pylance's scanner."""
    return table.dataset.scanner(use_scalar_index=not known_faults(table), **options)


def fault_of(table: Table, index: BaseIndex) -> IndexFault | None:
    """The fault of one index; a B-tree of addresses that a release may have made wrong is sampled.

    After a compaction with ``defer_index_remap``, an update may have made it younger than that, with its rows lost.
    """
    known = known_faults(table).get(index.name)
    if index.type == _TREE and (version_of(index) or known or version_manifest.had_moves(table.manifest)):
        return _sampled(table, index) or known
    return known


def checked_fault(table: Table, index: BaseIndex) -> IndexFault | None:
    """As :func:`fault_of`, with a sample of every B-tree."""
    return (_sampled(table, index) if index.type == _TREE else None) or known_faults(table).get(index.name)


def version_of(index: BaseIndex) -> int:
    """The version of an index, by which releases decide whether they can use it."""
    return max((int(entry.index_version) for entry in index.segments), default=0)


def refused_by(table: Table, index: BaseIndex) -> VersionWriter | None:
    """The last version of a release that would not maintain the index once the pinned pylance has updated it.

    pylance makes a B-tree of row ids one of row addresses.
    """
    stable = bool(table.manifest.manifest.reader_feature_flags & version_manifest.STABLE_ROW_IDS)
    return _older_writer(table) if stable and index.type == _TREE and not version_of(index) else None


def _older_writer(table: Table, index: BaseIndex | None = None) -> VersionWriter | None:
    """The last of the newest 32 versions that exist which such a release wrote; those of ours are left out.

    ``index``: only versions since it has the version that it has now.
    """
    for client in last_written(table):
        if index is not None and (index.name, version_of(index)) not in client.indexes:
            return None
        if not client.ours and (client.major is None or client.major < _MAINTAINS_ADDRESSES):
            return client
    return None


def _not_maintained(table: Table, index: BaseIndex) -> IndexFault | None:
    """The fault of a B-tree of addresses that was in the table when an older release wrote it."""
    older = _older_writer(table, index) if index.type == _TREE and version_of(index) else None
    if older is None:
        return None
    return IndexFault(
        f"has version {version_of(index)}, which releases before {_MAINTAINS_ADDRESSES}.0 do not maintain, and "
        f"{older.release} wrote version {older.version} of the table since",
        proven=False,
    )


def _stale(table: Table, index: BaseIndex) -> IndexFault | None:
    """The fault of a zone map or bloom filter that has no zone of a fragment which it claims to cover."""
    live = {fragment.id for fragment in table.manifest.manifest.fragments if _live_rows(fragment)}
    claimed = index.covered & live
    if not claimed or exported_store(table) is not None:  # without the index's files
        return None
    try:
        named = frozenset[int]().union(*(fragments_in(table, index, entry) for entry in index.segments))
    except MemwalOpsError as error:
        # Other classes name a cause outside of the file, which may pass.
        is_damaged = type(error) in {StorageError, ObjectNotFoundError}
        return IndexFault(f"cannot be read: {error}".rstrip("."), proven=is_damaged)
    if claimed <= named:
        return None
    gone = sorted(named - {fragment.id for fragment in table.manifest.manifest.fragments})
    instead = f": they name {_listed(gone)}, which the table no longer has" if gone else ""
    why = f"claims {_listed(sorted(claimed - named))}, of which its files have nothing{instead}"
    return IndexFault(why, proven=True)


def outdated_zones(table: Table, index: BaseIndex) -> str | None:
    """Why a zone map or bloom filter must not be updated but built anew; None: it may be updated.

    Where a column was changed in place, the index claims the fragment no more, and its file keeps the fragment's zones,
    with the rows that were NULL. pylance's update adds the new zones beside them, and claims the fragment again; one by
    another program left a zone twice. What cannot be read may be updated: the update fails by itself.
    """
    if index.type not in FRAGMENTS_IN or exported_store(table) is not None:
        return None
    live = {fragment.id for fragment in table.manifest.manifest.fragments}
    outdated: set[int] = set()
    try:
        for entry in index.segments:
            zones = Counter(_zones(table, index, entry))
            outdated |= {fragment for fragment, _ in zones} & live - covered_by([entry])
            outdated |= {fragment for (fragment, _), times in zones.items() if times > 1} & live
    except MemwalOpsError:
        return None
    return f"its files have outdated zones of {_listed(sorted(outdated))}" if outdated else None


def fragments_in(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> frozenset[int]:
    """The fragments of which a segment of a zone map or bloom filter has zones. One file is read."""
    return frozenset(fragment for fragment, _ in _zones(table, index, entry))


def _zones(table: Table, index: BaseIndex, entry: table_pb2.IndexMetadata) -> Iterator[tuple[int, int]]:
    path = f"{index_folder(table, entry)}/{FRAGMENTS_IN[index.type]}"
    with lance_errors("read index", path):
        zones = open_index_file(table.location, path, ["fragment_id", "zone_start"]).read_all().to_table()
    return zip(zones["fragment_id"].to_pylist(), zones["zone_start"].to_pylist(), strict=True)


def _sampled(table: Table, index: BaseIndex) -> IndexFault | None:
    (column, *more) = index.segments[0].fields
    field = next((field for field in table.manifest.manifest.fields if field.id == column), None)
    if more or field is None or field.parent_id >= 0 or not can_find_addresses(table, field.name):
        return None
    if exported_store(table) is not None:  # without rows
        return None
    return sampled_fault(table, field.name, index.segments)


def can_find_addresses(table: Table, column: str) -> bool:
    """Whether a condition can name a column, and pylance does not panic where it selects addresses by an index."""
    return "`" not in column and table.manifest.manifest.data_format.version != FIRST_FORMAT


def sampled_fault(table: Table, column: str, segments: Sequence[table_pb2.IndexMetadata]) -> IndexFault | None:
    """The fault of a B-tree of a top-level column, by the number of its entries and by a look-up of some rows.

    Asked for are at least two rows of each fragment that it claims; of more than 64 fragments, of the newest 32 and of
    32 others, which are other ones in each version. None for a column whose values have no SQL literals.

    Raises:
        StorageError: the table or the index cannot be read.
    """
    asked = (column, *(segment.SerializeToString() for segment in segments))
    return table.once(("sampled fault", asked), lambda: _sampled_fault(table, column, segments))


def _sampled_fault(table: Table, column: str, segments: Sequence[table_pb2.IndexMetadata]) -> IndexFault | None:
    rows = _rows_to_find(table, column, covered_by(segments))
    if rows is None:
        return IndexFault("cannot be checked: the table does not record how many rows its fragments have", proven=False)
    rows = rows.filter(rows[column].is_valid())
    if not rows.num_rows or not has_sql_literals(rows[column]):
        return None
    condition = is_one_of(column, rows[column].unique().to_pylist())
    with lance_errors("look up rows of", table.location.uri):
        hits = table.dataset.scanner(columns=[column], filter=condition, with_row_address=True).to_table()
    addresses = rows[ROW_ADDRESS].to_numpy()
    missing = addresses[~np.isin(addresses, hits[ROW_ADDRESS].to_numpy())]
    if missing.size:
        fragments = np.unique(missing >> np.uint64(32)).tolist()
        looked_up = f"{rows.num_rows:,} rows that were looked up as a sample"
        return IndexFault(f"does not find {missing.size:,} of {looked_up}, all in {_listed(fragments)}", proven=True)
    return _too_few_entries(table, segments)


def _rows_to_find(table: Table, column: str, covered: frozenset[int]) -> pa.Table | None:
    """Values and addresses of some live rows of these fragments; None: positions of rows are not known."""
    fragments = table.manifest.manifest.fragments
    counts = [_live_rows(fragment) for fragment in fragments]
    if any(count is None for count in counts):
        return None
    live = np.array(counts, dtype=np.int64)
    starts = np.cumsum(live) - live
    order = sorted(range(len(fragments)), key=lambda at: fragments[at].id, reverse=True)
    claimed = np.array([at for at in order if live[at] and fragments[at].id in covered], dtype=np.int64)
    random = np.random.default_rng(table.version)
    others = claimed[_SAMPLED_FRAGMENTS:]
    chosen = np.concatenate([claimed[:_SAMPLED_FRAGMENTS], random.permutation(others)[:_SAMPLED_FRAGMENTS]])
    of_each = max(_ROWS_OF_EACH, _ROWS_OF_ALL // max(1, len(chosen)))
    offsets = random.integers(0, live[chosen][:, None], size=(len(chosen), of_each))
    positions = np.unique(starts[chosen][:, None] + offsets)
    with lance_errors("read rows of", table.location.uri):
        return table.dataset.take(positions.tolist(), columns=[column, ROW_ADDRESS])


def _too_few_entries(table: Table, segments: Sequence[table_pb2.IndexMetadata]) -> IndexFault | None:
    """The fault of a B-tree with fewer entries than the fragments that it claims have live rows."""
    covered = covered_by(segments)
    needed = sum(_live_rows(fragment) or 0 for fragment in table.manifest.manifest.fragments if fragment.id in covered)
    entries = 0
    for segment in segments:
        if _TREE_PAGES not in (file.path for file in segment.files):
            return None  # made by a release that does not list the files, or in several parts
        path = f"{index_folder(table, segment)}/{_TREE_PAGES}"
        with lance_errors("read index", path):
            entries += int(open_index_file(table.location, path).num_rows())
    if entries >= needed:
        return None
    why = f"has {counted(entries, 'entry', 'entries')}, fewer than the {needed:,} rows of the fragments that it claims"
    return IndexFault(why, proven=True)


def _live_rows(fragment: table_pb2.DataFragment) -> int | None:
    """Rows that are not deleted; None if an old release did not record them."""
    deleted = fragment.deletion_file.num_deleted_rows
    if not fragment.physical_rows or (fragment.HasField("deletion_file") and not deleted):
        return None
    return int(fragment.physical_rows - deleted)


def _listed(fragments: Sequence[int]) -> str:
    shown = ", ".join(map(str, fragments[:_SHOWN]))
    more = f" and {len(fragments) - _SHOWN:,} more" if len(fragments) > _SHOWN else ""
    return f"{'fragment' if len(fragments) == 1 else 'fragments'} {shown}{more}"
