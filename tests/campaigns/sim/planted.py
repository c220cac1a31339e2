"""Planted bugs: each is a patch of the product with a plausible mistake.

A harness that cannot find them proves nothing. ``python -m tests.campaigns.sim.planted`` says how many
histories each one survives; with ``--write`` it writes the table of README.md and the seeds that CI
runs (found.json). A patch that the product never calls is an error: it would prove nothing either.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
from lance.dataset import Index

from memwal_ops.core import collector, commit_retry
from memwal_ops.core.candidates import Gate
from memwal_ops.errors import InvariantViolatedError
from memwal_ops.formats.lance.commit.commit import commit_strict
from memwal_ops.formats.lance.engines.merge import passes
from memwal_ops.formats.lance.generations import backlog, generation as generations
from memwal_ops.formats.lance.jobs import snapshot
from memwal_ops.formats.lance.jobs.catchup import publishing as index_publishing
from memwal_ops.formats.lance.jobs.gc import evidence as gc_evidence, job as gc, region as gc_region, wal, wal as gc_wal
from memwal_ops.formats.lance.jobs.gc.collectors import RegionCollector
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, CurrentEvidence, GcEvidence
from memwal_ops.formats.lance.jobs.gc.region import RegionView
from memwal_ops.formats.lance.jobs.gc.wal import FencePosts, WalView
from memwal_ops.formats.lance.regions import manifests as regions
from memwal_ops.formats.lance.regions.manifests import RegionManifestStore
from memwal_ops.formats.lance.retention import live_versions as retention
from memwal_ops.formats.lance.retention.live_versions import LiveVersions, VersionProgress
from memwal_ops.formats.lance.wire.memwal_index import MEMWAL_INDEX_NAME, MEMWAL_TYPE_URL
from memwal_ops.formats.lance.wire.region_manifest import encode_region_manifest, encode_version_hint
from tests.campaigns.sim.history import History

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

LIMIT = 200
_PLACE = Path(__file__).parent
FOUND = _PLACE / "found.json"
# For CI a second history is looked for among so many behind the first.
_CLOSE = 15
_SHOWN = 110


class Patch(NamedTuple):
    """What stands in the place of ``name`` in ``owner``."""

    owner: Any
    name: str
    new: Callable[..., Any]


@dataclass(frozen=True)
class Bug:
    """One mistake; ``make`` returns its patches, created each time, since they use what they replace."""

    name: str
    told: str
    make: Callable[[], Iterable[Patch]]

    @contextmanager
    def planted(self) -> Iterator[Counter[str]]:
        """Work with the bug; what is given counts how often each of its patches was called."""
        calls: Counter[str] = Counter()
        with contextlib.ExitStack() as stack:
            for patch in self.make():
                original = vars(patch.owner)[patch.name]
                counted = _counted(patch, calls)
                setattr(patch.owner, patch.name, staticmethod(counted) if _is_static(original) else counted)
                stack.callback(setattr, patch.owner, patch.name, original)
            yield calls


def _is_static(original: object) -> bool:
    return isinstance(original, staticmethod)


def _counted(patch: Patch, calls: Counter[str]) -> Callable[..., Any]:
    calls[patch.name] = 0

    @functools.wraps(patch.new)
    def call(*arguments: Any, **named: Any) -> Any:
        calls[patch.name] += 1
        return patch.new(*arguments, **named)

    return call


BUGS: dict[str, Bug] = {}


def bug(make: Callable[[], Iterable[Patch]]) -> Callable[[], Iterable[Patch]]:
    """Enter a function that makes patches; its docstring is what went wrong."""
    name = make.__name__.replace("_", " ")
    BUGS[name] = Bug(name, (make.__doc__ or "").strip(), make)
    return make


# -- merging


@bug
def order_not_checked() -> Iterable[Patch]:
    """Merge takes the newest generation of a region alone."""
    real = backlog.subtract

    def subtract(manifest: Any, merged: int) -> Any:
        region, fault = real(manifest, merged)
        return replace(region, pending=region.pending[-1:]), fault

    yield Patch(backlog, "subtract", subtract)


@bug
def marker_on_the_delete_pass() -> Iterable[Patch]:
    """Progress is committed with the deletions, the rows with a commit after that."""

    def commit(table: Any, change: Any, merge_pass: Any, note: Any) -> int:
        deletions = replace(change, new_fragments=())
        version = commit_strict(table, deletions.operation(), merge_pass.progress, note)
        if change.new_fragments:
            lance.LanceDataset.commit(
                table.location.uri, lance.LanceOperation.Append(list(change.new_fragments)), read_version=version
            )
        return version

    yield Patch(passes, "commit_pass", commit)


@bug
def jump_over_a_missing_generation() -> Iterable[Patch]:
    """A generation that is not there is skipped."""
    real = passes.open_generations

    def open_all(table: Any, merge_pass: Any, *copies: Any) -> Any:
        history = passes.SchemaHistory(table)
        found = []
        for ref in merge_pass.generations:
            try:
                found.append(passes.open_generation(table, ref, history, *copies))
            except passes.GenerationMissingError:
                continue
        return found or real(table, merge_pass, *copies)

    yield Patch(passes, "open_generations", open_all)


@bug
def deduped_by_the_wrong_address() -> Iterable[Patch]:
    """Of two writes of a key in one generation the first is taken for the newest."""
    real = passes.open_generation

    def open_generation(*arguments: Any) -> Any:
        return replace(real(*arguments), newest_row_first=True)

    yield Patch(passes, "open_generation", open_generation)


@bug
def tombstone_resurrected() -> Iterable[Patch]:
    """A tombstone is not told from a row."""
    real = generations.Generation.read_keys

    def read_keys(self: Any) -> Any:
        keys = real(self)
        at = keys.schema.get_field_index(generations.TOMBSTONE)
        return keys.set_column(at, generations.TOMBSTONE, pa.array(np.zeros(keys.num_rows, dtype=bool)))

    yield Patch(generations.Generation, "read_keys", read_keys)


@bug
def id_used_again() -> Iterable[Patch]:
    """A region is known by its id alone: a reused id has the progress of the previous region."""
    yield Patch(backlog, "check_identity", lambda *_, **__: None)
    yield Patch(gc_region, "check_identity", lambda *_, **__: None)


# -- building


@bug
def progress_cached_across_a_retry() -> Iterable[Patch]:
    """After a lost race the newest version is taken, with the MemWAL index that was read before."""
    real = commit_retry.CommitRetry.conflict

    def lose(self: Any, table: Any, error: Any) -> Any:
        newest = real(self, table, error)
        return replace(newest, memwal=table.memwal)

    yield Patch(commit_retry.CommitRetry, "conflict", lose)


@bug
def details_by_a_plain_commit() -> Iterable[Patch]:
    """The snapshot is published by pylance's own commit, which rebases over a merge."""

    real = snapshot.commit.commit_indexes

    def commit(table: Any, change: Any, note: Any) -> int:
        if note.job != "snapshot":
            return real(table, change, note)
        value = change.details.SerializeToString()

        def entry(uuid: object) -> Index:
            return Index(
                uuid=str(uuid), name=MEMWAL_INDEX_NAME, fields=[], dataset_version=table.version,
                fragment_ids=set(), index_version=0, index_details=(MEMWAL_TYPE_URL, value),
            )  # fmt: skip

        operation = lance.LanceOperation.CreateIndex([entry(change.uuid)], [entry(table.index.uuid)])
        return int(lance.LanceDataset.commit(table.location.uri, operation, read_version=table.version).version)

    yield Patch(snapshot.commit, "commit_indexes", commit)


