"""The soak, for as short a time as everything needs to happen once; ``make soak`` is the long form."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.campaigns.soak.ledger import Ledger, Operation, Sheet, choose, judge, new_blocks, number
from tests.campaigns.soak.soak import Form, soak
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SECONDS = float(os.environ.get("SOAK_SECONDS", "12"))
SEED = env_number("SOAK_SEED", 1 + CAMPAIGN_SEED)
# The other two have all of its actors, and a minute each is enough for every run of the tests.
_ONE_MORE = pytest.mark.skipif("SOAK_SECONDS" not in os.environ, reason="one more minute: SOAK_SECONDS=12")


@pytest.mark.req("S0-157", "S0-168", "S0-183", "S0-189", "S0-209", "S0-212")
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "native",
    [pytest.param(False, id="addresses", marks=_ONE_MORE), pytest.param(True, id="stable ids, pylance's own merges")],
)
def test_local(tmp_path: Path, native: bool) -> None:
    account = soak(Form("local", SECONDS, SEED, stable_row_ids=native, native=native), str(tmp_path))
    assert account.puts > 0
    assert account.kills.total() > 0


@pytest.mark.s3
@pytest.mark.req("S0-157", "S0-168", "S0-183", "S0-189", "S0-209", "S0-212")
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_s3_that_fails(tmp_path: Path) -> None:
    account = soak(Form("s3", SECONDS, SEED), str(tmp_path))
    assert account.puts > 0
    assert account.kills.total() > 0
    assert account.faults.total() > 0


# -- the judge


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Two puts, a delete, a put that was cut off, and one more."""
    made = Ledger.of(str(tmp_path), 1)
    for one in (
        Operation(1, "put", 40, ()),
        Operation(2, "put", 40, (1,)),
        Operation(3, "delete", 6, (1, 2)),
        Operation(1 << 16, "put", 30, (1, 2)),
        Operation(2 << 16, "put", 30, (1,)),
    ):
        made.begin(one)
        if one.seq != 1 << 16:
            made.acknowledge(one)
    return Ledger.of(str(tmp_path), 1)


def stands(ledger: Ledger, *without: int) -> Sheet:
    """What stands when some operations did not land."""
    sheet = Sheet(1, new_blocks(ledger.operations()))
    return sheet.replay([one for one in ledger.operations() if one.seq not in without], 7)


def test_the_judge_takes_what_may_stand(ledger: Ledger) -> None:
    assert judge(stands(ledger), ledger, 7, whole=True) == 2 << 16
    assert judge(stands(ledger, 1 << 16), ledger, 7, whole=True) == 2 << 16
    assert judge(stands(ledger, 1 << 16, 2 << 16), ledger, 7, whole=False) == 3
    assert judge(stands(ledger, 3, 1 << 16, 2 << 16), ledger, 7, whole=False) == 2


def lose_a_row(sheet: Sheet) -> None:
    sheet.seq[5] = 0


def resurrect(sheet: Sheet) -> None:
    sheet.seq[1] = 1


def undo_an_update(sheet: Sheet) -> None:
    changed = [at for at in range(2, 40) if sheet.seq[at] > 1]
    sheet.seq[changed[0]], sheet.ord[changed[0]] = 1, changed[0]


def mix_up_the_order(sheet: Sheet) -> None:
    sheet.ord[4] += 1


@pytest.mark.parametrize("fault", [lose_a_row, resurrect, undo_an_update, mix_up_the_order])
def test_the_judge_finds(ledger: Ledger, fault: Callable[[Sheet], None]) -> None:
    sheet = stands(ledger)
    fault(sheet)
    with pytest.raises(AssertionError, match=r"wrong|lost"):
        judge(sheet, ledger, 7, whole=True)


@pytest.mark.parametrize("lost", [1, 2, 3, 2 << 16])
def test_the_judge_misses_what_was_acknowledged(ledger: Ledger, lost: int) -> None:
    with pytest.raises(AssertionError, match=r"wrong|lost"):
        judge(stands(ledger, lost), ledger, 7, whole=True)


def test_no_two_writers_take_the_same_grave(ledger: Ledger) -> None:
    """A grave tells of one delete only whether it landed."""
    rng = np.random.default_rng(1)
    graves: dict[int, set[int]] = {}
    for incarnation in (0, 2, 7):
        chosen = (choose(ledger, number(incarnation, 9), rng, (10, 40)) for _ in range(200))
        graves[incarnation] = {one.blocks[0] for one in chosen if one.kind == "delete"}
    assert graves == {0: {2}, 2: {2 << 16}, 7: set()}


def test_the_judge_knows_strangers(ledger: Ledger) -> None:
    sheet = stands(ledger)
    with pytest.raises(KeyError, match="nobody ever wrote"):
        sheet.places(Operation(9, "put", 3, ()).keys(7, 1))
