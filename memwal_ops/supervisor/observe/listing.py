"""Search, filter, sort, group and page the rows of all tables, by the query string of the page.

A parameter that is not valid is ignored: a link from an older release still shows the tables.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from memwal_ops.supervisor.observe.findings import CRITICAL, OK, WARNING, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memwal_ops.supervisor.observe.overview import Row

PAGE_ROWS = 100
_MAX_TEXT, _MAX_QUERY = 200, 10_000
_MAX_PAGE = 100_000
STATES: dict[str, int | None] = {"critical": CRITICAL, "warning": WARNING, "ok": OK, "paused": None, "running": None}
GROUPS: dict[str, Callable[[Row], str]] = {
    "database": lambda row: row.folder,
    "format": lambda row: row.format or "unknown",
    "state": lambda row: WORDS[row.level],
}
_LABEL = "label:"
_LABELS = re.compile(r"label:[A-Za-z0-9_.-]{1,63}")
SORTS: dict[str, Callable[[Row], Any]] = {
    "state": lambda row: row.level,
    "name": lambda row: row.name,
    "format": lambda row: row.format,
    "rows": lambda row: row.rows,
    "size": lambda row: row.bytes,
    "held": lambda row: row.held,
    "free": lambda row: row.free,
    "parts": lambda row: row.parts,
    "coverage": lambda row: row.coverage,
    "recall": lambda row: row.recall,
    "waiting": lambda row: row.waiting,
    "age": lambda row: row.age,
    "last": lambda row: row.last,
    "next": lambda row: row.next,
    "cost": lambda row: row.cost,
}
_ASCENDING = frozenset({"name", "format", "free", "coverage", "recall", "next"})


@dataclass(frozen=True, slots=True)
class Query:
    """What a reader wants to see.

    Attributes:
        q: words that the name, the URI, the labels (``team=search``) or the finding of a table must have.
        state: of ``STATES``; ``format``: a format's name; empty: all.
        group: of ``GROUPS``, or a label as ``label:NAME``: show groups instead of tables; empty: tables.
        place: the folder or catalog of which to show the tables; empty: of all.
        label: as ``NAME=VALUE``: tables with that label; without a value, those that have none; empty: all.
        sort: of ``SORTS``; ``down``: the largest first.
        page: from 1.
    """

    q: str = ""
    state: str = ""
    format: str = ""
    group: str = ""
    place: str = ""
    label: str = ""
    sort: str = "state"
    down: bool = True
    page: int = 1

    @classmethod
    def read(cls, text: str) -> Query:
        """Return the query of a query string."""
        given = dict(parse_qsl(text, errors="surrogateescape", max_num_fields=50)) if len(text) <= _MAX_QUERY else {}
        sort = given.get("sort", "")
        sort = sort if sort in SORTS else "state"
        order, page = given.get("order"), given.get("page", "")
        return cls(
            q=given.get("q", "")[:_MAX_TEXT].strip(),
            state=given["state"] if given.get("state") in STATES else "",
            format=given.get("format", "")[:_MAX_TEXT],
            group=group if (group := given.get("group", "")) in GROUPS or _LABELS.fullmatch(group) else "",
            place=given.get("in", "")[: 10 * _MAX_TEXT],
            label=given.get("label", "")[:_MAX_TEXT],
            sort=sort,
            down=order == "down" or (order != "up" and sort not in _ASCENDING),
            page=min(int(page), _MAX_PAGE) if page.isascii() and page.isdigit() and int(page) else 1,
        )

    def link(self, **changes: Any) -> str:
        """Return the address of this query with changes; a change of anything but the page leads to the first one."""
        changed = replace(self, **{"page": 1, **changes})
        given = {
            **{name: getattr(changed, name) for name in ("q", "state", "format", "group", "label")},
            "in": changed.place,
            "sort": "" if changed.sort == "state" and changed.down else changed.sort,
            "order": "" if changed.down == (changed.sort not in _ASCENDING) else "down" if changed.down else "up",
            "page": "" if changed.page == 1 else changed.page,
        }
        text = urlencode({name: value for name, value in given.items() if value}, errors="surrogateescape")
        return f"/?{text}" if text else "/"

    def sort_link(self, column: str) -> str:
        """Return the address that sorts by a column; by the one that is sorted already, the other way round."""
        return self.link(sort=column, down=not self.down if column == self.sort else column not in _ASCENDING)

    def matches(self, row: Row) -> bool:
        """Whether to show a table."""
        return (
            (not self.state or _has_state(row, self.state))
            and (not self.format or (row.format or "unknown") == self.format)
            and (not self.place or row.folder == self.place)
            and (not self.label or _label_of(row, self.label.partition("=")[0]) == self.label)
            and (not self.q or _has_words(row, self.q.lower().split()))
        )


def _has_state(row: Row, state: str) -> bool:
    level = STATES[state]
    return (row.paused if state == "paused" else bool(row.running)) if level is None else row.level == level


def _label_of(row: Row, name: str) -> str:
    return f"{name}={row.labels.get(name, '')}"


def _has_words(row: Row, words: Iterable[str]) -> bool:
    labels = " ".join(_label_of(row, name) for name in row.labels)
    text = f"{row.name} {row.uri} {labels} {row.what}".lower()
    return all(word in text for word in words)


@dataclass(frozen=True, slots=True)
class Totals:
    """The sums of some tables.

    Attributes:
        cost: what their runs of the last week cost; None: nothing is known.
        free: the next time at which held bytes can go, by ISO 8601; ``free_table``: of which table.
    """

    tables: int
    critical: int
    warning: int
    ok: int
    paused: int
    running: int
    rows: float
    bytes: float
    held: float
    waiting: float
    cost: float | None
    free: str | None
    free_table: str

    @property
    def level(self) -> int:
        """The level of the worst table."""
        return CRITICAL if self.critical else WARNING if self.warning else OK


def totals(rows: Sequence[Row]) -> Totals:
    """Return the sums of tables."""
    levels = Counter(row.level for row in rows)
    soonest = min((row for row in rows if row.free), key=lambda row: row.free or "", default=None)
    return Totals(
        len(rows),
        levels[CRITICAL],
        levels[WARNING],
        levels[OK],
        sum(row.paused for row in rows),
        sum(bool(row.running) for row in rows),
        sum(row.rows or 0 for row in rows),
        sum(row.bytes or 0 for row in rows),
        sum(row.held or 0 for row in rows),
        sum(row.waiting or 0 for row in rows),
        sum(known) if (known := [row.cost for row in rows if row.cost is not None]) else None,
        None if soonest is None else soonest.free,
        "" if soonest is None else soonest.name,
    )


def page_of(rows: Sequence[Row], query: Query) -> tuple[list[Row], int]:
    """Return the rows of a page, sorted, and the number of pages; what is not known comes last."""
    value, pages = SORTS[query.sort], max(1, -(-len(rows) // PAGE_ROWS))
    by_name = sorted(rows, key=lambda row: row.name)
    known = [row for row in by_name if value(row) is not None]
    known.sort(key=value, reverse=query.down)
    ordered = known if len(known) == len(by_name) else [*known, *(row for row in by_name if value(row) is None)]
    first = (min(query.page, pages) - 1) * PAGE_ROWS
    return ordered[first : first + PAGE_ROWS], pages


def group_names(rows: Iterable[Row]) -> list[str]:
    """Return by what tables can be grouped: ``GROUPS``, and each label that one of them has."""
    return [*GROUPS, *sorted({f"{_LABEL}{name}" for row in rows for name in row.labels})]


def groups_of(rows: Iterable[Row], query: Query) -> list[tuple[str, str, Totals]]:
    """Return the groups of tables, the worst and largest first: each with its name, address and sums."""
    label, key = query.group.removeprefix(_LABEL), GROUPS.get(query.group)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.labels.get(label, "") if key is None else key(row), []).append(row)
    found = [(name, _group_link(query, name), totals(some)) for name, some in groups.items()]
    return sorted(found, key=lambda one: (-one[2].level, -one[2].tables, one[0]))


def _group_link(query: Query, name: str) -> str:
    if query.group.startswith(_LABEL):
        return query.link(group="", label=f"{query.group.removeprefix(_LABEL)}={name}")
    return query.link(group="", **{"place" if query.group == "database" else query.group: name})
