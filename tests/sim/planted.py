"""Bugs on purpose: each is a patch of the product as somebody might really write it.

A harness that cannot find them proves nothing. ``python -m tests.sim.planted`` prints how many
histories each one survives.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lance
import numpy as np
import pyarrow as pa
from lance.dataset import Index

from memwal_ops.core import backlog, fence_posts, generations, regions, retention
from memwal_ops.core.commit import commit_strict
from memwal_ops.core.fence_posts import FencePosts
from memwal_ops.core.regions import RegionManifestStore
from memwal_ops.core.retention import Retention
from memwal_ops.core.version_progress import VersionProgress
from memwal_ops.engines import local
from memwal_ops.errors import InvariantViolatedError
from memwal_ops.format.memwal_index import MEMWAL_INDEX_NAME, MEMWAL_TYPE_URL
from memwal_ops.format.region_manifest import encode_region_manifest, encode_version_hint
from memwal_ops.jobs import catchup, gc, gc_region, gc_rules, races, snapshot
from memwal_ops.jobs.collectables import Gate, Kind
from memwal_ops.jobs.gc_region import RegionView
from memwal_ops.jobs.gc_rules import Rules
from tests.sim.history import SimHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = 200


@contextmanager
def _patched(*patches: tuple[Any, str, Any]) -> Iterator[None]:
    originals = [(place, name, getattr(place, name)) for place, name, _ in patches]
    for place, name, new in patches:
        setattr(place, name, new)
    try:
        yield
    finally:
        for place, name, old in originals:
            setattr(place, name, old)


# -- merging


def _newest_first() -> Any:
    """Merge takes the newest generation of a region alone: order is not checked."""
    real = backlog._subtract

    def subtract(manifest: Any, merged: int) -> Any:
        region, fault = real(manifest, merged)
        return replace(region, pending=region.pending[-1:]), fault

    return _patched((backlog, "_subtract", subtract))


def _marker_before_the_rows() -> Any:
    """Progress is committed with the deletions, the rows with a commit after that."""

    def commit(table: Any, change: Any, merge_pass: Any, note: Any) -> int:
        deletions = replace(change, new_fragments=())
        version = commit_strict(table, deletions.operation(), merge_pass.progress, note)
        if change.new_fragments:
            lance.LanceDataset.commit(
                table.location.uri, lance.LanceOperation.Append(list(change.new_fragments)), read_version=version
            )
        return version

    return _patched((local, "_commit", commit))


def _pass_over_missing() -> Any:
    """A generation that is not there is skipped."""
    real = local._open_all

    def open_all(table: Any, merge_pass: Any) -> Any:
        history = local.SchemaHistory(table)
        found = []
        for ref in merge_pass.generations:
            try:
                found.append(local.open_generation(table, ref, history))
            except local.GenerationMissingError:
                continue
        return found or real(table, merge_pass)

    return _patched((local, "_open_all", open_all))


def _old_progress_after_a_lost_race() -> Any:
    """After a lost race the newest version is taken, with the progress that was read before."""
    real = races.Races.lose

    def lose(self: Any, table: Any, error: Any) -> Any:
        newest = real(self, table, error)
        return replace(newest, index=replace(newest.index, merged_generations=table.index.merged_generations))

    return _patched((races.Races, "lose", lose))


def _lowest_address_wins() -> Any:
    """Of two writes of a key in one generation the first is taken for the newest."""
    real = local.open_generation

    def open_generation(*arguments: Any) -> Any:
        return replace(real(*arguments), newest_row_first=True)

    return _patched((local, "open_generation", open_generation))


def _tombstones_are_rows() -> Any:
    """A tombstone is not told from a row."""
    real = generations.Generation.read_keys

    def read_keys(self: Any) -> Any:
        keys = real(self)
        at = keys.schema.get_field_index(generations.TOMBSTONE)
        return keys.set_column(at, generations.TOMBSTONE, pa.array(np.zeros(keys.num_rows, dtype=bool)))

    return _patched((generations.Generation, "read_keys", read_keys))


# -- building


def _plain_commit_of_details() -> Any:
    """The snapshot is published by pylance's own commit, which rebases over a merge."""

    def commit(table: Any, change: Any, note: Any) -> int:
        del note
        value = change.details.SerializeToString()

        def entry(uuid: object) -> Index:
            return Index(
                uuid=str(uuid), name=MEMWAL_INDEX_NAME, fields=[], dataset_version=table.version,
                fragment_ids=set(), index_version=0, index_details=(MEMWAL_TYPE_URL, value),
            )  # fmt: skip

        operation = lance.LanceOperation.CreateIndex([entry(change.uuid)], [entry(table.index.uuid)])
        return int(lance.LanceDataset.commit(table.location.uri, operation, read_version=table.version).version)

    return _patched((snapshot, "commit_indexes", commit))


def _claim_everything() -> Any:
    """A catch-up says that the index covers whatever is merged by now: progress is read after the build."""

    def claim(table: Any, covered: Any, *, progress_when_built: Any) -> Any:
        del covered, progress_when_built
        return dict(table.index.merged_generations)

    return _patched((catchup, "claim", claim))


