"""The writer: a fragment first, then the manifest that lists it; and no fragment is ever written twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memwal_ops import run_job
from memwal_ops.errors import InvariantViolatedError
from memwal_ops.formats.zeppelin.segments import create_object
from memwal_ops.formats.zeppelin.writer import Writer
from memwal_ops.storage.wrapper import StoreWrapper
from tests.support.dying_store import DyingStore, Killed
from tests.support.zeppelin.independent import Reader, fragment
from tests.support.zeppelin.merging import FAST, opened
from tests.support.zeppelin.namespace import NamespaceUnderTest

ROW = {"id": "new", "values": [1.0, 2.0, 3.0, 4.0]}


class Writes(StoreWrapper):
    """Notes what is written, and how."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self.seen: list[tuple[str, str]] = []

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        if verb in {"put", "put_if_absent", "compare_and_swap", "delete_many"}:
            self.seen.append((verb, str(arguments[0])))
        return method(*arguments, **named)


def fragments(made: NamespaceUnderTest) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in Path(made.uri, "wal").iterdir()}


@pytest.mark.req("S4-001", "S4-007")
def test_each_write_goes_through_the_log(made: NamespaceUnderTest) -> None:
    """An upsert and a delete create one fragment each, then swap the manifest; segments are a compaction's alone."""
    run_job(made.uri, "merge", FAST)
    for write in ({"vectors": [ROW]}, {"deletes": ["b"]}):
        table = opened(made)
        store = Writes(table.store)
        name = Writer(replace(table, store=store)).append(**write)
        wal = f"wal/{name}.wal" if made.dialect == "native" else f"wal/{name}.fragment.json"
        kept = [one for one in store.seen if not one[1].startswith(("manifests/", "_mem_wal_ops/history/"))]
        assert kept == [("put_if_absent", wal), ("compare_and_swap", "manifest.json")]
        after = opened(made).manifest
        assert after.segments == table.manifest.segments
        assert [one.key for one in after.fragments] == [*(one.key for one in table.manifest.fragments), wal]
        upserts, deletes = fragment(Path(made.uri, wal).read_bytes())
        assert ([row[0] for row in upserts], deletes) == (
            [one["id"] for one in write.get("vectors", [])],
            write.get("deletes", []),
        )
    expected = {**made.expected(), "new": (tuple(ROW["values"]), {})}
    del expected["b"]
    assert made.read() == expected
    assert "new" not in Reader(made.uri).read_base()
    run_job(made.uri, "merge", FAST)
    assert Reader(made.uri).read_base() == expected


@pytest.mark.req("S4-007", "S4-021")
@pytest.mark.parametrize("after", [False, True])
def test_a_fragment_that_no_manifest_lists_is_not_read(made: NamespaceUnderTest, after: bool) -> None:
    """Killed at each call: all of the write is visible, or nothing."""
    seen = set()
    for at in range(1, 20):
        table = opened(made)
        store = DyingStore(table.store, at, after=after)
        before = made.read()
        try:
            Writer(replace(table, store=store)).append([{**ROW, "id": f"new{at}"}])
        except Killed:
            read = made.read()
            assert {name: row for name, row in read.items() if name != f"new{at}"} == before
            seen.add(f"new{at}" in read)
        else:
            break
    assert made.read().keys() == {*before, f"new{at}"}
    assert False in seen


@pytest.mark.req("S4-002")
def test_fragments_are_immutable(made: NamespaceUnderTest) -> None:
    """Neither a writer nor a job writes an existing fragment; a name that is taken is refused."""
    first = fragments(made)
    assert first
    made.write()
    for job in ("merge", "verify", "gc"):
        run_job(made.uri, job)
        assert {name: fragments(made).get(name) for name in first} == first
    name = min(first)
    with pytest.raises(InvariantViolatedError, match="other content"):
        create_object(opened(made).store, f"wal/{name}", b"other")
    assert fragments(made)[name] == first[name]
    for data, _ in first.values():
        if made.dialect == "wiki":
            assert json.loads(data).keys() == {"id", "namespace", "vectors", "deletes", "checksum", "created_at"}
