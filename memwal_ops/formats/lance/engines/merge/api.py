"""The interface of merge engines: carry out one pass as one base version, or raise.

The job (``jobs.merge``) decides which generations make a pass, in which order, and how errors are
handled; an engine only carries it out. Engines differ in where the work runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from memwal_ops.core.spark.stages import carry, from_document, to_document
from memwal_ops.errors import RegionsBlockedError
from memwal_ops.formats.lance.wire.region_manifest import RegionRecord, mark_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memwal_ops.errors import MemwalOpsError
    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.generations.generation import GenerationRef
    from memwal_ops.formats.lance.table import Table


@dataclass(frozen=True, slots=True)
class MergePass:
    """A pass that is to be carried out.

    Attributes:
        generations: ascending within each region (S0-039).
        max_bytes: its memory budget.
    """

    generations: tuple[GenerationRef, ...]
    max_bytes: int

    @property
    def progress(self) -> Mapping[UUID, int]:
        """Region id to the highest generation of the pass: what its commit records."""
        return {ref.region_id: ref.generation for ref in self.generations}

    @property
    def records(self) -> Mapping[UUID, RegionRecord]:
        """Region id to the record of its highest generation, committed with the progress: an id may be used again."""
        return {ref.region_id: RegionRecord(ref.generation, mark_of(ref.path)) for ref in self.generations}

    @property
    def regions(self) -> Mapping[UUID, tuple[int, int]]:
        """Region id to its first and last generation."""
        spans: dict[UUID, tuple[int, int]] = {}
        for ref in self.generations:
            first = spans.get(ref.region_id, (ref.generation, 0))[0]
            spans[ref.region_id] = (first, ref.generation)
        return spans


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass did.

    Attributes:
        version: the base version that it published.
        rows_read: live rows in its generations.
        rows_upserted: rows written to the base.
        rows_deleted: base rows that a tombstone removed.
        bytes_read: size of the generations' data files.
        use_index: whether superseded base rows were found through the key index.
        phases: seconds per phase, for reports and benchmarks.
        metrics: other counts of the engine (Spark: tasks, lost attempts, shuffled and spilled bytes).
    """

    version: int
    rows_read: int
    rows_upserted: int
    rows_deleted: int
    bytes_read: int
    use_index: bool
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class BlockedRegionsError(RegionsBlockedError):
    """Some regions cannot be merged. The pass was abandoned before anything was published.

    ``causes`` maps a region id to the generation at fault (None: the region as a whole) and the error.
    """

    def __init__(self, causes: Mapping[UUID, tuple[int | None, MemwalOpsError]]) -> None:
        super().__init__("; ".join(str(error) for _, error in causes.values()))
        self.causes = causes


def _pack(error: BlockedRegionsError) -> list[dict[str, Any]]:
    return [
        {"region": str(region_id), "generation": generation, **to_document(cause)}
        for region_id, (generation, cause) in error.causes.items()
    ]


def _unpack(causes: list[dict[str, Any]]) -> BlockedRegionsError:
    return BlockedRegionsError({UUID(one["region"]): (one["generation"], from_document(one)) for one in causes})


carry(BlockedRegionsError, _pack, _unpack)


class Engine(Protocol):
    """Carries out passes."""

    @property
    def name(self) -> str:
        """The value of ``--engine`` that selects it."""

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Publish one pass as exactly ``table.version + 1``.

        Args:
            table: the pinned version that the pass was planned on.
            on_rows: called with the number of generation rows that were processed since the last call.

        Raises:
            BlockedRegionsError: generations that are missing, damaged or cannot be projected.
            CommitLostError: another writer published that version first; plan again on the newest one.
            MemwalOpsError: any other refusal; nothing was published.
        """

    def refuse_shared_keys(self, table: Table, whole: MergePass) -> None:
        """Compare the keys of all regions of a run before its first pass; a pass compares only its own keys.

        Args:
            table: the pinned version that the run begins on.
            whole: every generation that the run will merge, and its memory budget.

        Raises:
            BlockedRegionsError: regions that share a key, and generations that cannot be read.
        """
