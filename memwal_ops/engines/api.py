"""What a merge engine is: it takes one pass and lands it as one base version, or raises.

The job (``jobs.merge``) decides which generations make a pass, in which order, and what to do
about an error; an engine only carries it out. Engines differ in where the work runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memwal_ops.errors import MemwalOpsError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from uuid import UUID

    from memwal_ops.core.commit import CommitNote
    from memwal_ops.core.generations import GenerationRef
    from memwal_ops.core.table import Table


@dataclass(frozen=True, slots=True)
class MergePass:
    """The generations of one pass, ascending within each region (S0-039), and its memory budget in bytes."""

    generations: tuple[GenerationRef, ...]
    max_bytes: int

    @property
    def progress(self) -> Mapping[UUID, int]:
        """Region id to the highest generation of the pass: what its commit records."""
        return {ref.region_id: ref.generation for ref in self.generations}

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
        metrics: what else the engine counted (Spark: tasks, lost attempts, shuffled and spilled bytes).
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


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a stage is that runs on other machines.

    Attributes:
        stage: its name, as in a report's ``phases``.
        tasks_done: tasks that ended well, of ``tasks``; 0 of 0 where none was started yet.
        rows: that these tasks have read, deleted or written; a repeated task may count twice.
        bytes: the same: of keys that were read, of files that were written.
    """

    stage: str
    tasks_done: int
    tasks: int
    rows: int
    bytes: int


class BlockedRegionsError(MemwalOpsError):
    """Some regions cannot go on; the pass was given up before anything was published.

    ``causes`` maps a region id to the generation at fault (None: the region as a whole) and the
    error that says why.
    """

    exit_code = 10
    reason = "blocked"

    def __init__(self, causes: Mapping[UUID, tuple[int | None, MemwalOpsError]]) -> None:
        super().__init__("; ".join(str(error) for _, error in causes.values()))
        self.causes = causes


class Engine(Protocol):
    """Carries out passes."""

    @property
    def name(self) -> str:
        """The word that ``--engine`` takes."""

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Land one pass as exactly ``table.version + 1``.

        Args:
            table: the pinned version that the pass was decided on.
            on_rows: called with the number of generation rows that were dealt with since the last call.

        Raises:
            BlockedRegionsError: generations that are missing, damaged or cannot be projected.
            CommitLostError: another writer was first; decide again on the newest version.
            MemwalOpsError: any other refusal; nothing was published.
        """
