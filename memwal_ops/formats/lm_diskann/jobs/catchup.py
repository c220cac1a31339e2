"""Bring an index to the newest version of the table that it follows, and heal its graph around deleted nodes.

Inserted, changed and deleted rows of the table become inserts and deletes of the index. The rows of a batch are one
commit; the commit of the last batch also records the version of the table. After a killed run, the next one begins
again from the recorded version: rows that the index already has, with the same vector, are skipped, and rows that the
table does not have are deleted.

A codebook is trained on the rows that there are at that time. If other rows follow, around other centres, their codes
become alike: searches by the codes go astray, and so do the links that inserts choose and prune by them. No link is
missing, so only searches show it; longer candidate lists hide it. And a codebook that was trained on few rows knows
these by heart: as others take their place, the codes get worse, though nothing drifts.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memwal_ops.core.documents import document
from memwal_ops.core.report import Need
from memwal_ops.errors import InvalidUsageError, MemwalOpsError
from memwal_ops.formats.lm_diskann import graph, merging, source
from memwal_ops.formats.lm_diskann.graph import TRAIN_AT, around, insert, memory_of
from memwal_ops.formats.lm_diskann.kernels.distances import mean_error
from memwal_ops.formats.lm_diskann.kernels.reading import gather
from memwal_ops.formats.lm_diskann.source import IndexUnusableError, Source, Unusable, read_source, usable
from memwal_ops.formats.lm_diskann.vectors import SAMPLE, lengths, storable, stored, train
from memwal_ops.formats.lm_diskann.view import View
from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.files import Step
    from memwal_ops.formats.lm_diskann.library import Index
    from memwal_ops.formats.lm_diskann.specs import IndexCatchupOptions
    from memwal_ops.formats.lm_diskann.store import Store
    from memwal_ops.formats.lm_diskann.table import Table


BATCH = 100_000
_BUILD_BYTES = 1 << 30


@dataclass(frozen=True)
class Followed:
    """The result of one commit: rows inserted or replaced, rows deleted, rows without a usable vector, the epoch."""

    inserted: int
    deleted: int
    skipped: int
    epoch: int


def versions_behind(follows: Source | None, followed: int) -> int:
    """How many versions the table is ahead of the index, which has version ``followed``; 0 if it follows none.

    Opens the table. A table with fewer versions than the index has seen is another one, all versions of which are new.
    """
    if follows is None:
        return 0
    version = int(follows.table().revision)
    return version - followed if version >= followed else version


def follow(index: Index, follows: Source, batch: int, step: Step, *, rebuild: bool = False) -> Iterator[Followed]:
    """Bring the index to the newest version of the table; each batch is committed and published when it is yielded.

    Args:
        index: writable, without an open transaction.
        follows: the table.
        batch: rows of one commit; the first build, and a rebuild, use larger ones, within 1 GiB of vectors.
        step: performs durable steps.
        rebuild: compare all rows, regardless of the table's history.

    Raises:
        InvalidUsageError: a column was dropped, renamed, or is of another type now; or keys do not identify rows.
        IndexUnusableError: the table was restored, overwritten or replaced, or has expired versions that the index has
            not seen; this is recorded in the index.
    """
    state, table = index.writable().state, follows.open()
    whole = rebuild or not state.followed
    if not whole:
        usable(index.folder, state.unusable)
        why = source.check_history(table, state.followed, index.writable().followed())
        if why is not None:
            with index.staged() as staged:
                staged.unusable = why.value
            usable(index.folder, why.value)
        if table.version == state.followed:
            return
    dimension = follows.dimension(table)
    if dimension != index.parameters.dimension:
        raise InvalidUsageError(
            f"{follows.uri} now has vectors of {dimension} dimensions in {follows.column}; the index has "
            f"{index.parameters.dimension}.",
            remedy="Build a new index of the table.",
        )
    present = source.row_ids(table, follows)
    before = None if whole else follows.open(state.followed)
    renamed = before is not None and source.renamed(before, table, follows)
    fragments = table.get_fragments() if before is None or renamed else source.changed_fragments(before, table)
    # If the run is killed in between, the next one compares all rows: the columns may have their old names again.
    # An index that is not usable needs a rebuild anyway, and is not searched until the last commit of one.
    partly = (0, "") if renamed or (whole and not state.unusable) else None
    made = source.transaction_of(table, table.version)
    target = table.version, "" if made is None else made.uuid
    most = max(batch, _BUILD_BYTES // (4 * index.parameters.dimension)) if whole else batch
    live = index.writable().columns("SELECT row_id FROM lmd_lookup WHERE removed_epoch IS NULL")[0]
    gone = np.setdiff1d(live.astype(np.int64), present)
    for chunk in np.array_split(gone, max(1, -(-len(gone) // most)))[:-1]:
        yield _commit(index, step, chunk, [], 0, partly)
        gone = np.setdiff1d(gone, chunk, assume_unique=True)
    waiting: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []
    skipped = 0
    for ids, vectors in source.rows(table, follows, fragments):
        good = storable(lengths(vectors), index.parameters.metric)
        skipped += int((~good).sum())
        gone = np.union1d(gone, ids[~good])
        new = _differ(index, ids[good], vectors[good])
        waiting.append((ids[good][new], vectors[good][new]))
        if sum(len(ids) for ids, _ in waiting) > most:
            yield _commit(index, step, gone, waiting, skipped, partly)
            gone, waiting, skipped = gone[:0], [], 0
    yield _commit(index, step, gone, waiting, skipped, target)


def _commit(
    index: Index, step: Step, gone: NDArray[np.int64],
    waiting: list[tuple[NDArray[np.int64], NDArray[np.float32]]], skipped: int, target: tuple[int, str] | None,
) -> Followed:  # fmt: skip
    merging.raise_horizon(index, step)
    ids = np.concatenate([ids for ids, _ in waiting]) if waiting else np.zeros(0, np.int64)
    with index.staged() as staged:
        deleted = staged.delete(gone)
        if len(ids):
            insert(staged, ids, stored(index.parameters, np.concatenate([ids for _, ids in waiting])))
        staged.followed = target
    return Followed(len(ids), deleted, skipped, index.epoch)


def _differ(index: Index, ids: NDArray[np.int64], vectors: NDArray[np.float32]) -> NDArray[Any]:
    """Which rows the index does not have with the same vector: a compaction moves rows that did not change."""
    held_rows, nodes = index.writable().columns(
        "SELECT row_id, node_id FROM lmd_lookup WHERE removed_epoch IS NULL AND row_id IN (SELECT id FROM wanted)",
        wanted=ids,
    )
    new = np.ones(len(ids), bool)
    if len(held_rows):
        order = np.argsort(ids)
        at = order[np.searchsorted(ids, held_rows, sorter=order)]
        held = around(index.view, index.writable(), nodes.astype(np.int64), index.epoch).vectors
        new[at] = (held != stored(index.parameters, vectors[at])).any(axis=1)
    return new


# -- whether the codebook still fits the rows

K, LONGER = 10, 4
_TRAINED_ON, _TESTED_ON, _SEARCHED = 1024, 256, 128
_FEWEST = 32
_LOST = 0.005
_WORSE = 2.0
_WORN, _MATTERS = 0.1, 0.02
ROUNDING, ZERO = np.float32(1 + 1e-5), np.float32(1e-6)  # compiled code may add up a distance in another order


def code_error_ratio(view: View) -> float:
    """The error of the codes of the rows since the last build, in multiples of that of the rows before; 0: unknown.

    Of at most 128 rows each, by the published view alone: a poll asks whether ``is_stale`` has to be measured.
    """
    epoch, nodes = view.epoch, view.state.next_node_id
    built = view.built_nodes(epoch)
    if not view.state.codebook_id or min(built, nodes - built) < _SEARCHED:
        return 0.0
    random = np.random.default_rng(epoch)
    errors = []
    for first, last in ((0, built), (built, nodes)):
        chosen = np.setdiff1d(random.integers(first, last, 4 * _SEARCHED), view.dead)
        chosen = random.permutation(chosen)[:_SEARCHED]
        vectors = np.empty((len(chosen), view.parameters.dimension), np.float32)
        count = gather(view.source, view.parameters.layout, chosen, epoch, vectors, np.empty(len(chosen), np.int64))
        if count < _FEWEST:
            return 0.0
        errors.append(mean_error(view.book, vectors[:count]))
    return errors[1] / errors[0] if errors[0] else 0.0


def is_stale(index: Index, store: Store) -> bool:
    """Whether a build of the graph anew, with a codebook trained on the rows of now, finds rows that searches lose.

    Raises ``TableCorruptError``: a block cannot be read.
    """
    if not store.state.codebook_id or store.state.live < TRAIN_AT:
        return False
    random = np.random.default_rng(store.state.epoch)
    wear = wear_of(index.view, store, random)
    if wear.more < _WORN * wear.trained:
        return False
    return _has_outworn(index, store, wear) or _has_drifted(index, store, random)


@dataclass(frozen=True)
class Wear:
    """The error of the codes, and its cause.

    Attributes:
        share: of the rows that came since the last build.
        trained: mean squared error of the codes of the rows before: the codebook was trained on them.
        more: by how much that of all rows is larger.
        rows: vectors of some rows of both kinds.
    """

    share: float
    trained: float
    more: float
    rows: NDArray[np.float32]


def wear_of(view: View, store: Store, random: np.random.Generator) -> Wear:
    """Of at most 256 rows before and since the last build: a few milliseconds."""
    nodes, epochs = store.columns(
        "SELECT node_id, added_epoch FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id"
    )
    [built] = store.columns(  # it added more entry points than any commit since
        "SELECT added_epoch FROM lmd_entry_points WHERE removed_epoch IS NULL "
        "GROUP BY added_epoch ORDER BY count(*) DESC, added_epoch DESC LIMIT 1"
    )
    since = epochs > built[0]
    share, none = float(since.mean()), np.zeros((0, view.parameters.dimension), np.float32)
    if share in {0.0, 1.0}:
        return Wear(share, 1.0 - share, 0.0, none)
    vectors = []
    for which in (~since, since):
        there = nodes[which].astype(np.int64)
        chosen = random.choice(there, min(len(there), _TESTED_ON), replace=False)
        vectors.append(around(view, store, np.sort(chosen), view.epoch).vectors)
    trained, other = (mean_error(view.book, vector) for vector in vectors)
    return Wear(share, trained, share * (other - trained), np.concatenate(vectors))


def _has_outworn(index: Index, store: Store, wear: Wear) -> bool:
    """Whether a small index lost the advantage of a codebook that knows its rows by heart.

    Codes of other rows, however alike, have up to 1.6 times the error of those on which it was trained, if these are
    few. It matters if that is not small beside the distances that searches compare. With at least a tenth of the rows
    new, a build takes at most about twice the time of the upkeep of these.
    """
    if store.state.live > SAMPLE or wear.share < _WORN or wear.more <= 0:
        return False
    queries = wear.rows[:: max(1, len(wear.rows) // _SEARCHED)]
    _, distances = index.search(queries, k=K + 1, as_of=index.view.epoch)
    return bool(wear.more > _MATTERS * distances[:, -1].mean())


def _has_drifted(index: Index, store: Store, random: np.random.Generator) -> bool:
    """Whether searches lose rows that longer ones find, and a new codebook would have at most half the error.

    Both are measured on at most 1,280 random rows: about as much work as 640 searches and reading these blocks.
    """
    view = index.view
    [live] = store.columns("SELECT node_id FROM lmd_lookup WHERE removed_epoch IS NULL ORDER BY node_id")
    count = min(len(live), _TRAINED_ON + _TESTED_ON)
    chosen = random.choice(live.astype(np.int64), count, replace=False)
    vectors = around(view, store, np.sort(chosen), view.epoch).vectors
    vectors = vectors[random.permutation(count)]
    if _lost(index, vectors[:_SEARCHED]) < _LOST:
        return False
    tested = vectors[-max(1, count // 5) :]
    fresh = train(index.parameters, vectors[: -len(tested)])
    return bool(mean_error(view.book, tested) > _WORSE * mean_error(fresh, tested))


def _lost(index: Index, queries: NDArray[np.float32]) -> float:
    """The share of the nearest rows that a search with the index's own list does not find, but a longer one does.

    All of them, for a row that a search by its own vector does not find.
    """
    view = index.view
    _, short = index.search(queries, k=K, as_of=view.epoch)
    _, longer = index.search(queries, k=K, L=LONGER * index.parameters.search_list, as_of=view.epoch)
    lost = (short > longer[:, -1:] * ROUNDING) | (short[:, :1] > ZERO)
    return float(lost.mean())


# -- the job

_STALE = "Its codebook no longer fits its rows, and searches lose some: run it again with a larger --build-memory."


class CatchupDecision(enum.StrEnum):
    """The decisions of a catch-up."""

    CAUGHT_UP = "caught_up"
    UNUSABLE = "unusable"
    UNCHANGED = "unchanged"
    DRY_RUN = "dry_run"


@dataclass(frozen=True)
class IndexCatchupReport:
    """The result of a catch-up, or its plan.

    Attributes:
        epoch: of the index afterwards.
        healed: deleted nodes that were removed from the graph; of a plan: those to be healed.
        rewired: nodes whose neighbours were searched again.
        pruned: nodes whose links were only replaced, without a new search.
        skipped: rows of the followed table without a usable vector.
        versions: of the followed table, that the index was behind.
        followed: the version of the table that the index has now; None: it follows none.
        rebuilt: rows whose graph was built anew, with its codebook.
        stale: the codebook no longer fits the rows, and building anew takes more than the memory allowed.
    """

    decision: CatchupDecision
    epoch: int
    healed: int = 0
    rewired: int = 0
    pruned: int = 0
    inserted: int = 0
    deleted: int = 0
    skipped: int = 0
    versions: int = 0
    followed: int | None = None
    unusable: Unusable | None = None
    rebuilt: int = 0
    stale: bool = False

    @property
    def exit_code(self) -> int:
        """28 if the index has to be rebuilt."""
        return IndexUnusableError.exit_code if self.unusable is not None else 0

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return document(self, unusable=None if self.unusable is None else self.unusable.text)

    def needs(self) -> Iterator[Need]:
        """What a run would follow and heal, or why it cannot follow."""
        if self.unusable is not None:
            yield Need("catchup", f"refuse to follow: {self.unusable.text}")
        elif self.versions:
            yield Need("catchup", f"follow {counted(self.versions, 'version')}")
        if self.healed:
            yield Need("catchup", f"heal {counted(self.healed, 'deleted node')}")

    def describe(self) -> str:
        """The text for people."""
        nodes = counted(self.healed, "deleted node")
        if self.decision is CatchupDecision.DRY_RUN:
            behind = "" if self.followed is None else f"{counted(self.versions, 'version')} would be followed, "
            return f"{self.decision}: {behind}{nodes} would be healed; the index is at epoch {self.epoch}."
        if self.unusable is not None:
            return f"{self.decision}: {self.unusable.text}.\n{IndexUnusableError.remedy}"
        if self.followed is not None:
            rows = f"{counted(self.inserted, 'row')} inserted, {self.deleted:,} deleted, {self.skipped:,} skipped"
            nodes = f"{rows}; the index has version {self.followed} of its table; {nodes}"
        if self.rebuilt:
            nodes = f"the graph of {counted(self.rebuilt, 'row')} was built anew, with its codebook; {nodes}"
        stale = f"\n{_STALE}" if self.stale else ""
        return (
            f"{self.decision}: {nodes} healed, {counted(self.pruned, 'neighbour')} pruned and "
            f"{counted(self.rewired, 'node')} rewired; the index is at epoch {self.epoch}.{stale}"
        )


def backlog(table: Table) -> Mapping[str, float]:
    """The backlog metrics, from the published view and the followed table."""
    behind = versions_behind(read_source(table.location.uri, table.state.followed), table.state.followed)
    return {**unhealed(table), "versions_behind": behind, **drift(table)}


def drift(table: Table) -> Mapping[str, float]:
    """The backlog metric of the codebook; 0 where the view cannot be read, which other figures report."""
    try:
        view = View(table.location.uri, table.parameters)
    except MemwalOpsError:
        return {"code_error_ratio": 0.0}
    try:
        return {"code_error_ratio": code_error_ratio(view)}
    finally:
        view.close()


def unhealed(table: Table) -> Mapping[str, float]:
    """The backlog metrics of the graph."""
    nodes = max(1, table.state.live + table.tombstones)
    waits = table.tombstones - table.state.healed
    return {"unhealed_nodes": waits, "unhealed_percent": 100 * waits / nodes}


def plan(table: Table, options: IndexCatchupOptions, context: RunContext) -> IndexCatchupReport:
    """The backlog, from the published view. An index that cannot follow its table is not healed, unless rebuilt."""
    del context
    table.check_files()
    follows = read_source(table.location.uri, table.state.followed)
    followed = None if follows is None else table.state.followed
    if table.state.unusable and not options.rebuild:
        unusable = Unusable(table.state.unusable)
        return IndexCatchupReport(CatchupDecision.UNUSABLE, table.revision, followed=followed, unusable=unusable)
    behind = versions_behind(follows, table.state.followed)
    waits = table.tombstones - table.state.healed
    return IndexCatchupReport(CatchupDecision.DRY_RUN, table.revision, waits, versions=behind, followed=followed)


def apply(table: Table, options: IndexCatchupOptions, context: RunContext) -> IndexCatchupReport:
    """Follow the table, then heal the whole backlog, in batches.

    Raises:
        IndexBusyError: another writer or job has the index.
        InvalidUsageError: the table no longer has the columns that the index follows; earlier commits are kept.
        LeaseLostError: the guard denies; earlier commits are kept.
        StorageError: the disk is full, or failed, or the table cannot be read; earlier commits are kept.
    """
    done: Any = Counter[str]()
    follows = read_source(table.location.uri, table.state.followed)
    if follows is not None:
        follows.announce(table.parameters.uuid, table.location.uri)
    with table.open(options.wait.total_seconds(), changes=True) as index:
        before = index.writable().state.followed
        try:
            for part in () if follows is None else follow(
                index, follows, options.max_rows, table.durable, rebuild=options.rebuild
            ):  # fmt: skip
                done.update(inserted=part.inserted, deleted=part.deleted, skipped=part.skipped)
                context.revisions.append(part.epoch)
                context.figures["rows_followed"] += part.inserted + part.deleted
                context.advance("following", "rows", part.inserted + part.deleted)
                context.checkpoint()
        except IndexUnusableError:
            state = index.writable().state
            unusable = Unusable(state.unusable)
            return IndexCatchupReport(CatchupDecision.UNUSABLE, state.epoch, followed=state.followed, unusable=unusable)
        stale = _builds(index, options, own=follows is None)
        if stale and (options.rebuild or memory_of(index.parameters, len(index)) <= options.build_memory):
            context.advance("building", "rows", 0, total=len(index))
            built, stale = graph.build_again(index, table.durable), False
            done.update(healed=built.healed, rebuilt=built.rewired)
            context.revisions.append(built.epoch)
            context.figures["nodes_healed"] += built.healed
            context.advance("building", "rows", built.rewired, total=built.rewired)
            context.checkpoint()
        total, _ = graph.pending(index.writable())
        for batch in graph.heal(index, options.batch, table.durable):
            done.update(healed=batch.healed, rewired=batch.rewired, pruned=batch.pruned)
            context.revisions.append(batch.epoch)
            context.figures["nodes_healed"] += batch.healed
            context.advance("healing", "nodes", batch.healed, total=total)
            context.checkpoint()
        now = index.writable().state
        changed = any(done[name] for name in ("healed", "rewired", "rebuilt")) or now.followed != before
        changed = changed or (options.rebuild and follows is not None)
        return IndexCatchupReport(
            CatchupDecision.CAUGHT_UP if changed else CatchupDecision.UNCHANGED, now.epoch,
            versions=now.followed - before, followed=None if follows is None else now.followed, stale=stale, **done,
        )  # fmt: skip


def _builds(index: Index, options: IndexCatchupOptions, *, own: bool) -> bool:
    """Whether the graph is built anew, or should be: its codebook is stale, or that was asked for."""
    store = index.writable()
    if options.rebuild and own:
        return bool(store.state.codebook_id and store.state.live)
    return is_stale(index, store)
