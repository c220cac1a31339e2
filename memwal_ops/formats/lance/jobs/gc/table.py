"""Candidates of gc that do not belong to a region: external snapshots, leftovers, probe objects and strays."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from memwal_ops.core.candidates import Gate
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.formats.lance.files.versions import CHECKED_MARK, VERSIONS_FOLDER, is_of_checked_commit
from memwal_ops.formats.lance.indexes.snapshots import decode_file
from memwal_ops.formats.lance.jobs.gc.candidates import Kind, LanceCandidate, unrecognized
from memwal_ops.formats.lance.retention.leftovers import find_leftovers
from memwal_ops.formats.lance.wire.names import INDICES_FOLDER, MEM_WAL_FOLDER, parse_version_manifest_name
from memwal_ops.storage.clock import CLOCK_FOLDER
from memwal_ops.storage.external_manifests import MOVED, is_staged, manifest_entries
from memwal_ops.storage.probe import PROBE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.formats.lance.jobs.gc.evidence import Evidence
    from memwal_ops.storage.api import ObjectMeta

_SNAPSHOT = re.compile(rf"{INDICES_FOLDER}/([0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}})/index\.lance")
_OPS_FOLDER = "_mem_wal_ops"
# A probe takes seconds. If its objects were deleted meanwhile, it would report a store that loses writes.
_PROBE_AGE = timedelta(hours=1)
_REGION_COLUMNS = {"region_id", "shard_id"}


def table_candidates(evidence: Evidence) -> Iterator[LanceCandidate]:
    """All candidates that do not belong to a region, lazily."""
    yield from snapshot_candidates(evidence)
    yield from leftover_candidates(evidence)
    yield from staged_candidates(evidence)
    yield from unchecked_candidates(evidence)
    yield from own_candidates(evidence)
    for path in evidence.table.regions.strays:
        yield unrecognized(path, 0, f"not a region, although it is in {MEM_WAL_FOLDER}/; it is kept")
    for path, why in evidence.retention.unreadable.items():
        yield unrecognized(path, 0, f"this version cannot be read, so that everything that it may need is kept: {why}")


def snapshot_candidates(evidence: Evidence) -> Iterator[LanceCandidate]:
    """Files of region snapshots; all else in ``_indices/`` belongs to pylance and is not read."""
    for meta in evidence.table.store.list(INDICES_FOLDER):
        match = _SNAPSHOT.fullmatch(meta.path)
        if match is not None:
            candidate = _snapshot_candidate(evidence, meta, UUID(match[1]))
            if candidate is not None:
                yield candidate


def _snapshot_candidate(evidence: Evidence, meta: ObjectMeta, uuid: UUID) -> LanceCandidate | None:
    gates: tuple[Gate, ...]
    if evidence.retention.names_index(uuid):
        gates = (Gate(met=False, text="a version that may be opened names it"),)
    else:
        try:
            rows = decode_file(evidence.table.store.get(meta.path))
        except ObjectNotFoundError:
            return None
        except InvalidFormatError as error:
            return unrecognized(meta.path, meta.size, f"this may be a region snapshot, but it cannot be read: {error}")
        if not _REGION_COLUMNS.intersection(rows.schema.names):
            return None
        gates = (
            Gate(met=True, text="a region snapshot that no version, tag or branch names"),
            evidence.unfinished_gate(meta.last_modified),
        )
    return LanceCandidate(Kind.SNAPSHOT, meta.path, meta.size, 1, gates)


def leftover_candidates(evidence: Evidence) -> Iterator[LanceCandidate]:
    """Detached manifests: those of memwal-ops with their transaction files, and those of other programs."""
    protected = evidence.retention.protected()
    for leftover in find_leftovers(evidence.table):
        meta = leftover.manifest
        if leftover.job is None:
            why = "a detached version that memwal-ops did not create; a reader with its number may open it"
            yield unrecognized(meta.path, meta.size, why)
            continue
        keeper = protected.get(leftover.version)
        gates = (
            Gate(met=True, text=f"left by a {leftover.job} (run {leftover.run_id}) that was killed while it committed"),
            Gate(met=keeper is None, text="no tag, branch or hold names it" if keeper is None else f"kept by {keeper}"),
            evidence.unfinished_gate(meta.last_modified),
        )
        if leftover.transaction is not None:
            file = evidence.table.store.head(leftover.transaction)
            if file is not None:
                yield LanceCandidate(Kind.LEFTOVER, leftover.transaction, file.size, 1, gates)
        yield LanceCandidate(Kind.LEFTOVER, meta.path, meta.size, 1, gates)


def staged_candidates(evidence: Evidence) -> Iterator[LanceCandidate]:
    """Staged manifests of a table whose versions are, or were, recorded in DynamoDB: those of commits that lost."""
    store, listed = evidence.table.store, evidence.table.listed
    entries = manifest_entries(store)
    if entries is None and not listed.has(f"{VERSIONS_FOLDER}/{MOVED}"):
        return
    for meta in store.list(VERSIONS_FOLDER):
        if not is_staged(meta.path):
            continue
        why = None if entries is None else entries.why_staged(meta.path)
        text = "a staged manifest: another commit has its version, or the table was migrated" if why is None else why
        gates = (Gate(met=why is None, text=text), evidence.unfinished_gate(meta.last_modified, "written"))
        yield LanceCandidate(Kind.LEFTOVER, meta.path, meta.size, 1, gates)


def unchecked_candidates(evidence: Evidence) -> Iterator[LanceCandidate]:
    """Staged manifests of compactions that were killed before the version was checked; no version names them."""
    store, listed, scheme = evidence.table.store, evidence.table.listed, evidence.table.location.scheme
    by_dynamodb = manifest_entries(store) is not None or listed.has(f"{VERSIONS_FOLDER}/{MOVED}")
    if by_dynamodb or (scheme == "s3" and not listed.has(CHECKED_MARK)):
        return
    for meta in listed.files if listed.complete else store.list(VERSIONS_FOLDER):
        if is_staged(meta.path) and is_of_checked_commit(store, meta.path):
            name = parse_version_manifest_name(f"{meta.path.rpartition('/')[2].partition('.')[0]}.manifest")
            passed = name is not None and name.version <= evidence.table.version
            gates = (
                Gate(met=True, text="staged by a compaction that was killed before it was checked"),
                Gate(met=passed, text="the table is at its version, or a later one"),
                evidence.unfinished_gate(meta.last_modified),
            )
            yield LanceCandidate(Kind.LEFTOVER, meta.path, meta.size, 1, gates)


def own_candidates(evidence: Evidence) -> Iterator[LanceCandidate]:
    """Objects of memwal-ops: the quarantine, and those of killed jobs that read the store's clock or probed writes."""
    age = max(evidence.options.orphan_min_age, _PROBE_AGE)
    store = evidence.table.store
    folders = store.list_level(_OPS_FOLDER).directories
    if QUARANTINE_FOLDER in folders:
        yield from quarantine_candidates(evidence)
    for folder in sorted({CLOCK_FOLDER, PROBE_FOLDER}.intersection(folders)):
        for meta in store.list(folder):
            gates = (
                Gate(met=True, text="written by a job that probed the store and was killed"),
                evidence.age_gate("a probe may be running: written", meta.last_modified, age),
            )
            yield LanceCandidate(Kind.LEFTOVER, meta.path, meta.size, 1, gates)


def quarantine_candidates(evidence: Evidence) -> Iterator[LanceCandidate]:
    """Objects that repairs replaced: always kept, since an operator may undo the repair."""
    for meta in evidence.table.store.list(QUARANTINE_FOLDER):
        name = meta.path.removeprefix(f"{QUARANTINE_FOLDER}/").partition("/")[0]
        why = f"memwal-ops repair URI --undo {name} needs it; delete the folder yourself when it is not needed"
        yield LanceCandidate(Kind.QUARANTINE, meta.path, meta.size, 1, (Gate(met=False, text=why),))
