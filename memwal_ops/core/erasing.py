"""Run an erasure: what is the same in every format, and what each one fills in.

Before it says that rows are erased, all bytes that stay are searched for values of them
(:mod:`memwal_ops.core.byte_scan`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from memwal_ops.core.byte_scan import ErasedValues, Scanned, scan_bytes
from memwal_ops.core.certificate import CheckReport, check_certificate, check_key, write_certificate
from memwal_ops.core.erasure import ByteScan, EraseDecision, EraseReport, Holder
from memwal_ops.errors import InvariantViolatedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.erasure import EraseOptions
    from memwal_ops.storage.api import ObjectMeta

NOT_SEEN = (
    "earlier versions of objects, if the bucket keeps them: memwal-ops doctor URI reports it",
    "replicas and backups of the store",
    "caches of readers, and programs that have a version open",
)
"""What no command sees from here, in any format."""


@dataclass(slots=True)
class Survey:
    """What a reading of the whole table found.

    Attributes:
        table: the newest revision.
        living: how many rows are to be deleted, and are not yet.
        holders: all that may hold rows which must be gone.
        objects: every object of the table, and why it cannot hold such a row; None: it may.
    """

    table: Any
    living: int = 0
    holders: list[Holder] = field(default_factory=list)
    objects: list[tuple[ObjectMeta, str | None]] = field(default_factory=list)


@dataclass(kw_only=True)
class Erasure(ABC):
    """The erasure of rows of one table, as its format does it.

    A step is safe to kill: what is left to do is found by reading the table anew, and not from a record of the run.

    Attributes:
        options: those of the run.
        context: of the run.
        done: what it did, by name.
        faults: what it could not do, and that the table does not show.
        warnings: what the operator must know of the rows that were chosen.
        values: of the rows that this run has seen.
        not_seen: where no command can look.
        written_in_place: objects, or folders with a slash, that later commits write again under the same name.
    """

    options: EraseOptions
    context: RunContext
    done: Counter[str] = field(default_factory=Counter)
    faults: list[Holder] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    values: ErasedValues = field(default_factory=ErasedValues)
    not_seen: ClassVar[tuple[str, ...]] = NOT_SEEN
    written_in_place: ClassVar[tuple[str, ...]] = ()

    @property
    def before(self) -> datetime | None:
        """The time before which the rows were deleted; None: an expression says which they are."""
        return None

    @abstractmethod
    def survey(self) -> Survey:
        """Read all that the store lists, without changes."""

    @abstractmethod
    def erase(self) -> Survey:
        """Do every step that something needs, and survey what is left."""

    def scanned(self) -> Scanned | None:
        """What of the newest revision is searched for ``values``; None: nothing is."""
        return None

    def scan(self) -> ByteScan | None:
        """Look for the values in every object that is listed now; None: see :meth:`scanned`."""
        if (scanned := self.scanned()) is None:
            return None
        self.context.step("search bytes")
        return scan_bytes(scanned, self.values)

    def count(self, name: str, number: int) -> None:
        """Add to what was done."""
        if number:
            self.done[name] += number
            self.context.figures[name] += number


def run_erasure(
    table: Any, options: EraseOptions, begin: Callable[[], Erasure], *, applied: bool
) -> EraseReport | CheckReport:
    """Plan or apply an erasure, or check a certificate, as the options say.

    Args:
        table: any revision.
        options: those of the run.
        begin: checks the table and makes the erasure; not called for a check.
        applied: whether the run may change anything.

    Raises:
        OptionError: no rows are given; or the key cannot sign.
        MemwalOpsError: that of a step; what was done stays, and the next run continues.
    """
    if options.check is not None:
        return check_certificate(table.newest(), options.check)
    started = time.monotonic()
    options.require_target()
    if options.sign_with is not None:
        check_key(options.sign_with)
    erasure = begin()
    found = erasure.erase() if applied else erasure.survey()
    report = EraseReport(
        applied=applied,
        holders=(*found.holders, *erasure.faults),
        version=found.table.revision,
        living=found.living,
        done=dict(erasure.done),
        not_seen=erasure.not_seen,
        warnings=(*options.dangers(), *erasure.warnings),
    )
    if report.decision is EraseDecision.ERASED and (scan := erasure.scan()) is not None:
        report.byte_scan = scan
        report.holders += tuple(scan.holders)
    if report.decision is EraseDecision.ERASED:
        proven = [(meta, why) for meta, why in found.objects if why is not None]
        if len(proven) < len(found.objects):
            unproven = next(meta.path for meta, why in found.objects if why is None)
            raise InvariantViolatedError(f"Nothing holds such a row, and yet nothing shows that of {unproven}.")
        if options.certificate is not None:
            report.certificate = write_certificate(found.table, options, erasure, proven, report.byte_scan)
    report.seconds = time.monotonic() - started
    return report