@bug
def stale_catchup() -> Iterable[Patch]:
    """An index that was built on an older version is published, whatever became of its fragments."""
    yield Patch(index_publishing, "still_fits", lambda *_: True)


# -- collecting


@bug
def nobody_but_readers_of_the_newest() -> Iterable[Patch]:
    """Only readers of the newest version are considered."""
    yield Patch(LiveVersions, "needs", lambda *_: None)


def _but_for(kept: Callable[[Any], Collection[int]], *, branches: bool = True) -> Patch:
    """Needs without those of some versions of main."""
    real = LiveVersions.needs

    def needs(self: Any, region_id: Any, generation: int) -> Any:
        left = self.without(kept(self))
        if not branches:
            left._trees = {name: tree for name, tree in left._trees.items() if not name}
        return real(left, region_id, generation)

    return Patch(LiveVersions, "needs", needs)


@bug
def gc_ignores_tags() -> Iterable[Patch]:
    """Versions that stand for a tag are not looked at."""
    yield _but_for(lambda self: {version for branch, version in self.tags.values() if branch is None})


@bug
def gc_ignores_branches() -> Iterable[Patch]:
    """Branches, and the versions that stand for them, are not looked at."""
    yield _but_for(lambda self: self._branched.keys(), branches=False)


@bug
def gc_ignores_holds() -> Iterable[Patch]:
    """Holds are not looked at."""
    yield Patch(retention, "holds_in_force", lambda *_: ())


