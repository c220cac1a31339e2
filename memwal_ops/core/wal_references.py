"""Which WAL entries a generation of the region layout points into (S0-147, S0-190)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.versions import VERSIONS_FOLDER
from memwal_ops.format.names import parse_version_manifest_name, parse_wal_entry_name
from memwal_ops.format.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store


def wal_references(store: Store, folder: str) -> frozenset[int] | None:
    """Ids of the WAL entries whose files are fragments of the dataset at ``folder``, in any of its versions.

    A file is told by its name, whatever base path it is said to stand below: a table that was copied
    still says where it came from. None: it has no manifest, and nobody knows what it would need.

    Raises:
        InvalidFormatError: a manifest does not decode; nobody knows what it needs.
        ObjectNotFoundError: a manifest vanished meanwhile.
    """
    found: set[int] = set()
    manifests = 0
    for meta in store.list(f"{folder}/{VERSIONS_FOLDER}"):
        if parse_version_manifest_name(meta.path.rsplit("/", 1)[-1]) is None:
            continue
        manifests += 1
        for fragment in decode_version_manifest(store.get(meta.path)).manifest.fragments:
            for file in fragment.files:
                entry = parse_wal_entry_name(file.path.rsplit("/", 1)[-1])
                if entry is not None:
                    found.add(entry.entry_id)
    return frozenset(found) if manifests else None
