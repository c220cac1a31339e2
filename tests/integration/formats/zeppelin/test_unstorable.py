"""Values that no segment can store: their fragment blocks the log with the reason, and is corrected in its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import xxhash

from memwal_ops import open_table, run_job
from memwal_ops.errors import InvalidUsageError
from memwal_ops.formats import zeppelin
from tests.support.run_cli import contents
from tests.support.zeppelin import independent
from tests.support.zeppelin.merging import FAST
from tests.support.zeppelin.namespace import NamespaceUnderTest
from tests.support.zeppelin.server import append, ulid

VALUES = [1.0, 0.0, 0.0, 0.0]
SURROGATE = "a\ud800"


def fragment_of(made: NamespaceUnderTest, vectors: list[dict[str, Any]]) -> str:
    """Another program's fragment, last in the log: as it would write it, with a checksum that is right."""
    rows = [{"attributes": {}, "values": VALUES, **one} for one in vectors]
    if made.dialect == "native":
        name, packed = ulid(), [[row["id"], row["values"], row["attributes"]] for row in rows]
        checksum = independent.native_checksum(packed, [])
        data = b"\x01" + msgpack.packb([name, packed, [], checksum], use_single_float=True)
        append(made.uri, name, data, len(rows), 0)
        return name
    name = zeppelin.open_writer(made.uri).append([{"id": f"x{at}", "values": VALUES} for at in range(len(vectors))])
    body = json.dumps({"deletes": [], "vectors": rows}, sort_keys=True, separators=(",", ":"))
    body = body.replace("Infinity", "1e999").replace('"second"', '"first"').replace('"long"', "9" * 5000)
    body = body.replace('"deep"', "[" * 5000 + "]" * 5000)
    document = f'{{"id":"{name}","checksum":{xxhash.xxh64_intdigest(body.encode())},' + body[1:]
    Path(made.uri, "wal", f"{name}.fragment.json").write_text(document)
    return name


WIKI: dict[str, dict[str, Any]] = {
    "id": {"id": SURROGATE},
    "key": {"id": "x", "attributes": {SURROGATE: 1}},
    "text": {"id": "x", "attributes": {"a": ["b", SURROGATE]}},
    "number": {"id": "x", "attributes": {"a": {"b": [float("inf")]}}},
    "depth": {"id": "x", "attributes": {"a": json.loads("[" * 200 + "]" * 200)}},
}
# Of other programs alone: the writer has no such members, and reads no text.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "member": ({"id": "x", "text": "important"}, "'text'"),
    "twice": ({"id": "x", "attributes": {"first": 1, "second": 2}}, "'first' is twice"),
    "long": ({"id": "x", "attributes": {"a": "long"}}, "integer too long"),
    "deep": ({"id": "x", "attributes": {"a": "deep"}}, "too deep"),
}
NATIVE: dict[str, dict[str, Any]] = {
    "null": {"id": "x", "attributes": {"a": None}},
    "booleans": {"id": "x", "attributes": {"a": [True, False]}},
    "mixed": {"id": "x", "attributes": {"a": [1, "x"]}},
    "map": {"id": "x", "attributes": {"a": {"b": 1}}},
    "large": {"id": "x", "attributes": {"a": 2**64 - 1}},
}
CASES = [*(("wiki", name, one) for name, one in WIKI.items()), *(("native", name, one) for name, one in NATIVE.items())]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("dialect", "name", "row"), CASES, ids=[f"{one[0]}-{one[1]}" for one in CASES])
def test_what_precedes_is_compacted_and_the_reason_is_named(
    tmp_path: Path, dialect: str, name: str, row: dict[str, Any]
) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), dialect)
    made.write()
    before = made.expected()
    bad = fragment_of(made, [row, {"id": "y"}])
    made.put("z")
    found = run_job(made.uri, "verify").to_json()["findings"]
    assert any(bad in one["place"] and "cannot" in one["evidence"] for one in found), (name, found)
    report = run_job(made.uri, "merge", FAST)
    assert report.exit_code == 10
    (blocked,) = report.to_json()["blocked"]
    assert blocked["fragment"] == bad
    assert "id" in blocked["detail"] if name == "id" else "attribute" in blocked["detail"]
    assert "intact" in report.describe()
    assert open_table(made.uri).manifest.fragments[0].id == bad
    assert {one["id"] for one in zeppelin.query(made.uri, vector=VALUES, k=99, consistency="eventual")} == before.keys()
    corrected = [{"id": "x", "values": VALUES, "attributes": {"a": "corrected"}}, {"id": "y", "values": VALUES}]
    assert zeppelin.replace_fragment(made.uri, bad, vectors=corrected) != bad
    made.model |= {one["id"]: (tuple(one["values"]), one.get("attributes", {})) for one in corrected}  # type: ignore[arg-type]
    assert made.read() == made.expected(), "in its place: z was written later"
    assert run_job(made.uri, "merge", FAST).decision == "merged"
    assert made.read() == made.expected()
    assert run_job(made.uri, "verify").decision == "healthy"


