"""Read the WAL entries to which a generation of the region layout refers (S0-147, S0-190)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER
from memwal_ops.formats.lance.wire.names import parse_version_manifest_name, parse_wal_entry_name
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest

if TYPE_CHECKING:
    from memwal_ops.storage.api import Store


def wal_references(store: Store, folder: str) -> frozenset[int] | None:
    """Ids of the WAL entries whose files are fragments of the dataset at ``folder``, in any of its versions.

    A file is identified by its name, regardless of its base path: a copied table still has the base paths
    of its origin. None: the generation has no manifest, and its references are unknown.

    Raises:
        InvalidFormatError: a manifest does not decode, and its references are unknown.
        ObjectNotFoundError: a manifest was deleted meanwhile.
    """
    entries: set[int] = set()
    manifests = 0
    for meta in store.list(f"{folder}/{VERSIONS_FOLDER}"):
        if parse_version_manifest_name(meta.path.rsplit("/", 1)[-1]) is None:
            continue
        manifests += 1
        for fragment in decode_version_manifest(store.get(meta.path)).manifest.fragments:
            for file in fragment.files:
                entry = parse_wal_entry_name(file.path.rsplit("/", 1)[-1])
                if entry is not None:
                    entries.add(entry.entry_id)
    return frozenset(entries) if manifests else None
