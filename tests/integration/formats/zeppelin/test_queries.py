"""What queries find: in the log, in the segment, in a namespace that a script wrote."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats import zeppelin
from memwal_ops.formats.zeppelin.jobs import merge
from tests.support.overtaken import Overtaken
from tests.support.run_cli import contents
from tests.support.stores import Beside
from tests.support.zeppelin import independent
from tests.support.zeppelin.merging import FAST
from tests.support.zeppelin.namespace import NamespaceUnderTest

BAD_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"k": 2.5}, {"k": "3"}, {"k": True}, {"k": 0}, {"nprobe": None}, {"vector": "ab"}, {"vector": [1, None]},
    {"vector": [[1, 2]]}, {"vector": [1e39, 0]}, {"vector": None, "text": 3, "field": "t"},
    {"vector": None, "text": "a", "field": 3}, {"consistency": "x"}, {"filter": []}, {"filter": "price"},
    {"filter": {"op": "range", "field": "price", "gte": "3"}},
)  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_arguments_of_other_types_are_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "ns")
    zeppelin.create(uri, dimensions=2)
    zeppelin.open_writer(uri).append([{"id": "a", "values": [1, 2], "attributes": {"price": 3}}])
    for more in BAD_ARGUMENTS:
        with pytest.raises(InvalidUsageError):
            zeppelin.query(uri, **{"vector": [1, 2], **more})


CREATED = "2026-01-15T10:00:00Z"


@pytest.mark.req("S4-008")
def test_queries_see_the_log(made: NamespaceUnderTest) -> None:
    def found(**more: Any) -> dict[str, tuple[float, ...]]:
        return {one["id"]: one["distance"] for one in zeppelin.query(made.uri, vector=[1, 1, 0, 0], k=99, **more)}

    strong = found()
    assert strong.keys() == made.expected().keys()
    assert found(consistency="eventual") == {}
    run_job(made.uri, "merge")
    assert found() == found(consistency="eventual") == pytest.approx(strong)
    made.put("b", "z", deletes=("e",))
    assert found().keys() == made.expected().keys()
    assert "z" not in found(consistency="eventual")
    red = zeppelin.query(made.uri, vector=[1, 1, 0, 0], k=99, filter={"color": "red"})
    assert {one["id"] for one in red} == {name for name, row in made.expected().items() if row[1].get("color") == "red"}
    for values, more in made.expected().values():
        best = zeppelin.query(made.uri, vector=values, k=1)[0]
        assert best["distance"] < 1e-5
        assert best["attributes"] == more


def test_distances(tmp_path: Path) -> None:
    expected = {"cosine": [0.0, 1.0, 2.0], "euclidean": [1.0, 5.0, 9.0], "dot_product": [-2.0, 0.0, 1.0]}
    for metric, distances in expected.items():
        uri = str(tmp_path / metric)
        zeppelin.create(uri, dimensions=2, metric=metric)
        rows = [("x", [2, 0]), ("y", [0, 2]), ("z", [-2 if metric == "euclidean" else -1, 0])]
        zeppelin.open_writer(uri).append([{"id": name, "values": values} for name, values in rows])
        for _ in range(2):
            found = zeppelin.query(uri, vector=[1, 0])
            assert [one["id"] for one in found] == ["x", "y", "z"]
            assert [one["distance"] for one in found] == pytest.approx(distances)
            run_job(uri, "merge")


FAR: dict[str, list[float]] = {
    "short": [1e-4, 0.0], "shorter": [0.0, 1e-30], "against": [-1e-4, 0.0], "long": [1e20, 1e20],
    "longest": [3e38, -3e38], "one": [1.0, 0.0],
}  # fmt: skip


@pytest.mark.parametrize("metric", ["cosine", "euclidean", "dot_product"])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_distances_of_very_short_and_very_long_vectors(tmp_path: Path, metric: str) -> None:
    """Squares of single-precision numbers overflow above 1e19, and vanish below 1e-23."""

    def expected(values: list[float], wanted: list[float]) -> float:
        one, other = ([float(np.float32(value)) for value in vector] for vector in (values, wanted))
        if metric == "euclidean":
            return math.dist(one, other) ** 2
        dot = sum(a * b for a, b in zip(one, other, strict=True))
        return -dot if metric == "dot_product" else 1 - dot / math.hypot(*one) / math.hypot(*other)

    uri = str(tmp_path / "ns")
    zeppelin.create(uri, dimensions=2, metric=metric)
    zeppelin.open_writer(uri).append([{"id": name, "values": values} for name, values in FAR.items()])
    for _ in range(2):
        for wanted in ([1e-4, 0.0], [1e20, 0.0], [1e-30, 1e-30], [2.0, 1.0]):
            found = {one["id"]: one["distance"] for one in zeppelin.query(uri, vector=wanted, k=9)}
            right = {name: expected(values, wanted) for name, values in FAR.items()}
            assert found == pytest.approx(right, rel=1e-9, abs=1e-15)
            assert [*found.values()] == sorted(found.values())
        run_job(uri, "merge", clusters=2)
    assert run_job(uri, "verify", deep=True).decision == "healthy"


def test_text_queries(tmp_path: Path) -> None:
    uri = str(tmp_path / "ns")
    zeppelin.create(uri, dimensions=1)
    texts = ["red car", "red red wine", "blue sky", "a red house with many other words in it"]
    rows = [{"id": str(at), "values": [at + 1], "attributes": {"t": one}} for at, one in enumerate(texts)]
    zeppelin.open_writer(uri).append(rows)
    before = zeppelin.query(uri, text="red", field="t")
    assert [one["id"] for one in before] == ["1", "0", "3"]
    run_job(uri, "merge", fts_field=("t",), clusters=3)
    assert opened_fields(uri) == ("t",)
    after = zeppelin.query(uri, text="red", field="t")
    assert [one["id"] for one in after] == ["1", "0", "3"]
    assert [one["distance"] for one in after] == pytest.approx([one["distance"] for one in before])
    assert zeppelin.query(uri, text="green", field="t") == []


def opened_fields(uri: str) -> tuple[str, ...]:
    found: Any = open_table(uri)
    fields: tuple[str, ...] = found.manifest.segments[0].fts_fields
    return fields


def test_within_a_fragment_deletes_apply_first_and_the_later_upsert_wins(tmp_path: Path) -> None:
    made = Script(tmp_path / "ns")
    made.fragment([("a", [1, 0]), ("b", [2, 0]), ("a", [3, 0])], ["b", "z"])
    assert made.read() == {"a": ((3.0, 0.0), {}), "b": ((2.0, 0.0), {})}
    assert run_job(made.uri, "merge", metric="euclidean").decision == "merged"
    assert made.read() == {"a": ((3.0, 0.0), {}), "b": ((2.0, 0.0), {})}


class Script:
    """A namespace that a script after the document wrote: no meta.json, no history, its own checksums and order."""

    def __init__(self, path: Path) -> None:
        self.path, self.uri, self.number = path, str(path), 0
        path.mkdir()
        self.write({"fragments": [], "segments": [], "pending_deletes": [], "fencing_token": 42, "updated_at": "x"})

    def write(self, manifest: dict[str, Any]) -> None:
        (self.path / "manifest.json").write_text(json.dumps(manifest))

    @property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "manifest.json").read_text())
        return found

    def fragment(self, vectors: list[Any], deletes: list[str], name: str | None = None) -> str:
        self.number += 1
        name = name or f"01HXYZ{self.number:020}"
        rows = [{"id": one[0], "values": one[1], "attributes": one[2] if len(one) > 2 else {}} for one in vectors]
        body = json.dumps({"deletes": deletes, "vectors": rows}, sort_keys=True, separators=(",", ":"))
        document = {"id": name, "namespace": self.path.name, "vectors": rows, "deletes": deletes,
                    "checksum": xxhash.xxh64_intdigest(body.encode()), "created_at": CREATED}  # fmt: skip
        key = f"{self.path.name}/wal/{name}.fragment.json"
        (self.path / "wal").mkdir(exist_ok=True)
        (self.path / "wal" / f"{name}.fragment.json").write_text(json.dumps(document, indent=2))
        manifest = self.manifest
        manifest["fragments"].append({"id": name, "key": key, "vector_count": len(rows), "delete_count": len(deletes),
                                      "created_at": "2026-01-15T10:00:00Z"})  # fmt: skip
        self.write(manifest)
        return name

    def segment(self, name: str, rows: list[Any]) -> None:
        folder = self.path / "segments" / name
        folder.mkdir(parents=True)
        width = len(rows[0][1])
        (folder / "centroids.bin").write_bytes(struct.pack(f"<II{width}f", 1, width, *rows[0][1]))
        packed = b"".join(struct.pack("<I", len(one)) + one.encode() + struct.pack(f"<{width}f", *v) for one, v in rows)
        (folder / "cluster_0.bin").write_bytes(struct.pack("<II", len(rows), width) + packed)
        (folder / "attrs_0.bin").write_text(json.dumps([None] * len(rows)))
        manifest = self.manifest
        manifest["segments"].append({"id": name, "key_prefix": f"{self.path.name}/segments/{name}/",
                                     "vector_count": len(rows), "centroid_count": 1, "created_at": "x",
                                     "quantization": None, "bitmap_fields": [], "fts_fields": []})  # fmt: skip
        self.write(manifest)

    def read(self) -> independent.Rows:
        return independent.Reader(self.uri).read()


@pytest.mark.req("S4-004", "S4-012", "S4-014")
def test_a_scripts_namespace(tmp_path: Path) -> None:
    """Two segments of which the later wins, ids that are excluded, and a log whose order is the manifest's."""
    made = Script(tmp_path / "ns")
    made.segment("seg-1", [("a", [1, 0]), ("b", [2, 0]), ("c", [3, 0])])
    made.segment("seg-2", [("b", [20, 0]), ("d", [4, 0]), ("p", [5, 0]), ("q", [6, 0])])
    made.fragment([("e", [7, 0]), ("q", [60, 0])], ["c"], name="01ZZZZ0000000000000000000A")
    made.fragment([("e", [8, 0])], [], name="01AAAA0000000000000000000A")
    made.write({**made.manifest, "pending_deletes": ["p", "q"]})
    expected = {"a": 1.0, "b": 20.0, "d": 4.0, "e": 8.0}
    found = zeppelin.query(made.uri, vector=[1, 0], k=99, metric="euclidean")
    assert {one["id"] for one in found} == expected.keys()
    report = run_job(made.uri, "merge")
    assert report.decision == "merged"
    assert "cosine" in report.to_json()["warnings"][0], "nothing tells the metric"
    assert {name: row[0][0] for name, row in made.read().items()} == expected
    assert made.manifest["pending_deletes"] == ["q"], "the log writes it, and nothing tells which came later"
    assert made.manifest["fencing_token"] == 43, "above the one that the manifest had"
    assert [one["vector_count"] for one in made.manifest["segments"]] == [4]
    assert [one["vector_count"] for one in made.manifest["fragments"]] == [1]


