"""Random histories lose nothing; and each fault that real systems had, planted, is found by them."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops import open_table
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.zeppelin import compaction, publish
from memwal_ops.formats.zeppelin.jobs import gc, merge
from memwal_ops.formats.zeppelin.options import MergeOptions
from memwal_ops.formats.zeppelin.wire.manifest import Manifest
from memwal_ops.storage.local import LocalObjectStore
from memwal_ops.storage.locked_folder import LockedFolder
from tests.campaigns.zeppelin.histories import run_history
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.stores import Beside
from tests.support.zeppelin.merging import expire
from tests.support.zeppelin.namespace import NamespaceUnderTest

HISTORIES = env_number("ZEPPELIN_HISTORIES", 8)
FIRST = CAMPAIGN_SEED * 1000
DIALECTS = ("wiki", "native")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
@pytest.mark.req("S4-035", "S4-041", "S4-043", "S4-047")
def test_nothing_is_lost(tmp_path: Path, seed: int, dialect: str) -> None:
    run_history(tmp_path, seed, dialect)


def no_compare(patch: pytest.MonkeyPatch) -> None:
    """1, 10, 11: the manifest is overwritten without a condition."""

    def swap(self: LockedFolder, path: str, data: bytes, e_tag: str) -> bool:
        del e_tag
        LocalObjectStore.put(self, path, data)
        return True

    patch.setattr(LockedFolder, "compare_and_swap", swap)


def deletes_at_once(patch: pytest.MonkeyPatch) -> None:
    """2: what a compaction took off is deleted right after the swap."""
    commit = merge._Run._commit

    def committed(self: Any, inputs: Any, built: Any) -> Any:
        table = commit(self, inputs, built)
        table.store.delete_many([one.key for one in inputs.fragments])
        return table

    patch.setattr(merge._Run, "_commit", committed)


def forgets_tokens(patch: pytest.MonkeyPatch) -> None:
    """5: a zombie's commit is not fenced, nor are its inputs asked for again."""

    def commit(self: Any, inputs: Any, built: Any) -> Any:
        read = {one.id for one in inputs.fragments}

        def change(table: Any) -> Any:
            rest = [one for one in table.manifest.fragments if one.id not in read]
            segments = [] if built.segment is None else [built.segment]
            return table.manifest.changed(fragments=rest, segments=segments)

        return publish.retried(inputs.table.newest(), change, compaction=True)

    patch.setattr(merge._Run, "_commit", commit)


def clears_by_watermark(patch: pytest.MonkeyPatch) -> None:
    """7: a commit clears what is not above the last ULID that was read, instead of what was read."""
    changed = Manifest.changed

    def lost(self: Manifest, **parts: Any) -> Manifest:
        if parts.get("segments") is not None and parts.get("fragments"):
            parts["fragments"] = []
        return changed(self, **parts)

    patch.setattr(Manifest, "changed", lost)


def forgets_history(patch: pytest.MonkeyPatch) -> None:
    """9: only the live manifest counts as a root."""
    read = gc.read_roots

    def live_only(table: Any, *more: Any) -> Any:
        found = read(table, *more)
        live = table.newest().manifest
        fragments, prefixes = dict.fromkeys(live.fragment_keys, "live"), dict.fromkeys(live.prefixes, "live")
        return replace(found, fragments=fragments, prefixes=prefixes)

    patch.setattr(gc, "read_roots", live_only)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """9, 14: orphans of a sleeping compactor go without a token above its own."""
    patch.setattr(gc, "_fence", lambda table, judge: table)


def collects_at_once(patch: pytest.MonkeyPatch) -> None:
    """9: orphans need neither an earlier run nor an age."""
    from memwal_ops.core.candidates import Gate

    patch.setattr(gc.Judge, "_noted", lambda *_: Gate(met=True, text="planted"))
    patch.setattr(gc.Judge, "_made", lambda *_: Gate(met=True, text="planted"))
    patch.setattr(gc, "_fence", lambda table, judge: table)


def claims_late(patch: pytest.MonkeyPatch) -> None:
    """The lost F5: the token goes into the manifest only with the commit, and need not be ours but not above it."""
    patch.setattr(merge, "claim", lambda table, lease: table)
    changed = Manifest.changed

    def commit(self: Any, inputs: Any, built: Any) -> Any:
        read = {one.id for one in inputs.fragments}

        def change(table: Any) -> Any:
            if table.manifest.token > self.lease.token:
                raise publish.FencedError("planted")
            rest = [one for one in table.manifest.fragments if one.id not in read]
            segments = [] if built.segment is None else [built.segment]
            return changed(table.manifest, fragments=rest, segments=segments, token=self.lease.token)

        return publish.retried(inputs.table.newest(), change, compaction=True)

    patch.setattr(merge._Run, "_commit", commit)


def upserts_before_deletes(patch: pytest.MonkeyPatch) -> None:
    """Order: the log is read backwards."""
    read = compaction.read_fragments
    patch.setattr(compaction, "read_fragments", lambda table, refs, *more: read(table, [*reversed(refs)], *more))


def keeps_deleted(patch: pytest.MonkeyPatch) -> None:
    """Deletes of the log do not reach the segment."""
    patch.setattr(compaction.Inputs, "superseded", property(lambda self: frozenset(self.rows.ids)))


def two_compactors(folder: Path) -> set[str]:
    """A (1) has the lease and sleeps; B (2) reads F1 to F4; F5 comes; A wakes, and ends; B commits. What is lost."""
    made = NamespaceUnderTest(str(folder / "ns"))
    for name in "1234":
        made.put(name)
    asleep, wake = threading.Event(), threading.Event()
    options = MergeOptions(lease_ttl=timedelta(minutes=5))

    def sleep() -> None:
        asleep.set()
        assert wake.wait(60)

    def compact(hooked: Any) -> None:
        table: Any = open_table(made.uri)
        with suppress(MemwalOpsError):
            merge.apply(replace(table, store=hooked(table.store)), options)

    def leased(path: str) -> bool:
        return path == "manifest.json" and Path(made.uri, "lease.json").exists()

    first = threading.Thread(target=compact, args=(lambda store: Beside(store, "get_with_tag", leased, sleep),))
    first.start()
    assert asleep.wait(60)
    expire(made)

    def meanwhile() -> None:
        made.put("5")
        wake.set()
        first.join(60)

    compact(lambda store: Beside(store, "compare_and_swap", lambda path, data, _: b"seg-" in data, meanwhile))
    assert wake.is_set()
    return {*made.expected()} - {*made.read()}


@pytest.mark.req("S4-026", "S4-042", "S4-044")
def test_the_fragment_that_passes_both_layers_is_not_lost(tmp_path: Path) -> None:
    assert two_compactors(tmp_path) == set()


def test_that_fragment_is_lost_where_the_token_comes_late(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        claims_late(patch)
        assert two_compactors(tmp_path) == {"5"}


PLANTED = [
    no_compare, deletes_at_once, forgets_tokens, clears_by_watermark, forgets_history, no_fence, collects_at_once,
    upserts_before_deletes, keeps_deleted,
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTED, ids=lambda one: one.__name__)
def test_a_planted_fault_is_found(tmp_path: Path, plant: Any) -> None:
    """Within some hundred histories; most within a few."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(300):
            for dialect in DIALECTS:
                try:
                    run_history(tmp_path, seed, dialect)
                except Exception:
                    return
    pytest.fail(f"{plant.__name__} was not found")
