"""Hold what a survey of a table found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memwal_ops.core import erasing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.formats.lance.jobs.erase.log import LogSurvey


@dataclass(slots=True)
class Survey(erasing.Survey):
    """What holds such rows.

    Attributes:
        stained: fragments of the newest version that hold them, with the reason.
        indexes: indexes with a segment that may hold them, with the reason.
        newest_mentions: whether the newest version has the expression of a deletion.
        versions: older versions that hold them, with the reason.
        log: what of the log does; None: there is none, or it was not read.
    """

    stained: Mapping[int, str] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    newest_mentions: bool = False
    versions: dict[int, str] = field(default_factory=dict)
    log: LogSurvey | None = None