def contested(made: Script) -> None:
    """Two ids of the log are in ``pending_deletes``; one of them is in a segment, too."""
    made.segment("seg-1", [("a", [1, 0]), ("old", [2, 0]), ("p", [3, 0])])
    made.fragment([("old", [20, 0]), ("new", [4, 0])], [])
    made.fragment([("b", [5, 0]), ("new", [40, 0])], [])
    made.write({**made.manifest, "pending_deletes": ["p", "old", "new"]})


@pytest.mark.req("S4-014")
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_neither_a_pending_delete_nor_a_write_of_the_log_is_dropped(tmp_path: Path, max_bytes: int) -> None:
    made = Script(tmp_path / "ns")
    contested(made)
    assert {one["id"] for one in zeppelin.query(made.uri, vector=[1, 0], k=9, metric="euclidean")} == {"a", "b"}
    options = replace(FAST, metric="euclidean", max_bytes=max_bytes)
    report = run_job(made.uri, "merge", options)
    assert report.decision == "merged"
    assert any("'new'" in one and "2 ids" in one for one in report.to_json()["warnings"])
    assert made.manifest["pending_deletes"] == ["old", "new"]
    assert {*made.read()} == {"a", "b"}
    waiting = open_table(made.uri).summary().backlog
    assert (waiting["fragments"], waiting["oldest_age"]) == (0, 0), "a trigger would start compactions for ever"
    for apply in (True, True, False):  # and nothing is written again and again
        before = contents(made.uri)
        report = run_job(made.uri, "merge", options, apply=apply)
        assert report.decision == ("nothing_to_merge" if apply else "dry_run")
        assert report.fragments == 0
        assert "2 ids are both in pending_deletes and in the log: 'new', 'old'" in " ".join(report.describe().split())
        assert "all fragments are compacted" not in report.describe()
        assert contents(made.uri) == before
    shown = run_job(made.uri, "inspect")
    assert "2 ids are both in pending_deletes and in the log: 'new', 'old'" in " ".join(shown.describe().split())
    assert shown.to_json()["contested"] == 2
    found = {one["check"]: one for one in run_job(made.uri, "verify").to_json()["findings"]}
    assert "'new'" in found["pending_ids"]["evidence"]
    zeppelin.open_writer(made.uri).append(deletes=["old"])
    assert run_job(made.uri, "merge", options).decision == "merged"
    assert made.manifest["pending_deletes"] == ["new"]
    made.write({**made.manifest, "pending_deletes": []})
    assert {name: row[0][0] for name, row in made.read().items()} == {"a": 1.0, "b": 5.0, "new": 40.0}
    assert run_job(made.uri, "merge", options).decision == "merged"
    assert made.manifest["fragments"] == []
    assert {name: row[0][0] for name, row in made.read().items()} == {"a": 1.0, "b": 5.0, "new": 40.0}


