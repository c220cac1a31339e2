"""A process for migrations that are killed: ``write URI FIRST`` or ``migrate URI SEED``.

A writer prints each row before it writes it, and again when it was acknowledged. Where it is refused it goes on in a
new region, with new keys, in the layout that the table has by then; at times it sleeps with its region held.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from memwal_ops import open_table
from memwal_ops.errors import MemwalOpsError
from tests.support.layout_migrations import OTHER, REFUSED, migrate, rows, writer


def write(uri: str, first: int) -> None:
    dice, key = random.Random(first), first
    mine: list[int] = []
    held: Any = None
    while True:
        try:
            if held is None:
                held, mine = writer(uri, open_table(uri).layout.name), []
            if mine and dice.random() < 0.3:
                written = {dice.choice(mine): dice.random()}
            else:
                key += 1
                written = {key: dice.random()}
            mine += written
            _say("tries", written)
            held.put(rows(written))
            _say("wrote", written)
            if dice.random() < 0.1:
                held.close()
                held = None
            elif dice.random() < 0.05:
                time.sleep(dice.random())
        except REFUSED:
            held = None


def _say(word: str, written: dict[int, float]) -> None:
    for key, value in written.items():
        sys.stdout.write(f"{word} {key} {value}\n")
    sys.stdout.flush()


def migrate_again_and_again(uri: str, seed: int) -> None:
    dice = random.Random(seed)
    while True:
        try:
            if dice.random() < 0.3:
                migrate(uri, rollback=True)
            else:
                migrate(uri, OTHER[open_table(uri).layout.name])
        except MemwalOpsError as error:
            sys.stderr.write(f"{error.reason}\n")


if __name__ == "__main__":
    acts = {"write": write, "migrate": migrate_again_and_again}
    acts[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
