"""Hold what a survey of a table found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memwal_ops.core import erasing
from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime
    from uuid import UUID

    from memwal_ops.core.erasure import Holder
    from memwal_ops.formats.lance.jobs.erase.target import Target
    from memwal_ops.formats.lance.options import GcOptions
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import ObjectMeta

CLEAN = "it was read: it has no such row"


@dataclass
class LogSurvey(ABC):
    """What of a log holds such rows, in any layout.

    Attributes:
        merged: whether this run merged already: what is not merged now is blocked.
        objects: every object of it, and why it cannot hold such a row; None: it may.
    """

    table: Table
    target: Target
    options: GcOptions
    merged: bool = False
    objects: list[tuple[ObjectMeta, str | None]] = field(default_factory=list)

    @property
    def numbers(self) -> list[tuple[UUID, int]]:
        """Region and number of the generations that hold such rows."""
        return []

    @abstractmethod
    def versions(self, reading: Mapping[tuple[UUID, int], list[int]]) -> Mapping[int, str]:
        """Versions whose readers need a part of the log that holds such rows; of generations, ``reading`` has them."""

    @abstractmethod
    def holders(self, versions_until: datetime | None) -> Iterable[Holder]:
        """What holds such rows, with what keeps it; versions may expire at ``versions_until``."""

    def empty_posts(self) -> int:
        """Empty the entries that must stay and need not have their rows; return how many."""
        return 0

    def _why_file(self, meta: ObjectMeta, search: Callable[[], str | None]) -> str | None:
        """Why a file of the log may hold such a row, searched once in a run; None: it has none, or it is gone."""

        def why() -> str | None:
            try:
                return search()
            except ObjectNotFoundError:
                return None
            except InvalidFormatError as error:
                return f"it cannot be read: {error}"

        return self.target.once((meta.path, meta.size, meta.last_modified), why)


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
    log: LogSurvey | None = None
