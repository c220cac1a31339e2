"""Random histories lose nothing; and each fault that real systems had, planted, is found by them."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from memwal_ops import open_table
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.zeppelin.jobs import merge
from memwal_ops.formats.zeppelin.specs import ZeppelinMergeOptions
from tests.campaigns.zeppelin.histories import run_history
from tests.campaigns.zeppelin.planted import PLANTED, claims_late
from tests.support.seeds import CAMPAIGN_SEED, env_number
from tests.support.stores import Beside
from tests.support.zeppelin.merging import expire
from tests.support.zeppelin.namespace import NamespaceUnderTest

HISTORIES = env_number("ZEPPELIN_HISTORIES", 500)
FIRST = CAMPAIGN_SEED * 1000
DIALECTS = ("wiki", "native")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
@pytest.mark.req("S4-002", "S4-035", "S4-041", "S4-043", "S4-047")
def test_nothing_is_lost(tmp_path: Path, seed: int, dialect: str) -> None:
    run_history(tmp_path, seed, dialect)


def two_compactors(folder: Path) -> set[str]:
    """A (1) has the lease and sleeps; B (2) reads F1 to F4; F5 comes; A wakes, and ends; B commits. What is lost."""
    made = NamespaceUnderTest(str(folder / "ns"))
    for name in "1234":
        made.put(name)
    asleep, wake = threading.Event(), threading.Event()
    options = ZeppelinMergeOptions(lease_ttl=timedelta(minutes=5))

    def sleep() -> None:
        asleep.set()
        assert wake.wait(600)

    def compact(hooked: Any) -> None:
        table: Any = open_table(made.uri)
        with suppress(MemwalOpsError):
            merge.apply(replace(table, store=hooked(table.store)), options)

    def leased(path: str) -> bool:
        return path == "manifest.json" and Path(made.uri, "lease.json").exists()

    first = threading.Thread(target=compact, args=(lambda store: Beside(store, "get_with_tag", leased, sleep),))
    first.start()
    assert asleep.wait(600)
    expire(made)

    def meanwhile() -> None:
        made.put("5")
        wake.set()
        first.join(600)

    compact(lambda store: Beside(store, "compare_and_swap", lambda path, data, _: b"seg-" in data, meanwhile))
    assert wake.is_set()
    return {*made.expected()} - {*made.read()}


@pytest.mark.req("S4-026", "S4-042", "S4-044")
def test_the_fragment_that_passes_both_layers_is_not_lost(tmp_path: Path) -> None:
    assert two_compactors(tmp_path) == set()


def test_that_fragment_is_lost_where_the_token_comes_late(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        claims_late(patch)
        assert two_compactors(tmp_path) == {"5"}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda one: one.__name__)
def test_a_planted_fault_is_found(tmp_path: Path, plant: Any) -> None:
    """Within some twenty histories; most within a few."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(100):
            for dialect in DIALECTS:
                try:
                    run_history(tmp_path, seed, dialect)
                except Exception:
                    return
    pytest.fail(f"{plant.__name__} was not found")