@pytest.mark.req("S4-014")
def test_the_first_contested_ids_are_named_and_all_are_counted(tmp_path: Path) -> None:
    made = Script(tmp_path / "ns")
    made.fragment([(f"v{at}", [at, 1]) for at in range(9)], [])
    made.write({**made.manifest, "pending_deletes": [f"v{at}" for at in range(9)]})
    text = "9 ids are both in pending_deletes and in the log: 'v0', 'v1', 'v2', ..."
    for job in ("merge", "inspect", "verify"):
        assert text in " ".join(run_job(made.uri, job).describe().split()), job
    assert made.manifest["fencing_token"] == 42, "no lease is needed to find that there is nothing to do"
    made.fragment([("w", [1, 1])], [])
    assert run_job(made.uri, "merge", FAST).decision == "merged"
    assert {*made.read()} == {"w"}


@pytest.mark.req("S4-014")
def test_a_later_write_of_an_excluded_id_shows_it(tmp_path: Path) -> None:
    made = Script(tmp_path / "ns")
    contested(made)
    zeppelin.open_writer(made.uri).append([{"id": "new", "values": [6.0, 0.0]}, {"id": "p", "values": [7.0, 0.0]}])
    expected = {"a": 1.0, "b": 5.0, "new": 6.0, "p": 7.0}
    assert {name: row[0][0] for name, row in made.read().items()} == expected
    assert run_job(made.uri, "merge", replace(FAST, metric="euclidean")).decision == "merged"
    assert {name: row[0][0] for name, row in made.read().items()} == expected
    assert made.manifest["pending_deletes"] == ["old"]


