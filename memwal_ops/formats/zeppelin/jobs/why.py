"""Explain why objects of a namespace are kept or deletable: every gate of each. Reads only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.explanation import Explanation, explain
from memwal_ops.formats.zeppelin.jobs.gc import Evidence, Objects, Revisions

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.zeppelin.namespace import Namespace
    from memwal_ops.formats.zeppelin.options import WhyOptions


def plan(table: Namespace, options: WhyOptions, context: RunContext | None = None) -> Explanation:
    """Explain ``options.target``: a fragment's key, an object of a segment, a revision's record.

    Raises:
        ObjectNotFoundError: it does not exist, or is not an object that gc collects.
    """
    del context
    evidence = Evidence.of(table, options, datetime.now(UTC))
    objects = Objects(table, evidence)
    return explain(table, options.target, (objects, Revisions(table, evidence, objects)))


apply = plan