@pytest.mark.parametrize(("dialect", "name", "row"), CASES, ids=[f"{one[0]}-{one[1]}" for one in CASES])
def test_the_writer_refuses_what_cannot_be_stored(tmp_path: Path, dialect: str, name: str, row: dict[str, Any]) -> None:
    del name
    made = NamespaceUnderTest(str(tmp_path / "ns"), dialect)
    made.write()
    before = contents(made.uri)
    with pytest.raises(InvalidUsageError, match="cannot"):
        zeppelin.open_writer(made.uri).append([{**row, "values": VALUES}])
    for numbers in ({"a": float("nan")}, {"a": [1.0, float("-inf")]}):
        with pytest.raises(InvalidUsageError, match="cannot"):
            zeppelin.open_writer(made.uri).append([{"id": "x", "values": VALUES, "attributes": numbers}])
    with pytest.raises(InvalidUsageError, match="number"):
        zeppelin.open_writer(made.uri).append([{"id": "x", "values": [10**400, 0, 0, 0]}])
    with pytest.raises(InvalidUsageError, match="surrogate"):
        zeppelin.open_writer(made.uri).append(deletes=[SURROGATE])
    assert contents(made.uri) == before


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_segment_would_lose_blocks_the_log(tmp_path: Path, name: str) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "wiki")
    row, why = OTHERS[name]
    bad = fragment_of(made, [row])
    path = Path(made.uri, "wal", f"{bad}.fragment.json")
    (blocked,) = run_job(made.uri, "merge", FAST).to_json()["blocked"]
    assert (blocked["fragment"], blocked["reason"]) == (bad, "fragment_corrupt")
    assert why in blocked["detail"], blocked
    assert "intact" in blocked["remedy"]
    # It says so of an object whose checksum is right alone.
    text = path.read_text()
    path.write_text(text.replace('"x"', '"y"'))
    (blocked,) = run_job(made.uri, "merge", FAST).to_json()["blocked"]
    assert "intact" not in blocked["remedy"], blocked


def test_a_member_of_the_fragment_that_is_not_in_the_document_blocks_the_log(tmp_path: Path) -> None:
    made = NamespaceUnderTest(str(tmp_path / "ns"), "wiki")
    bad = fragment_of(made, [{"id": "x"}])
    path = Path(made.uri, "wal", f"{bad}.fragment.json")
    path.write_text('{"sparse":[1],' + path.read_text()[1:])
    (blocked,) = run_job(made.uri, "merge", FAST).to_json()["blocked"]
    assert "'sparse'" in blocked["detail"]


ANY_JSON = {"null": None, "bools": [True, False], "mixed": [1, "x", None], "map": {"b": [{"c": 1}]}, "huge": 10**400}


def test_a_wiki_namespace_has_any_json_value(tmp_path: Path) -> None:
    """The document does not limit attributes: they are kept as they are, also where no bitmap can have them."""
    made = NamespaceUnderTest(str(tmp_path / "ns"), "wiki")
    made.write()
    fragment_of(made, [{"id": "any", "attributes": ANY_JSON}])
    made.model["any"] = ((1.0, 0.0, 0.0, 0.0), ANY_JSON)
    report = run_job(made.uri, "merge", replace(FAST, bitmap_field=(*ANY_JSON, "color")))
    assert report.decision == "merged", report.describe()
    assert made.read() == made.expected()
    assert run_job(made.uri, "verify", deep=True).decision == "healthy"
    for wanted in ({"bools": True}, {"huge": 10**400}, {"op": "range", "field": "huge", "gte": 3}):
        assert [one["id"] for one in zeppelin.query(made.uri, vector=VALUES, filter=wanted)] == ["any"]


def test_a_fragment_that_is_not_listed_is_not_replaced(made: NamespaceUnderTest) -> None:
    (first, *_) = open_table(made.uri).manifest.fragments
    run_job(made.uri, "merge", FAST)
    with pytest.raises(InvalidUsageError, match="not list"):
        zeppelin.replace_fragment(made.uri, first.id, deletes=["a"])
    assert made.read() == made.expected()


def attributes_with(made: NamespaceUnderTest, change: Callable[[str], str]) -> None:
    (segment,) = open_table(made.uri).manifest.segments
    path = Path(made.uri, segment.prefix, "attrs_0.bin")
    path.write_text(change(path.read_text()))


def test_segments_with_numbers_that_are_not_json_are_written_again(made: NamespaceUnderTest) -> None:
    """Those of earlier releases: a reader that is strict about JSON cannot read them."""
    made.put("n")
    run_job(made.uri, "merge", FAST)
    made.forget_records()
    attributes_with(made, lambda text: text.replace('"blue"', "NaN").replace('"red"', "Infinity"))
    findings = run_job(made.uri, "verify").to_json()["findings"]
    assert any("NaN" in one["evidence"] and "attrs_0.bin" in one["place"] for one in findings)
    assert run_job(made.uri, "merge", replace(FAST, retrain=True)).decision == "merged"
    (segment,) = open_table(made.uri).manifest.segments
    text = Path(made.uri, segment.prefix, "attrs_0.bin").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert run_job(made.uri, "verify").decision == "healthy"
