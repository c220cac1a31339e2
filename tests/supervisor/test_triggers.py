"""Triggers: what they say, what they refuse, and that nothing in them is ever executed."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memwal_ops.supervisor.triggers import TriggerError, parse_trigger

KINDS = {"generations": "count", "bytes": "bytes", "oldest_age": "seconds"}


@pytest.mark.parametrize(
    ("text", "figures", "fires"),
    [
        ("generations >= 8", {"generations": 8}, True),
        ("generations >= 8", {"generations": 7}, False),
        ("bytes >= 1GiB", {"bytes": 2**30}, True),
        ("bytes > 1GiB", {"bytes": 2**30}, False),
        ("oldest_age >= 10m", {"oldest_age": 600}, True),
        ("generations >= 8 or bytes >= 1GiB", {"generations": 1, "bytes": 2**31}, True),
        ("generations >= 8 and bytes >= 1GiB", {"generations": 9, "bytes": 1}, False),
        ("generations >= 1 or generations >= 2 and bytes > 5", {"generations": 1, "bytes": 0}, True),
        ("(generations >= 1 or generations >= 2) and bytes > 5", {"generations": 1, "bytes": 0}, False),
        ("not generations >= 8", {"generations": 1}, True),
        ("NOT (generations < 8 OR bytes == 0)", {"generations": 8, "bytes": 3}, True),
        ("generations != 3", {"generations": 3}, False),
        ("generations>=1_000", {"generations": 1000}, True),
        ("not generations >= 8", {}, False),
    ],
)
def test_it_fires(text: str, figures: dict[str, float], fires: bool) -> None:
    assert parse_trigger(text, KINDS).holds(figures) is fires


@pytest.mark.parametrize(
    ("text", "says", "column"),
    [
        ("", "name of a figure", 1),
        ("generatons >= 8", "did you mean generations", 1),
        ("generations >= ", "amount", 16),
        ("generations >= many", "no number", 16),
        ("generations 8", "expected >=", 13),
        ("bytes >= 5XB", "no size", 10),
        ("oldest_age >= 5", "no unit", 15),
        ("generations >= 8 bytes >= 1", "join comparisons", 18),
        ("(generations >= 8", "not closed", 1),
        ("generations >= 8)", "unexpected", 17),
        ("generations >= 8 or", "name of a figure", 20),
        ("__import__('os').system('true')", "means nothing", 12),
        ("generations >= 8; bytes >= 1", "means nothing", 17),
        ("(" * 500 + "generations >= 8" + ")" * 400, "too many parentheses", 22),
    ],
)
def test_it_says_where_it_is_wrong(text: str, says: str, column: int) -> None:
    with pytest.raises(TriggerError, match=says) as raised:
        parse_trigger(text, KINDS)
    assert raised.value.column == column


@hypothesis.settings(deadline=None)
@given(st.text(alphabet="generatiosby <>=!()andort0189KMiB._;'\"", max_size=60))
def test_any_text_is_a_trigger_or_refused(text: str) -> None:
    try:
        trigger = parse_trigger(text, KINDS)
    except TriggerError as error:
        assert 1 <= error.column <= len(text) + 1
    else:
        assert trigger.holds(dict.fromkeys(KINDS, 5.0)) in {True, False}
        assert trigger.holds({}) is False
