"""Bytes of both dialects, beside a decoder that was written from the facts."""

from __future__ import annotations

import copy
import json
import struct
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from memwal_ops.errors import InvalidFormatError, UnsupportedFeatureError
from memwal_ops.formats.zeppelin.backlog import written_at
from memwal_ops.formats.zeppelin.lease import decode_lease
from memwal_ops.formats.zeppelin.wire import new_ulid, ulid_time
from memwal_ops.formats.zeppelin.wire.fragment import (
    NATIVE,
    WIKI,
    Fragment,
    decode_fragment,
    double_text,
    encode_fragment,
    single_text,
    vector_texts,
)
from memwal_ops.formats.zeppelin.wire.manifest import FragmentRef, decode_manifest, encode_manifest, new_manifest
from memwal_ops.formats.zeppelin.wire.segment import (
    ScalarQuantizer,
    decode_bitmaps,
    decode_centroids,
    decode_cluster,
    decode_grouped,
    encode_attributes,
    encode_bitmaps,
    encode_centroids,
    encode_cluster,
    encode_text_index,
)
from tests.support.zeppelin import independent

if TYPE_CHECKING:
    from collections.abc import Iterator

SINGLES = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCALARS = st.one_of(
    st.text(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)
)
ATTRIBUTES = st.one_of(st.none(), st.dictionaries(st.text(), st.one_of(SCALARS, st.lists(st.text())), max_size=3))


@st.composite
def fragments(draw: st.DrawFn) -> Fragment:
    width = draw(st.integers(1, 3))
    rows = draw(st.lists(st.tuples(st.text(min_size=1), st.lists(SINGLES, min_size=width, max_size=width), ATTRIBUTES)))
    values = np.array([row[1] for row in rows], np.float32).reshape(len(rows), width if rows else 0)
    deletes = draw(st.lists(st.text(min_size=1), max_size=3))
    return Fragment("01ARZ3NDEKTSV4RRFFQ69G5FAV", [row[0] for row in rows], values, [row[2] for row in rows], deletes)


@settings(deadline=None, max_examples=200)
@given(fragments())
@pytest.mark.req("S4-003", "S4-006")
def test_fragments_in_both_dialects(fragment: Fragment) -> None:
    for dialect in (WIKI, NATIVE):
        if dialect == WIKI:
            more = [one or {} for one in fragment.attributes]
            fragment = Fragment(
                fragment.id, fragment.ids, fragment.values, more, fragment.deletes, "ns", "2026-01-15T10:00:00Z"
            )
        data = encode_fragment(fragment, dialect)
        upserts, deletes = independent.fragment(data)
        assert [one[0] for one in upserts] == [*fragment.ids]
        assert [struct.pack("<f", value) for one in upserts for value in one[1]] == [
            struct.pack("<f", value) for value in fragment.values.reshape(-1)
        ]
        assert [one[2] for one in upserts] == [one or {} for one in fragment.attributes]
        assert deletes == [*fragment.deletes]
        found = decode_fragment(data, dialect)
        assert encode_fragment(found, dialect) == data
        assert found.id == fragment.id


@settings(deadline=None, max_examples=500)
@given(st.lists(SINGLES, min_size=1, max_size=20), st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_read_as_serde_writes_them(values: list[float], wide: float) -> None:
    found = vector_texts(np.array([values], np.float32))
    assert found == ["[" + ",".join(independent.single(independent.f32(one)) for one in values) + "]"]
    assert double_text(wide) == independent.double(wide)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1.0"), (1e-7, "1e-7"), (1e-6, "0.000001"), (1e12, "1000000000000.0"), (1e13, "1e+13"), (-0.0, "-0.0"),
     (0.1, "0.1"), (16777216.0, "16777216.0"), (3.4028235e38, "3.4028235e+38"), (1.5e-10, "1.5e-10")],
)  # fmt: skip
def test_notation_of_singles(value: float, text: str) -> None:
    assert single_text(np.float32(value)) == text
    assert vector_texts(np.array([[value]], np.float32)) == [f"[{text}]"]


@pytest.mark.parametrize(
    ("value", "text"), [(1e16, "1e+16"), (1e15, "1000000000000000.0"), (1e-5, "0.00001"), (1e-6, "1e-6")]
)
def test_notation_of_doubles(value: float, text: str) -> None:
    assert double_text(value) == text


