"""Change the codebook of a vector index, one safe step per run (S0-113).

A codebook cannot be changed in place: distances from the base and from unmerged generations would
no longer compare. So a second index with new centroids is built beside the first, writers maintain
both, and the first is dropped when nothing needs it any more. Each run looks where things stand,
takes at most one step, and says which comes next: who runs it again agrees to that.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from memwal_ops.core.backlog import read_backlog
from memwal_ops.core.base_indexes import BaseIndex, base_indexes, coverage
from memwal_ops.core.catchup_claims import claim
from memwal_ops.core.codebook import read_codebook
from memwal_ops.core.commit import CommitLostError, CommitNote, IndexChange, check_rewritable
from memwal_ops.core.datasets import open_dataset
from memwal_ops.core.index_build import IndexBuild, create_index
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.wal import last_wal_entry
from memwal_ops.errors import (
    InvalidUsageError,
    InvariantViolatedError,
    MemwalOpsError,
    UnsupportedFeatureError,
)
from memwal_ops.format.memwal_index import with_catchup, with_maintained_indexes
from memwal_ops.jobs import catchup
from memwal_ops.jobs.index_publishing import publish_build, publish_change
from memwal_ops.jobs.races import Races
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from uuid import UUID

    import lance

    from memwal_ops.core.generations import GenerationRef
    from memwal_ops.core.layout import Layout
    from memwal_ops.core.table import Table
    from memwal_ops.format.region_manifest import RegionManifest

_CONCURRENT_OPENS = 8
_NEXT = {
    "create": "Run it again: {new} will be built with new centroids, beside {old}.",
    "maintain": "Run it again: writers will be told to maintain {new} as well.",
    "catch_up": "Run it again: {new} will be brought up to what was merged.",
    "wait": "Restart the writers, so that they maintain {new}; merge what they flushed before; then run it again.",
    "drop": "When every reader uses {new}, run it again: {old} will be dropped.",
    "done": "Nothing is left to do.",
}


@dataclass(frozen=True, slots=True)
class Hold:
    """What still needs the old index: a generation that has no new one, or an unflushed log (generation None)."""

    region_id: UUID
    generation: int | None
    because: str

    def to_json(self) -> dict[str, object]:
        """The ``holds`` entry of a report."""
        return {"region_id": str(self.region_id), "generation": self.generation, "because": self.because}


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """One run of a migration.

    ``decision`` is one of created, maintained, caught_up, waiting, dropped, done, dry_run;
    ``next`` is the step that the next run takes, in words.
    """

    decision: str
    run_id: str
    old: str
    new: str
    holds: tuple[Hold, ...]
    next: str
    version: int
    seconds: float

    def to_json(self) -> dict[str, object]:
        """The document of ``catchup --migrate-codebook --json``."""
        return {
            "decision": self.decision,
            "old": self.old,
            "new": self.new,
            "holds": [hold.to_json() for hold in self.holds],
            "next": self.next,
            "version": self.version,
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }


def migrate(table: Table, old: str, new: str, *, dry_run: bool = False) -> MigrationReport:
    """Take the next step of replacing the vector index ``old`` by ``new``.

    Args:
        table: any version of the table.
        old: the index with the codebook that is to go.
        new: the name of its successor, which need not exist yet.
        dry_run: only say which step is next.

    Raises:
        InvalidUsageError: neither index exists, they are one, or they are not two vector indexes on one column.
        UnsupportedFeatureError: the old index does not say how it was built; create the new one by hand.
        CommitConflictError: too many races for the next version were lost in a row.
    """
    started = time.monotonic()
    check_rewritable(table)
    note = CommitNote(job="catchup", run_id=str(uuid.uuid4()), release=__version__)
    table = table.newest()
    step, holds = _next_step(table, old, new)
    decision = "dry_run"
    if not dry_run:
        probe_conditional_writes(table.store)
        decision = _take(table, step, old, new, note)
        table = table.newest()
        step, holds = _next_step(table, old, new)
    return MigrationReport(
        decision=decision,
        run_id=note.run_id,
        old=old,
        new=new,
        holds=holds,
        next=_NEXT[step].format(old=old, new=new),
        version=table.version,
        seconds=time.monotonic() - started,
    )


def _next_step(table: Table, old: str, new: str) -> tuple[str, tuple[Hold, ...]]:
    indexes = base_indexes(table)
    before, after = indexes.get(old), indexes.get(new)
    if old == new:
        raise InvalidUsageError(f"The new index must have another name than {old}.")
    if before is None and after is None:
        raise InvalidUsageError(
            f"{table.location.uri} has no index {old}; its indexes: {', '.join(indexes) or 'none'}."
        )
    for index in (before, after):
        if index is not None and not index.is_vector:
            raise InvalidUsageError(f"Index {index.name} is a {index.type}, which has no codebook.")
    if before is None:
        return "done", ()
    if after is None:
        return "create", ()
    if [*after.segments[0].fields] != [*before.segments[0].fields]:
        raise InvalidUsageError(f"Index {new} is not on the same column as {old}.")
    maintained = table.index.maintained_indexes
    if old in maintained and new not in maintained:
        return "maintain", ()
    if not coverage(after.covered, table.manifest).complete:
        return "catch_up", ()
    holds = _holds(table, old, new)
    return ("wait" if holds else "drop"), holds


def _take(table: Table, step: str, old: str, new: str, note: CommitNote) -> str:
    races = Races()
    if step == "create":
        _create(table, old, new, note, races)
        return "created"
    if step == "maintain":
        publish_change(table, partial(_maintain, new), note, races)
        return "maintained"
    if step == "catch_up":
        report = catchup.apply(table, catchup.CatchupOptions(indexes=(new,)))
        if report.failures:
            raise report.failures[0]
        return "caught_up"
    if step == "drop":
        publish_change(table, partial(_drop, old, new), note, races)
        return "dropped"
    return {"wait": "waiting", "done": "done"}[step]


def _holds(table: Table, old: str, new: str) -> tuple[Hold, ...]:
    """Generations and logs in which queries would find only the old index."""
    index = table.index
    if old not in index.maintained_indexes and not index.maintain_all_indexes:
        return ()
    backlog, layout = read_backlog(table), table.layout
    holds = [Hold(fault.region_id, fault.generation, f"It cannot be read: {fault.error}") for fault in backlog.blocked]

    def look(ref: GenerationRef) -> Hold | None:
        with lance_errors("read the indexes of", ref.folder):
            names = {one.name for one in open_dataset(table.location, ref.folder).describe_indices()}
        return None if new in names else Hold(ref.region_id, ref.generation, f"It was flushed without index {new}.")

    with ThreadPoolExecutor(_CONCURRENT_OPENS) as pool:
        holds += [hold for hold in pool.map(look, backlog.pending) if hold is not None]
        unflushed = list(
            pool.map(lambda region: _has_unflushed_rows(table, region.manifest, layout), backlog.regions.values())
        )
    known = {ref.region_id for ref in backlog.pending}
    held = {hold.region_id for hold in holds}
    for region, has_log in zip(backlog.regions.values(), unflushed, strict=True):
        region_id = region.manifest.region_id
        if has_log and region_id not in held and region_id not in known:
            because = (
                f"It has rows that are not flushed yet, and no flushed generation shows that its writer knows {new}."
            )
            holds.append(Hold(region_id, None, because))
    return tuple(sorted(holds, key=lambda hold: (hold.region_id, hold.generation or 0)))


def _has_unflushed_rows(table: Table, manifest: RegionManifest, layout: Layout) -> bool:
    replayed, seen = manifest.replay_after_wal_id, manifest.wal_id_last_seen
    return last_wal_entry(table.store, manifest.region_id, replayed, seen, layout) > (replayed or 0)


def _create(table: Table, old: str, new: str, note: CommitNote, races: Races) -> None:
    """Train the new index on the table's rows and publish it."""
    while True:
        step, _ = _next_step(table, old, new)
        if step != "create":
            return  # another run was faster
        arguments = _arguments(table, base_indexes(table)[old])
        try:
            build = create_index(table, new, partial(_create_with_pylance, new, arguments))
            if build is None:
                raise InvariantViolatedError(f"pylance made no index {new}.")
            publish_build(table, new, build, partial(_created, new, build, table), note, races)
        except CommitLostError as error:
            table = races.lose(table, error)
        else:
            return


