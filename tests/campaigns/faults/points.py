"""The name of every storage call, and of every pylance call that writes: ``store.put_if_absent:region manifest``."""

from __future__ import annotations

import re

#: The first pattern that a path matches names what the call is about.
_KINDS = [
    (r"", "table"),
    (r"_versions", "versions"),
    (r"_versions/d.*", "detached manifest"),
    (r"_versions/latest_version_hint\.json", "version hint"),
    (r"_versions/[^-]+-.*", "staged version"),
    (r"_versions/.*", "version"),
    (r"_transactions", "transactions"),
    (r"_transactions/.*", "transaction"),
    (r"_indices", "indexes"),
    (r"_indices/[^/]+/index\.lance", "snapshot"),
    (r"_indices/.*", "index"),
    (r"_deletions", "deletion vectors"),
    (r"_deletions/.*", "deletion vector"),
    (r"data", "data files"),
    (r"data/.*", "data file"),
    (r"tree", "branches"),
    (r"_mem_wal", "regions"),
    (r"_mem_wal/[^/]+", "region"),
    (r"_mem_wal/[^/]+/manifest", "region manifests"),
    (r"_mem_wal/[^/]+/manifest/version_hint\.json", "region hint"),
    (r"_mem_wal/[^/]+/manifest/.*", "region manifest"),
    (r"_mem_wal/[^/]+/wal", "wal"),
    (r"_mem_wal/[^/]+/wal/.*", "wal entry"),
    (r"_mem_wal/[^/]+/[^/]+_gen_\d+(/.*)?", "generation"),
    (r"_mem_wal_ops/([a-z]+)(/.*)?", r"\1"),
]
_COMPILED = [(re.compile(pattern), kind) for pattern, kind in _KINDS]


def kind_of(path: str) -> str:
    """What stands at a path below the table's root."""
    for pattern, kind in _COMPILED:
        found = pattern.fullmatch(path)
        if found is not None:
            return found.expand(kind)
    return "other"


def store_point(method: str, paths: list[str]) -> str:
    """The name of a storage call."""
    kinds = list(dict.fromkeys(kind_of(path) for path in paths)) or ["nothing"]
    return f"store.{method}:{' and '.join(kinds)}"


# What never changes once it stands; it can only go.
_IMMUTABLE = {
    "version", "detached manifest", "transaction", "snapshot", "index", "deletion vector", "data file",
    "region manifest", "wal entry", "generation",
}  # fmt: skip
# New files that no other process can know yet.
_NEW = {
    "store.put:detached manifest", "store.put:snapshot", "store.put:transaction",
    "pylance.write_fragments", "pylance.delete_rows", "pylance.compaction.execute",
}  # fmt: skip
# Written and read by one run alone.
_OWN = {"clock", "probe"}


def is_indifferent(name: str) -> bool:
    """Whether others who delete nothing might as well run after the call as before it.

    It reads what never changes, or writes what no other process reads.
    """
    call, _, kind = name.partition(":")
    return (call in {"store.get", "store.get_range"} and kind in _IMMUTABLE) or name in _NEW or kind in _OWN