def scripted(checksum_of: Any, values: str = "[0.1,1e-05,-2]", **more: Any) -> bytes:
    """What a script after the document writes: pretty, in any order of members."""
    vectors = [{"id": "vec-1", "values": json.loads(values), "attributes": {"color": "rot\u00e9", "n": 1.5e-07}}]
    deletes = ["vec-old-1"]
    document = {
        "id": "01HXYZ0000000000000000000A", "namespace": "ns", "vectors": vectors, "deletes": deletes,
        "checksum": checksum_of(vectors, deletes), "created_at": "2026-01-15T10:00:00Z", **more,
    }  # fmt: skip
    return json.dumps(document, indent=2).encode()


def by_python(vectors: Any, deletes: Any, *, ascii_only: bool = False) -> int:
    text = json.dumps(
        {"deletes": deletes, "vectors": vectors}, sort_keys=True, separators=(",", ":"), ensure_ascii=ascii_only
    )
    return xxhash.xxh64_intdigest(text.encode())


def by_serde(vectors: Any, deletes: Any) -> int:
    text = f'{{"deletes":{independent.canonical(deletes)},"vectors":{independent.canonical(vectors)}}}'
    return xxhash.xxh64_intdigest(text.encode())


def by_singles(vectors: Any, deletes: Any) -> int:
    (one,) = vectors
    values = ",".join(independent.single(independent.f32(value)) for value in one["values"])
    row = f'{{"attributes":{independent.canonical(one["attributes"])},"id":"vec-1","values":[{values}]}}'
    return xxhash.xxh64_intdigest(f'{{"deletes":{independent.canonical(deletes)},"vectors":[{row}]}}'.encode())


def in_its_order(form: str, *, sort_keys: bool = False) -> Any:
    """A checksum in the document's own order, or with both lists joined in another way."""

    def checksum(vectors: Any, deletes: Any) -> int:
        texts = {
            name: json.dumps(value, sort_keys=sort_keys, separators=(",", ":"))
            for name, value in (("vectors", vectors), ("deletes", deletes))
        }
        return xxhash.xxh64_intdigest((form % texts).encode())

    return checksum


@pytest.mark.req("S4-006")
@pytest.mark.parametrize("sort_keys", [True, False])
@pytest.mark.parametrize(
    "form",
    [
        '{"vectors":%(vectors)s,"deletes":%(deletes)s}',
        '{"deletes":%(deletes)s,"vectors":%(vectors)s}',
        "%(vectors)s%(deletes)s",
        "[%(vectors)s,%(deletes)s]",
    ],
)
def test_checksums_in_the_documents_order_pass(form: str, sort_keys: bool) -> None:
    data = scripted(in_its_order(form, sort_keys=sort_keys))
    assert decode_fragment(data, WIKI).ids == ["vec-1"]
    with pytest.raises(InvalidFormatError, match="checksum"):
        decode_fragment(data.replace(b"vec-old-1", b"vec-old-2"), WIKI)


@pytest.mark.req("S4-006")
@pytest.mark.parametrize("checksum", [by_python, by_serde, by_singles], ids=["tokens", "doubles", "singles"])
def test_checksums_of_honest_writers_pass(checksum: Any) -> None:
    found = decode_fragment(scripted(checksum), WIKI)
    assert [*found.ids] == ["vec-1"]
    assert found.values.tolist() == [[independent.f32(0.1), independent.f32(1e-5), -2.0]]
    assert found.attributes == [{"color": "rot\u00e9", "n": 1.5e-07}]


@pytest.mark.req("S4-006")
def test_any_changed_byte_of_the_content_is_found() -> None:
    data = scripted(by_python)
    for old, new in ((b"0.1", b"0.2"), (b'"vec-1"', b'"vec-2"'), (b"vec-old-1", b"vec-old-2"), (b"color", b"colour")):
        with pytest.raises(InvalidFormatError, match="checksum"):
            decode_fragment(data.replace(old, new), WIKI)
    native = encode_fragment(decode_fragment(data, WIKI), NATIVE)
    assert decode_fragment(native, NATIVE).ids == ["vec-1"]
    for at in range(40, len(native)):
        with pytest.raises(InvalidFormatError):
            decode_fragment(native[:at] + bytes([native[at] ^ 1]) + native[at + 1 :], NATIVE)


