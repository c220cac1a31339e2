"""The report of an expire run, as a document and as text."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from memwal_ops.core.documents import document
from memwal_ops.core.report import Need
from memwal_ops.errors import DeletesFailedError
from memwal_ops.text import counted, paragraph, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from memwal_ops.formats.lance.retention.garbage import Later

_SHOWN = 8
_CLONES = (
    "Shallow clones elsewhere that read these versions cannot be found from here, and break. Tag a version to keep it."
)


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that is kept, and why. ``old_enough``: when it becomes old enough, if only its age keeps it."""

    version: int
    because: str
    old_enough: datetime | None = None

    def to_json(self) -> dict[str, object]:
        """The entry of ``kept``; ``old_enough`` is a time as of ISO 8601, or null."""
        return document(self)


@dataclass
class ExpireReport:
    """Report of an expire run.

    Attributes:
        decision: planned, nothing_to_expire, expired, or incomplete (the store refused some deletions).
        versions: planned: those that would be deleted. Applied: those that were planned and are not listed
            afterwards. Ascending.
        kept: those that are kept, ascending.
        objects: files that would be, or were, deleted, manifests included.
        bytes: size of these files.
        frees: generations that gc may delete once these versions are deleted, and their bytes.
        failed: per path the error of the store.
        unreadable: listed versions of which files are missing, each with one of those files.
        put_back: versions that a tag, branch or hold named during their deletion, and that are listed again.
        branches: branches of the table. Files that they refer to are kept.
        later: bytes that only their age keeps, and when the last of them are old enough; None: there are none.
        for_branches: files of deleted versions, kept since a branch or a detached version refers to them.
    """

    decision: str
    applied: bool
    versions: tuple[int, ...]
    kept: tuple[KeptVersion, ...]
    newest: int
    branches: int
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    objects: int = 0
    bytes: int = 0
    frees: tuple[int, int] = (0, 0)
    failed: dict[str, str] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    put_back: tuple[int, ...] = ()
    for_branches: int = 0
    later: Later | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """27 if the store refused deletions."""
        return DeletesFailedError.exit_code if self.failed else 0

    def needs(self) -> Iterator[Need]:
        """What a run would delete now, and what it can delete later."""
        later = 0 if self.later is None else self.later.bytes
        by = None if self.later is None else self.later.by.isoformat(timespec="seconds")
        if self.objects:
            what = f"delete {counted(len(self.versions), 'version')}, {counted(self.objects, 'object')} in all"
            read = len(self.versions) + len(self.kept)
            yield Need("expire", what, frees=self.bytes, later=later, by=by, versions=read)
        elif by is not None:
            yield Need("expire", "nothing yet", later=later, by=by, now=False)

    def to_json(self, *, limit: int = 100) -> dict[str, object]:
        """The document of ``expire --json``; ``limit`` bounds all lists."""
        lists = (self.versions, self.kept, self.failed, self.unreadable, self.put_back)
        return {
            "decision": self.decision,
            "apply": self.applied,
            "counts": {
                "expire": len(self.versions),
                "kept": len(self.kept),
                "failed": len(self.failed),
                "unreadable": len(self.unreadable),
            },
            "expire": list(self.versions[:limit]),
            "kept": [version.to_json() for version in self.kept[-limit:]],
            "failed": [{"path": path, "error": why} for path, why in islice(sorted(self.failed.items()), limit)],
            "unreadable": [
                {"version": version, "missing": path} for version, path in islice(self.unreadable.items(), limit)
            ],
            "put_back": list(self.put_back[:limit]),
            "truncated": any(len(entries) > limit for entries in lists),
            "objects": self.objects,
            "bytes": self.bytes,
            "later": None if self.later is None else self.later.to_json(),
            "frees_for_gc": {"generations": self.frees[0], "bytes": self.frees[1]},
            "branches": {"count": self.branches, "files_kept": self.for_branches},
            "version": self.newest,
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }

    def describe(self) -> str:
        """The report as text for people."""
        parts = [_headline(self)]
        named = [version for version in self.kept if version.because.startswith(("tag", "hold", "branch"))]
        parts += [
            paragraph(f"  version {kept.version} is kept: {kept.because}", hanging="    ") for kept in named[:_SHOWN]
        ]
        if self.frees[0]:
            freed = f"{counted(self.frees[0], 'generation')} ({size_text(self.frees[1])})"
            word = "were" if self.applied and self.frees[0] > 1 else "was" if self.applied else "would be"
            parts.append(f"{freed} {word} kept only by these versions; memwal-ops gc can drain and delete them.")
        if self.later is not None:
            size, by = size_text(self.later.bytes), self.later.by
            of = "young versions, and files that no version needs,"
            parts.append(paragraph(f"Up to {size} more of {of} are old enough by {by:%Y-%m-%d %H:%M} UTC."))
        if self.for_branches:
            files = counted(self.for_branches, "file")
            verb = "is" if self.for_branches == 1 else "are"
            parts.append(
                f"{files} of these versions {verb} kept: {counted(self.branches, 'branch', 'branches')} may read them."
            )
        if self.put_back:
            versions = ", ".join(map(str, self.put_back))
            parts.append(paragraph(f"Listed again, since a tag, branch or hold named them meanwhile: {versions}."))
        for path, why in list(self.failed.items())[:_SHOWN]:
            parts.append(paragraph(f"NOT DELETED: {path}: {why}", hanging="  "))
        if len(self.failed) > _SHOWN:
            parts.append(f"NOT DELETED: {counted(len(self.failed) - _SHOWN, 'file')} more; see --json.")
        for version, path in list(self.unreadable.items())[:_SHOWN]:
            parts.append(paragraph(f"UNREADABLE: version {version} is listed, but {path} is missing.", hanging="  "))
        parts += [paragraph(f"WARNING: {warning}", hanging="  ") for warning in self.warnings]
        if self.versions:
            parts.append(paragraph(_CLONES))
        if self.decision == "planned":
            parts.append("Add --apply to do it.")
        return "\n".join(parts)


def _headline(report: ExpireReport) -> str:
    versions, kept = counted(len(report.versions), "version"), counted(len(report.kept), "version")
    match report.decision:
        case "planned":
            return f"planned: {versions} would be deleted ({size_text(report.bytes)} of base files), {kept} kept."
        case "expired" | "incomplete" as word:
            return f"{word}: {versions} ({size_text(report.bytes)} of base files), {kept} kept, {report.seconds:.2f} s."
        case _:
            first = min((kept.old_enough for kept in report.kept if kept.old_enough is not None), default=None)
            when = "" if first is None else f" The first is old enough at {first:%Y-%m-%d %H:%M} UTC."
            return f"nothing_to_expire: {kept} kept: young, the newest, or held by a tag, branch or hold.{when}"
