"""The first and the last step of every engine's pass: open all generations, commit the written files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import TYPE_CHECKING

from memwal_ops.errors import GenerationCorruptError, GenerationMissingError, MemwalOpsError, SchemaProjectionError
from memwal_ops.formats.lance.commit.commit import commit_strict
from memwal_ops.formats.lance.commit.publication import deleted_unless_named
from memwal_ops.formats.lance.engines.merge.api import BlockedRegionsError, MergePass
from memwal_ops.formats.lance.engines.merge.rewrite import remove_files
from memwal_ops.formats.lance.generations.generation import Generation, open_generation
from memwal_ops.formats.lance.retention.schema_history import SchemaHistory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from uuid import UUID

    import lance

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite
    from memwal_ops.formats.lance.generations.copies import GenerationCopies
    from memwal_ops.formats.lance.generations.generation_ref import GenerationRef
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.region_manifest import RegionRecord

_CONCURRENT_OPENS = 8


def open_generations(table: Table, merge_pass: MergePass, copies: GenerationCopies | None = None) -> list[Generation]:
    """Open every generation before any work; with ``copies``, small ones are copied there first.

    Raises:
        BlockedRegionsError: all that are missing, damaged or cannot be projected, together.
    """
    history = SchemaHistory(table)
    generations: list[Generation] = []
    causes: dict[UUID, tuple[int | None, MemwalOpsError]] = {}

    def open_one(ref: GenerationRef) -> Generation | MemwalOpsError:
        try:
            return open_generation(table, ref, history, copies)
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
    """Publish the files of a pass, with the progress of all its regions; returns the new version.

    Raises:
        CommitLostError: another writer published the next version first.
        MemwalOpsError: see :func:`memwal_ops.formats.lance.commit.commit.commit_strict`.
    """
    return commit_files(
        table, change.operation(), change.written_files(), merge_pass.progress, note, merge_pass.records
    )


def commit_files(
    table: Table,
    operation: lance.LanceOperation.BaseOperation,
    files: Sequence[str],
    progress: Mapping[UUID, int],
    note: CommitNote,
    records: Mapping[UUID, RegionRecord] = MappingProxyType({}),
) -> int:
    """Run :func:`memwal_ops.formats.lance.commit.commit.commit_strict`; if nothing was published, delete ``files``.

    ``files`` are those written for the commit.
    """
    with deleted_unless_named(lambda: remove_files(table, files)):
        return commit_strict(table, operation, progress, note, records=records)
