"""Show an index folder by its published view. Reads only."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lm_diskann.files import GRAPH, lowest_reader
from memwal_ops.formats.lm_diskann.jobs.catchup import drift, unhealed, versions_behind
from memwal_ops.formats.lm_diskann.jobs.compact import backlog as compact_backlog
from memwal_ops.formats.lm_diskann.jobs.gc import backlog as gc_backlog
from memwal_ops.formats.lm_diskann.jobs.merge import backlog as merge_backlog
from memwal_ops.formats.lm_diskann.source import Unusable, read_source
from memwal_ops.text import counted, paragraph

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.core.context import RunContext
    from memwal_ops.formats.lm_diskann.specs import IndexInspectOptions
    from memwal_ops.formats.lm_diskann.table import Table


@dataclass(frozen=True)
class IndexInspection:
    """The inspection; ``document`` is the JSON document."""

    document: Mapping[str, Any]

    decision = "inspected"
    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return dict(self.document)

    def describe(self) -> str:
        """The text for people."""
        document = self.document
        fixed, state, waits = document["parameters"], document["state"], document["backlog"]
        graph = "no graph yet: every search compares all rows" if document["exact"] else "graph"
        kept = f"Epochs {state['retained_from']} to {document['revision']} are retained"
        lines = [
            f"LM-DiskANN index, epoch {document['revision']}: {state['live']:,} rows ({graph}).",
            f"  {fixed['dimension']} dimensions, {fixed['metric']}, R {fixed['links']}, L {fixed['search_list']}, "
            f"alpha {fixed['alpha']:g}, {fixed['quantizer']}.",
            f"  Blocks of {fixed['block_size']:,} bytes; graph.lmd has {document['graph_bytes']:,} bytes "
            f"({waits['free_percent']:.1f} % of it can be given back).",
            f"  {waits['delta_blocks']:,.0f} unmerged delta blocks ({waits['dirty_percent']:.1f} % of the nodes).",
            f"  {waits['unhealed_nodes']:,.0f} deleted nodes are not healed ({waits['unhealed_percent']:.1f} %).",
            f"  {kept}; lowest reader: {document['lowest_reader'] or 'none'}.",
        ]
        blocked = (f"BLOCKED: {part['detail']} {part['remedy']}" for part in document["blocked"])
        return "\n".join([*lines, *self._followed(), *(paragraph(text, hanging="  ") for text in blocked)])

    def _followed(self) -> list[str]:
        follows = self.document["follows"]
        if follows is None:
            return []
        rows = f"key {follows['key']}" if follows["key"] else "stable row ids"
        behind = follows["error"] or f"{counted(self.document['backlog']['versions_behind'], 'version')} behind."
        place = f"column {follows['column']} of {follows['uri']} by {rows}"
        return [f"  Follows {place}: version {follows['version']}; {behind}"]


def plan(table: Table, options: IndexInspectOptions, context: RunContext) -> IndexInspection:
    """Inspect the view; for a followed table, how many versions it is ahead, or why it cannot be read."""
    del options, context
    fixed = asdict(table.parameters) | {"block_size": table.parameters.layout.block_size}
    uuid = fixed.pop("uuid")
    follows, behind = _follows(table)
    backlogs = merge_backlog(table), unhealed(table), drift(table), behind, compact_backlog(table), gc_backlog(table)
    return IndexInspection(
        {
            "decision": "inspected",
            "format": table.format.name,
            "uri": table.location.uri,
            "revision": table.revision,
            "uuid": str(uuid),
            "parameters": fixed,
            "state": asdict(table.state),
            "exact": not table.state.codebook_id,
            "backlog": {name: value for part in backlogs for name, value in part.items()},
            "follows": follows,
            "view": table.view_number,
            "view_error": None if table.view_error is None else str(table.view_error),
            "blocked": [dict(part.document) for part in table.blocked],
            "graph_bytes": os.path.getsize(os.path.join(table.location.uri, GRAPH)),
            "lowest_reader": lowest_reader(table.location.uri),
        }
    )


def _follows(table: Table) -> tuple[dict[str, Any] | None, dict[str, float]]:
    source, error, behind = read_source(table.location.uri, table.state.followed), None, dict[str, float]()
    try:
        behind = {"versions_behind": versions_behind(source, table.state.followed)}
    except MemwalOpsError as reason:
        error = str(reason)
    if source is None:
        return None, behind
    unusable = Unusable(table.state.unusable).text if table.state.unusable else None
    return {**asdict(source), "version": table.state.followed, "unusable": unusable, "error": error}, behind


apply = plan