# -- collecting


def _only_the_newest_version() -> Any:
    """Nobody but readers of the newest version is thought of: no older version, no tag."""
    return _patched((Retention, "needs", lambda *_: None))


def _no_branches() -> Any:
    """The versions of branches are not looked at."""
    real = Retention.refresh

    def refresh(self: Any, table: Any, now: Any) -> None:
        real(self, table, now)
        self._trees = {name: tree for name, tree in self._trees.items() if not name}

    return _patched((Retention, "refresh", refresh))


def _no_holds() -> Any:
    """Holds are not looked at."""
    return _patched((retention, "standing_holds", lambda *_: ()))


def _version_without_progress_needs_nothing() -> Any:
    """A region that a version does not name yet is taken for one that it does not need."""
    real = retention.read_version_progress

    def read(store: Any, meta: Any) -> VersionProgress:
        found = real(store, meta)
        return found if found.merged_generations else VersionProgress({}, None)

    return _patched((retention, "read_version_progress", read))


def _no_catchup() -> Any:
    """Whether an index covers a generation is not asked."""
    return _patched((gc, "covered_generations", lambda _: {}), (gc_rules, "covered_generations", lambda _: {}))


def _delete_before_drain() -> Any:
    """Generations are deleted while the region manifest lists them."""
    real = RegionView.again

    def again(self: Any, item: Any) -> Any:
        if item.kind is Kind.GENERATION and all(gate.met for gate in item.gates):
            return item
        return real(self, item)

    return _patched((gc._Run, "_drain", lambda _, view: view), (RegionView, "again", again))


def _no_grace() -> Any:
    """What is drained, or flushed, goes at once."""
    real = gc_region._look

    def look(rules: Any, region_id: Any) -> Any:
        return real(replace(rules, options=replace(rules.options, reader_grace=timedelta(0))), region_id)

    return _patched((gc_region, "_look", look))


def _no_fence_posts() -> Any:
    """Every entry that is flushed goes."""
    return _patched((FencePosts, "post", lambda *_: None))


def _last_entry_goes() -> Any:
    """The last entry of a log is no post."""
    real = fence_posts.FencePosts._posts

    def posts(self: Any, run_at: int, at: int) -> Any:
        return (post for post in real(self, run_at, at) if "the last entry" not in post.what)

    return _patched((FencePosts, "_posts", posts))


def _unflushed_entries_go() -> Any:
    """The log is collected up to what was seen, not to what was flushed."""
    return _patched(
        (RegionView, "_replayed", staticmethod(lambda manifest: manifest.wal_id_last_seen or 0)),
    )


def _references_forgotten() -> Any:
    """Whether a generation has its rows in the log is not asked."""
    return _patched((gc_region, "wal_references", lambda *_: frozenset()))


def _young_orphans_go() -> Any:
    """The age of an orphan is not asked."""
    real = Rules.older

    def older(self: Any, what: str, written: Any, limit: Any) -> Gate:
        found = real(self, what, written, limit)
        return replace(found, met=True) if "flush may be under way" in what else found

    return _patched((Rules, "older", older))


def _manifest_gap() -> Any:
    """A region manifest is written one version too high."""

    def commit(self: Any, manifest: Any) -> bool:
        skipped = manifest.next()
        self._store.put_if_absent(self._path(skipped.version), encode_region_manifest(skipped))
        self._store.put(f"{self.folder}/{regions.HINT}", encode_version_hint(skipped.version))
        return True

    return _patched((RegionManifestStore, "commit", commit))


PLANTED: dict[str, Callable[[], Any]] = {
    name.strip("_").replace("_", " "): plant
    for name, plant in {**globals()}.items()
    if name.startswith("_") and callable(plant) and plant.__doc__
    and getattr(plant, "__module__", "") == __name__ and name != "_patched"
}  # fmt: skip


def histories_until_caught(
    plant: Callable[[], Any], folder: str, *, first: int = 1, limit: int = LIMIT
) -> tuple[int, str] | None:
    """The history that tells a planted bug, and what told it; None: all ``limit`` from ``first`` on passed.

    Only a broken invariant counts, of the witness or of the product itself: a patch that merely
    crashes proves nothing.
    """
    for number in range(first, first + limit):
        with plant():
            history = SimHistory(number, folder)
            try:
                history.run()
            except (AssertionError, InvariantViolatedError) as error:
                return number, next(iter(str(error).splitlines()), type(error).__name__)
    return None


def main() -> None:
    """The table of tests/sim/README.md."""
    say = sys.stdout.write
    say("| planted bug | caught in history | what told it |\n|---|---|---|\n")
    for name in sys.argv[1:] or PLANTED:
        with tempfile.TemporaryDirectory() as place:
            told = histories_until_caught(PLANTED[name], place)
        doc = (PLANTED[name].__doc__ or "").strip()
        say(f"| {doc} | {'NOT CAUGHT' if told is None else told[0]} | {'' if told is None else told[1][:110]} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
