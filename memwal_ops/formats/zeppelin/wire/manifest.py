"""Decode, change and encode manifests of both dialects and all encodings.

``wiki``: pretty JSON with ``key`` and ``key_prefix`` in its entries; ``pending_deletes`` are **vector ids**.
``native``: JSON, ``0x01`` and positional MessagePack, or ``0x02`` with an envelope before that; entries have a
``sequence_number``, and ``pending_deletes`` are **object keys** that are pending deletion. Unknown fields are
preserved, and an unchanged manifest encodes to the bytes that it was decoded from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from memwal_ops.errors import InvalidFormatError, UnsupportedFeatureError, import_extra
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE, WIKI
from memwal_ops.formats.zeppelin.wire.segment import CALIBRATION, CODEBOOK

msgpack = import_extra("msgpack", "zeppelin", "Zeppelin namespaces")
FIELDS = (
    "fragments", "segments", "compaction_watermark", "active_segment", "next_sequence", "pending_deletes",
    "fencing_token", "updated_at", "version", "namespace", "namespace_incarnation", "deletion_fence",
    "hierarchical_routing_nodes", "manifest_binding_version", "artifact_origins", "control_state_digest",
    "branch_roots", "branch_lineage", "coarse_payload_encodings", "late_state", "input_fragments",
    "semantic_coverage",
)  # fmt: skip
FRAGMENT_FIELDS = ("id", "vector_count", "delete_count", "sequence_number", "size_bytes", "artifact_origin")
SEGMENT_FIELDS = (
    "id", "vector_count", "cluster_count", "quantization", "hierarchical", "bitmap_fields", "fts_fields",
    "has_global_fts", "cluster_owners", "sketch", "cluster_objects", "bootstrap", "membership", "artifact_origin",
)  # fmt: skip
_WIKI_FRAGMENT = ("id", "key", "vector_count", "delete_count", "created_at")
_WIKI_SEGMENT = (
    "id", "key_prefix", "vector_count", "centroid_count", "created_at", "quantization", "bitmap_fields", "fts_fields",
)  # fmt: skip
_OURS = (0, 2, 0)
_VERSION = FIELDS.index("version")
_PLAIN = "v1"
# Far above what any release makes; so many names are in memory at once.
_MAX_CLUSTERS = 1 << 20
_MAX_COUNT = 1 << 63
_SEGMENT = re.compile(r"[^/\x00-\x1f]+")
_CODES: Mapping[str | None, tuple[str, ...]] = {"scalar": (CALIBRATION,), "product": (CODEBOOK,)}
_ULID = re.compile(r"[0-9A-Za-z_-]{1,64}")
# State of native namespaces that only a server may change.
_SERVERS = (
    "deletion_fence", "artifact_origins", "control_state_digest", "branch_roots", "branch_lineage", "late_state",
    "input_fragments", "semantic_coverage", "hierarchical_routing_nodes",
)  # fmt: skip


@dataclass(frozen=True)
class FragmentRef:
    """A listed fragment. ``key`` is relative to the namespace; ``order`` rises in the order of replay."""

    id: str
    key: str
    vectors: int
    deletes: int
    order: int
    created_at: str | None = None
    bytes: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has neither a vector nor a delete, as writers other than memwal-ops may leave one."""
        return not self.vectors and not self.deletes


@dataclass(frozen=True)
class SegmentRef:
    """A live segment.

    Attributes:
        prefix: of its objects, relative to the namespace, with the ``/`` at its end.
        quantization: None, ``scalar``, ``product``; native also ``two_bit``.
        owners: per cluster the prefix that contains its objects; empty: all are under ``prefix``.
        objects: native grouped cluster objects, as the manifest lists them.
        hierarchical: a tree of nodes instead of flat clusters.
        others: objects of the segment as a whole, besides the centroids, that queries read: path, and size if recorded.
    """

    id: str
    prefix: str
    vectors: int
    clusters: int
    quantization: str | None = None
    bitmap_fields: tuple[str, ...] = ()
    fts_fields: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    objects: tuple[Mapping[str, Any], ...] = ()
    hierarchical: bool = False
    created_at: str | None = None
    others: tuple[tuple[str, int | None], ...] = ()

    def prefix_of(self, cluster: int) -> str:
        """The prefix of a cluster's objects."""
        return self.owners[cluster] if self.owners else self.prefix

    @property
    def prefixes(self) -> frozenset[str]:
        """Every prefix with objects that it needs: its own, and those of carried clusters."""
        return frozenset({self.prefix, *self.owners})


