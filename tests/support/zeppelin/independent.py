"""A reader of namespaces written from the facts about the format, not from our code: no import of ours.

``read`` gives what a strong query may find; ``read_base`` what segments hold. Slow, plain, and strict.
"""

from __future__ import annotations

import json
import struct
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import msgpack
import xxhash

Rows = dict[str, tuple[tuple[float, ...], dict[str, Any]]]
MANIFEST = [
    "fragments", "segments", "compaction_watermark", "active_segment", "next_sequence", "pending_deletes",
    "fencing_token", "updated_at", "version", "namespace", "namespace_incarnation", "deletion_fence",
    "hierarchical_routing_nodes", "manifest_binding_version",
]  # fmt: skip
FRAGMENT = ["id", "vector_count", "delete_count", "sequence_number", "size_bytes", "artifact_origin"]
SEGMENT = [
    "id", "vector_count", "cluster_count", "quantization", "hierarchical", "bitmap_fields", "fts_fields",
    "has_global_fts", "cluster_owners", "sketch", "cluster_objects", "bootstrap", "membership", "artifact_origin",
]  # fmt: skip


def f32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return float("inf")


def single(value: float) -> str:
    """serde_json's text of an f32."""
    return "-0.0" if str(value) == "-0.0" else "0.0" if not value else _notation(*_shortest(value, f32), -6, 12)


def double(value: float) -> str:
    """serde_json's text of an f64."""
    return "-0.0" if str(value) == "-0.0" else "0.0" if not value else _notation(*_shortest(value, float), -5, 15)


def _shortest(value: float, back: Any) -> tuple[str, int]:
    """The fewest digits that give a number back, by search; of a tie the neighbour that does."""
    for digits in range(1, 18):
        for rounding in ("ROUND_HALF_EVEN", "ROUND_HALF_UP", "ROUND_HALF_DOWN"):
            with localcontext(prec=digits, rounding=rounding):
                text = f"{+Decimal(value):e}"
            if back(float(text)) == value:
                mantissa, power = text.split("e")
                return mantissa, int(power)
    raise AssertionError(value)


def _notation(mantissa: str, power: int, least: int, most: int) -> str:
    sign = "-" if mantissa.startswith("-") else ""
    digits = mantissa.lstrip("-").replace(".", "").rstrip("0") or "0"
    if not least <= power <= most:
        body = digits[0] + (f".{digits[1:]}" if digits[1:] else "")
        return f"{sign}{body}e{'+' if power > 0 else ''}{power}"
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{digits}"
    digits = digits.ljust(power + 1, "0")
    return f"{sign}{digits[: power + 1]}.{digits[power + 1 :] or '0'}"


def canonical(value: Any) -> str:
    if isinstance(value, float):
        return double(value)
    if isinstance(value, dict):
        inner = ",".join(f"{canonical(key)}:{canonical(value[key])}" for key in sorted(value, key=str.encode))
        return "{" + inner + "}"
    if isinstance(value, list):
        return "[" + ",".join(canonical(one) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def native_checksum(vectors: list[Any], deletes: list[str]) -> int:
    rows = []
    for one in vectors:
        values = ",".join(single(value) for value in one[1])
        rows.append(f"[{canonical(one[0])},[{values}],{canonical(one[2] if len(one) > 2 else None)}]")
    return xxhash.xxh3_64_intdigest(f"[[{','.join(rows)}],{canonical(deletes)}]".encode())


def wiki_checksum(text: str) -> int:
    """Over the number tokens as they stand in the file."""

    class Token(str):
        __slots__ = ()

    def dump(value: Any) -> str:
        if isinstance(value, Token):
            return str(value)
        if isinstance(value, dict):
            return (
                "{"
                + ",".join(f"{json.dumps(key, ensure_ascii=False)}:{dump(value[key])}" for key in sorted(value))
                + "}"
            )
        if isinstance(value, list):
            return "[" + ",".join(map(dump, value)) + "]"
        return json.dumps(value, ensure_ascii=False)

    found = json.loads(text, parse_float=Token, parse_int=Token)
    return xxhash.xxh64_intdigest(dump({"deletes": found["deletes"], "vectors": found["vectors"]}).encode())


def manifest(data: bytes) -> dict[str, Any]:
    if data[:1] == b"{":
        return json.loads(data)
    if data[:1] == b"\x02":
        data = b"\x01" + data[3 + int.from_bytes(data[1:3], "big") :]
    assert data[:1] == b"\x01"
    found = dict(zip(MANIFEST, msgpack.unpackb(data[1:], strict_map_key=False), strict=False))
    found["fragments"] = [dict(zip(FRAGMENT, one, strict=False)) for one in found["fragments"]]
    found["segments"] = [dict(zip(SEGMENT, one, strict=False)) for one in found["segments"]]
    return found


def fragment(data: bytes) -> tuple[list[tuple[str, tuple[float, ...], dict[str, Any]]], list[str]]:
    if data[:1] == b"{":
        found = json.loads(data)
        assert wiki_checksum(data.decode()) == found["checksum"]
        rows = [(one["id"], tuple(map(f32, one["values"])), one.get("attributes") or {}) for one in found["vectors"]]
        return rows, found["deletes"]
    assert data[:1] == b"\x01"
    _, vectors, deletes, checksum = msgpack.unpackb(data[1:])
    assert native_checksum(vectors, deletes) == checksum
    return [(one[0], tuple(one[1]), (one[2] if len(one) > 2 else None) or {}) for one in vectors], deletes


def cluster(data: bytes) -> list[tuple[str, tuple[float, ...]]]:
    count, width = struct.unpack_from("<II", data)
    rows, at = [], 8
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + length].decode()
        rows.append((name, struct.unpack_from(f"<{width}f", data, at + 4 + length)))
        at += 4 + length + 4 * width
    assert at == len(data)
    return rows


