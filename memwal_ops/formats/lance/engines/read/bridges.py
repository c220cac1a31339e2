"""Find merged generations whose indexes cover base rows that the base's index does not cover yet (S0-201, S0-219).

A merge puts rows into new fragments, which the base's index covers only after the next catch-up. Until then the merged
generations, which are kept for it, have these rows in indexes of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.files.versions import read_version_manifest
from memwal_ops.formats.lance.indexes.base_indexes import coverage
from memwal_ops.formats.lance.wire.memwal_index import merge_progress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.engines.read.unmerged import Unmerged
    from memwal_ops.formats.lance.generations.generation_ref import GenerationRef
    from memwal_ops.formats.lance.indexes.base_indexes import BaseIndex
    from memwal_ops.formats.lance.table import Table

_MAX_VERSIONS = 64


def bridges(unmerged: Unmerged, index: BaseIndex) -> tuple[GenerationRef, ...] | None:
    """The merged generations that have every row of the fragments that the index does not cover.

    None: there may be others, so these fragments have to be scanned: other commits than merges wrote rows to them,
    a generation was collected, or the versions that would show it no longer exist.
    """
    table = unmerged.table
    merged = _merged_into(table, coverage(index.covered, table.manifest).uncovered)
    if merged is None:
        return None
    listed = {region.region_id: {ref.generation: ref for ref in region.merged} for region in unmerged.regions}
    found: list[GenerationRef] = []
    for region_id, (above, until) in merged.items():
        if region_id in unmerged.pruned:
            continue
        for number in range(above + 1, until + 1):
            ref = listed.get(region_id, {}).get(number)
            if ref is None:
                return None
            found.append(ref)
    return tuple(found)


def _merged_into(table: Table, fragments: frozenset[int]) -> Mapping[UUID, tuple[int, int]] | None:
    """Per region the progress before and after the merges that made these fragments; None: not known."""
    spans: dict[UUID, tuple[int, int]] = {}
    missing, version = set(fragments), table.manifest
    for number in range(table.version - 1, max(table.version - 1 - _MAX_VERSIONS, -1), -1):
        if not missing:
            break
        try:
            before = read_version_manifest(table.store, number, table.naming)
        except ObjectNotFoundError:
            return None
        added = missing - {fragment.id for fragment in before.manifest.fragments}
        if added:
            old, new = merge_progress(before.indexes), merge_progress(version.indexes)
            risen = {region_id for region_id, progress in new.items() if progress > old.get(region_id, 0)}
            if not risen:
                return None
            for region_id in risen:
                until = spans.get(region_id, (0, new[region_id]))[1]
                spans[region_id] = (old.get(region_id, 0), until)
        missing -= added
        version = before
    return None if missing else spans
