"""Publish the next version of a legacy table: data, deletions and states of MemWALs together, as exactly V + 1.

pylance 14 builds no version of such a table: it decodes the details as those of the current layouts. So the manifest is
built here, from V's own, and published by the same put-if-absent as every other commit
(:mod:`memwal_ops.formats.lance.commit.commit`).

Its transaction is an ``UpdateMemWalState``, also where rows come with it. Writers that began at V and commit later
compare theirs with it: appends, updates and merges of the same MemWAL are then refused. As an ``Update`` of other
fragments, a second merge of the same generation would pass, and insert its rows twice.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memwal_ops.errors import InvariantViolatedError, UnsupportedFeatureError
from memwal_ops.formats.lance.commit.commit import check_rewritable, check_takes_rows, commit_built, next_entry
from memwal_ops.formats.lance.legacy.index import legacy_entry, mem_wals_of
from memwal_ops.formats.lance.wire._pb import table_pb2
from memwal_ops.formats.lance.wire.legacy_index import encode_mem_wals
from memwal_ops.formats.lance.wire.version_manifest import DELETION_FILES, STABLE_ROW_IDS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memwal_ops.formats.lance.commit.commit import CommitNote
    from memwal_ops.formats.lance.engines.merge.rewrite import Rewrite
    from memwal_ops.formats.lance.legacy.states import Change
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire.version_manifest import VersionManifest

_DELETION_TYPES = {"array": 0, "bitmap": 1}


@dataclass(frozen=True, slots=True)
class Draft:
    """The next version, before its states are in it."""

    fragments: tuple[table_pb2.DataFragment, ...]
    max_fragment_id: int | None
    indexes: tuple[table_pb2.IndexMetadata, ...]


def check_mergeable(table: Table) -> None:
    """Refuse, before any work, a table to which :func:`merge_draft` cannot add rows.

    Raises:
        UnsupportedFeatureError: as :func:`check_rewritable` and :func:`check_takes_rows`; stable row ids, whose
            versions Lance keeps beside rows.
    """
    check_rewritable(table)
    check_takes_rows(table)
    if table.manifest.manifest.writer_feature_flags & STABLE_ROW_IDS:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has stable row ids, which cannot be assigned while its MemWAL index is legacy.",
            remedy="Run memwal-ops migrate --apply, and then memwal-ops merge: it merges what the migration adopts.",
        )


def draft_of(version: VersionManifest) -> Draft:
    """The content of a version."""
    manifest = version.manifest
    return Draft(
        tuple(manifest.fragments),
        manifest.max_fragment_id if manifest.HasField("max_fragment_id") else None,
        tuple(version.index_entries),
    )


def merge_draft(table: Table, change: Rewrite) -> Draft:
    """The content of the next version after a pass: new fragments, deletion vectors, and no fragment without rows."""
    before = draft_of(table.manifest)
    deletions = {one.id: one.to_json()["deletion_file"] for one in change.updated_fragments}
    kept = []
    for fragment in before.fragments:
        if fragment.id in change.removed_fragment_ids:
            continue
        copied = deepcopy(fragment)
        if fragment.id in deletions:
            _set_deletion(copied.deletion_file, deletions[fragment.id])
        kept.append(copied)
    highest = max([-1 if before.max_fragment_id is None else before.max_fragment_id, *(one.id for one in kept)])
    for number, fragment_made in enumerate(change.new_fragments, highest + 1):
        made = fragment_made.to_json()
        fragment = table_pb2.DataFragment(id=number, physical_rows=made["physical_rows"])
        if made["deletion_file"] is not None or made["row_id_meta"] is not None:
            raise InvariantViolatedError("A fragment that was just written has deletions, or row ids.")
        for file in made["files"]:
            fragment.files.add(**{name: value for name, value in file.items() if value is not None})
        kept.append(fragment)
    last = highest + len(change.new_fragments)
    return Draft(tuple(kept), last if last >= 0 else None, before.indexes)


def publish(table: Table, change: Change, note: CommitNote, draft: Draft | None = None) -> int:
    """Publish a change of states as exactly the next version, with the data of ``draft``; by default V's own.

    Returns and raises: as :func:`memwal_ops.formats.lance.commit.commit.commit_built`.
    """
    check_rewritable(table)
    version = table.version + 1
    draft = draft or draft_of(table.manifest)
    manifest = deepcopy(table.manifest.manifest)
    del manifest.fragments[:]
    manifest.fragments.extend(draft.fragments)
    if draft.max_fragment_id is not None:
        manifest.max_fragment_id = draft.max_fragment_id
    if any(fragment.HasField("deletion_file") for fragment in draft.fragments):
        manifest.reader_feature_flags |= DELETION_FILES
        manifest.writer_feature_flags |= DELETION_FILES
    old = legacy_entry(table)
    details = encode_mem_wals(change.applied(mem_wals_of(table), version))
    indexes = [one for one in draft.indexes if one.name != old.name]
    section = table_pb2.IndexSection(indices=[*indexes, next_entry(old, details, table.version)])
    transaction = note.transaction(table.version)
    transaction.update_mem_wal_state.CopyFrom(change.message(version))
    return commit_built(table, replace(table.manifest, manifest=manifest, indexes=section), transaction)


def _set_deletion(target: table_pb2.DeletionFile, made: dict[str, object]) -> None:
    target.Clear()
    for name, value in made.items():
        if name == "file_type":
            target.file_type = _DELETION_TYPES[str(value)]
        elif value is not None:
            setattr(target, name, value)


def live_rows(fragments: Iterable[table_pb2.DataFragment]) -> int:
    """Rows that no deletion vector hides, by the manifest."""
    return sum(one.physical_rows - one.deletion_file.num_deleted_rows for one in fragments)
