"""The tables of docs/compatibility.md, from the results of the matrix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaigns.clients.environments import RELEASES

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
START, END = "<!-- make client-matrix -->", "<!-- end -->"
GROUPS = (
    ("MemWAL, stable row ids", "mem-wal-stable.*"),
    ("MemWAL", "mem-wal.*"),
    ("scalar and text indexes, stable row ids", "stable-(?!ivf).*"),
    ("vector indexes, stable row ids", "stable-ivf.*"),
    ("vector indexes", "ivf.*"),
    ("scalar and text indexes", "btree|bitmap|zonemap|bloomfilter|label_list|ngram|inverted"),
    ("storage versions", "storage-.*|appended-2.2|compact-to-2.2"),
    ("blobs", "blobs.*"),
    ("own compactions", "compact.*|lineage-spilled"),
    ("other folders: bases, clones", "bases.*|clone"),
    ("plain, other options", ".*"),
)


def replaced(page: str, results: Mapping[str, Any]) -> str:
    """The page with the tables of these results."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{tables(results)}\n{END}{after}"


def tables(results: Mapping[str, Any]) -> str:
    """How many kinds of tables each release goes on with rightly; below, what it does wrongly without any job, too."""
    releases = [one for one in RELEASES if one in results]
    ordered = [(one, results[one]) for one in releases]
    lines = ["| kinds of tables | " + " | ".join(releases) + " |", "|---" * (len(releases) + 1) + "|"]
    for name, _ in GROUPS:
        cells = (_cell(found, name) for _, found in ordered)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "| kind | does wrongly what no job had in hand, too | refused by name |", "|---|---|---|"]
    for kind in sorted({kind for one in results.values() for kind in (*one["own"], *one["refused"])}):
        own = [f"{one} ({', '.join(found['own'][kind])})" for one, found in ordered if kind in found["own"]]
        refused = [one for one, found in ordered if kind in found["refused"]]
        lines.append(f"| {kind} | {'; '.join(own)} | {', '.join(refused)} |")
    return "\n".join(lines)


def group_of(kind: str) -> str:
    """The row in which a kind is counted."""
    return next(name for name, pattern in GROUPS if re.fullmatch(pattern, kind))


def _cell(result: Mapping[str, Any], group: str) -> str:
    kinds = [kind for kind in result["kinds"] if group_of(kind) == group]
    if not kinds:
        return "-"
    own, refused = (sum(kind in result[name] for kind in kinds) for name in ("own", "refused"))
    right = sum(kind not in result["own"] and kind not in result["refused"] for kind in kinds)
    return ", ".join([str(right), *([f"own {own}"] if own else []), *([f"refused {refused}"] if refused else [])])