def _create_with_pylance(new: str, arguments: dict[str, Any], dataset: lance.LanceDataset) -> None:
    dataset.create_index(name=new, **arguments)


def _created(new: str, build: IndexBuild, built_on: Table, newest: Table) -> IndexChange:
    said = claim(newest, build.covered, progress_when_built=built_on.index.merged_generations)
    return IndexChange(with_catchup(newest.index.details, {new: said}), added=build.added)


def _arguments(table: Table, index: BaseIndex) -> dict[str, Any]:
    """How to build an index like ``index``, with centroids of its own."""
    with lance_errors("read the indexes of", table.location.uri):
        described = next(one for one in table.dataset.describe_indices() if one.name == index.name)
    details = described.details or {}
    try:
        arguments = {
            "column": described.field_names[0],
            "index_type": described.index_type,
            "metric": details["metric_type"].lower(),
            "num_partitions": read_codebook(table, index.segments[-1]).partitions,
        }
        compression, graph = details.get("compression", {}), details.get("hnsw", {})
        if "num_sub_vectors" in compression:
            arguments["num_sub_vectors"] = compression["num_sub_vectors"]
        if "num_bits" in compression and compression.get("type") != "sq":
            arguments["num_bits"] = compression["num_bits"]
        names = {"max_connections": "m", "construction_ef": "ef_construction", "max_level": "max_level"}
        arguments |= {names[key]: value for key, value in graph.items() if key in names}
    except (KeyError, IndexError, AttributeError, MemwalOpsError) as error:
        raise UnsupportedFeatureError(
            f"Index {index.name} does not say how it was built: {error}.",
            remedy="Create the new index yourself with dataset.create_index(..., name=NEW), then run this again.",
        ) from error
    return arguments


def _maintain(new: str, table: Table) -> IndexChange | None:
    names = table.index.maintained_indexes
    return None if new in names else IndexChange(with_maintained_indexes(table.index.details, [*names, new]))


def _drop(old: str, new: str, table: Table) -> IndexChange:
    step, _ = _next_step(table, old, new)
    if step != "drop":
        raise InvalidUsageError(f"Index {old} cannot be dropped now: something was written meanwhile.")
    names = [name for name in table.index.maintained_indexes if name != old]
    details = with_catchup(with_maintained_indexes(table.index.details, names), {old: None})
    return IndexChange(details, removed=base_indexes(table)[old].segment_ids)
