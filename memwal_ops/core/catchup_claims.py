"""What ``index_catchup`` may say of an index: never more than its fragments say.

The list is written by many hands: pylance derives it at some commits, clears it at others, leaves
it as it is when an update moves rows out of an index; older releases and the region layout do not
derive it at all. Here it is compared with the fragments, which decide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.base_indexes import BaseIndex, base_indexes, coverage
from memwal_ops.core.layout import Layout
from memwal_ops.core.versions import read_version_manifest
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.format.memwal_index import decode_memwal_index, find_memwal_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from memwal_ops.core.table import Table


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
    """What is to stand for the index; None: nothing needs to."""
    merged = table.index.merged_generations
    if coverage(index.covered, table.manifest).complete:
        return dict(merged)
    if recorded is None and table.layout is not Layout.REGION:
        return None
    if recorded is not None and not any(recorded.values()):
        return None  # claims nothing already
    borne_out = _progress_that_is_covered(table, index)
    allowed = _at_most(borne_out, merged)
    if recorded is not None and all(recorded[region_id] <= allowed.get(region_id, 0) for region_id in recorded):
        return None
    return allowed


def _at_most(progress: Mapping[UUID, int], limit: Mapping[UUID, int]) -> dict[UUID, int]:
    """Each region of ``limit`` with its progress, or the limit where that is lower."""
    return {region_id: min(progress.get(region_id, 0), generation) for region_id, generation in limit.items()}


def _progress_that_is_covered(table: Table, index: BaseIndex) -> Mapping[UUID, int]:
    """Merge progress of the version that the index was last built on, if it still covers that version.

    Fragments that are gone since do not count against it: their rows were superseded, or pylance took
    the index along when it compacted them.
    """
    try:
        built_on = read_version_manifest(table.store, index.built_at, table.naming)
    except ObjectNotFoundError:
        return {}
    living = {fragment.id for fragment in table.manifest.manifest.fragments}
    lacking = {fragment.id for fragment in built_on.manifest.fragments if fragment.id in living} - index.covered
    entry = None if built_on.indexes is None else find_memwal_entry(built_on.indexes)
    if lacking or entry is None:
        return {}
    return decode_memwal_index(entry).merged_generations
