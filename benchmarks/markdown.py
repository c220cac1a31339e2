"""Print tables as Markdown, a row as soon as it is measured."""

from __future__ import annotations


def row(*cells: object) -> None:
    """One row."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: str) -> None:
    """A blank line, and the head of a table."""
    print()
    row(*cells)
    row(*["---"] * len(cells))
