"""Which histories a planted deviation is refused in, by the trace alone (``python -m tests.campaigns.traces.hunt``)."""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING

from tests.campaigns.sim.history import History
from tests.campaigns.sim.planted import BUGS
from tests.campaigns.traces.planted import DEVIATIONS
from tests.campaigns.traces.protocol import ForbiddenError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.campaigns.sim.planted import Bug

_LIMIT = 60
ALL = BUGS | DEVIATIONS


def refused(planted: Bug, seed: int, folder: str) -> str | None:
    """The first event of a history that the protocols forbid; None: they accept all, or something else fails first."""
    with planted.planted():
        made = History(seed, f"{folder}/{seed}")
        try:
            made.run()
        except BaseException as error:
            while error is not None and not isinstance(error, ForbiddenError):
                error = error.__context__  # type: ignore[assignment]
            return None if error is None else str(error)
    return None


def first(planted: Bug, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first history in which a deviation is refused, with the event."""
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = refused(planted, seed, folder)
        if found is not None:
            return seed, found
    return None


def main() -> None:
    """Hunt those that are named, or all."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="BUG")
    for name in parser.parse_args().names or ALL:
        sys.stdout.write(f"{name}: {first(ALL[name], range(1, _LIMIT + 1))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