@pytest.mark.parametrize("dialect", [WIKI, NATIVE])
def test_foreign_and_truncated_bytes_are_refused(dialect: str) -> None:
    whole = encode_fragment(decode_fragment(scripted(by_python), WIKI), dialect)
    cuts = [whole[:at] for at in range(len(whole))]
    for data in [*cuts, b"\x02" + whole[1:], b"\xff" * 40, b"{}", b"[1]", b"\x01\x94\xc0\xc0\xc0\xc0", whole + b"x"]:
        with pytest.raises(InvalidFormatError):
            decode_fragment(data, dialect)


@pytest.mark.parametrize("values", ["[NaN,1]", "[Infinity,1]", "[1e39,1]", '["a",1]', "[[1],[2]]", "[]", "[null]"])
def test_values_that_are_no_finite_numbers_are_refused(values: str) -> None:
    with pytest.raises(InvalidFormatError):
        decode_fragment(scripted(by_python, values), WIKI)


DOCUMENT = """{
  "fragments": [
    {
      "id": "01HXYZ",
      "key": "my_ns/wal/01HXYZ.fragment.json",
      "vector_count": 100,
      "delete_count": 2,
      "created_at": "2026-01-15T10:00:00Z"
    }
  ],
  "segments": [
    {
      "id": "seg-abc",
      "key_prefix": "my_ns/segments/seg-abc/",
      "vector_count": 5000,
      "centroid_count": 32,
      "created_at": "2026-01-15T12:00:00Z",
      "quantization": null,
      "bitmap_fields": [
        "color",
        "price"
      ],
      "fts_fields": [
        "content"
      ]
    }
  ],
  "pending_deletes": [
    "vec-old-1"
  ],
  "fencing_token": 42,
  "updated_at": "2026-01-15T12:00:00Z"
}"""


@pytest.mark.req("S4-011", "S4-012", "S4-013", "S4-014", "S4-015", "S4-016", "S4-017", "S4-018", "S4-019", "S4-020")
def test_the_documents_own_manifest() -> None:
    found = decode_manifest(DOCUMENT.encode(), "copied_elsewhere")
    (fragment,), (segment,) = found.fragments, found.segments
    assert (found.dialect, found.namespace, found.token) == ("wiki", "my_ns", 42)
    assert (fragment.id, fragment.key, fragment.vectors, fragment.deletes) == (
        "01HXYZ", "wal/01HXYZ.fragment.json", 100, 2,
    )  # fmt: skip
    assert (segment.prefix, segment.vectors, segment.clusters) == ("segments/seg-abc/", 5000, 32)
    assert (segment.quantization, segment.bitmap_fields, segment.fts_fields) == (None, ("color", "price"), ("content",))
    assert found.pending == ("vec-old-1",)
    assert encode_manifest(found).decode() == DOCUMENT
    changed = json.loads(encode_manifest(found.changed(token=43)))
    assert changed["updated_at"] != "2026-01-15T12:00:00Z"
    expected = {**json.loads(DOCUMENT), "fencing_token": 43, "updated_at": changed["updated_at"]}
    assert changed == expected
    for kind in ("scalar", "product"):
        text = DOCUMENT.replace('"quantization": null', f'"quantization": "{kind}"')
        assert decode_manifest(text.encode(), "my_ns").segments[0].quantization == kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("my_ns/wal/01HXYZ", "my_ns/wal/../01HXYZ"),
        ("my_ns/wal/01HXYZ", "other/wal/01HXYZ"),
        ("my_ns/segments/seg-abc/", "my_ns/segments/"),
        ('"quantization": null', '"quantization": "zip"'),
        ('"fencing_token": 42', '"fencing_token": "42"'),
        ('"centroid_count": 32', '"centroid_count": -1'),
        ('"segments": [', '"segments": 3, "old": ['),
        ("}", ""),
        ('"delete_count": 2', '"sequence_number": 2'),
    ],
)
def test_manifests_that_lead_elsewhere_are_refused(old: str, new: str) -> None:
    with pytest.raises(InvalidFormatError):
        decode_manifest(DOCUMENT.replace(old, new, 1).encode(), "my_ns")


def native_manifest(*, entries: bool = True) -> list[Any]:
    refs = [["01ARZ3NDEKTSV4RRFFQ69G5FAW", 4, 1, 7, 421, None]] if entries else []
    segments = [["seg_A", 8, 4, "two_bit", False, ["tenant"], [], False, [], None, [], None, None, None]]
    return [refs, segments, None, "seg_A", 8, ["ns/wal/01OLD.wal"], 3, "2026-08-15T12:00:00Z", 12, "ns", [17] * 16,
            None, {}, "v1"]  # fmt: skip


