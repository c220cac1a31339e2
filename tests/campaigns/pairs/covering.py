"""The covering array of a model, by its seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from covertable import make_async, sorters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.campaigns.pairs.dimensions import Rule


def covering(
    model: Mapping[str, Sequence[str]], rules: Sequence[Rule], seed: int, threes: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """Rows in which every two values of two dimensions are together, and every three of ``threes``.

    The first ones cover most.

    Args:
        model: values by dimension.
        rules: what cannot be together.
        seed: other rows for each.
        threes: dimensions that are covered in threes.
    """
    constraints = [
        {"operator": "fn", "requires": [*rule.about], "evaluate": lambda row, rule=rule: not rule.broken(row)}
        for rule in rules
    ]
    more = [{"fields": [*threes], "strength": 3}] if threes else []
    yield from make_async(
        {name: [*values] for name, values in model.items()},
        sorter=sorters.hash, salt=str(seed), constraints=constraints, sub_models=more,
    )  # fmt: skip
