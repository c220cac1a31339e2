"""Exit codes are a contract: one reason has each of them, and what is told apart elsewhere keeps its base's."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import pytest

import memwal_ops
from memwal_ops import errors
from memwal_ops.errors import MemwalOpsError, worst_exit_code

if TYPE_CHECKING:
    from collections.abc import Iterator

# They need packages of their own, and have no errors.
_LEFT_OUT = ("memwal_ops.airflow", "memwal_ops.__main__")


def subclasses(of: type[MemwalOpsError]) -> Iterator[type[MemwalOpsError]]:
    for one in of.__subclasses__():
        yield one
        yield from subclasses(one)


def _load(name: str) -> None:
    """Without Java there is no PySpark, nor in the environment of ``make next-pylance``."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "pyspark":
            raise


def test_a_code_has_one_reason() -> None:
    here = {one for one in subclasses(MemwalOpsError) if one.__module__ == errors.__name__}
    assert len({one.exit_code for one in here}) == len({one.reason for one in here}) == len(here)


def test_what_is_told_apart_elsewhere_has_the_code_of_its_base() -> None:
    for module in pkgutil.walk_packages(memwal_ops.__path__, "memwal_ops."):
        if not module.name.startswith(_LEFT_OUT):
            _load(module.name)
    codes = {one.exit_code: one for one in subclasses(MemwalOpsError) if one.__module__ == errors.__name__}
    ours = [one for one in subclasses(MemwalOpsError) if one.__module__.startswith("memwal_ops.")]
    others = [one for one in ours if one not in codes.values() and not one.__name__.startswith("_")]
    assert others
    for one in others:
        assert issubclass(one, codes[one.exit_code]), one
        assert "report it" not in one.remedy, f"{one}: what happens to a user is no bug of ours"


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([], 0), ([0, 0], 0), ([10, 18], 18), ([18, 24, 20], 24), ([24, 33], 33), ([18, 13, 9], 9), ([10, 0], 10)],
)
def test_the_worst_outcome_decides_and_damage_before_all(codes: list[int], worst: int) -> None:
    assert worst_exit_code(codes) == worst
