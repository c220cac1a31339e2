"""Hold what a survey of a table found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memwal_ops.core import erasing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

    from memwal_ops.core.erasure import Holder
    from memwal_ops.storage.api import ObjectMeta


class AnyLog(Protocol):
    """What of a log holds such rows, in any layout.

    Attributes:
        objects: every object of it, and why it cannot hold such a row; None: it may.
    """

    objects: list[tuple[ObjectMeta, str | None]]

    @property
    def numbers(self) -> list[tuple[UUID, int]]:
        """Region and number of the generations that hold such rows."""

    def versions(self, reading: Mapping[tuple[UUID, int], list[int]]) -> Mapping[int, str]:
        """Versions whose readers need a part of the log that holds such rows; of generations, ``reading`` has them."""

    def holders(self, versions_until: datetime | None) -> Iterable[Holder]:
        """What holds such rows; the versions that need a part of it may expire at ``versions_until``."""

    def empty_posts(self) -> int:
        """Empty the entries that must stay and need not have their rows; return how many."""


@dataclass(slots=True)
class Survey(erasing.Survey):
    """What holds such rows.

    Attributes:
        stained: fragments of the newest version that hold them, with the reason.
        indexes: indexes with a segment that may hold them, with the reason.
        newest_mentions: whether the newest version has the expression of a deletion.
        versions: older versions that hold them, with the reason.
        on_branches: the objects of other branches by path, and why one cannot hold such a row; None: it may.
        log: what of the log does; None: there is none, or it was not read.
    """

    stained: Mapping[int, str] = field(default_factory=dict)
    indexes: Mapping[str, str] = field(default_factory=dict)
    newest_mentions: bool = False
    versions: dict[int, str] = field(default_factory=dict)
    on_branches: dict[str, str | None] = field(default_factory=dict)
    log: AnyLog | None = None
