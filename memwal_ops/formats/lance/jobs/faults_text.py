"""Format a blocked region as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from memwal_ops.formats.lance.generations.backlog import Blocked


def problem(fault: Blocked, heading: str) -> str:
    """Why a region is blocked and what to do, indented below ``heading region ID``."""
    where = "" if fault.generation is None else f" at generation {fault.generation}"
    return "\n".join(
        [
            f"{heading} region {fault.region_id}{where}: {fault.error.reason}",
            paragraph(str(fault.error), indent="    "),
            paragraph(f"What to do: {fault.error.remedy} (runbooks/merge-blocked.md)", indent="    "),
        ]
    )