@bug
def gc_ignores_catchup() -> Iterable[Patch]:
    """Whether an index covers a generation is not asked."""
    yield Patch(gc_evidence, "covered_generations", lambda _: {})


@bug
def version_without_progress() -> Iterable[Patch]:
    """A version in which nothing is merged yet is taken for one without MemWAL."""
    real = retention.read_version_progress

    def read(store: Any, meta: Any) -> VersionProgress:
        found = real(store, meta)
        return found if found.merged_generations else VersionProgress({}, None)

    yield Patch(retention, "read_version_progress", read)


@bug
def delete_before_drain() -> Iterable[Patch]:
    """Generations are deleted while the region manifest lists them."""
    real = RegionView.revalidate

    def revalidate(self: Any, item: Any) -> Any:
        if item.kind is CandidateKind.GENERATION and all(gate.met for gate in item.gates):
            return item
        return real(self, item)

    yield Patch(RegionCollector, "drain", lambda _: 0)
    yield Patch(RegionView, "revalidate", revalidate)


@bug
def no_grace() -> Iterable[Patch]:
    """What is drained, or flushed, goes at once."""
    real = gc.read_evidence

    def read_evidence(table: Any, options: Any, now: Any) -> Any:
        return real(table, replace(options, reader_grace=timedelta(0)), now)

    yield Patch(gc, "read_evidence", read_evidence)


@bug
def no_fence_posts() -> Iterable[Patch]:
    """Every entry that is flushed goes."""
    yield Patch(FencePosts, "post", lambda *_: None)


@bug
def last_entry_goes() -> Iterable[Patch]:
    """The last entry of a log is no post."""
    real = wal.FencePosts._posts

    def posts(self: Any, run_at: int, at: int) -> Any:
        return (post for post in real(self, run_at, at) if "the last entry" not in post.what)

    yield Patch(FencePosts, "_posts", posts)


@bug
def unflushed_entries_go() -> Iterable[Patch]:
    """The log is collected up to what was seen, not to what was flushed."""
    yield Patch(WalView, "_replay_after", lambda manifest: manifest.wal_id_last_seen or 0)


@bug
def references_forgotten() -> Iterable[Patch]:
    """Whether a generation has its rows in the log is not asked."""
    yield Patch(gc_wal, "wal_references", lambda *_: frozenset())


@bug
def orphan_age_ignored() -> Iterable[Patch]:
    """The age of an orphan is not asked."""
    real = GcEvidence.age_gate

    def age_gate(self: Any, what: str, written: Any, limit: Any) -> Gate:
        found = real(self, what, written, limit)
        return replace(found, met=True) if "flush may be in progress" in what else found

    yield Patch(GcEvidence, "age_gate", age_gate)


@bug
def manifest_gap() -> Iterable[Patch]:
    """A region manifest is written one version too high."""

    def commit(self: Any, manifest: Any) -> bool:
        skipped = manifest.next()
        self._store.put_if_absent(self.path(skipped.version), encode_region_manifest(skipped))
        self._store.put(f"{self.folder}/{regions.HINT}", encode_version_hint(skipped.version))
        return True

    yield Patch(RegionManifestStore, "commit", commit)


