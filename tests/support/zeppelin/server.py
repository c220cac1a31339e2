"""What other programs do to a namespace: a Zeppelin server, or a script after the document. No import of our code.

Nothing comes in between: each change is one step, published as its dialect says.
"""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import xxhash

from tests.support.zeppelin.independent import (
    FRAGMENT,
    MANIFEST,
    SEGMENT,
    Reader,
    centroids,
    cluster,
    fragment,
    manifest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def ulid(ahead: float = 0) -> str:
    """By a clock that is so many seconds ahead."""
    value = int((time.time() + ahead) * 1000) << 80 | int.from_bytes(os.urandom(10))
    return "".join(_DIGITS[value >> 5 * place & 31] for place in reversed(range(26)))


def edit(uri: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Publish a manifest; natively with the next version, both recorded."""
    path = Path(uri, "manifest.json")
    before = path.read_bytes()
    found = manifest(before)
    change(found)
    if before[:1] == b"{":
        path.write_text(json.dumps(found, indent=2))
        return
    _record(uri, found["version"], before)
    found["version"] += 1
    found["fragments"] = [[one.get(name) for name in FRAGMENT] for one in found["fragments"]]
    found["segments"] = [[one.get(name) for name in SEGMENT] for one in found["segments"]]
    after = b"\x01" + msgpack.packb([found[name] for name in MANIFEST if name in found])
    path.write_bytes(after)
    _record(uri, found["version"], after)


def _record(uri: str, version: int, data: bytes) -> None:
    path = Path(uri, f"manifests/{version:020}.msgpack")
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        assert path.read_bytes() == data, "another manifest is recorded with that version"
    else:
        path.write_bytes(data)


def fence(uri: str) -> bytes:
    """A server begins to delete the namespace: from now on nobody may publish. Returns the manifest."""
    edit(uri, lambda found: found.update(deletion_fence=["_deletions/01K.json"]))
    return Path(uri, "manifest.json").read_bytes()


def hide(uri: str, name: str) -> None:
    """Put an id into a wiki namespace's ``pending_deletes``: no query returns it, until it is written again."""
    edit(uri, lambda found: found["pending_deletes"].append(name))


def append_later_version(uri: str, name: str) -> str:
    """A native fragment of a version after ours, in which deletes apply **after** upserts; it has an id in both."""
    made = ulid()
    body = [made, [[name, [1.0, 0.0, 0.0, 0.0]]], [name]]
    text = f'[[["{name}",[1.0,0.0,0.0,0.0],null]],["{name}"]]'
    data = b"\x03" + msgpack.packb([*body, xxhash.xxh3_64_intdigest(text.encode())], use_single_float=True)
    append(uri, made, data, 1, 1)
    return made


def append(uri: str, name: str, data: bytes, vectors: int, deletes: int) -> None:
    """Put a native fragment, and list it last."""
    path = Path(uri, "wal", f"{name}.wal")
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)

    def listed(found: dict[str, Any]) -> None:
        values = (name, vectors, deletes, found["next_sequence"], len(data), None)
        found["fragments"].append(dict(zip(FRAGMENT, values, strict=True)))
        found["next_sequence"] += 1

    edit(uri, listed)


def compact_carrying(uri: str, token: int) -> bool:
    """A server's incremental compaction: clusters that the log does not touch stay with the older segment.

    Returns False where there is nothing to carry: no segment, no log, or one cluster only; or where clusters have
    indexes, which it does not write.
    """
    root, reader = Path(uri), Reader(uri)
    found = reader.manifest
    old = next((one for one in found["segments"] if one["id"] == found["active_segment"]), None)
    if old is None or not found["fragments"] or old["cluster_count"] < 2 or old["bitmap_fields"] or old["fts_fields"]:
        return False
    upserts: dict[str, Any] = {}
    touched: set[str] = set()
    for ref in sorted(found["fragments"], key=lambda one: one["sequence_number"]):
        rows, deletes = fragment((root / "wal" / f"{ref['id']}.wal").read_bytes())
        touched |= {*deletes} | {row[0] for row in rows}
        for gone in deletes:
            upserts.pop(gone, None)
        upserts.update({row[0]: row for row in rows})
    new = f"seg_{ulid()}"
    place = root / "segments" / new
    place.mkdir()
    owners = old["cluster_owners"] or [old["id"]] * old["cluster_count"]
    data = (place.parent / old["id"] / "centroids.bin").read_bytes()
    width = len(centroids(data)[0])
    total = 0
    for number, owner in enumerate(owners):
        at = place.parent / owner
        attributes = json.loads((at / f"attrs_{number}.bin").read_bytes())
        rows = [
            (*row, more)
            for row, more in zip(cluster((at / f"cluster_{number}.bin").read_bytes()), attributes, strict=True)
        ]
        kept = [row for row in rows if row[0] not in touched]
        added = [*upserts.values()] if number == 0 else []
        total += len(kept) + len(added)
        if len(kept) < len(rows) or added:
            owners = [*owners[:number], new, *owners[number + 1 :]]
            _write_cluster(place, number, [*kept, *added], width)
    assert len(centroids(data)) == len(owners)
    (place / "centroids.bin").write_bytes(data)
    carried = {
        f"segments/{owner}/{kind}_{number}.bin" for number, owner in enumerate(owners) for kind in ("cluster", "attrs")
    }
    olds = {str(path.relative_to(root)) for path in (place.parent / old["id"]).iterdir()}
    retired = [*(f"wal/{one['id']}.wal" for one in found["fragments"]), *sorted(olds - carried)]

    def published(found: dict[str, Any]) -> None:
        found["segments"] = [{**old, "id": new, "vector_count": total, "cluster_owners": owners}]
        found["active_segment"], found["fragments"], found["fencing_token"] = new, [], token
        found["pending_deletes"] = [*found["pending_deletes"], *(f"{found['namespace']}/{key}" for key in retired)]

    edit(uri, published)
    return True


def _write_cluster(place: Path, number: int, rows: list[Any], width: int) -> None:
    data = struct.pack("<II", len(rows), width)
    for name, values, _ in rows:
        data += struct.pack("<I", len(name.encode())) + name.encode() + struct.pack(f"<{width}f", *values)
    (place / f"cluster_{number}.bin").write_bytes(data)
    (place / f"attrs_{number}.bin").write_text(json.dumps([more or None for _, _, more in rows]))
