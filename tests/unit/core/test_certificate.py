"""What a run could not remove, and has no time to wait for, is held: the next run would do no more."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from memwal_ops.core.certificate import Erasure, TableSurvey, run_erasure
from memwal_ops.core.context import RunContext
from memwal_ops.core.erasure import RowHolder
from memwal_ops.core.options import EraseOptions

LATER = datetime.now(UTC) + timedelta(days=1)


class Stuck(Erasure):
    """An erasure of a format whose index refuses to be built anew."""

    def survey(self) -> TableSurvey:
        """Always the same holder."""
        table: Any = SimpleNamespace(revision=3)
        survey = TableSurvey(table)
        survey.holders = [RowHolder("index", "vec_idx", "it may have them", self.context.figures.get("until"))]  # type: ignore[arg-type]
        return survey

    def erase(self) -> TableSurvey:
        """Nothing is done, but what the figures of the run say."""
        self.count("rows_deleted", int(self.context.figures.get("rows", 0)))
        return self.survey()


@pytest.mark.parametrize(
    ("applied", "figures", "decision", "code"),
    [
        (False, {}, "planned", 0),
        (True, {}, "held", 63),
        (True, {"rows": 2}, "waiting", 0),
        (True, {"until": LATER}, "waiting", 0),
    ],
)
def test_what_stays(applied: bool, figures: dict[str, Any], decision: str, code: int) -> None:
    options, context = EraseOptions(where="id = 7"), RunContext()
    context.figures.update(figures)
    report: Any = run_erasure(None, options, lambda: Stuck(options=options, context=context), applied=applied)
    assert (report.decision, report.exit_code) == (decision, code)
    assert ("HELD BY index vec_idx" in report.describe()) == (code == 63)