@pytest.mark.parametrize("arity", [14, 10, 9])
def test_native_manifests_encode_to_the_bytes_that_were_read(arity: int) -> None:
    packed = b"\x01" + msgpack.packb(native_manifest()[:arity])
    header = msgpack.packb({"min_reader": "0.2.0", "writer": "0.2.0", "written_at": 1})
    envelope = b"\x02" + len(header).to_bytes(2, "big") + header + packed[1:]
    plain = independent.manifest(packed)
    for data in (packed, envelope, json.dumps(plain, indent=2).encode()):
        found = decode_manifest(data, "ns")
        assert encode_manifest(found) == data
        assert (found.token, found.version, found.pending) == (3, 12, ("wal/01OLD.wal",))
        assert [one.order for one in found.fragments] == [7]
        assert found.segments[0].quantization == "two_bit"
        changed = independent.manifest(encode_manifest(found.changed(token=4)))
        assert changed == {**plain, "fencing_token": 4, "version": 13, "updated_at": changed["updated_at"]}


def test_native_manifests_that_only_a_server_may_write() -> None:
    plain = decode_manifest(b"\x01" + msgpack.packb(native_manifest()), "ns")
    assert plain.unwritable is None
    for field, value in (("deletion_fence", [1]), ("manifest_binding_version", "v3_roots"), ("late_state", [1])):
        document = {**plain.document, field: value}
        found = decode_manifest(json.dumps(document).encode(), "ns")
        assert found.unwritable is not None, field
    short = decode_manifest(b"\x01" + msgpack.packb(native_manifest()[:8]), "ns")
    assert short.unwritable is not None
    later = msgpack.packb({"min_reader": "9.0.0", "writer": "9.0.0", "written_at": 1})
    with pytest.raises(UnsupportedFeatureError, match=r"9\.0\.0"):
        decode_manifest(b"\x02" + len(later).to_bytes(2, "big") + later + b"\x90", "ns")
    for data in (b"", b"\x03abc", b"\x01", b"\x01\x90", b"\x02\x00\x05abc", b"PAR1"):
        with pytest.raises(InvalidFormatError):
            decode_manifest(data, "ns")
    with pytest.raises(InvalidFormatError, match="of the namespace"):
        decode_manifest(b"\x01" + msgpack.packb(native_manifest()), "another")


@pytest.mark.req("S4-040")
def test_leases_of_both_dialects() -> None:
    for name in ("holder", "holder_id"):
        text = json.dumps({name: "node-abc", "fencing_token": 42, "acquired_at": "2026-01-15T10:00:00Z",
                           "expires_at": "2026-01-15T10:05:00Z"})  # fmt: skip
        found = decode_lease(text.encode())
        assert (found.holder, found.token, (found.expires - found.acquired).total_seconds()) == ("node-abc", 42, 300)
    for bad in (b"", b"{}", b"[]", b'{"holder":1,"fencing_token":1,"acquired_at":"x","expires_at":"y"}'):
        with pytest.raises(InvalidFormatError):
            decode_lease(bad)


def test_clusters_of_every_layout() -> None:
    ids, vectors = ["a", "\u00e9\u00e9"], np.array([[1, 2], [3, 4]], np.float32)
    plain = encode_cluster(ids, vectors, 2)
    assert independent.cluster(plain) == [("a", (1.0, 2.0)), ("\u00e9\u00e9", (3.0, 4.0))]
    coarse = b"codes"
    section = b"ZCL2" + struct.pack("<QQQQ", 36, 5, 41, len(plain)) + coarse + plain
    group1 = (
        b"ZBP1" + struct.pack("<I", 2) + struct.pack("<IQQ", 9, 48, 0) + struct.pack("<IQQ", 5, 48, len(plain)) + plain
    )
    at = 8 + 36
    group4 = b"ZBP\x04" + struct.pack("<IIQQQQ", 1, 5, at, 5, at + 5, len(plain)) + coarse + plain
    names = struct.pack("<I", 2) + b"".join(struct.pack("<I", len(one.encode())) + one.encode() for one in ids)
    rows = vectors.tobytes()
    group5 = b"ZBP\x05" + struct.pack("<I", 1) + b"d" * 56 + names + rows
    layout = [5, 2, 64, 0, 64, len(names), 64 + len(names), len(rows)]
    fields = ("cluster_idx", "row_count", "coarse_offset", "coarse_len", "ids_offset", "ids_len", "vectors_offset",
              "vectors_len")  # fmt: skip
    for found in (
        decode_cluster(plain),
        decode_cluster(section),
        decode_grouped(group1, 5, {}),
        decode_grouped(group4, 5, {}),
        decode_grouped(group5, 5, {"row_layouts": [layout]}),
        decode_grouped(group5, 5, {"row_layouts": [dict(zip(fields, layout, strict=True))]}),
    ):
        assert found[0] == ids
        assert (found[1] == vectors).all()
    for data in [plain[:at] for at in range(len(plain))] + [
        plain + b"x", b"\xff" * 64, struct.pack("<III", 1, 0, 0),
        b"ZCL2" + bytes(16) + struct.pack("<QQ", 0, 64) + bytes(28),
        b"ZCL3" + bytes(16) + struct.pack("<QQ", 36, len(section)) + section,
    ]:  # fmt: skip
        with pytest.raises(InvalidFormatError):
            decode_cluster(data)
    with pytest.raises(InvalidFormatError):
        decode_grouped(group1, 6, {})


