"""Define what a table's log means for its jobs, so that no job asks whether there is a MemWAL index."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Log:
    """The log of a table.

    Attributes:
        exists: the newest version has the current MemWAL index. For code that makes, migrates or opens it.
        strict_commits: a commit is exactly the next version, since a rebase by pylance could revert merge progress.
        keeps_codebooks: vector indexes keep theirs, since distances from generations must compare with theirs.
        shows_progress: the newest version shows what is merged, so that generations are drained and collected.
        versions_hold_generations: an old version may be all that keeps a generation from being collected.
    """

    exists: bool
    strict_commits: bool
    keeps_codebooks: bool
    shows_progress: bool
    versions_hold_generations: bool


LOG = Log(exists=True, strict_commits=True, keeps_codebooks=True, shows_progress=True, versions_hold_generations=True)
NO_LOG = Log(
    exists=False, strict_commits=False, keeps_codebooks=False, shows_progress=False, versions_hold_generations=False
)
