"""Publish a manifest by compare-and-swap, and record it in the history."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from memwal_ops.errors import CommitConflictError, ConditionalWriteUnsupportedError, LeaseLostError
from memwal_ops.formats.zeppelin import history
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE
from memwal_ops.formats.zeppelin.wire.manifest import encode_manifest
from memwal_ops.formats.zeppelin.wire.names import MANIFEST
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_compare_and_swap, probe_conditional_writes

if TYPE_CHECKING:
    from collections.abc import Callable

    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.wire.manifest import Manifest

# As many as Zeppelin's own compaction; an append takes milliseconds, so ten conflicts in a row mean a tight loop.
ATTEMPTS = 10
_FIRST_WAIT = 0.05
_MAX_WAIT = 2.0
_swaps_proven: set[str] = set()


class FencedError(LeaseLostError):
    """Another compactor put a higher token into the manifest: nothing of this run is or becomes visible."""


def probe(table: Namespace) -> None:
    """Verify put-if-absent and compare-and-swap before anything relies on them.

    Raises:
        ConditionalWriteUnsupportedError: the store does not enforce one of them.
    """
    probe_conditional_writes(table.store)
    if table.store.root in _swaps_proven or table.store.root.startswith("/"):
        return  # a local folder has a lock file
    try:
        probe_compare_and_swap(table.store)
    except ConditionalWriteUnsupportedError as error:
        raise ConditionalWriteUnsupportedError(
            str(error), remedy="Keep the namespace on a store that enforces If-Match: every commit replaces one object."
        ) from error
    _swaps_proven.add(table.store.root)


def publish(table: Namespace, manifest: Manifest, *, compaction: bool = False) -> Namespace | None:
    """Replace the manifest of ``table``; None if another writer replaced it first.

    Args:
        table: the manifest from which the change was made.
        manifest: the new manifest.
        compaction: it removes entries, so both manifests are recorded: readers of the previous one still need those
            entries. Native publications are all recorded.

    Raises:
        UnsupportedFeatureError: a server fenced the namespace for deletion, or bound the manifest to state that only it
            can write, after it was opened.
        StoreUnavailableError: no response; the next run determines the outcome.
    """
    # Checked on the manifest that is replaced. Timeline otherwise: W reads it and writes a fragment; a server fences
    # the namespace; W's swap conflicts, and its second attempt lists the fragment although objects are being deleted.
    table.check_writable()
    data = encode_manifest(manifest)
    records = compaction or manifest.dialect == NATIVE
    if records and not table.recorded:
        # First the predecessor: once it is replaced, the objects that its readers need are recorded nowhere else.
        history.record(table.store, table.manifest, table.data)
    if not table.store.compare_and_swap(MANIFEST, data, table.tag):
        return None
    if records:
        history.record(table.store, manifest, data)
    return table.newest()


def retried(table: Namespace, change: Callable[[Namespace], Manifest | None], *, compaction: bool = False) -> Namespace:
    """Publish a change, computed again from the newest manifest after each conflict; None: nothing to do.

    Raises:
        CommitConflictError: other writers were first too often.
    """
    for attempt in range(ATTEMPTS):
        manifest = change(table)
        if manifest is None:
            return table
        done = publish(table, manifest, compaction=compaction)
        if done is not None:
            return done
        get_logger(__name__).info("commit_conflict", table=table.location.uri, attempt=attempt + 1)
        wait = min(_FIRST_WAIT * 2**attempt, _MAX_WAIT)
        time.sleep(random.uniform(0, wait))  # noqa: S311 - jitter
        table = table.newest()
    raise CommitConflictError(
        f"{table.location.uri}: other writers replaced the manifest {ATTEMPTS} times in a row before this run could.",
        remedy="Run it again when fewer writers append.",
    )


def recorded(table: Namespace) -> Namespace:
    """The same namespace with its live manifest recorded: the grace period of its predecessors starts then."""
    if table.recorded:
        return table
    revision = history.record(table.store, table.manifest, table.data)
    return replace(table, revision=revision, recorded=True)