def test_centroids_of_both_layouts() -> None:
    centroids = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    data = encode_centroids(centroids)
    assert independent.centroids(data) == [(1, 2), (3, 4), (5, 6)]
    for one in (data, b"ZCT2" + data + struct.pack("<Q", 0)):
        assert (decode_centroids(one) == centroids).all()
    for bad in (data[:-1], data + b"x", b"", encode_centroids(np.array([[np.nan]], np.float32)),
                struct.pack("<II", 2**32 - 1, 0), b"ZCT2" + struct.pack("<II", 1, 0)):  # fmt: skip
        with pytest.raises(InvalidFormatError):
            decode_centroids(bad)


@pytest.mark.req("S4-020", "S4-032")
def test_bitmaps_and_inverted_lists() -> None:
    rows: list[Any] = [{"color": "red", "n": 1, "tags": ["x", "y"]}, None, {"color": "red", "n": True}, {"n": 1.5}]
    found = decode_bitmaps(encode_bitmaps(rows, ["color", "n", "tags"]))
    assert {key: [*value] for key, value in found["color"].items()} == {"s:red": [0, 2]}
    assert {key.partition(":")[0] for key in found["n"]} == {"i", "b", "f"}
    assert [*found["tags"]["s:y"]] == [0]
    many = [{"n": number} for number in range(10_001)]
    assert decode_bitmaps(encode_bitmaps(many, ["n"])) == {}, "too many values: no bitmap"
    for odd in (10**400, {"a": 1}, [["x"]], [None]):
        assert decode_bitmaps(encode_bitmaps([{"n": 1}, {"n": odd}], ["n"])) == {}, "no bitmap can have that value"
    assert [*decode_bitmaps(encode_bitmaps([{"n": None}, {"n": [True, False]}], ["n"]))["n"]["b:true"]] == [1]
    texts = json.loads(encode_text_index([{"t": "Red car, red"}, {"t": "blue"}], ["t"])[5:])["fields"]["t"]
    assert texts["doc_count"] == 2
    assert texts["postings"]["red"] == {"df": 1, "entries": [{"position": 0, "tf": 2}]}
    assert json.loads(encode_attributes([{}, None, {"a": 1}])) == [None, None, {"a": 1}]
    foreign = [{"a": float("nan"), "b": [1e999, 2.0], "c": {"d": -1e999}}, {"a": "\ud800"}]
    written = encode_attributes(foreign)
    assert b"NaN" not in written
    assert json.loads(written) == [{"a": None, "b": [None, 2.0], "c": {"d": None}}, {"a": "\ud800"}]


def test_scalar_codes_round_down_as_those_of_zeppelin() -> None:
    quantizer = ScalarQuantizer(np.zeros(1, np.float32), np.full(1, 255, np.float32))
    vectors = np.array([[-1], [0.999], [1], [127.5], [254.99], [300]], np.float32)
    _, data = quantizer.cluster(0, [str(at) for at in range(6)], vectors)
    assert [*data[8 + 5 :: 6]] == [0, 0, 1, 127, 254, 255]


@pytest.mark.req("S4-005")
def test_ulids_rise_even_where_clocks_do_not() -> None:
    ahead = "7" + "Z" * 9 + "0" * 16
    found = [new_ulid(ahead)]
    for _ in range(100):
        found.append(new_ulid(found[-1]))
    assert found == sorted({*found})
    assert found[0] > ahead
    assert ulid_time("no ulid") is None
    assert all(len(one) == 26 for one in found)


