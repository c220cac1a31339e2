"""The report of ``gc`` in every format: candidates for deletion, and the gates that each of them has to meet.

A candidate is deletable only if every gate is met; the sentences of the met gates are then its proof, and those of
the others are the reasons why it is kept. An unrecognized object has the kind ``unknown`` and is kept.
"""

from __future__ import annotations

import enum
import re
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, ClassVar, Generic, TypeVar

from memwal_ops import errors
from memwal_ops.core.report import Need
from memwal_ops.storage.clock import PLANNED_BY
from memwal_ops.text import counted, grid, paragraph, size_text

_SHOWN = 8
_MAX_REASONS = 1000
# Other reports show these paragraphs indented.
_NARROW = 104
_NUMBERS = re.compile(r"\d+( (d|h|min|s)\b)?")


UNKNOWN = "unknown"
"""The kind of unrecognized objects; every format has it."""


class Verdict(enum.StrEnum):
    """Whether a candidate is deleted, held or unrecognized."""

    DELETE = "delete"
    HELD = "held"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition of a deletion.

    It is met or not, by a sentence with the reason; one by time says also when it will be.
    """

    met: bool
    text: str
    until: datetime | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An object, or several objects that are deleted together. A format derives a class with its own labels.

    Attributes:
        kind: a member of the format's ``StrEnum`` of kinds; the value is what ``gc --json`` prints.
        path: below the table's root, without a trailing slash; a candidate that is not an object has a name of the
            same form.
        drain: whether it is kept only by its entry in a list that readers follow, and by its age.
    """

    kind: str
    path: str
    bytes: int
    objects: int
    gates: tuple[Gate, ...]
    drain: bool = False

    @property
    def verdict(self) -> Verdict:
        """``DELETE`` if every gate is met; without gates, ``HELD``."""
        if self.kind == UNKNOWN:
            return Verdict.UNKNOWN
        return Verdict.DELETE if self.gates and all(gate.met for gate in self.gates) else Verdict.HELD

    @property
    def why(self) -> str:
        """The proof if it is deletable; otherwise the gates that are not met."""
        wanted = self.verdict is Verdict.DELETE
        return "; ".join(gate.text for gate in self.gates if gate.met is wanted)

    def labels(self) -> Mapping[str, Any]:
        """Additional JSON keys of the format that identify the candidate."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The candidate as an entry of ``delete``, ``held`` or ``unknown``."""
        return {
            "kind": str(self.kind),
            "path": self.path,
            **self.labels(),
            "bytes": self.bytes,
            "objects": self.objects,
            "proof" if self.verdict is Verdict.DELETE else "because": self.why,
        }


CandidateT = TypeVar("CandidateT", bound=Candidate)


def unrecognized(path: str, size: int, why: str) -> Candidate:
    """A candidate for an object that cannot be classified; it is kept."""
    return Candidate(UNKNOWN, path, size, 1, (Gate(met=False, text=why),))


def age_gate(what: str, written: datetime, limit: timedelta, now: datetime) -> Gate:
    """A gate that is met once ``limit`` has passed since ``written``.

    Args:
        what: what happened at ``written``; the text continues with ``, 3 h ago``.
        written: by the store's clock.
        limit: how long the object is kept; zero is always met, even if ``written`` is in the future.
        now: by the slower of the local clock and the store's: an object must not seem older than it is.
    """
    age = now - written
    met = age >= limit or not limit
    text = f"{what}, {_short(max(age, timedelta()))} ago; kept for {_short(limit)}"
    return Gate(met, text, None if met else written + limit)


def _short(span: timedelta) -> str:
    seconds = int(span.total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


class GcDecision(enum.StrEnum):
    """The outcome of a garbage collection."""

    PLANNED = "planned"
    NOTHING_TO_DELETE = "nothing_to_delete"
    DRAINED = "drained"
    DELETED = "deleted"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True)
class KindText:
    """The names of a kind in the text of a report.

    ``heading``: its row in the table of counts. ``counted``: singular and plural of a kind with very many similar
    candidates: they are counted, not named.
    """

    heading: str
    counted: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class _Reason:
    """A reason that keeps candidates: ``count`` of one kind, ``bytes`` in all; ``first`` is one of them."""

    first: Candidate
    kind: KindText
    why: str
    count: int = 0
    bytes: int = 0

    def describe(self) -> str:
        if self.kind.counted is not None:
            named = counted(self.count, *self.kind.counted)
        else:
            named = self.first.path + ("" if self.count == 1 else f" and {self.count - 1:,} more")
        text = f"{named} ({size_text(self.bytes)}): {self.why}"
        return paragraph(text, indent="  ", hanging="  ", width=_NARROW)


