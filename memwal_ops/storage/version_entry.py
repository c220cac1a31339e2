"""What an external manifest store records of a version of a table. Imports no client of one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of one version: the manifest's key in the bucket and its size in bytes (None: not recorded).

    ``moved_to``: the version is fenced, since the table was migrated to that URI; there is no manifest. ``last_fence``
    is the last version that is fenced, or is to be.
    """

    version: int
    path: str
    size: int | None
    moved_to: str | None = None
    last_fence: int | None = None