@dataclass(frozen=True)
class Manifest:
    """The content of a namespace at one time.

    Attributes:
        namespace: its name, the first part of all keys.
        fragments: uncompacted, in the order of replay.
        segments: the live ones, oldest first; a later one overrides.
        pending: wiki: ids that no query returns; native: keys, relative to the namespace.
        document: the fields as they were read.
        encoding: ``json``, ``msgpack``, or ``envelope``; ``header``: the bytes before the MessagePack payload.
        arity: of MessagePack lists: of the manifest, its fragments and its segments.
    """

    dialect: str
    namespace: str
    fragments: tuple[FragmentRef, ...]
    segments: tuple[SegmentRef, ...]
    pending: tuple[str, ...]
    token: int
    document: Mapping[str, Any]
    encoding: str = "json"
    header: bytes = b""
    arity: tuple[int, int, int] = (len(FIELDS), len(FRAGMENT_FIELDS), len(SEGMENT_FIELDS))

    @property
    def version(self) -> int | None:
        """The native manifest version; wiki manifests have none."""
        return self.document.get("version") if self.dialect == NATIVE else None

    @property
    def prefixes(self) -> frozenset[str]:
        """Prefixes of all segments' objects."""
        return frozenset(prefix for segment in self.segments for prefix in segment.prefixes)

    @property
    def fragment_ids(self) -> list[str]:
        """Ids of all listed fragments, in the order of replay."""
        return [ref.id for ref in self.fragments]

    @property
    def segment_ids(self) -> list[str]:
        """Ids of the live segments."""
        return [segment.id for segment in self.segments]

    @property
    def segment_rows(self) -> int:
        """The rows of all segments, also those that are superseded."""
        return sum(segment.vectors for segment in self.segments)

    @property
    def fragment_keys(self) -> frozenset[str]:
        """Keys of all listed fragments."""
        return frozenset(ref.key for ref in self.fragments)

    @property
    def borrowed(self) -> frozenset[str]:
        """Native: ids of fragments and segments whose objects belong to another namespace, as a branch has them."""
        return frozenset(
            str(entry["id"]) for entry in self._raw("fragments", "segments") if entry.get("artifact_origin") is not None
        )

    @property
    def hidden(self) -> frozenset[str]:
        """Wiki: ids that no query returns, also if the log has them (S4-014); native: none."""
        return frozenset(self.pending) if self.dialect == WIKI else frozenset()

    @property
    def pending_keys(self) -> tuple[str, ...]:
        """Wiki: entries of ``pending_deletes`` that look like object keys, as native ones do; they are kept."""
        if self.dialect != WIKI:
            return ()
        prefixes = f"{self.namespace}/wal/", f"{self.namespace}/segments/"
        return tuple(key for key in self.pending if key.startswith(prefixes))

    @property
    def unwritable(self) -> str | None:
        """Why only a Zeppelin server may write this manifest; None: memwal-ops may."""
        if self.dialect == WIKI:
            return None
        binding = self.document.get("manifest_binding_version")
        if binding is not None and binding != _PLAIN:
            return f"its binding version is {binding!r}"
        held = next((name for name in _SERVERS if self.document.get(name)), None)
        if held is not None:
            return f"it has {held.replace('_', ' ')}"
        if self.encoding != "json" and self.arity[0] <= _VERSION:
            return "it was written by a release whose manifests have no version"
        if self.borrowed:
            return "some of its objects belong to another namespace"
        return None

    def changed(
        self,
        *,
        fragments: Sequence[FragmentRef] | None = None,
        segments: Sequence[SegmentRef] | None = None,
        pending: Sequence[str] | None = None,
        token: int | None = None,
    ) -> Manifest:
        """The next manifest: with these parts replaced, the version one higher, and a new ``updated_at``."""
        document = dict(self.document)
        kept = {entry["id"]: entry for entry in self._raw("fragments")}
        if fragments is not None:
            document["fragments"] = [kept.get(ref.id) or self._fragment(ref) for ref in fragments]
        if segments is not None:
            by_id = {entry["id"]: entry for entry in self._raw("segments")}
            document["segments"] = [by_id.get(segment.id) or self._segment(segment) for segment in segments]
            if self.dialect == NATIVE:
                document["active_segment"] = segments[-1].id if segments else None
                if encodings := document.get("coarse_payload_encodings"):
                    live = {segment.id for segment in segments}
                    document["coarse_payload_encodings"] = {k: v for k, v in encodings.items() if k in live}
        if pending is not None:
            document["pending_deletes"] = [self._absolute(key) for key in pending]
        if token is not None:
            document["fencing_token"] = token
        if self.dialect == NATIVE:
            document["version"] = (self.version or 0) + 1
            top = max((ref.order for ref in fragments or ()), default=-1) + 1
            document["next_sequence"] = max(document.get("next_sequence") or 0, top)
        document["updated_at"] = timestamp(datetime.now(UTC))
        parts = {"fragments": fragments, "segments": segments, "pending": pending}
        changes: dict[str, Any] = {name: tuple(part) for name, part in parts.items() if part is not None}
        return replace(self, document=document, token=self.token if token is None else token, **changes)

    def _raw(self, *names: str) -> list[Mapping[str, Any]]:
        return [entry for name in names for entry in self.document.get(name) or ()]

    def _absolute(self, entry: str) -> str:
        return f"{self.namespace}/{entry}" if self.dialect == NATIVE else entry

    def _fragment(self, ref: FragmentRef) -> dict[str, Any]:
        if self.dialect == WIKI:
            values = (ref.id, f"{self.namespace}/{ref.key}", ref.vectors, ref.deletes, ref.created_at)
            return dict(zip(_WIKI_FRAGMENT, values, strict=True))
        numbers = (ref.vectors, ref.deletes, ref.order, ref.bytes or 0)
        return dict(zip(FRAGMENT_FIELDS, (ref.id, *numbers, None), strict=True))

    def _segment(self, segment: SegmentRef) -> dict[str, Any]:
        fields = ([*segment.bitmap_fields], [*segment.fts_fields])
        if self.dialect == WIKI:
            counts = (segment.vectors, segment.clusters, segment.created_at, segment.quantization)
            wiki = (segment.id, f"{self.namespace}/{segment.prefix}", *counts, *fields)
            return dict(zip(_WIKI_SEGMENT, wiki, strict=True))
        native = (segment.id, segment.vectors, segment.clusters, segment.quantization or "none", False, *fields)
        return dict(zip(SEGMENT_FIELDS, (*native, False, [], None, [], None, None, None), strict=True))


