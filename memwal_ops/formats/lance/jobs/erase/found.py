"""Hold what a survey of a table found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.erasure import Holder
    from memwal_ops.formats.lance.jobs.erase.log import LogSurvey
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta


@dataclass(slots=True)
class Survey:
    """What holds such rows.

    Attributes:
        table: the newest version.
        living: how many rows match and are not deleted.
        stained: fragments of the newest version that hold them, with the reason.
        indexes: indexes with a segment that may hold them, with the reason.
        versions: older versions that hold them, with the reason.
        holders: all holders, these among them.
        objects: every object of the table, and why it cannot hold such a row; None: it may.
    """

    table: Table
    living: int = 0
    stained: Mapping[int, str] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    versions: dict[int, str] = field(default_factory=dict)
    newest_mentions: bool = False
    holders: list[Holder] = field(default_factory=list)
    objects: list[tuple[ObjectMeta, str | None]] = field(default_factory=list)
    log: LogSurvey | None = None
