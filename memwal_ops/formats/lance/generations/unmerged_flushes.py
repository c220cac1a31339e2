"""Determine the versions that show whether columns are those of a flush that is not merged.

A generation has the columns of the version at its flush. Whether one of them was dropped and added again since is shown
by the versions from then on (:mod:`memwal_ops.formats.lance.retention.schema_history`). This applies to the newest
version, and to each that may be restored, since a tag, branch or hold keeps it: then its unmerged generations are
merged. Of the latter, only the versions up to it are needed: its data files are older than what was flushed after it.
"""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError
from memwal_ops.formats.lance.generations.backlog import read_backlog
from memwal_ops.formats.lance.generations.generation import read_flush
from memwal_ops.formats.lance.generations.generation_ref import GenerationRef, generation_ref
from memwal_ops.formats.lance.retention.schema_recorder import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.formats.lance.generations.backlog import RegionBacklog
    from memwal_ops.formats.lance.retention.live_versions import LiveVersions
    from memwal_ops.formats.lance.table import Table

_CONCURRENT_READS = 8


@dataclass
class UnmergedFlushes:
    """When unmerged generations were flushed; each generation is read once."""

    _flushed: dict[GenerationRef, int | None] = field(default_factory=dict)

    def needed(self, table: Table, retention: LiveVersions, protected: Collection[int]) -> Mapping[int, str]:
        """The versions that show the columns of unmerged generations, each with the version that has not merged them.

        Regions with an unreadable manifest, and missing generations, are not considered.

        Args:
            table: the newest version.
            protected: those that may be restored.

        Requests: as :func:`read_backlog`, and up to five for each region and each progress in it, the first time.

        Raises:
            InvalidFormatError: the manifest of a generation that the newest version has not merged is damaged.
        """
        regions = read_backlog(table).regions
        if not regions:
            return {}
        first = {version: _first_unmerged(regions, retention.progress(version)) for version in protected}
        newest = first[table.version] = _first_unmerged(regions, table.index.merged_generations)
        self._read(table, {ref for refs in first.values() for ref in refs}, frozenset(newest))
        found: dict[int, str] = {}
        versions = retention.versions
        for version, refs in sorted(first.items(), reverse=True):
            flushed = min((time for ref in refs if (time := self._flushed[ref]) is not None), default=None)
            if flushed is None:
                continue
            is_newest = version == table.version
            of = "an unmerged generation" if is_newest else f"a generation that version {version} has not merged"
            for older, following in reversed(list(pairwise(versions[: bisect_right(versions, version)]))):
                if nanoseconds(retention.written(following)) > flushed:
                    found.setdefault(older, f"has the schema of {of}")
                elif not is_newest:
                    break  # there may be many such versions, and many tags
        return found

    def _read(self, table: Table, refs: Collection[GenerationRef], newest: Collection[GenerationRef]) -> None:
        def read(ref: GenerationRef) -> int | None:
            try:
                return read_flush(table, ref)
            except InvalidFormatError:
                if ref in newest:
                    raise
                return 0  # not known: it may be restored from a backup

        missing = [ref for ref in refs if ref not in self._flushed]
        with ThreadPoolExecutor(_CONCURRENT_READS) as pool:
            self._flushed |= dict(zip(missing, pool.map(read, missing), strict=True))


def _first_unmerged(regions: Mapping[UUID, RegionBacklog], merged: Mapping[UUID, int]) -> tuple[GenerationRef, ...]:
    """The oldest generation of each region that is not merged at a progress."""

    def find() -> Iterator[GenerationRef]:
        for region_id, region in regions.items():
            waiting = region.manifest.unmerged(merged.get(region_id, 0))
            if waiting:
                yield generation_ref(region_id, waiting[0])

    return tuple(find())
