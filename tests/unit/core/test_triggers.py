"""Triggers: what they say, what they refuse, and that nothing in them is ever executed."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import given, strategies as st

from memwal_ops.core.triggers import TriggerError, parse_trigger

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
    assert parse_trigger(text, KINDS).is_met(figures) is fires


@pytest.mark.parametrize(
    ("text", "says", "column"),
    [
        ("", "name of a metric", 1),
        ("generatons >= 8", "did you mean generations", 1),
        ("generations >= ", "amount", 16),
        ("generations >= many", "not a number", 16),
        ("generations >= 1__000", "'1__000' is not a number", 16),
        ("generations >= 1000_", "'1000_' is not a number", 16),
        ("generations >= _1000", "'_1000' is not a number", 16),
        ("generations 8", "expected >=", 13),
        ("bytes >= 5XB", "not a size", 10),
        ("oldest_age >= 5", "no unit", 15),
        ("generations >= 8 bytes >= 1", "join comparisons", 18),
        ("(generations >= 8", "not closed", 1),
        ("generations >= 8)", "unexpected", 17),
        ("generations >= 8 or", "name of a metric", 20),
        ("__import__('os').system('true')", "unexpected character", 12),
        ("generations >= 8; bytes >= 1", "unexpected character", 17),
        ("(" * 500 + "generations >= 8" + ")" * 400, "too many parentheses", 22),
    ],
)
def test_the_error_has_its_position(text: str, says: str, column: int) -> None:
    with pytest.raises(TriggerError, match=says) as raised:
        parse_trigger(text, KINDS)
    assert raised.value.column == column


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the name of a metric, not 'the end' (column 1)"),
        ("and >= 1", "expected the name of a metric, not 'and' (column 1)"),
        ("Or >= 1", "expected the name of a metric, not 'Or' (column 1)"),
        ("zzz >= 1", "unknown metric 'zzz'; the metrics are bytes, generations, oldest_age (column 1)"),
        ("generatons >= 1", "unknown metric 'generatons'; did you mean generations? (column 1)"),
        ("generations 8", "expected >=, <=, >, <, == or != after 'generations' (column 13)"),
        ("generations >= >", "expected an amount after '>=' (column 16)"),
        ("generations >= many", "'many' is not a number (column 16)"),
        ("generations >= 8 8", "unexpected '8'; join comparisons by and, or (column 18)"),
        ("(generations >= 8", "a parenthesis is not closed (column 1)"),
        ("generations ? 8", "unexpected character '?' (column 13)"),
        (" " * 985 + "generations >= 8", "a trigger has at most 1000 characters (column 1000)"),
    ],
)
def test_the_whole_message(text: str, message: str) -> None:
    with pytest.raises(TriggerError) as raised:
        parse_trigger(text, KINDS)
    assert str(raised.value) == message


@pytest.mark.parametrize(("text", "fires"), [("<=", [True, True, False]), ("<", [True, False, False])])
def test_the_bound_itself(text: str, fires: list[bool]) -> None:
    trigger = parse_trigger(f"bytes {text} 5", KINDS)
    assert [trigger.is_met({"bytes": figure}) for figure in (4, 5, 6)] == fires
    assert (trigger.text, trigger.figures) == (f"bytes {text} 5", {"bytes"})


def test_the_longest_and_the_deepest() -> None:
    assert parse_trigger(" " * 984 + "generations >= 8", KINDS).is_met({"generations": 8})
    for opening, closing in (("not ", ""), ("(", ")")):
        assert parse_trigger(f"{opening * 20}bytes >= 8{closing * 20}", KINDS).is_met({"bytes": 8})
        with pytest.raises(TriggerError, match="too many parentheses") as raised:
            parse_trigger(f"{opening * 21}bytes >= 8{closing * 21}", KINDS)
        assert raised.value.column == 1 + 21 * len(opening)


@pytest.mark.parametrize(
    ("text", "fires"),
    [
        ("bytes >= 1", False),
        ("not bytes >= 1", False),
        ("generations >= 8 or bytes >= 1", True),
        ("bytes >= 1 or generations >= 8", True),
        ("generations >= 9 or bytes >= 1", False),
        ("generations >= 8 and bytes >= 1", False),
        ("not (generations >= 9 and bytes >= 1)", True),
        ("not (generations >= 8 and bytes >= 1)", False),
        ("not (generations >= 8 or bytes >= 1)", False),
        ("generations >= 8 and (oldest_age >= 1s or generations >= 2)", True),
    ],
)
def test_a_metric_that_is_missing_decides_nothing(text: str, fires: bool) -> None:
    """A log of which some sizes are not known is due by its generations; what is not known makes nothing due."""
    trigger = parse_trigger(text, KINDS)
    assert trigger.is_met({"generations": 8}) is fires
    assert trigger.figures <= KINDS.keys()


@hypothesis.settings(deadline=None)
@given(st.text(alphabet="generatiosby <>=!()andort0189KMiB._;'\"", max_size=60))
def test_any_text_is_a_trigger_or_refused(text: str) -> None:
    try:
        trigger = parse_trigger(text, KINDS)
    except TriggerError as error:
        assert 1 <= error.column <= len(text) + 1
    else:
        assert trigger.is_met(dict.fromkeys(KINDS, 5.0)) in {True, False}
        assert trigger.is_met({}) is False
