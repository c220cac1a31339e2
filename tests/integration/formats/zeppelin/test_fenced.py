"""A server takes a native namespace from us in the middle of a run: nothing is published, nothing deleted."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memwal_ops import run_job
from memwal_ops.core.context import RunContext
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.zeppelin.jobs import gc, merge
from memwal_ops.formats.zeppelin.specs import ZeppelinGcOptions
from memwal_ops.formats.zeppelin.writer import Writer
from tests.support.overtaken import Overtaken
from tests.support.stores import Beside
from tests.support.zeppelin.merging import FAST, expire, opened
from tests.support.zeppelin.namespace import NamespaceUnderTest
from tests.support.zeppelin.server import edit, fence

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.zeppelin.namespace import Namespace

NOW = ZeppelinGcOptions(reader_grace=timedelta(0), orphan_min_age=timedelta(0), keep_revisions=1, allow_unsafe=True)
JOBS: dict[str, Callable[[Namespace], object]] = {
    "append": lambda table: Writer(table).append([{"id": "late", "values": [1, 2, 3, 4]}]),
    "merge": lambda table: merge.apply(table, FAST),
    "gc": lambda table: gc.apply(table, NOW, RunContext()),
}


def upgrade(uri: str) -> bytes:
    """A server of a later release binds the manifest to branches that we do not read."""
    edit(uri, lambda found: found.update(manifest_binding_version="v3_roots"))
    return Path(uri, "manifest.json").read_bytes()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [fence, upgrade])
@pytest.mark.parametrize("name", JOBS)
def test_a_server_comes_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: Callable[[str], bytes]
) -> None:
    """At every write of the run; once the fence is in the manifest, that manifest stays."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    for _ in range(2):
        made.write()
        run_job(made.uri, "merge", FAST)
    made.write()
    expire(made)
    whole = made.uri
    refused = 0
    for at in range(1, 16):
        made.uri = str(tmp_path / str(at) / "ns")
        shutil.copytree(whole, made.uri)
        after: list[bytes] = []
        table = opened(made)
        store: Any = Overtaken(table.store, at, lambda after=after: after.append(how(made.uri)), writes=True)
        try:
            JOBS[name](replace(table, store=store))
        except UnsupportedFeatureError:
            refused += 1
        if not after:
            break
        assert Path(made.uri, "manifest.json").read_bytes() == after[0], at
        read = made.read()
        read.pop("late", None)  # published before
        assert read == made.expected(), at
        with pytest.raises(UnsupportedFeatureError):
            JOBS[name](opened(made))
    assert refused


@pytest.mark.parametrize("how", [fence, upgrade])
def test_nothing_is_collected_behind_a_server(tmp_path: Path, how: Callable[[str], bytes]) -> None:
    """It comes while gc lists the objects: what its branches need, we do not know."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    for _ in range(2):
        made.write()
        run_job(made.uri, "merge", FAST)
    table, log = opened(made), Path(made.uri, "wal")
    before = {*log.iterdir()}
    store: Any = Beside(table.store, "list", lambda path: not path, lambda: how(made.uri))
    with pytest.raises(UnsupportedFeatureError):
        gc.apply(replace(table, store=store), NOW, RunContext())
    assert store.happened
    assert {*log.iterdir()} == before
    assert made.read() == made.expected()


@pytest.mark.parametrize("retrain", [False, True])
def test_hierarchical_segments_are_not_read_as_flat_ones(tmp_path: Path, retrain: bool) -> None:
    """A server made a tree of the segment; whoever reads it as flat clusters publishes a part of its rows."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "native")
    made.write()
    run_job(made.uri, "merge", FAST)
    made.put("late")
    edit(made.uri, lambda found: found["segments"][0].update(hierarchical=True))
    before = opened(made).manifest
    with pytest.raises(UnsupportedFeatureError, match="hierarchical"):
        run_job(made.uri, "merge", replace(FAST, retrain=retrain))
    after = opened(made).manifest
    assert (after.fragments, after.segments) == (before.fragments, before.segments)
    edit(made.uri, lambda found: found.update(hierarchical_routing_nodes={after.segments[0].id: ["n0"]}))
    for job in ("merge", "gc"):
        with pytest.raises(UnsupportedFeatureError, match="hierarchical routing nodes"):
            run_job(made.uri, job)
