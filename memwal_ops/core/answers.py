"""How well an index answers: the result of asking it beside a search without it, for tables of every format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from memwal_ops.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray


PAGE = "runbooks/wrong-answers.md"
ASKED_BY = "verify"
"""The job that asks indexes."""
_RECALL = "index_recall_low"


class PastAnswers(Protocol):
    """The recorded answers of a table's indexes."""

    def __call__(self, uri: str) -> Sequence[Mapping[str, Any]]:
        """The entries of ``answers`` of the last verification that asked, each with ``asked_at``."""


def no_past_answers(uri: str) -> Sequence[Mapping[str, Any]]:
    """No answers: there is no run history."""
    del uri
    return ()


@dataclass(frozen=True, slots=True)
class BadAnswers:
    """One index that answered badly.

    Attributes:
        why: what was found: one sentence or several.
        wrong: whether rows were missing or wrong; otherwise its recall is low.
        asked_at: when it was asked, as ISO 8601; empty: that is not known.
    """

    index: str
    type: str
    why: str
    remedy: str
    wrong: bool
    asked_at: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry of reports."""
        kind = "wrong" if self.wrong else "recall_low"
        document = {"index": self.index, "type": self.type, "kind": kind, "why": self.why, "remedy": self.remedy}
        return {**document, "asked_at": self.asked_at or None, "runbook": PAGE}

    def describe(self) -> str:
        """One line of a report."""
        when = f", asked {self.asked_at[:16].replace('T', ' ')} UTC" if self.asked_at else ""
        how = "answers wrongly" if self.wrong else "finds too few of the nearest rows"
        return f"the index {self.index} ({self.type}) {how}{when}: {self.why}"


def bad_answers(entries: Iterable[Mapping[str, Any]]) -> list[BadAnswers]:
    """Those of the recorded entries whose index answers badly, wrong answers first."""
    bad = [answer for answer in map(_bad, entries) if answer is not None]
    return sorted(bad, key=lambda answer: not answer.wrong)


def _bad(entry: Mapping[str, Any]) -> BadAnswers | None:
    recorded = entry.get("findings")
    findings = [finding for finding in recorded if isinstance(finding, dict)] if isinstance(recorded, list) else []
    index, wrong = str(entry.get("index")), int(entry.get("wrong") or 0)
    if not findings and not wrong:
        return None
    why = " ".join(dict.fromkeys(str(finding.get("evidence")) for finding in findings))
    remedy = next((str(finding["remedy"]) for finding in findings if finding.get("remedy")), "")
    return BadAnswers(
        index,
        str(entry.get("type")),
        why
        or f"{counted(wrong, 'answer')} of {int(entry.get('queries') or 0):,} {'was' if wrong == 1 else 'were'} wrong.",
        remedy or f"Build it anew: memwal-ops catchup URI --rebuild --index {index}",
        wrong=any(finding.get("check") != _RECALL for finding in findings) or not findings,
        asked_at=str(entry.get("asked_at") or ""),
    )


_FALL, _AGAIN = 0.05, timedelta(days=7)


def fallen_recall(entries: Iterable[Mapping[str, Any]], now: datetime) -> Iterator[tuple[str, datetime]]:
    """What verifications found of indexes: rows that were appended are found by more than 0.05 less often than others.

    With the time when each was asked. An index that was built within the last week, or at an unknown time, is left out.
    """
    for entry in entries:
        trained, appended = entry.get("built_rows_recall"), entry.get("appended_rows_recall")
        built, asked = entry.get("built_at"), entry.get("asked_at")
        if trained is None or appended is None or not built or not asked or trained - appended <= _FALL:
            continue
        if datetime.fromisoformat(built) + _AGAIN <= now:
            yield f"recall of {entry['index']} fell from {trained:.2f} to {appended:.2f}", datetime.fromisoformat(asked)


_RESAMPLES = 500
_CONFIDENCE = 0.99
_Z = 2.576  # of 99 %
_SHOWN = 5
_FEW = 10


@dataclass(frozen=True, slots=True)
class Interval:
    """A share with its confidence interval. It was measured by a sample, from 0 to 1, at 99 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class IndexAnswers:
    """Answers of one index, compared.

    Attributes:
        wrong: how many of these got an answer that lacks rows, or has rows that do not match.
        missing: rows that answers lack, each counted once per query.
        extra: rows in answers that do not match.
        examples_missing, examples_extra: addresses of a few of them.
        values: of these rows, by address: only on demand, because they are data.
        recall: of a vector index: the share of the nearest rows that it finds; None for others.
        built_rows_recall: the same for the rows that it was trained with; None: there are too few to measure it.
        appended_rows_recall: the same for the rows that were appended since.
        trained_rows: how many rows it was trained with, deleted ones included; None: that is not known.
        appended_rows_excess: by how much the share of newer rows is larger in what a search finds than in the nearest
            rows, -1 to 1: about 0 in a healthy index, also where its codes are coarse.
        probed_recall: of codes with the metric dot: the recall of a search of all partitions, without refinement.
        codes_recall: the recall that the trained codes of its rows give; a healthy index has it as ``probed_recall``.
        found_itself: the share of rows that a search by their own vector finds; not for the metric dot.
        segments: parts of which the index consists; built_at: when the oldest was built, ISO 8601; None: not known.
        rows_compared: rows of which every answer was compared; of others only those that were drawn.
        bytes_at_most: an upper bound of what was read for it.
        settings: of searches: k, nprobes, refine factor.
        skipped: why it was not asked; empty: it was.
        error: the error with which it answered; empty: none.
        findings: what is wrong with its answers, each with ``check``, ``evidence`` and ``remedy``.
    """

    index: str
    type: str
    queries: int = 0
    wrong: int = 0
    missing: int = 0
    extra: int = 0
    examples_missing: Sequence[int | str] = ()
    examples_extra: Sequence[int | str] = ()
    values: Sequence[str] = ()
    recall: Interval | None = None
    built_rows_recall: Interval | None = None
    appended_rows_recall: Interval | None = None
    appended_rows_excess: Interval | None = None
    trained_rows: int | None = None
    probed_recall: Interval | None = None
    codes_recall: Interval | None = None
    found_itself: Interval | None = None
    segments: int = 0
    built_at: str | None = None
    rows_compared: int = 0
    bytes_at_most: int = 0
    settings: str = ""
    skipped: str = ""
    error: str = ""
    findings: Sequence[Mapping[str, str]] = ()

    def to_json(self) -> dict[str, Any]:
        """The entry of ``answers`` in reports."""
        document = {
            "index": self.index,
            "type": self.type,
            "queries": self.queries,
            "wrong": self.wrong,
            "recall": _value(self.recall),
            "recall_low": None if self.recall is None else self.recall.low,
            "recall_high": None if self.recall is None else self.recall.high,
            "built_rows_recall": _value(self.built_rows_recall),
            "appended_rows_recall": _value(self.appended_rows_recall),
            "appended_rows_excess": _value(self.appended_rows_excess),
            "probed_recall": _value(self.probed_recall),
            "codes_recall": _value(self.codes_recall),
            "found_itself": _value(self.found_itself),
            "missing": self.missing,
            "extra": self.extra,
            "examples_missing": [*self.examples_missing],
            "examples_extra": [*self.examples_extra],
            "segments": self.segments,
            "built_at": self.built_at,
            "rows_compared": self.rows_compared,
            "bytes_at_most": self.bytes_at_most,
            "settings": self.settings,
            "skipped": self.skipped or None,
            "error": self.error or None,
            "findings": [dict(finding) for finding in self.findings],
        }
        return document | ({"values": [*self.values]} if self.values else {})

    def describe(self) -> str:
        """One line of a report."""
        if self.skipped:
            return f"{self.index} ({self.type}): not asked: {self.skipped}"
        figures = [counted(self.queries, "query", "queries"), f"{self.wrong:,} wrong"]
        if self.recall is not None:
            figures.append(f"recall {_text(self.recall)}")
        if self.built_rows_recall is not None and self.appended_rows_recall is not None:
            figures.append(
                f"built rows {self.built_rows_recall.value:.3f}, appended rows {self.appended_rows_recall.value:.3f}"
            )
        if self.settings:
            figures.append(self.settings)
        return f"{self.index} ({self.type}): {', '.join(figures)}; {counted(self.rows_compared, 'row')} compared"


