"""Backlog triggers such as ``generations >= 8 or bytes >= 1GiB``: parsed once, evaluated at every poll.

A grammar of comparisons with and, or, not and parentheses; nothing is ever executed::

    disjunction := conjunction ("or" conjunction)*
    conjunction := condition ("and" condition)*
    condition   := "not" condition | "(" disjunction ")" | METRIC (">=" | "<=" | ">" | "<" | "==" | "!=") AMOUNT
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from memwal_ops.text import parse_duration, parse_size

_TOKEN = re.compile(r"\s*(?:(?P<op>>=|<=|==|!=|>|<)|(?P<paren>[()])|(?P<word>[A-Za-z0-9_.,]+)|(?P<invalid>\S))")
_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}
_MAX_LENGTH = 1000
_MAX_DEPTH = 20


class TriggerError(ValueError):
    """An invalid trigger expression; ``column`` counts from 1."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(f"{message} (column {column})")
        self.column = column


class _Node(Protocol):
    def holds(self, figures: Mapping[str, float]) -> bool | None: ...  # None: a metric that it needs is not known


@dataclass(frozen=True, slots=True)
class _Comparison:
    figure: str
    compare: Callable[[float, float], bool]
    amount: float

    def holds(self, figures: Mapping[str, float]) -> bool | None:
        return self.compare(figures[self.figure], self.amount) if self.figure in figures else None


@dataclass(frozen=True, slots=True)
class _Not:
    inner: _Node

    def holds(self, figures: Mapping[str, float]) -> bool | None:
        inner = self.inner.holds(figures)
        return None if inner is None else not inner


@dataclass(frozen=True, slots=True)
class _Compound:
    parts: tuple[_Node, ...]
    every: bool

    def holds(self, figures: Mapping[str, float]) -> bool | None:
        found = {part.holds(figures) for part in self.parts}
        return (not self.every) if (not self.every) in found else None if None in found else self.every


@dataclass(frozen=True, slots=True)
class Trigger:
    """A parsed trigger: its text, and the metrics that it compares."""

    text: str
    figures: frozenset[str]
    _root: _Node

    def is_met(self, figures: Mapping[str, float]) -> bool:
        """Whether it fires, whatever the metrics are that could not be read."""
        return self._root.holds(figures) is True


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    column: int


class _Parser:
    def __init__(self, text: str, kinds: Mapping[str, str]) -> None:
        self._tokens = _tokens(text)
        self._kinds = kinds
        self._at = 0
        self.figures: set[str] = set()

    def parse(self) -> _Node:
        root = self._disjunction(0)
        rest = self._next()
        if rest.kind != "end":
            raise TriggerError(f"unexpected {rest.text!r}; join comparisons by and, or", rest.column)
        return root

    def _disjunction(self, depth: int) -> _Node:
        return self._compound("or", depth, self._conjunction)

    def _conjunction(self, depth: int) -> _Node:
        return self._compound("and", depth, self._condition)

    def _compound(self, word: str, depth: int, part: Callable[[int], _Node]) -> _Node:
        parts = [part(depth)]
        while self._peek().text.lower() == word:
            self._next()
            parts.append(part(depth))
        return parts[0] if len(parts) == 1 else _Compound(tuple(parts), every=word == "and")

    def _condition(self, depth: int) -> _Node:
        token = self._next()
        if depth > _MAX_DEPTH:
            raise TriggerError("too many parentheses", token.column)
        if token.text.lower() == "not":
            return _Not(self._condition(depth + 1))
        if token.text == "(":
            inner = self._disjunction(depth + 1)
            closing = self._next()
            if closing.text != ")":
                raise TriggerError("a parenthesis is not closed", token.column)
            return inner
        return self._comparison(token)

    def _comparison(self, figure: _Token) -> _Node:
        if figure.kind != "word" or figure.text.lower() in {"and", "or"}:
            raise TriggerError(f"expected the name of a metric, not {figure.text or 'the end'!r}", figure.column)
        if figure.text not in self._kinds:
            raise TriggerError(
                f"unknown metric {figure.text!r}{_did_you_mean(figure.text, self._kinds)}", figure.column
            )
        compare = self._next()
        if compare.kind != "op":
            raise TriggerError(f"expected >=, <=, >, <, == or != after {figure.text!r}", compare.column)
        amount = self._next()
        if amount.kind != "word":
            raise TriggerError(f"expected an amount after {compare.text!r}", amount.column)
        self.figures.add(figure.text)
        return _Comparison(figure.text, _COMPARE[compare.text], _amount(amount, self._kinds[figure.text]))

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token


def parse_trigger(text: str, kinds: Mapping[str, str]) -> Trigger:
    """Parse a trigger over metrics, each given with its unit: count, bytes or seconds.

    Raises ``TriggerError``: the expression is invalid; with the column.
    """
    if len(text) > _MAX_LENGTH:
        raise TriggerError(f"a trigger has at most {_MAX_LENGTH} characters", _MAX_LENGTH)
    parser = _Parser(text, kinds)
    root = parser.parse()
    return Trigger(text, frozenset(parser.figures), root)


def _tokens(text: str) -> list[_Token]:
    tokens = []
    at = 0
    while match := _TOKEN.match(text, at):
        kind = str(match.lastgroup)
        if kind == "invalid":
            raise TriggerError(f"unexpected character {match[kind]!r}", match.start(kind) + 1)
        tokens.append(_Token(kind, match[kind], match.start(kind) + 1))
        at = match.end()
    return [*tokens, _Token("end", "", len(text) + 1)]


def _amount(token: _Token, kind: str) -> float:
    try:
        if kind == "bytes" and not token.text.isdecimal():
            return parse_size(token.text)
        if kind == "seconds":
            return parse_duration(token.text).total_seconds()
        return float(token.text)  # which accepts 1_000, and refuses 1__000
    except ValueError as error:
        reason = str(error) if kind != "count" else f"{token.text!r} is not a number"
        raise TriggerError(reason.rstrip("."), token.column) from None


def _did_you_mean(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; the metrics are {', '.join(sorted(known))}"