def new_manifest(namespace: str, dialect: str) -> Manifest:
    """The manifest of an empty namespace."""
    moment = timestamp(datetime.now(UTC))
    if dialect == WIKI:
        names = ("fragments", "segments", "pending_deletes", "fencing_token", "updated_at")
        return Manifest(WIKI, namespace, (), (), (), 0, dict(zip(names, ([], [], [], 0, moment), strict=True)))
    empty: tuple[Any, ...] = ([], [], None, None, 0, [], 0, moment, 1, namespace, None, None, {}, "v1")
    document = dict(zip(FIELDS, empty, strict=False))
    arity = (len(empty), len(FRAGMENT_FIELDS), len(SEGMENT_FIELDS))
    return Manifest(NATIVE, namespace, (), (), (), 0, document, "msgpack", b"\x01", arity)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``."""
    if manifest.encoding == "json":
        return json.dumps(manifest.document, indent=2, ensure_ascii=False).encode()
    top, fragments, segments = manifest.arity
    document = dict(manifest.document)
    document["fragments"] = [_positional(entry, FRAGMENT_FIELDS, fragments) for entry in document["fragments"]]
    document["segments"] = [_positional(entry, SEGMENT_FIELDS, segments) for entry in document["segments"]]
    payload: bytes = msgpack.packb(_positional(document, FIELDS, top))
    return manifest.header + payload


def decode_manifest(data: bytes, namespace: str, *, dialect: str | None = None) -> Manifest:
    """A manifest from the bytes of ``manifest.json``.

    Args:
        data: the object.
        namespace: the name of its folder; the keys of a copied wiki manifest may have another one.
        dialect: the dialect of the other objects, for a manifest without entries.

    Raises:
        InvalidFormatError: truncated or foreign bytes, mixed dialects, keys outside the namespace.
        UnsupportedFeatureError: it requires a later reader.
    """
    try:
        if data[:1] == b"{":
            document = json.loads(data, parse_constant=_refused)
            if b"\\ud" in data.lower():  # a lone surrogate: the next manifest could not be encoded
                json.dumps(document, ensure_ascii=False).encode()
            return _decode(document, namespace, _dialect(document, dialect), "json", b"")
        if data[:1] == b"\x01":
            return _decode_packed(data[1:], namespace, "msgpack", b"\x01")
        if data[:1] == b"\x02":
            return _decode_envelope(data, namespace)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidFormatError(f"It is not a manifest: {error!r:.200}.") from error
    raise InvalidFormatError(f"It begins with {data[:4]!r}, which is not a known version of a manifest.")


def timestamp(moment: datetime) -> str:
    """ISO 8601 with ``Z``."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _refused(constant: str) -> float:
    raise InvalidFormatError(f"{constant} is not a JSON number.")