class Reasons:
    """The distinct reasons per kind. Each has the number of candidates that it keeps, and one example."""

    def __init__(self) -> None:
        self._reasons: dict[Verdict, dict[tuple[str, str], _Reason]] = {Verdict.HELD: {}, Verdict.UNKNOWN: {}}

    def add(self, candidate: Candidate, kind: KindText) -> None:
        """Count a candidate that is kept."""
        reasons = self._reasons[candidate.verdict]
        # Reasons that differ only in numbers and ages are counted as one; otherwise they would hide the others.
        plain = _NUMBERS.sub("...", candidate.why) if kind.counted is not None else candidate.why
        key = (candidate.kind, plain)
        if key in reasons or len(reasons) < _MAX_REASONS:
            before = reasons.get(key) or _Reason(candidate, kind, candidate.why)
            why = before.why if before.why == candidate.why else plain
            reasons[key] = _Reason(before.first, kind, why, before.count + 1, before.bytes + candidate.bytes)

    def describe(self) -> Iterator[str]:
        """A block of lines for held candidates, and one for unrecognized ones, with the first reasons of each."""
        for verdict, reasons in self._reasons.items():
            if reasons:
                lines = ["Held:" if verdict is Verdict.HELD else "Unknown, and kept:"]
                lines += [reason.describe() for reason in list(reasons.values())[:_SHOWN]]
                if len(reasons) > _SHOWN:
                    lines.append(f"  and {len(reasons) - _SHOWN} other reasons (--json, --plan-file)")
                yield "\n".join(lines)