@pytest.mark.req("S4-014")
def test_entries_that_look_like_keys_are_kept(tmp_path: Path) -> None:
    made = Script(tmp_path / "ns")
    contested(made)
    keys = ["ns/wal/01HXYZ00000000000000000001.fragment.json", "ns/segments/seg-0/centroids.bin"]
    made.write({**made.manifest, "pending_deletes": [*keys, "p"]})
    report = run_job(made.uri, "merge", replace(FAST, metric="euclidean"))
    assert report.decision == "merged"
    assert any(keys[0] in one for one in report.to_json()["warnings"])
    assert made.manifest["pending_deletes"] == keys
    assert run_job(made.uri, "merge", replace(FAST, metric="euclidean")).decision == "nothing_to_merge"
    assert {*made.read()} == {"a", "b", "old", "new"}


@pytest.mark.req("S4-014")
def test_a_delete_is_not_dropped_for_a_write_that_a_pass_has_not_read(tmp_path: Path) -> None:
    """The id is in a segment and, beyond the pass, in the log: the entry hides both."""
    made = Script(tmp_path / "ns")
    made.segment("seg-1", [("a", [1, 0]), ("p", [3, 0])])
    made.fragment([("b", [5, 0])], [])
    table: Any = open_table(made.uri)

    def late() -> None:
        made.fragment([("p", [30, 0])], [])

    made.write({**made.manifest, "pending_deletes": ["p"]})
    store = Beside(
        table.store, "compare_and_swap", lambda path, data, *_: b"seg-" in data and b"seg-1" not in data, late
    )
    report = merge.apply(replace(open_table(made.uri), store=store), replace(FAST, metric="euclidean"))
    assert store.happened
    assert report.decision == "merged"
    assert {*made.read()} == {"a", "b"}


@pytest.mark.req("S4-014")
def test_ids_that_are_hidden_while_a_compaction_runs_stay_hidden(tmp_path: Path) -> None:
    made = Script(tmp_path / "ns")
    made.segment("seg-1", [("a", [1, 0]), ("b", [2, 0])])
    made.fragment([("c", [3, 0])], [])

    def hide() -> None:
        made.write({**made.manifest, "pending_deletes": ["b"]})

    table: Any = open_table(made.uri)
    store = Overtaken(table.store, 6, hide, writes=True)
    report = merge.apply(replace(table, store=store), FAST)
    assert report.decision == "merged"
    assert {*made.read()} == {"a", "c"}
