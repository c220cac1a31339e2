"""The why job of tables with the legacy MemWAL index: the conditions of each file of a log. Reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.explanation import Explanation
from memwal_ops.errors import ObjectNotFoundError
from memwal_ops.formats.lance.jobs.legacy import gc as legacy_gc
from memwal_ops.formats.lance.jobs.why import grouped, of_the_base
from memwal_ops.formats.lance.retention.damage import names_damage

if TYPE_CHECKING:
    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lance.options import WhyOptions
    from memwal_ops.formats.lance.table import Table


@names_damage
def plan(table: Table, options: WhyOptions, context: RunContext | None = None) -> Explanation:
    """Why a file, or the files of a folder, are kept. Raises ``ObjectNotFoundError``: the target does not exist."""
    del context
    target = options.target.removeprefix(table.location.uri).strip("/")
    reasons = [
        candidate
        for candidate in legacy_gc.candidates(table, options)
        if candidate.path == target or candidate.path.startswith(f"{target}/")
    ]
    if not reasons:
        if next(iter(table.store.list(target)), None) is None and table.store.head(target) is None:
            raise ObjectNotFoundError(
                f"{options.target} does not exist in {table.location.uri}.", remedy="Give a path below the table."
            )
        reasons = [of_the_base(table, target)]
    return Explanation(options.target, grouped(reasons, group=True))


apply = plan
