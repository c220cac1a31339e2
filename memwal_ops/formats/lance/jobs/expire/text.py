"""The report of an expire run as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.text import counted, paragraph, size_text

if TYPE_CHECKING:
    from memwal_ops.formats.lance.jobs.expire.job import ExpireReport

_SHOWN = 8
_CLONES = (
    "Shallow clones elsewhere that read these versions cannot be found from here, and break. Tag a version to keep it."
)


def describe(report: ExpireReport) -> str:
    """The report as text for people."""
    parts = [_headline(report)]
    named = [version for version in report.kept if version.because.startswith(("tag", "hold", "branch"))]
    parts += [paragraph(f"  version {kept.version} is kept: {kept.because}", hanging="    ") for kept in named[:_SHOWN]]
    if report.frees[0]:
        freed = f"{counted(report.frees[0], 'generation')} ({size_text(report.frees[1])})"
        word = "were" if report.applied and report.frees[0] > 1 else "was" if report.applied else "would be"
        parts.append(f"{freed} {word} kept only by these versions; memwal-ops gc can drain and delete them.")
    if report.later is not None:
        size, by = size_text(report.later.bytes), report.later.by
        of = "young versions, and files that no version needs,"
        parts.append(paragraph(f"Up to {size} more of {of} are old enough by {by:%Y-%m-%d %H:%M} UTC."))
    if report.for_branches:
        files = counted(report.for_branches, "file")
        verb = "is" if report.for_branches == 1 else "are"
        parts.append(
            f"{files} of these versions {verb} kept: {counted(report.branches, 'branch', 'branches')} may read them."
        )
    if report.put_back:
        versions = ", ".join(map(str, report.put_back))
        parts.append(paragraph(f"Listed again, since a tag, branch or hold named them meanwhile: {versions}."))
    for path, why in list(report.failed.items())[:_SHOWN]:
        parts.append(paragraph(f"NOT DELETED: {path}: {why}", hanging="  "))
    if len(report.failed) > _SHOWN:
        parts.append(f"NOT DELETED: {counted(len(report.failed) - _SHOWN, 'file')} more; see --json.")
    for version, path in list(report.unreadable.items())[:_SHOWN]:
        parts.append(paragraph(f"UNREADABLE: version {version} is listed, but {path} is missing.", hanging="  "))
    parts += [paragraph(f"WARNING: {warning}", hanging="  ") for warning in report.warnings]
    if report.versions:
        parts.append(paragraph(_CLONES))
    if report.decision == "planned":
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
