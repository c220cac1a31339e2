"""The ledger of orphans: objects that no manifest lists, each with the time at which gc first found it (S4-037).

An object that no manifest lists may be one that a compaction or a writer is about to list. So gc first records it,
and deletes it in a later run, after a delay; Zeppelin's own gc keeps the same ledger, ``_gc/candidates.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.zeppelin.wire.fragment import NATIVE
from memwal_ops.formats.zeppelin.wire.manifest import timestamp
from memwal_ops.storage.records import check_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.zeppelin.namespace import Namespace

_NATIVE, _WIKI = "_gc/candidates.json", "_mem_wal_ops/gc/candidates.json"
_VERSION = 1


@dataclass
class Ledger:
    """Per path since when it has been unlisted. ``seen`` collects the paths of this run.

    Attributes:
        path: its object.
        since: the stored times.
        revisions: per path the revision at which it was first found.
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


def read_ledger(table: Namespace) -> Ledger:
    """Read the ledger; an unreadable one counts as empty: everything is recorded again, and deleted later.

    Raises:
        UnsupportedFeatureError: a later release wrote it.
    """
    path = ledger_path(table.manifest.dialect)
    try:
        data, tag = table.store.get_with_tag(path)
    except ObjectNotFoundError:
        return Ledger(path)
    since: dict[str, datetime] = {}
    revisions: dict[str, int] = {}
    try:
        found: Any = json.loads(data)
        if isinstance(found, dict):
            check_format(found.get("version", _VERSION), _VERSION, path)
        for one in found["candidates"] if isinstance(found, dict) else found:
            name = str(one["key"]).partition("/")[2]
            moment = datetime.fromisoformat(one["first_seen_unreachable_at"])
            since[name] = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
            revisions[name] = int(one.get("unreachable_since_manifest_version") or 0)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Ledger(path, tag=tag)
    return Ledger(path, since, revisions, tag)


def write_ledger(table: Namespace, ledger: Ledger, now: datetime) -> None:
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
