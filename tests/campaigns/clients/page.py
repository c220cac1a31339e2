"""The tables of docs/compatibility.md, from the results of the matrix."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaigns.clients.environments import RELEASES

if TYPE_CHECKING:
    from collections.abc import Mapping

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
START, END = "<!-- make client-matrix -->", "<!-- end -->"
_OWN = re.compile(r"(\S+ \S+) \(([^)]*)\)")
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


@dataclass
class Column:
    """What the page tells of one release.

    Attributes:
        counts: by row of the first table, its cell.
        own: by kind of table, the steps that it does wrongly.
        refused: kinds that the jobs refuse.
    """

    counts: dict[str, str]
    own: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def replaced(page: str, results: Mapping[str, Any]) -> str:
    """The page with the columns of these results; those of releases that did not run now stay as they are."""
    before, _, rest = page.partition(START)
    old, _, after = rest.partition(END)
    columns = columns_of(old) | {release: _column(found) for release, found in results.items()}
    return f"{before}{START}\n{tables(columns)}\n{END}{after}"


def columns_of(old: str) -> dict[str, Column]:
    """What stands in the tables of a page, by release; nothing if it has none."""
    if "\n\n" not in old:
        return {}
    groups, kinds = ([*map(_cells, table.splitlines())] for table in old.strip().split("\n\n"))
    columns = {release: Column({row[0]: row[at] for row in groups[2:]}) for at, release in enumerate(groups[0]) if at}
    for equal, own, refused in kinds[2:]:
        for kind in equal.split(", "):
            for release, steps in _OWN.findall(own):
                columns[release].own[kind] = steps
            for release in filter(None, refused.split(", ")):
                columns[release].refused.append(kind)
    return columns


def tables(columns: Mapping[str, Column]) -> str:
    """How many kinds of tables each release goes on with rightly; below, what it does wrongly without any job, too."""
    ordered = [(one, columns[one]) for one in RELEASES if one in columns]
    lines = ["| kinds of tables | " + " | ".join(one for one, _ in ordered) + " |", "|---" * (len(ordered) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(found.counts[name] for _, found in ordered) + " |" for name, _ in GROUPS]
    lines += ["", "| kind | does wrongly what no job had in hand, too | refused by name |", "|---|---|---|"]
    rows: dict[str, list[str]] = {}
    for kind in sorted({kind for _, found in ordered for kind in (*found.own, *found.refused)}):
        own = [f"{one} ({found.own[kind]})" for one, found in ordered if kind in found.own]
        refused = [one for one, found in ordered if kind in found.refused]
        rows.setdefault(f"{'; '.join(own)} | {', '.join(refused)}", []).append(kind)
    lines += [f"| {', '.join(kinds)} | {row} |" for row, kinds in rows.items()]
    return "\n".join(lines)


def group_of(kind: str) -> str:
    """The row in which a kind is counted."""
    return next(name for name, pattern in GROUPS if re.fullmatch(pattern, kind))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _column(result: Mapping[str, Any]) -> Column:
    own = {kind: ", ".join(steps) for kind, steps in result["own"].items()}
    return Column({name: _cell(result, name) for name, _ in GROUPS}, own, result["refused"])


def _cell(result: Mapping[str, Any], group: str) -> str:
    kinds = [kind for kind in result["kinds"] if group_of(kind) == group]
    if not kinds:
        return "-"
    own, refused = (sum(kind in result[name] for kind in kinds) for name in ("own", "refused"))
    right = sum(kind not in result["own"] and kind not in result["refused"] for kind in kinds)
    return ", ".join([str(right), *([f"own {own}"] if own else []), *([f"refused {refused}"] if refused else [])])
