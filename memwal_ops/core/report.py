"""The interface of a job's report."""

from __future__ import annotations

from typing import Any, Protocol


class Report(Protocol):
    """The result of a plan or a run.

    ``decision`` is a member of an enum of the job (a ``StrEnum``): one word of a fixed set, never a silent no-op.
    """

    @property
    def decision(self) -> str:
        """The outcome in one word."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command: 0, or the code of the error that the report describes."""

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``. Keys with the same meaning are the same in every format."""

    def describe(self) -> str:
        """The report as human-readable text."""
