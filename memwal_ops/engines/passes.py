"""The first and the last step of every engine's pass: open all generations, land what was written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from memwal_ops.core.commit import CommitLostError, commit_strict
from memwal_ops.core.generations import Generation, open_generation
from memwal_ops.core.schema_history import SchemaHistory
from memwal_ops.engines.api import BlockedRegionsError, MergePass
from memwal_ops.errors import (
    CommitStateUnknownError,
    GenerationCorruptError,
    GenerationMissingError,
    MemwalOpsError,
    SchemaProjectionError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import lance

    from memwal_ops.core.commit import CommitNote
    from memwal_ops.core.generations import GenerationRef
    from memwal_ops.core.table import Table
    from memwal_ops.engines.rewrite import Rewrite

_CONCURRENT_OPENS = 8


def open_generations(table: Table, merge_pass: MergePass) -> list[Generation]:
    """Open every generation before any work.

    Raises:
        BlockedRegionsError: all that are missing, damaged or cannot be projected, together.
    """
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


def commit_pass(table: Table, change: Rewrite, merge_pass: MergePass, note: CommitNote) -> int:
    """Publish what a pass wrote, with the progress of all its regions; the new version.

    Raises:
        CommitLostError: another writer was first.
        MemwalOpsError: see :func:`memwal_ops.core.commit.commit_strict`.
    """
    return commit_files(table, change.operation(), change.written_files(), merge_pass.progress, note)


def commit_files(
    table: Table,
    operation: lance.LanceOperation.BaseOperation,
    files: Sequence[str],
    progress: Mapping[UUID, int],
    note: CommitNote,
) -> int:
    """:func:`memwal_ops.core.commit.commit_strict`; ``files`` are what was written for it.

    Where nothing was published, they are removed: a disk that is full would be fuller with each try.
    """
    try:
        return commit_strict(table, operation, progress, note)
    except CommitStateUnknownError:
        raise  # a version may name them
    except MemwalOpsError as error:
        if not isinstance(error, CommitLostError) or error.files_are_ours:
            table.store.delete_many(files)
        raise