def _decode_envelope(data: bytes, namespace: str) -> Manifest:
    end = 3 + int.from_bytes(data[1:3], "big")
    header = msgpack.unpackb(data[3:end])
    least = tuple(int(part) for part in str(header["min_reader"]).split(".")[:3])
    if least > _OURS:
        raise UnsupportedFeatureError(
            f"The manifest requires readers of Zeppelin {header['min_reader']} or later; this release reads 0.2.0."
        )
    # The payload is a manifest of version 1 without its version byte.
    return _decode_packed(data[end:], namespace, "envelope", data[:end])


def _decode_packed(payload: bytes, namespace: str, encoding: str, header: bytes) -> Manifest:
    document = msgpack.unpackb(payload, strict_map_key=False)
    if not isinstance(document, list) or not 1 < len(document) <= len(FIELDS):
        raise InvalidFormatError("It is not a list with the number of fields of a manifest.")
    document = dict(zip(FIELDS, document, strict=False))
    fragments, segments = document["fragments"], document["segments"]
    arity = (
        len(document),
        max((len(ref) for ref in fragments), default=len(FRAGMENT_FIELDS)),
        max((len(segment) for segment in segments), default=len(SEGMENT_FIELDS)),
    )
    document["fragments"] = [_named(ref, FRAGMENT_FIELDS) for ref in fragments]
    document["segments"] = [_named(segment, SEGMENT_FIELDS) for segment in segments]
    return replace(_decode(document, namespace, NATIVE, encoding, header), arity=arity)


