"""All jobs that are installed: ours, and those of other packages, found by entry point."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from memwal_ops.errors import JobPluginError
from memwal_ops.jobs.api import FIGURE_KINDS, POOLS, Job

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.metadata import EntryPoint

GROUP = "memwal_ops.jobs"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@cache
def load_jobs() -> Mapping[str, Job]:
    """Every registered job by name, ours first.

    Raises:
        JobPluginError: one of them cannot be imported, or is none.
    """
    found: dict[str, Job] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda one: (not is_ours(one), one.name)):
        job = load_job(entry)
        if job.name in found:
            raise JobPluginError(f"Two packages register a job {job.name!r}; one is {entry.value}.")
        found[job.name] = job
    if "merge" not in found:
        raise JobPluginError(
            "No job of memwal-ops is registered: it runs from its sources, and was not installed since they changed.",
            remedy="Install it: pip install -e . (or make demo).",
        )
    return found


def is_ours(entry: EntryPoint) -> bool:
    """Whether an entry point is one of this package."""
    return entry.value.startswith("memwal_ops.")


def package_of(job: str) -> str | None:
    """The package that registers a job, with its release; None for one of ours."""
    for entry in entry_points(group=GROUP):
        if entry.name == job and not is_ours(entry):
            return entry.value if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return None


def load_job(entry: EntryPoint) -> Job:
    """One job, checked.

    Raises:
        JobPluginError: says what is wrong with it.
    """
    try:
        job = entry.load()
    except Exception as error:
        raise JobPluginError(f"The job {entry.name!r} ({entry.value}) cannot be imported: {error!r}") from error
    wrong = _wrong(job, entry)
    if wrong is not None:
        raise JobPluginError(f"The job {entry.name!r} ({entry.value}) cannot be used: {wrong}.")
    assert isinstance(job, Job)  # noqa: S101 - for the type checker: _wrong looked
    return job


def _wrong(job: object, entry: EntryPoint) -> str | None:  # noqa: PLR0911 - one for each thing that can be wrong
    if not isinstance(job, Job):
        return f"it is a {type(job).__name__}, no memwal_ops.jobs.api.Job"
    if job.name != entry.name or _NAME.fullmatch(job.name) is None:
        return f"its name is {job.name!r}; it must be that of the entry point, of lower-case letters, digits and _"
    if job.pool not in POOLS:
        return f"its pool is {job.pool!r}; it must be one of {', '.join(POOLS)}"
    if not is_dataclass(job.options):
        return "its options are no dataclass"
    try:
        job.options()
    except Exception as error:  # noqa: BLE001 - a stranger's code
        return f"its options need values ({error}); every field must have a default ({len(fields(job.options))} fields)"
    odd = sorted(
        name for name, kind in job.figures.items() if _NAME.fullmatch(name) is None or kind not in FIGURE_KINDS
    )
    if odd:
        return f"its figures {', '.join(odd)} have no proper name, or a kind other than {', '.join(FIGURE_KINDS)}"
    return None