def wilson(hits: int, total: int) -> Interval | None:
    """A share of independent trials with Wilson's interval; None without trials."""
    if not total:
        return None
    share, z2 = hits / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def share_by_query(hits: Sequence[int], totals: Sequence[int], seed: int = 0) -> Interval | None:
    """A share of rows, with its interval by a bootstrap over the queries; None without rows.

    Rows of one query are not independent: a search that misses a partition misses several. With few queries, or a share
    of 0 or 1, the bootstrap has no width; Wilson's interval of as many trials as there are queries bounds it.
    """
    import numpy as np  # noqa: PLC0415 - commands that ask nothing start without it

    hit_counts, of = np.asarray(hits, np.int64), np.asarray(totals, np.int64)
    hit_counts, of = hit_counts[of > 0], of[of > 0]
    if not of.size:
        return None
    share = float(hit_counts.sum() / of.sum())
    low, high = _bootstrapped(of.size, lambda drawn: hit_counts[drawn].sum(axis=1) / of[drawn].sum(axis=1), seed)
    if not 0 < share < 1:
        bound = wilson(round(share * of.size), int(of.size))
        assert bound is not None  # noqa: S101 - there are trials
        low, high = min(low, bound.low), max(high, bound.high)
    return Interval(share, low, high)


def mean_by_query(differences: NDArray[np.float64], seed: int = 0) -> Interval | None:
    """The mean of one figure for each query, with its interval by a bootstrap; None with fewer than 10 queries."""
    if differences.size < _FEW:
        return None
    low, high = _bootstrapped(differences.size, lambda drawn: differences[drawn].mean(axis=1), seed)
    return Interval(float(differences.mean()), low, high)


def _bootstrapped(
    queries: int, figure: Callable[[NDArray[np.int64]], NDArray[np.float64]], seed: int
) -> tuple[float, float]:
    """The interval of a figure by a bootstrap over the queries; ``figure`` is given resamples x queries."""
    import numpy as np  # noqa: PLC0415 - commands that ask nothing start without it

    drawn = np.random.default_rng(seed).integers(0, queries, size=(_RESAMPLES, queries))
    outside = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(figure(drawn), [outside, 1 - outside])
    return float(low), float(high)


def examples(addresses: Sequence[int | str]) -> Sequence[int]:
    """The first few of them, as reports list them."""
    return [int(address) for address in addresses[:_SHOWN]]


def _value(share: Interval | None) -> float | None:
    return None if share is None else round(share.value, 4)


def _text(share: Interval) -> str:
    return f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})"
