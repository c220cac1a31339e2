"""What a PromQL expression asks of the metrics that there are: names, labels, label values."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB_NAME = "memwal-ops"
"""``job_name`` of the scrape: the label ``job`` of every metric that has none of its own."""
# What Prometheus makes itself.
_ITS_OWN = {"up": {"instance", "job"}, "ALERTS": {"alertname", "alertstate", "severity", "instance", "table", "job"}}
_TARGET = {"instance", "job"}


@dataclass
class Scrape:
    """The series of one scrape, as Prometheus stores them with ``honor_labels``."""

    labels: dict[str, dict[str, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    """By name of the sample and of the label: its values."""

    @classmethod
    def of(cls, text: str) -> Scrape:
        made = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                values = made.labels[sample.name]
                for name, value in {"job": JOB_NAME, **sample.labels}.items():
                    values[name].add(value)
        return made

    def of_metric(self, name: str) -> set[str]:
        """The names of a metric's labels in Prometheus."""
        return _ITS_OWN[name] if name in _ITS_OWN else {*self.labels[name], *_TARGET}

    def wrong(self, expression: str) -> list[str]:
        """What an expression names that does not exist; empty where all is well."""
        return [*self._wrong(promql.parse(expression))]

    def _wrong(self, parsed: Any) -> Iterator[str]:
        for node in nodes(parsed):
            if isinstance(node, promql.VectorSelector):
                yield from self._wrong_selector(node)
            elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                yield from self._missing(node.modifier.labels, node.expr)
            elif isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching:
                for side in (node.lhs, node.rhs):
                    yield from self._missing(node.modifier.matching.labels, side)

    def _wrong_selector(self, node: Any) -> Iterator[str]:
        if node.name in _ITS_OWN:
            return
        if node.name not in self.labels:
            yield f"no metric {node.name}"
            return
        values = self.labels[node.name]
        for matcher in node.matchers.matchers:
            if matcher.name not in self.of_metric(node.name):
                yield f"{node.name} has no label {matcher.name}"
            elif (
                matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual)
                and matcher.name != "instance"
                and matcher.value not in values[matcher.name]
            ):
                yield f"{node.name} has no {matcher.name}={matcher.value}"

    def _missing(self, labels: list[str], expression: Any) -> Iterator[str]:
        for name in metrics(expression) & {*self.labels, *_ITS_OWN}:
            for label in labels:
                if label not in self.of_metric(name):
                    yield f"{name} has no label {label}"


def nodes(parsed: Any) -> list[Any]:
    """Every part of a parsed expression."""
    found: list[Any] = []
    promql.walk(parsed, found.append)
    return found


def selectors(expression: str) -> list[Any]:
    """Every selector, from left to right."""
    return [node for node in nodes(promql.parse(expression)) if isinstance(node, promql.VectorSelector)]


def metrics(parsed: Any) -> set[str]:
    """The names of the metrics of a parsed expression."""
    return {node.name for node in nodes(parsed) if isinstance(node, promql.VectorSelector)}