def centroids(data: bytes) -> list[tuple[float, ...]]:
    count, width = struct.unpack_from("<II", data)
    assert len(data) == 8 + 4 * count * width
    return [struct.unpack_from(f"<{width}f", data, 8 + 4 * width * one) for one in range(count)]


class Reader:
    """A namespace on local files, at its live manifest or at another one."""

    def __init__(self, uri: str, data: bytes | None = None) -> None:
        self.root = Path(uri)
        self.manifest = manifest(data if data is not None else (self.root / "manifest.json").read_bytes())
        self.wiki = "next_sequence" not in self.manifest and "active_segment" not in self.manifest

    def read(self) -> Rows:
        rows = self.read_base()
        refs = self.manifest["fragments"]
        if not self.wiki:
            refs = sorted(refs, key=lambda one: one["sequence_number"])
        for ref in refs:
            name = f"{ref['id']}.fragment.json" if self.wiki else f"{ref['id']}.wal"
            if self.wiki:
                assert ref["key"].split("/", 1)[1] == f"wal/{name}"
            upserts, deletes = fragment((self.root / "wal" / name).read_bytes())
            assert (len(upserts), len(deletes)) == (ref["vector_count"], ref["delete_count"])
            for one in deletes:
                rows.pop(one, None)
            rows.update({one: (values, more) for one, values, more in upserts})
        self.exclude(rows)
        return rows

    def exclude(self, rows: Rows) -> None:
        """Of a wiki namespace, ``pending_deletes``: "Vector IDs to exclude from query results"."""
        for name in self.manifest["pending_deletes"] if self.wiki else ():
            rows.pop(name, None)

    def read_base(self) -> Rows:
        rows: Rows = {}
        segments = self.manifest["segments"]
        if not self.wiki:
            segments = [one for one in segments if one["id"] == self.manifest["active_segment"]]
        for one in segments:
            rows.update(self.segment(one))
        self.exclude(rows)
        return rows

    def segment(self, one: dict[str, Any]) -> Rows:
        rows: Rows = {}
        clusters = one["centroid_count" if self.wiki else "cluster_count"]
        own = self.root / "segments" / one["id"]
        if self.wiki:
            assert one["key_prefix"].split("/", 1)[1] == f"segments/{one['id']}/"
        assert len(centroids((own / "centroids.bin").read_bytes())) == clusters
        for number in range(clusters):
            owners = one.get("cluster_owners") or []
            place = own.parent / owners[number] if owners else own
            found = cluster((place / f"cluster_{number}.bin").read_bytes())
            attributes = json.loads((place / f"attrs_{number}.bin").read_bytes())
            assert len(attributes) == len(found)
            for (name, values), more in zip(found, attributes, strict=True):
                assert name not in rows, "a row stands once"
                rows[name] = (values, more or {})
        assert len(rows) == one["vector_count"]
        return rows
