"""The local engine: one process, memory bounded by the pass's budget.

Open, collapse, locate, rewrite, commit. The first four only add files that nobody can see; the
last is one atomic version with data, deletions and progress of every region of the pass.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.core.commit import CommitLostError, commit_strict
from memwal_ops.core.generations import Generation, open_generation
from memwal_ops.core.schema_history import SchemaHistory
from memwal_ops.engines.api import BlockedRegionsError, MergePass, PassResult
from memwal_ops.engines.collapse import collapse
from memwal_ops.engines.locate import locate
from memwal_ops.engines.rewrite import Rewrite, rewrite
from memwal_ops.errors import GenerationCorruptError, GenerationMissingError, MemwalOpsError, SchemaProjectionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from uuid import UUID

    from memwal_ops.core.commit import CommitNote
    from memwal_ops.core.generations import GenerationRef
    from memwal_ops.core.table import Table

_CONCURRENT_OPENS = 8


class LocalEngine:
    """Merges passes in this process."""

    name = "local"

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Land one pass; see :meth:`memwal_ops.engines.api.Engine.run`."""
        try:
            return _run(table, merge_pass, note, on_rows)
        finally:
            # What the pass held goes back to the system, so that passes do not add up.
            pa.default_memory_pool().release_unused()


def _run(table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
    started = time.monotonic()
    phases: dict[str, float] = {}
    with _timed(phases, "open"):
        generations = _open_all(table, merge_pass)
    with _timed(phases, "collapse"):
        winners = collapse(generations, table.primary_key)
    with _timed(phases, "locate"):
        superseded = locate(table, winners, max_bytes=merge_pass.max_bytes)
    with _timed(phases, "rewrite"):
        change = rewrite(table, generations, winners, superseded, merge_pass.max_bytes, on_rows)
    with _timed(phases, "commit"):
        version = _commit(table, change, merge_pass, note)
    return PassResult(
        version=version,
        rows_read=winners.rows_read,
        rows_upserted=winners.num_upserts,
        rows_deleted=superseded.deleted,
        bytes_read=sum(generation.data_bytes for generation in generations),
        use_index=superseded.use_index,
        seconds=time.monotonic() - started,
        phases=phases,
    )


def _open_all(table: Table, merge_pass: MergePass) -> list[Generation]:
    """Open every generation before any work; all that are at fault are reported together."""
    history = SchemaHistory(table)
    generations: list[Generation] = []
    causes: dict[UUID, tuple[int | None, MemwalOpsError]] = {}

    def open_one(ref: GenerationRef) -> Generation | MemwalOpsError:
        try:
            return open_generation(table, ref, history)
        except (GenerationMissingError, GenerationCorruptError, SchemaProjectionError) as error:
            return error

    with ThreadPoolExecutor(_CONCURRENT_OPENS) as pool:
        for ref, outcome in zip(merge_pass.generations, pool.map(open_one, merge_pass.generations), strict=True):
            if isinstance(outcome, MemwalOpsError):
                causes.setdefault(ref.region_id, (ref.generation, outcome))
            else:
                generations.append(outcome)
    if causes:
        raise BlockedRegionsError(causes)
    return generations


def _commit(table: Table, change: Rewrite, merge_pass: MergePass, note: CommitNote) -> int:
    try:
        return commit_strict(table, change.operation(), merge_pass.progress, note)
    except CommitLostError as error:
        if error.files_are_ours:
            table.store.delete_many(change.written_files())
        raise


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        phases[name] = round(time.monotonic() - started, 6)