@pytest.mark.req("S4-011")
@pytest.mark.parametrize("dialect", [WIKI, NATIVE])
def test_new_manifests(dialect: str) -> None:
    data = encode_manifest(new_manifest("ns", dialect))
    plain = independent.manifest(data)
    assert plain["fragments"] == plain["segments"] == plain["pending_deletes"] == []
    assert encode_manifest(decode_manifest(data, "ns")) == data


ODD: list[Any] = [None, "", "x", -1, 2**64, 1.5, True, [], {}, [None], [[]], [1], {"a": 1}, "../x", "a" * 300]


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document, the first of each list."""
    entries = document.items() if isinstance(document, dict) else enumerate(document[:1])
    for key, value in entries:
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


def wiki_manifest() -> dict[str, Any]:
    fragment = {"id": "01A", "key": "ns/wal/01A.fragment.json", "vector_count": 1, "delete_count": 0,
                "created_at": "2026-01-15T10:00:00Z"}  # fmt: skip
    segment = {"id": "seg-1", "key_prefix": "ns/segments/seg-1/", "vector_count": 3, "centroid_count": 1,
               "created_at": "x", "quantization": "scalar", "bitmap_fields": ["a"], "fts_fields": ["b"]}  # fmt: skip
    return {"fragments": [fragment], "segments": [segment], "pending_deletes": ["p"], "fencing_token": 4,
            "updated_at": "x"}  # fmt: skip


@pytest.mark.parametrize("dialect", [WIKI, NATIVE])
def test_an_odd_value_in_a_manifest_is_refused_or_can_be_published(dialect: str) -> None:
    """Never an error of Python, neither here nor where the next manifest is made of it."""
    if dialect == WIKI:
        plain: dict[str, Any] = wiki_manifest()
    else:
        plain = {**decode_manifest(b"\x01" + msgpack.packb(native_manifest()), "ns").document}
    assert decode_manifest(json.dumps(plain).encode(), "ns", dialect=dialect).dialect == dialect
    refused = 0
    for at in [*places(plain)]:
        for value in ODD:
            document = copy.deepcopy(plain)
            *path, last = at
            inner: Any = document
            for one in path:
                inner = inner[one]
            inner[last] = value
            try:
                found = decode_manifest(json.dumps(document).encode(), "ns", dialect=dialect)
            except (InvalidFormatError, UnsupportedFeatureError):
                refused += 1
                continue
            assert {type(one.id) for one in (*found.fragments, *found.segments)} <= {str}
            assert {written_at(one) is None for one in found.fragments} <= {True, False}
            assert found.unwritable is None or dialect == NATIVE
            name = "wal/01B.fragment.json" if dialect == WIKI else "wal/01B.wal"
            ref = FragmentRef("01B", name, 1, 0, 2**62)
            changed = found.changed(fragments=[*found.fragments, ref], segments=found.segments, token=9)
            data = encode_manifest(changed)
            assert decode_manifest(data, "ns", dialect=dialect).fragments[-1].id == "01B", (at, value)
    assert refused > 100


def test_texts_and_numbers_that_no_manifest_can_have() -> None:
    """A lone surrogate could not be encoded again; what is no JSON, no other reader would read."""
    for value in ('"\\ud800"', "NaN", "Infinity"):
        data = json.dumps(wiki_manifest()).replace('"x"', value).encode()
        with pytest.raises(InvalidFormatError):
            decode_manifest(data, "ns")
    assert decode_manifest(json.dumps({**wiki_manifest(), "updated_at": "\U0001f600"}).encode(), "ns").token == 4


def test_numbers_of_clusters_that_no_segment_has() -> None:
    """All names of a segment are in memory at once."""
    document = wiki_manifest()
    document["segments"][0]["centroid_count"] = 2**40
    with pytest.raises(InvalidFormatError, match="clusters"):
        decode_manifest(json.dumps(document).encode(), "ns")
    plain = {**decode_manifest(b"\x01" + msgpack.packb(native_manifest()), "ns").document}
    plain["segments"][0]["cluster_owners"] = [plain["segments"][0]["id"]] * 99
    with pytest.raises(InvalidFormatError, match="99 owners"):
        decode_manifest(json.dumps(plain).encode(), "ns")
