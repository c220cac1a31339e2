"""The local engine: one process, memory bounded by the pass's budget.

Open, collapse, locate, rewrite, commit. The first four only add files that no reader sees; the
last publishes data, deletions and progress of every region of the pass as one atomic version.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from memwal_ops.core import tracing
from memwal_ops.formats.lance.engines.merge.api import MergePass, PassResult
from memwal_ops.formats.lance.engines.merge.collapse import collapse
from memwal_ops.formats.lance.engines.merge.locate import locate
from memwal_ops.formats.lance.engines.merge.passes import commit_pass, open_generations
from memwal_ops.formats.lance.engines.merge.rewrite import rewrite
from memwal_ops.formats.lance.engines.merge.sharing import refuse_shared_keys
from memwal_ops.formats.lance.generations.copies import copies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.generations.copies import GenerationCopies
    from memwal_ops.formats.lance.table import Table


class LocalEngine:
    """Merges passes in this process."""

    name = "local"

    def run(self, table: Table, merge_pass: MergePass, note: CommitNote, on_rows: Callable[[int], None]) -> PassResult:
        """Publish one pass; see :meth:`memwal_ops.formats.lance.engines.merge.api.Engine.run`."""
        try:
            with copies_of(table, merge_pass.max_bytes) as copies:
                return _run(table, merge_pass, copies, note, on_rows)
        finally:
            # Return the memory of the pass to the system, so that passes do not add up.
            pa.default_memory_pool().release_unused()

    def refuse_shared_keys(self, table: Table, whole: MergePass) -> None:
        """See :meth:`memwal_ops.formats.lance.engines.merge.api.Engine.refuse_shared_keys`."""
        try:
            refuse_shared_keys(table, whole)
        finally:
            pa.default_memory_pool().release_unused()


def _run(
    table: Table,
    merge_pass: MergePass,
    copies: GenerationCopies | None,
    note: CommitNote,
    on_rows: Callable[[int], None],
) -> PassResult:
    started = time.monotonic()
    phases: dict[str, float] = {}
    with _timed(phases, "open"):
        generations = open_generations(table, merge_pass, copies)
    with _timed(phases, "collapse"):
        winners = collapse(generations, table.primary_key)
    with _timed(phases, "locate"):
        superseded = locate(table, winners, max_bytes=merge_pass.max_bytes)
    with _timed(phases, "rewrite"):
        change = rewrite(table, generations, winners, superseded, merge_pass.max_bytes, on_rows)
    with _timed(phases, "commit"):
        version = commit_pass(table, change, merge_pass, note)
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


@contextmanager
def _timed(phases: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        with tracing.phase(name):
            yield
    finally:
        phases[name] = round(time.monotonic() - started, 6)
