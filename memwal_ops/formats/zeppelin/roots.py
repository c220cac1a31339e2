"""Determine what gc must keep: the objects of the live manifest and of every retained revision (S4-035).

A revision is retained if it is one of the newest, if a hold or a named snapshot keeps it, and for a
grace period after the next one was published: a reader that started just before still reads its objects.

An object that no manifest lists may be one that a compaction or a writer is about to list. So gc first records it in a
ledger of orphans, with the time at which it found it, and deletes it in a later run, after a delay (S4-037); Zeppelin's
own gc keeps the same ledger, ``_gc/candidates.json``.
"""

from __future__ import annotations

import json
from array import array
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.core.holds import holds_in_force
from memwal_ops.errors import ObjectNotFoundError, TableCorruptError, VersionGoneError, import_extra
from memwal_ops.formats.zeppelin import remedies
from memwal_ops.formats.zeppelin.namespace import Namespace, Revision, read_revision, recorded_revisions
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE
from memwal_ops.formats.zeppelin.wire.manifest import Manifest, timestamp
from memwal_ops.storage.records import check_format

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta

    from memwal_ops.storage.api import Store

msgpack = import_extra("msgpack", "zeppelin", "Zeppelin namespaces")
_NATIVE, _WIKI = "_gc/candidates.json", "_mem_wal_ops/gc/candidates.json"
_VERSION = 1


@dataclass
class OrphanLedger:
    """Per path since when, and since which revision, it has been unlisted.

    Attributes:
        path: its object.
        tag: entity tag of the object that was read; None: there is none yet.
        seen: unlisted now.
    """

    path: str
    since: Mapping[str, datetime] = field(default_factory=dict)
    revisions: Mapping[str, int] = field(default_factory=dict)
    tag: str | None = None
    seen: set[str] = field(default_factory=set)


def ledger_path(dialect: str) -> str:
    """The path of the ledger."""
    return _NATIVE if dialect == NATIVE else _WIKI