@dataclass(kw_only=True)
class CollectionReport(Generic[CandidateT]):
    """The report of a run. A format derives a class with the texts of its kinds and its own keys.

    Attributes:
        limit: maximum number of candidates of each verdict in ``items``.
        counts: number of candidates per kind and verdict.
        bytes_reclaimable: size of the deletable candidates, by the proofs of this run.
        deleted_bytes: their size, also of candidates of which only a part could be deleted.
        items: the first candidates of each verdict.
        failed: the store's error for each path that it did not delete.
        drained: entries that this run removed from the list that readers follow; ``drainable``: how many it could.
        limited: whether ``max_deletes`` ended the run.
        replaced: why it is not certain that the table is the one that the plan was made from; the run
            ended there.
        faults: the error of each part of the table that cannot be read; all of the part was kept.
        reasons: why candidates are kept, each reason once.
        plan_file: the file to which every candidate was written.
    """

    kinds: ClassVar[Mapping[str, KindText]] = {}
    """The kinds that are counted, in the order of the report."""
    drains: ClassVar[tuple[str, str]] = ("part", "parts")
    """What a drain removes from a list: singular and plural."""
    closing: ClassVar[str] = ""
    """The last sentence of the text: a reference to more information."""

    applied: bool
    limit: int = 0
    plan_file: str | None = None
    warnings: tuple[str, ...] = ()
    run_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    counts: dict[str, Counter[Verdict]] = field(default_factory=lambda: defaultdict(Counter))
    bytes_reclaimable: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0
    items: dict[Verdict, list[CandidateT]] = field(default_factory=lambda: {verdict: [] for verdict in Verdict})
    truncated: bool = False
    failed: dict[str, str] = field(default_factory=dict)
    drained: int = 0
    drainable: int = 0
    limited: bool = False
    replaced: str | None = None
    faults: dict[Any, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic, repr=False)
    seconds: float = 0.0
    reasons: Reasons = field(default_factory=Reasons)

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.replaced is not None:
            return errors.TableReplacedError.exit_code
        if self.failed:
            return errors.DeletesFailedError.exit_code
        return errors.RegionsBlockedError.exit_code if self.faults else 0

    @property
    def decision(self) -> GcDecision:
        """The outcome in one word."""
        if self.failed or self.replaced is not None:
            return GcDecision.INCOMPLETE
        if self.applied and self.deleted_objects:
            return GcDecision.DELETED
        if self.applied and self.drained:
            return GcDecision.DRAINED
        some = any(counter[Verdict.DELETE] for counter in self.counts.values())
        planned = not self.applied and (some or self.drainable)
        return GcDecision.PLANNED if planned else GcDecision.NOTHING_TO_DELETE

    def add(self, candidate: CandidateT) -> None:
        """Count a candidate, and add it to ``items`` up to ``limit``."""
        verdict = candidate.verdict
        self.counts[candidate.kind][verdict] += 1
        if verdict is Verdict.DELETE:
            self.bytes_reclaimable += candidate.bytes
        else:
            self.reasons.add(candidate, self.kinds.get(candidate.kind) or KindText(str(candidate.kind)))
        self.drainable += candidate.drain
        if len(self.items[verdict]) < self.limit:
            self.items[verdict].append(candidate)
        else:
            self.truncated = True

    def about(self) -> str:
        """The second line of the text: what was read; empty: no such line."""
        return ""

    def notes(self) -> Iterator[str]:
        """The format's sentences on what to do next."""
        return iter(())

    def details(self) -> Mapping[str, Any]:
        """The format's own keys of ``to_json``."""
        return {}

    def to_json(self) -> dict[str, Any]:
        """The document of ``gc --json``."""
        return {
            "decision": self.decision.value,
            "apply": self.applied,
            "counts": {
                str(kind): {verdict.value: self.counts.get(kind, Counter())[verdict] for verdict in Verdict}
                for kind in self._texts()
            },
            "bytes_reclaimable": self.bytes_reclaimable,
            "deleted": {"objects": self.deleted_objects, "bytes": self.deleted_bytes},
            **{verdict.value: [candidate.to_json() for candidate in self.items[verdict]] for verdict in Verdict},
            "truncated": self.truncated,
            "failed": [{"path": path, "error": why} for path, why in sorted(self.failed.items())],
            "drained": self.drained,
            "limited": self.limited,
            "replaced": self.replaced,
            **self.details(),
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 6),
            "run_id": self.run_id,
        }

    def needs(self) -> Iterator[Need]:
        """What a run would delete."""
        if self.decision is GcDecision.PLANNED:
            yield Need("gc", "delete what no version needs", frees=self.bytes_reclaimable)

    def describe(self) -> str:
        """The report as human-readable text."""
        parts = [f"{self._headline()}\n  {about}." if (about := self.about()) else self._headline()]
        rows = [
            (text.heading, *(f"{counter[verdict]:,}" for verdict in Verdict))
            for kind, text in self._texts().items()
            if (counter := self.counts.get(kind))
        ]
        if rows:
            deletable = "deleted" if self.applied else "deletable"
            parts.append(grid(("", deletable, "held", "unknown"), rows, words=("",)))
        parts += self.reasons.describe()
        for path, why in list(self.failed.items())[:_SHOWN]:
            parts.append(paragraph(f"NOT DELETED: {path}: {why}", hanging="  "))
        if self.replaced is not None:
            parts.append(paragraph(f"STOPPED: {self.replaced} {errors.TableReplacedError.remedy}", hanging="  "))
        parts += [paragraph(f"WARNING: {warning}", hanging="  ") for warning in self.warnings]
        if closing := paragraph(" ".join(filter(None, self._closing()))):
            parts.append(closing)
        return "\n\n".join(parts)

    def _headline(self) -> str:
        match self.decision:
            case GcDecision.PLANNED:
                text = f"planned: {size_text(self.bytes_reclaimable)} deletable"
                if self.drainable:
                    text += f", {counted(self.drainable, *self.drains)} drainable"
                return f"{text}; nothing was changed."
            case GcDecision.DELETED | GcDecision.INCOMPLETE:
                gone = counted(self.deleted_objects, "object")
                return f"{self.decision}: {gone}, {size_text(self.deleted_bytes)}, in {self.seconds:.2f} s."
            case GcDecision.DRAINED:
                return f"drained: {counted(self.drained, *self.drains)}; nothing was old enough to be deleted yet."
            case _:
                return "nothing_to_delete: every object is needed, or not old enough."

    def _closing(self) -> Iterator[str]:
        if self.plan_file is not None:
            yield f"{self.plan_file} lists every candidate."
        yield from self.notes()
        if self.decision is GcDecision.PLANNED:
            yield PLANNED_BY
            yield "Add --apply to delete; every check is then repeated."
        if self.limited:
            yield "--max-deletes ended this run; the next one continues."
        yield self.closing

    def _texts(self) -> Mapping[str, KindText]:
        return {**self.kinds, **{kind: KindText(str(kind)) for kind in self.counts if kind not in self.kinds}}
