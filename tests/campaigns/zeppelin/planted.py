"""The faults of real systems, planted one by one as patches of our jobs; the numbers are those of the README."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memwal_ops.core.candidates import Gate
from memwal_ops.errors import BusyError
from memwal_ops.formats.zeppelin import backlog, compaction, lease, namespace
from memwal_ops.formats.zeppelin.jobs import gc, merge
from memwal_ops.formats.zeppelin.namespace import Namespace
from memwal_ops.formats.zeppelin.wire.fragment import WIKI, decode_fragment
from memwal_ops.formats.zeppelin.wire.manifest import Manifest, SegmentRef
from memwal_ops.storage.local import LocalObjectStore, LockedFolder

if TYPE_CHECKING:
    import pytest


def no_compare(patch: pytest.MonkeyPatch) -> None:
    """1, 10, 11: the manifest is overwritten without a condition."""

    def swap(self: LockedFolder, path: str, data: bytes, e_tag: str) -> bool:
        del e_tag
        LocalObjectStore.put(self, path, data)
        return True

    patch.setattr(LockedFolder, "compare_and_swap", swap)


def deletes_at_once(patch: pytest.MonkeyPatch) -> None:
    """2: what a compaction took off is deleted right after the swap."""
    commit = merge._Run._commit

    def committed(self: Any, inputs: Any, built: Any) -> Any:
        table = commit(self, inputs, built)
        table.store.delete_many([one.key for one in inputs.fragments])
        return table

    patch.setattr(merge._Run, "_commit", committed)


def forgets_tokens(patch: pytest.MonkeyPatch) -> None:
    """5: a zombie's commit is not fenced, nor are its inputs asked for again."""

    def commit(self: Any, inputs: Any, built: Any) -> Any:
        read = {one.id for one in inputs.fragments}

        def change(table: Any) -> Any:
            rest = [one for one in table.manifest.fragments if one.id not in read]
            segments = [] if built.segment is None else [built.segment]
            return table.manifest.changed(fragments=rest, segments=segments)

        return namespace.retried(inputs.table.newest(), change, compaction=True)

    patch.setattr(merge._Run, "_commit", commit)


def clears_by_watermark(patch: pytest.MonkeyPatch) -> None:
    """7: a commit clears what is not above the last ULID that was read, instead of what was read."""
    changed = Manifest.changed

    def lost(self: Manifest, **parts: Any) -> Manifest:
        if parts.get("segments") is not None:
            rest = parts["fragments"]
            read = {one.id for one in self.fragments} - {one.id for one in rest}
            parts["fragments"] = [one for one in rest if one.id > max(read, default="")]
        return changed(self, **parts)

    patch.setattr(Manifest, "changed", lost)


def forgets_history(patch: pytest.MonkeyPatch) -> None:
    """9: only the live manifest counts as a root."""
    read = gc.read_roots

    def live_only(table: Any, *more: Any) -> Any:
        found = read(table, *more)
        live = table.newest().manifest
        fragments, prefixes = dict.fromkeys(live.fragment_keys, "live"), dict.fromkeys(live.prefixes, "live")
        return replace(found, fragments=fragments, prefixes=prefixes)

    patch.setattr(gc, "read_roots", live_only)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """9: orphans of a sleeping compactor go without a token above its own."""
    patch.setattr(gc, "_fence", lambda table, judge: table)


def collects_at_once(patch: pytest.MonkeyPatch) -> None:
    """9: orphans need neither an earlier run nor an age."""
    patch.setattr(gc.NamespaceEvidence, "_recorded_gate", lambda *_: Gate(met=True, text="planted"))
    patch.setattr(gc.NamespaceEvidence, "_created_gate", lambda *_: Gate(met=True, text="planted"))
    patch.setattr(gc, "_fence", lambda table, judge: table)


def claims_late(patch: pytest.MonkeyPatch) -> None:
    """The lost F5: the token goes into the manifest only with the commit, and need not be ours but not above it."""
    patch.setattr(merge, "claim", lambda table, lease: table)
    changed = Manifest.changed

    def commit(self: Any, inputs: Any, built: Any) -> Any:
        read = {one.id for one in inputs.fragments}

        def change(table: Any) -> Any:
            if table.manifest.token > self.lease.token:
                raise namespace.FencedError("planted")
            rest = [one for one in table.manifest.fragments if one.id not in read]
            segments = [] if built.segment is None else [built.segment]
            return changed(table.manifest, fragments=rest, segments=segments, token=self.lease.token)

        return namespace.retried(inputs.table.newest(), change, compaction=True)

    patch.setattr(merge._Run, "_commit", commit)


