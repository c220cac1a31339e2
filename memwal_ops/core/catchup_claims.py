"""What ``index_catchup`` may say of an index: never more than its fragments say.

The list is written by many hands: pylance derives it at some commits, clears it at others, leaves
it as it is when an update moves rows out of an index; older releases and the region layout do not
derive it at all. Here it is compared with the fragments, which decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.base_indexes import BaseIndex, base_indexes, coverage
from memwal_ops.core.layout import Layout
from memwal_ops.core.versions import VERSIONS_FOLDER, read_version_manifest
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry
from memwal_ops.format.names import parse_version_manifest_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from memwal_ops.core.table import Table
    from memwal_ops.format.version_manifest import VersionManifest


def claim(table: Table, covered: frozenset[int], *, progress_when_built: Mapping[UUID, int]) -> dict[UUID, int]:
    """What may be said of an index that covers ``covered`` in ``table``'s version.

    Args:
        table: the version that the claim is to stand in.
        covered: fragment ids.
        progress_when_built: merge progress of a version whose fragments it covers, as far as they are
            still there.
    """
    merged = table.index.merged_generations
    if coverage(covered, table.manifest).complete:
        return dict(merged)
    return _at_most(progress_when_built, merged)


def covered_generations(table: Table) -> dict[str, dict[UUID, int]]:
    """Per base index and region the generation up to which a query by that index needs no generation (S0-184, S0-188).

    The lower of what its fragments say and of what ``index_catchup`` says, where it says anything: a
    reader that trusts the list would look for the generation.
    """
    merged = table.index.merged_generations
    found: dict[str, dict[UUID, int]] = {}
    for name, index in base_indexes(table).items():
        uncovered = coverage(index.covered, table.manifest).uncovered
        reached = dict(merged) if not uncovered else _at_most(_progress_covered(table, index.covered) or {}, merged)
        recorded = table.index.index_catchup.get(name)
        found[name] = reached if recorded is None else _at_most(recorded, reached)
    return found


def wrong_claims(table: Table, names: Iterable[str]) -> dict[str, dict[UUID, int]]:
    """The claims among ``names`` that the fragments do not bear out, each with what is to stand instead.

    An index that is absent is read as caught up by the specification (S0-079) and as not caught up
    by pylance; in the region layout it is therefore wrong where the index is behind.
    """
    indexes = base_indexes(table)
    found: dict[str, dict[UUID, int]] = {}
    for name in names:
        if name not in indexes or not table.index.merged_generations:
            continue
        recorded = table.index.index_catchup.get(name)
        right = _right_claim(table, indexes[name], recorded)
        if right is not None and right != recorded:
            found[name] = right
    return found


def _right_claim(table: Table, index: BaseIndex, recorded: Mapping[UUID, int] | None) -> dict[UUID, int] | None:
    """What is to stand for the index; None: what stands may stay."""
    merged = table.index.merged_generations
    uncovered = coverage(index.covered, table.manifest).uncovered
    if not uncovered:
        return dict(merged)
    if recorded is None and table.layout is not Layout.REGION:
        return None
    if recorded is not None and not any(recorded.values()):
        return None  # claims nothing already
    allowed = _progress_covered(table, index.covered)
    if allowed is None:
        # The history does not reach back to it. A fragment that is younger than all covered ones was
        # added later; an older one was covered when the claim was made, and is not any more.
        if recorded is not None and min(uncovered) > max(index.covered, default=-1):
            return None
        allowed = {}
    if recorded is not None and all(recorded[region_id] <= allowed.get(region_id, 0) for region_id in recorded):
        return None
    return _at_most(allowed if recorded is None else recorded, _at_most(allowed, merged))


def _at_most(progress: Mapping[UUID, int], limit: Mapping[UUID, int]) -> dict[UUID, int]:
    """Each region of ``limit`` with its progress, or the limit where that is lower."""
    return {region_id: min(progress.get(region_id, 0), generation) for region_id, generation in limit.items()}


def _progress_covered(table: Table, covered: frozenset[int]) -> Mapping[UUID, int] | None:
    """Merge progress of the newest version whose fragments are all covered; None where none is left.

    A fragment's id tells no age of its rows: a compaction puts old rows under a new id, so that "the
    version before the oldest uncovered fragment" may have had the same rows under another id that is not
    covered either. Each such version is found by bisection (ids only rise), one manifest for each halving,
    and looked at; if it has uncovered fragments, those are older, and the search goes on before them.
    """
    versions = sorted(
        name.version
        for meta in table.store.list(VERSIONS_FOLDER)
        if (name := parse_version_manifest_name(meta.path.rsplit("/", 1)[-1])) is not None
        and not name.detached
        and name.version < table.version
    )
    known: dict[int, VersionManifest | None] = {table.version: table.manifest}

    def read(version: int) -> VersionManifest | None:
        if version not in known:
            try:
                known[version] = read_version_manifest(table.store, version, table.naming)
            except ObjectNotFoundError:
                known[version] = None  # cleaned up meanwhile, with all that were older
        return known[version]

    behind = table.manifest
    while uncovered := coverage(covered, behind).uncovered:
        oldest = min(uncovered)
        low, high = 0, len(versions)
        while low < high:
            middle = (low + high) // 2
            version = read(versions[middle])
            if version is not None and any(fragment.id == oldest for fragment in version.manifest.fragments):
                high = middle
            else:
                low = middle + 1
        # Those in front of ``low`` did not have it yet, or are gone.
        found = next((one for number in reversed(versions[:low]) if (one := read(number)) is not None), None)
        if found is None:
            return None
        if any(fragment.id == oldest for fragment in found.manifest.fragments):
            return None  # the ids do not tell an order here: a version was restored
        behind = found
    entry = None if behind.indexes is None else find_memwal_entry(behind.indexes)
    return {} if entry is None else decode_memwal_index(entry).merged_generations