@bug
def another_table_in_the_place() -> Iterable[Patch]:
    """The collector never asks whether it is still the table that it planned on; manifests are not judged again."""
    real = RegionView.revalidate

    def revalidate(self: Any, item: Any) -> Any:
        return item if item.kind is CandidateKind.REGION_MANIFEST else real(self, item)

    yield Patch(collector, "delete_proven", lambda store, paths, _: store.delete_many(paths))
    yield Patch(CurrentEvidence, "check", lambda _: None)
    yield Patch(RegionView, "revalidate", revalidate)
    yield Patch(gc_evidence, "require_complete", lambda _: None)


# -- running


class NeverExecutedError(Exception):
    """A patch that the product did not call: it patches nothing any more."""


def tell(planted: Bug, seed: int, folder: str, kind: type[History] = History) -> tuple[str | None, Counter[str]]:
    """What told the bug in one history, None: nothing; and how often its patches were called.

    Only a broken invariant counts, of the witness or of the product itself: a patch that merely
    crashes proves nothing.
    """
    with planted.planted() as calls:
        try:
            kind(seed, f"{folder}/{seed}").run()
        except (AssertionError, InvariantViolatedError) as error:
            return " ".join(str(error).splitlines()[:2]) or type(error).__name__, calls
        except Exception:
            return None, calls
    return None, calls


def hunt(planted: Bug, seeds: Iterable[int], kind: type[History] = History) -> list[tuple[int, str]]:
    """The first history that tells a bug, with what told it; empty: none does.

    Raises:
        NeverExecutedError: none of the histories came by one of its patches.
    """
    calls: Counter[str] = Counter()
    found: list[tuple[int, str]] = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            told, called = tell(planted, seed, folder, kind)
        calls.update(called)
        if told is not None:
            found.append((seed, told))
            break
    unused = [name for name, number in calls.items() if not number]
    if unused:
        raise NeverExecutedError(f"{planted.name}: the product never called {', '.join(unused)}.")
    return found


def _hunt_by_name(name: str) -> list[tuple[int, str]]:
    """The first history that tells it, and another one if there is one close behind."""
    found = hunt(BUGS[name], range(1, LIMIT + 1))
    if found:
        found += hunt(BUGS[name], range(found[0][0] + 1, found[0][0] + 1 + _CLOSE))
    return found


def _row(name: str, histories: list[tuple[int, str]]) -> str:
    seed, told = histories[0] if histories else ("NOT FOUND", "")
    words = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|[01]{64}", "...", told).replace("|", "/")
    return f"| {name}: {BUGS[name].told} | {seed} | {words[:_SHOWN]} |\n"


def main() -> None:
    """Hunt all bugs, or those that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="BUG")
    parser.add_argument("--write", action="store_true", help="write the table and the seeds for CI")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.names or list(BUGS)
    known: dict[str, list[tuple[int, str]]] = {}
    if FOUND.exists():
        known = {name: [(seed, told) for seed, told in one] for name, one in json.loads(FOUND.read_text()).items()}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(_hunt_by_name, name): name for name in names}
        for done in as_completed(waiting):
            known[waiting[done]] = done.result()
            sys.stdout.write(_row(waiting[done], done.result()))
            sys.stdout.flush()
            if options.write:
                _write({name: known[name] for name in BUGS if name in known})


def _write(found: dict[str, list[tuple[int, str]]]) -> None:
    FOUND.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    readme = _PLACE / "README.md"
    table = "| planted bug | found in history | what told it |\n|---|---|---|\n"
    table += "".join(_row(name, histories) for name, histories in found.items())
    text = re.sub(r"\| planted bug \|.*?\n(?=[^|]|\Z)", lambda _: table, readme.read_text(), count=1, flags=re.DOTALL)
    readme.write_text(text)


if __name__ == "__main__":
    main()