def publishes_behind_a_fence(patch: pytest.MonkeyPatch) -> None:
    """3: whether a server is deleting the namespace is asked when it is opened, and never again."""
    published = namespace.publish

    def unasked(table: Any, *more: Any, **named: Any) -> Any:
        with patch.context() as inner:
            inner.setattr(Namespace, "check_writable", lambda self: None)
            return published(table, *more, **named)

    patch.setattr(namespace, "publish", unasked)


def replays_by_ulid(patch: pytest.MonkeyPatch) -> None:
    """4: the log is read in the order of its ULIDs; clocks differ."""
    read = compaction.read_fragments

    def by_ulid(table: Any, refs: Any, *more: Any) -> Any:
        return read(table, sorted(refs, key=lambda one: one.id), *more)

    patch.setattr(compaction, "read_fragments", by_ulid)


def insists_on_its_release(patch: pytest.MonkeyPatch) -> None:
    """6: a compactor whose lease expired and was taken waits for its own release, and ends as busy."""
    release = lease._release

    def insists(table: Any, held: Any) -> None:
        standing = lease.read_lease(table)
        if standing is None or standing[0].holder != held.holder:
            raise BusyError("planted")
        release(table, held)

    patch.setattr(lease, "_release", insists)


def releases_for_others(patch: pytest.MonkeyPatch) -> None:
    """6: the release of an expired lease ends the lease of the one who has taken it."""

    def blind(table: Any, held: Any) -> None:
        standing = lease.read_lease(table)
        if standing is not None:
            record = replace(standing[0], holder=held.holder, token=held.token, expires=standing[0].acquired)
            lease._put(table, record, standing[1])

    patch.setattr(lease, "_release", blind)


def forgets_pending(patch: pytest.MonkeyPatch) -> None:
    """8: a commit replaces ``pending_deletes``: of keys nobody knows any more, of hidden ids that came meanwhile."""
    changed = Manifest.changed

    def lost(self: Manifest, **parts: Any) -> Manifest:
        if parts.get("segments") is not None:
            parts["pending"] = [one for one in parts["pending"] if one not in self.pending]
        return changed(self, **parts)

    patch.setattr(Manifest, "changed", lost)


def forgets_hidden(patch: pytest.MonkeyPatch) -> None:
    """8: ids that came into ``pending_deletes`` while the compaction ran are cleared with those that it read."""
    commit = merge._Run._commit

    def blind(self: Any, inputs: Any, built: Any) -> Any:
        if inputs.table.manifest.dialect == WIKI:
            inputs = replace(inputs, hidden=frozenset({*inputs.hidden, *(f"v{one}" for one in range(12))}))
        return commit(self, inputs, built)

    patch.setattr(merge._Run, "_commit", blind)


def puts_the_first_lease(patch: pytest.MonkeyPatch) -> None:
    """12: a lease where there is none is a plain PUT: of two compactors both have the token."""
    put = lease._put

    def plain(table: Any, record: Any, tag: Any) -> bool:
        if tag is not None:
            return put(table, record, tag)
        table.store.put(lease.LEASE, lease.encode_lease(record, table.manifest.dialect))
        return True

    patch.setattr(lease, "_put", plain)


def forgets_carried(patch: pytest.MonkeyPatch) -> None:
    """13: a replaced segment's prefix is deleted, with the clusters that the live one carries from it."""
    patch.setattr(SegmentRef, "prefixes", property(lambda self: frozenset({self.prefix})))


def guesses_versions(patch: pytest.MonkeyPatch) -> None:
    """15: a fragment of a version that is not known is read as one that is."""

    def guessed(data: bytes, dialect: str) -> Any:
        return decode_fragment(data if data[:1] == b"{" else b"\x01" + data[1:], dialect)

    patch.setattr(backlog, "decode_fragment", guessed)


def upserts_before_deletes(patch: pytest.MonkeyPatch) -> None:
    """Order: the log is read backwards."""
    read = compaction.read_fragments
    patch.setattr(compaction, "read_fragments", lambda table, refs, *more: read(table, [*reversed(refs)], *more))


def keeps_deleted(patch: pytest.MonkeyPatch) -> None:
    """Deletes of the log do not reach the segment."""
    patch.setattr(compaction.Inputs, "superseded", property(lambda self: frozenset(self.rows.ids)))


PLANTED = [
    no_compare, deletes_at_once, publishes_behind_a_fence, replays_by_ulid, forgets_tokens, insists_on_its_release,
    releases_for_others, clears_by_watermark, forgets_pending, forgets_hidden, forgets_history, no_fence,
    collects_at_once, puts_the_first_lease, forgets_carried, guesses_versions, upserts_before_deletes, keeps_deleted,
]  # fmt: skip