def read_ledger(table: Namespace) -> OrphanLedger:
    """Read the ledger; an unreadable one counts as empty: everything is recorded again, and deleted later.

    Raises ``UnsupportedFeatureError``: a later release wrote it.
    """
    path = ledger_path(table.manifest.dialect)
    try:
        data, tag = table.store.get_with_tag(path)
    except ObjectNotFoundError:
        return OrphanLedger(path)
    since: dict[str, datetime] = {}
    revisions: dict[str, int] = {}
    try:
        document: Any = json.loads(data)
        if isinstance(document, dict):
            check_format(document.get("version", _VERSION), _VERSION, path)
        for candidate in document["candidates"] if isinstance(document, dict) else document:
            name = str(candidate["key"]).partition("/")[2]
            moment = datetime.fromisoformat(candidate["first_seen_unreachable_at"])
            since[name] = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
            revisions[name] = int(candidate.get("unreachable_since_manifest_version") or 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return OrphanLedger(path, tag=tag)
    return OrphanLedger(path, since, revisions, tag)


def write_ledger(table: Namespace, ledger: OrphanLedger, now: datetime) -> None:
    """Write the paths that this run found; if another run wrote the ledger meanwhile, its version is kept."""
    entries = [
        {
            "key": f"{table.manifest.namespace}/{name}",
            "first_seen_unreachable_at": timestamp(ledger.since.get(name, now)),
            "unreachable_since_manifest_version": ledger.revisions.get(name, table.revision),
        }
        for name in sorted(ledger.seen)
    ]
    if {*ledger.since} == ledger.seen and (ledger.tag is not None or not entries):
        return  # nothing new
    data = json.dumps({"version": _VERSION, "candidates": entries}, indent=2).encode()
    if ledger.tag is None:
        table.store.put_if_absent(ledger.path, data)
    else:
        table.store.compare_and_swap(ledger.path, data, ledger.tag)


SNAPSHOTS = "snapshots"
NATIVE_KEPT, WIKI_KEPT = 128, 1


class Cache:
    """What recorded revisions list: a record never changes.

    Memory: each key once, and four bytes for each entry of a revision. Every append of a native namespace is a revision
    that lists the whole log, so the manifests themselves would grow with the square of the log.

    Attributes:
        listed: keys of fragments and prefixes of segments that any of them lists.
    """

    def __init__(self) -> None:
        self.listed: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._keys: list[str] = []
        self._fragments: dict[int, array[int]] = {}
        self._prefixes: dict[int, frozenset[str]] = {}

    def __contains__(self, revision: int) -> bool:
        return revision in self._prefixes

    def add(self, revision: int, manifest: Manifest) -> None:
        """Keep what a revision lists."""
        keys = manifest.fragment_keys
        self._keys += (new := [key for key in keys if key not in self._numbers])
        self._numbers |= zip(new, range(len(self._numbers), len(self._keys)), strict=True)
        self._fragments[revision] = array("I", (self._numbers[key] for key in keys))
        self._prefixes[revision] = manifest.prefixes
        self.listed |= {*new, *manifest.prefixes}

    def fragments(self, revision: int) -> Iterator[str]:
        """The keys of its fragments; of a revision that was not read, none."""
        return (self._keys[number] for number in self._fragments.get(revision, ()))

    def prefixes(self, revision: int) -> frozenset[str]:
        """The prefixes of its segments; of a revision that was not read, none."""
        return self._prefixes.get(revision, frozenset())


@dataclass(frozen=True)
class Roots:
    """The roots of garbage collection, for a live manifest.

    Attributes:
        revisions: all that are recorded, oldest first.
        fragments: per key the revision that needs it, as text.
        prefixes: the same per prefix of a segment.
        cleared: keys and prefixes that a recorded revision or ``pending_deletes`` lists: they were published once, and
            removed by a compaction if no revision needs them now.
    """

    revisions: tuple[Revision, ...]
    fragments: Mapping[str, str]
    prefixes: Mapping[str, str]
    cleared: frozenset[str]


def read_roots(table: Namespace, kept: int | None, grace: timedelta, now: datetime, cache: Cache) -> Roots:
    """Read all roots again, at the newest manifest.

    Args:
        table: at its newest manifest.
        kept: how many of the newest revisions are retained; None: as many as the dialect's own collector keeps.
        grace: how long one is retained after the next was published.
        now: by the slower of the local clock and the store's.
        cache: of earlier calls.

    Raises ``TableCorruptError``: a recorded revision or a snapshot cannot be read: what it needs is unknown.
    """
    native = table.manifest.dialect == NATIVE
    newest = kept if kept is not None else NATIVE_KEPT if native else WIKI_KEPT
    held = {number: f"hold {hold.number}" for hold in holds_in_force(table.store, now) for number in hold.versions}
    held |= _pins(table.store) if native else {}
    revisions = recorded_revisions(table.store, table.manifest.dialect)
    for place, revision in enumerate(revisions):
        following = revisions[place + 1] if place + 1 < len(revisions) else None
        why = None
        if following is None or revision.number >= table.revision:
            why = "it is the newest"
        elif len(revisions) - place <= newest:
            why = f"it is one of the newest {newest}"
        elif revision.number in held:
            why = f"{held[revision.number]} keeps it"
        elif grace and now - following.written < grace:
            why = f"the next one is younger than {grace}"
        revisions[place] = replace(revision, kept=why)
    return _collected(table, tuple(revisions), cache)


def _collected(table: Namespace, revisions: tuple[Revision, ...], cache: Cache) -> Roots:
    fragments: dict[str, str] = {}
    prefixes: dict[str, str] = {}
    for revision in revisions:
        if revision.number not in cache:
            with suppress(VersionGoneError):  # another collector has expired it meanwhile
                cache.add(revision.number, read_revision(table, revision.number))
        if revision.kept is not None:
            what = f"revision {revision.number} needs it: {revision.kept}"
            fragments |= dict.fromkeys(cache.fragments(revision.number), what)
            prefixes |= dict.fromkeys(cache.prefixes(revision.number), what)
    cleared = {*cache.listed}
    live = table.manifest
    fragments |= dict.fromkeys(live.fragment_keys, "the live manifest lists it")
    prefixes |= dict.fromkeys(live.prefixes, "the live manifest needs it")
    if live.dialect == NATIVE:
        # Retired by a commit, which added the key there in the same compare-and-swap.
        cleared |= {key if key.startswith("wal/") else prefix_of(key) for key in live.pending}
    return Roots(revisions, fragments, prefixes, frozenset(cleared))


def prefix_of(path: str) -> str:
    """The prefix of the segment that an object belongs to."""
    return "/".join(path.split("/")[:2]) + "/"


def _pins(store: Store) -> dict[int, str]:
    pins = {}
    for meta in store.list(SNAPSHOTS):
        try:
            data = store.get(meta.path)
            version = msgpack.unpackb(data[1:])[0] if data[:1] == b"\x01" else None
        except ObjectNotFoundError:
            continue
        except (ValueError, TypeError, IndexError, msgpack.UnpackException):
            version = None
        if type(version) is not int:
            raise TableCorruptError(
                f"{meta.path} cannot be read: it is not known which revision it pins.", remedy=remedies.SNAPSHOT
            )
        pins[version] = f"the snapshot {meta.path.removeprefix(f'{SNAPSHOTS}/').removesuffix('.msgpack')}"
    return pins
