"""The dictionary that every table under test must equal: last write of a key wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Key = tuple[Any, ...]
Row = dict[str, Any]
Rows = dict[Key, Row]


@dataclass(frozen=True)
class Operation:
    """One put (`row`) or delete (`row is None`) of a key, and the generation in which it stands."""

    region: str
    generation: int
    key: Key
    row: Row | None


@dataclass
class Model:
    """Base rows and everything that was written since, in order."""

    keys: list[str]
    base: Rows = field(default_factory=dict)
    log: list[Operation] = field(default_factory=list)

    def key_of(self, row: Row) -> Key:
        return tuple(row[name] for name in self.keys)

    def put(self, region: str, generation: int, rows: Iterable[Row]) -> None:
        self.log.extend(Operation(region, generation, self.key_of(row), row) for row in rows)

    def delete(self, region: str, generation: int, keys: Iterable[Row]) -> None:
        self.log.extend(Operation(region, generation, self.key_of(key), None) for key in keys)

    def expected(self, upto: Mapping[str, int] | None = None) -> Rows:
        """All rows that stand; with `upto` ({region: generation}) only what these generations and
        older ones hold: what the base table must be once exactly those are merged."""
        rows = dict(self.base)
        for op in self.log:
            if upto is not None and op.generation > upto.get(op.region, 0):
                continue
            if op.row is None:
                rows.pop(op.key, None)
            else:
                rows[op.key] = op.row
        return rows


def _brief(row: Row, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={row.get(name)!r}"[:90] for name in names)


def _difference(got: Rows, want: Rows, limit: int) -> list[str]:
    missing = [k for k in want if k not in got]
    extra = [k for k in got if k not in want]
    other = [k for k in want if k in got and got[k] != want[k]]
    lines = [f"{len(got)} rows, expected {len(want)}: {len(missing)} missing, {len(extra)} extra, {len(other)} differ"]
    lines += [f"  missing {k!r}: {_brief(want[k], want[k])}" for k in missing[:limit]]
    lines += [f"  extra   {k!r}: {_brief(got[k], got[k])}" for k in extra[:limit]]
    for k in other[:limit]:
        names = [n for n in {**want[k], **got[k]} if got[k].get(n) != want[k].get(n) or (n in got[k]) != (n in want[k])]
        lines.append(f"  differs {k!r}: got {_brief(got[k], names)} / expected {_brief(want[k], names)}")
    return lines


def assert_same(got: Rows, want: Rows, *, seed: object = None, limit: int = 5) -> None:
    """Raise AssertionError with a diff that a person can read, and the seed that makes it again."""
    if got != want:
        head = [] if seed is None else [f"seed {seed}:"]
        raise AssertionError("\n".join([*head, *_difference(got, want, limit)]))