def _named(values: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    if len(values) > len(names):
        raise InvalidFormatError(f"An entry has {len(values)} fields; {len(names)} are known.")
    return dict(zip(names, values, strict=False))


def _positional(document: Mapping[str, Any], names: Sequence[str], arity: int) -> list[Any]:
    return [document.get(name) for name in names[:arity]]


def _dialect(document: Mapping[str, Any], known: str | None) -> str:
    entries = [*(document.get("fragments") or ()), *(document.get("segments") or ())]
    signs = {WIKI for entry in entries if "key" in entry or "key_prefix" in entry}
    signs |= {NATIVE for entry in entries if "sequence_number" in entry or "cluster_count" in entry}
    signs |= {NATIVE for name in ("active_segment", "next_sequence", "compaction_watermark") if name in document}
    signs |= {known} if known is not None else set()
    if len(signs) > 1:
        raise InvalidFormatError("It mixes the two dialects: entries with a key, and others with a sequence number.")
    return signs.pop() if signs else WIKI


def _decode(document: Mapping[str, Any], namespace: str, dialect: str, encoding: str, header: bytes) -> Manifest:
    if not isinstance(document["fragments"], list) or not isinstance(document["segments"], list):
        raise InvalidFormatError("Its fragments and segments are not lists.")
    token = document.get("fencing_token") or 0
    if type(token) is not int or token < 0:
        raise InvalidFormatError(f"Its fencing token is {token!r}.")
    if dialect == WIKI:
        return _decode_wiki(document, namespace, token)
    for name in ("version", "next_sequence"):
        _count(document.get(name) or 0)
    named = document.get("namespace")
    # A native manifest may have its namespace's name; a different name means that it was copied here by mistake.
    if named and named != namespace:
        raise InvalidFormatError(f"It is the manifest of the namespace {named!r}.")
    fragments = sorted((_native_fragment(entry) for entry in document["fragments"]), key=lambda ref: ref.order)
    pending = [_relative(str(key), namespace) for key in document.get("pending_deletes") or ()]
    active = document.get("active_segment")
    segments = {entry["id"]: _native_segment(entry, namespace) for entry in document["segments"]}
    if active is not None and active not in segments:
        raise InvalidFormatError(f"Its active segment {active!r} is not in its list of segments.")
    live = (segments[active],) if active is not None else ()
    manifest = Manifest(NATIVE, namespace, tuple(fragments), live, tuple(pending), token, document, encoding, header)
    return _unique(manifest)


def _decode_wiki(document: Mapping[str, Any], namespace: str, token: int) -> Manifest:
    keys = [entry["key"] for entry in document["fragments"]] + [entry["key_prefix"] for entry in document["segments"]]
    names = {str(key).partition("/")[0] for key in keys}
    if len(names) > 1:
        raise InvalidFormatError(f"Its keys belong to several namespaces: {', '.join(sorted(names))}.")
    namespace = names.pop() if names else namespace
    fragments = []
    for order, entry in enumerate(document["fragments"]):
        key = _relative(entry["key"], namespace)
        if key != f"wal/{_checked(entry['id'])}.fragment.json":
            raise InvalidFormatError(f"The fragment {entry['id']} has the key {entry['key']!r}.")
        counts = _count(entry.get("vector_count", 0)), _count(entry.get("delete_count", 0))
        created = entry.get("created_at")
        fragments.append(FragmentRef(entry["id"], key, *counts, order, created if isinstance(created, str) else None))
    segments = []
    for entry in document["segments"]:
        prefix = _relative(entry["key_prefix"], namespace)
        prefix = prefix if prefix.endswith("/") else f"{prefix}/"
        if prefix != f"segments/{_checked(entry['id'])}/":
            raise InvalidFormatError(f"The segment {entry['id']} has the prefix {entry['key_prefix']!r}.")
        kind, counts = entry.get("quantization"), (_count(entry["vector_count"]), _clusters(entry["centroid_count"]))
        fields = _fields(entry, "bitmap_fields"), _fields(entry, "fts_fields")
        codes = tuple((prefix + name, None) for name in _CODES.get(kind, ()))
        created = entry.get("created_at")
        segments.append(SegmentRef(entry["id"], prefix, *counts, kind, *fields, created_at=created, others=codes))
        if kind not in {None, "scalar", "product"}:
            raise InvalidFormatError(f"The segment {entry['id']} has the quantization {kind!r}.")
    pending = document.get("pending_deletes") or []
    if not all(isinstance(key, str) for key in pending):
        raise InvalidFormatError("Its pending deletes are not ids.")
    return _unique(Manifest(WIKI, namespace, tuple(fragments), tuple(segments), tuple(pending), token, document))


def _native_fragment(entry: Mapping[str, Any]) -> FragmentRef:
    order = _count(entry.get("sequence_number") or 0)
    name = _checked(entry["id"])
    counts = _count(entry["vector_count"]), _count(entry["delete_count"])
    return FragmentRef(name, f"wal/{name}.wal", *counts, order, bytes=entry.get("size_bytes") or None)


def _native_segment(entry: Mapping[str, Any], namespace: str) -> SegmentRef:
    objects = entry.get("cluster_objects") or []
    if objects and not isinstance(objects[0], dict):
        names = ("key", "clusters", "live_offset", "live_len", "size_bytes", "cluster_layout_version", "row_layouts")
        objects = [_named(each, names) for each in objects]
    objects = [{**each, "key": _relative(each["key"], namespace)} for each in objects]
    kind = entry.get("quantization") or "none"
    if not isinstance(kind, str):
        raise InvalidFormatError(f"The segment {entry['id']} has the quantization {kind!r:.80}.")
    owners = tuple(f"segments/{_checked(owner)}/" for owner in entry.get("cluster_owners") or ())
    if owners and len(owners) != entry["cluster_count"]:
        raise InvalidFormatError(
            f"The segment {entry['id']} has {len(owners)} owners of {entry['cluster_count']} clusters."
        )
    fields = _fields(entry, "bitmap_fields"), _fields(entry, "fts_fields")
    return SegmentRef(
        _checked(entry["id"]), f"segments/{entry['id']}/", _count(entry["vector_count"]),
        _clusters(entry["cluster_count"]), None if kind == "none" else kind, *fields, owners, tuple(objects),
        bool(entry.get("hierarchical")), others=tuple(_others(entry, namespace)),
    )  # fmt: skip


def _others(entry: Mapping[str, Any], namespace: str) -> Iterator[tuple[str, int | None]]:
    """The objects of a native segment as a whole: in MessagePack lists, in JSON maps; the key first."""
    for name, size_at in (("sketch", 4), ("bootstrap", 1), ("membership", 1)):
        stored = entry.get(name)
        if stored is not None:
            at = ("key", "size_bytes") if isinstance(stored, dict) else (0, size_at)
            yield _relative(stored[at[0]], namespace), stored[at[1]] or None
    if entry.get("has_global_fts"):
        yield f"segments/{entry['id']}/global_fts.bin", None


def _unique(manifest: Manifest) -> Manifest:
    for named in (manifest.fragments, manifest.segments):
        ids = [entry.id for entry in named]
        if len(ids) != len(set(ids)):
            raise InvalidFormatError("It lists a fragment or segment twice.")
    return manifest


def _relative(key: str, namespace: str) -> str:
    first, _, rest = key.partition("/")
    parts = rest.removesuffix("/").split("/")
    if first != namespace or not all(_SEGMENT.fullmatch(part) and part not in {".", ".."} for part in parts):
        raise InvalidFormatError(f"The key {key!r:.120} does not belong to the namespace {namespace}.")
    return rest


def _checked(name: object) -> str:
    if not isinstance(name, str) or _ULID.fullmatch(name) is None:
        raise InvalidFormatError(f"{name!r:.80} is not an identifier of a fragment or segment.")
    return name


def _fields(entry: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = entry.get(name) or []
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise InvalidFormatError(f"The segment {entry['id']} has the {name} {names!r:.80}.")
    return tuple(names)


def _clusters(value: object) -> int:
    count = _count(value)
    if count > _MAX_CLUSTERS:
        raise InvalidFormatError(f"{count} is not a number of clusters.")
    return count


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MAX_COUNT:
        raise InvalidFormatError(f"{value!r:.40} is not a count.")
    return value
