"""The expire job: let old base versions go, through pylance's own clean-up, so that gc can free what they held.

pylance decides which files go with a version; which versions go is decided here, since pylance knows
nothing of reader holds. Tags, branches and holds keep theirs.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from memwal_ops.core.holds import announced_expiry
from memwal_ops.core.lance_errors import lance_errors
from memwal_ops.core.retention import Retention
from memwal_ops.errors import InvalidUsageError
from memwal_ops.jobs.collectables import Kind
from memwal_ops.jobs.gc import GcReport, read_rules, views
from memwal_ops.jobs.gc_rules import GcOptions
from memwal_ops.storage.clock import store_time

if TYPE_CHECKING:
    from collections.abc import Collection

    from memwal_ops.core.table import Table

_SAFE_AGE = timedelta(hours=1)
_DANGER = (
    "Versions younger than 1 h are expired: a writer that began at version N commits after N+1; if N+1 is gone then, "
    "pylance does not see that it conflicts, and rows are lost or doubled. Do this only if nobody else writes."
)


@dataclass(frozen=True, slots=True)
class ExpireOptions:
    """Which versions may go.

    Attributes:
        older_than: only versions that were published at least this long ago.
        keep: the newest versions stay, at any age.
    """

    older_than: timedelta = timedelta(days=7)
    keep: int = 1

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise InvalidUsageError(f"--keep must be at least 1, not {self.keep}: the newest version is the table.")


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that stays, and why."""

    version: int
    because: str

    def to_json(self) -> dict[str, object]:
        """The entry of ``kept``."""
        return {"version": self.version, "because": self.because}


@dataclass
class ExpireReport:
    """What a run found and did. ``decision`` is planned, nothing_to_expire or expired.

    Attributes:
        versions: those that go, ascending.
        kept: those that stay, ascending.
        bytes: what the base table's clean-up frees, or freed.
        frees: generations that gc may take once these versions are gone, and their bytes.
    """

    decision: str
    applied: bool
    run_id: str
    versions: tuple[int, ...]
    kept: tuple[KeptVersion, ...]
    bytes: int
    frees: tuple[int, int]
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    newest: int = field(default=0)

    def to_json(self, *, limit: int = 100) -> dict[str, object]:
        """The document of ``expire --json``; ``limit`` bounds both lists."""
        return {
            "decision": self.decision,
            "apply": self.applied,
            "counts": {"expire": len(self.versions), "kept": len(self.kept)},
            "expire": list(self.versions[:limit]),
            "kept": [one.to_json() for one in self.kept[-limit:]],
            "truncated": max(len(self.versions), len(self.kept)) > limit,
            "bytes": self.bytes,
            "frees_for_gc": {"generations": self.frees[0], "bytes": self.frees[1]},
            "version": self.newest,
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }


def plan(table: Table, options: ExpireOptions) -> ExpireReport:
    """Which versions would go, which stay and why, and what gc could free then. Reads only."""
    started = time.monotonic()
    retention = Retention()
    now = datetime.now(UTC)
    retention.refresh(table, now)
    going, kept = _choose(table, retention, options, now)
    size = _explained_bytes(table, going) if going else 0
    report = _report("planned" if going else "nothing_to_expire", table, options, going, kept)
    report.bytes = size
    report.frees = _frees(table, going)
    report.seconds = time.monotonic() - started
    return report


def apply(table: Table, options: ExpireOptions) -> ExpireReport:
    """Let them go. Safe to kill, to run twice and at once.

    Raises:
        StorageError: the store failed; whatever went is consistent, the next run goes on.
    """
    started = time.monotonic()
    retention = Retention()
    now = store_time(table.store)
    retention.refresh(table, now)
    going, kept = _choose(table, retention, options, now)
    frees = _frees(table, going)
    if not going:
        report = _report("nothing_to_expire", table, options, going, kept, applied=True)
    else:
        with announced_expiry(table.store, going):
            # A hold that was taken before it could see the announcement is seen here.
            retention.refresh(table, now)
            going, kept = _choose(table, retention, options, now)
            report = _report("expired" if going else "nothing_to_expire", table, options, going, kept, applied=True)
            if going:
                with lance_errors("clean up old versions of", table.location.uri):
                    stats = table.dataset.cleanup_old_versions(versions=list(going), error_if_tagged_old_versions=False)
                report.bytes = int(stats.bytes_removed)
                report.frees = frees
    report.seconds = time.monotonic() - started
    return report


def _report(
    decision: str,
    table: Table,
    options: ExpireOptions,
    going: tuple[int, ...],
    kept: tuple[KeptVersion, ...],
    *,
    applied: bool = False,
) -> ExpireReport:
    warnings = (_DANGER,) if going and options.older_than < _SAFE_AGE else ()
    run_id = str(uuid.uuid4())
    return ExpireReport(decision, applied, run_id, going, kept, 0, (0, 0), warnings, newest=table.version)


def _choose(
    table: Table, retention: Retention, options: ExpireOptions, now: datetime
) -> tuple[tuple[int, ...], tuple[KeptVersion, ...]]:
    going: list[int] = []
    kept: list[KeptVersion] = []
    versions = retention.versions
    newest = set(versions[-options.keep :])
    protected = retention.protected()
    for version, following in zip(versions, [*versions[1:], *versions[-1:]], strict=True):
        if version >= table.version:
            kept.append(KeptVersion(version, "the newest version"))
        elif version in newest:
            kept.append(KeptVersion(version, f"one of the newest {options.keep}"))
        elif version in protected:
            kept.append(KeptVersion(version, protected[version]))
        elif options.older_than and now - retention.written(version) < options.older_than:
            kept.append(KeptVersion(version, f"published {retention.written(version):%Y-%m-%d %H:%M} UTC, too young"))
        elif options.older_than and now - retention.written(following) < min(options.older_than, _SAFE_AGE):
            # It may be old, but it was the newest until then: readers opened it a moment ago.
            kept.append(KeptVersion(version, f"the newest until {retention.written(following):%Y-%m-%d %H:%M} UTC"))
        else:
            going.append(version)
    return tuple(going), tuple(kept)


def _explained_bytes(table: Table, versions: tuple[int, ...]) -> int:
    with lance_errors("look what a clean-up frees of", table.location.uri):
        explained = table.dataset.explain_cleanup_old_versions(
            versions=list(versions), error_if_tagged_old_versions=False
        )
    return int(explained.stats.bytes_removed)


def _frees(table: Table, versions: Collection[int]) -> tuple[int, int]:
    """Generations that only these versions hold, and their bytes."""
    if not versions:
        return 0, 0
    rules = read_rules(table, GcOptions(), datetime.now(UTC))
    left = rules.retention.without(frozenset(versions))
    count = size = 0
    for view in views(rules, GcReport(applied=False, limit=0), lambda _: None):
        for item in view.directories():
            if item.kind is not Kind.GENERATION or item.generation is None or item.region_id is None:
                continue
            blocked = [gate for gate in rules.nobody_needs(item.region_id, item.generation) if not gate.met]
            others = rules.with_retention(left).nobody_needs(item.region_id, item.generation)
            if blocked and all(gate.met for gate in others):
                count += 1
                size += item.bytes
    return count, size
