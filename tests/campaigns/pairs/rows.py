"""Which format a row is of: its program, and what runs it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tests.campaigns.pairs import scripts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.campaigns.pairs.scripts import Program


def format_of(row: Mapping[str, str]) -> str:
    """Of a Lance table, whose rows name none, or another one."""
    return row.get("format", "lance")


def program_of(row: Mapping[str, str], seed: str) -> Program:
    """The program of a row, its history drawn by the seed."""
    if format_of(row) == "lance":
        return scripts.program_of(row, seed)
    program: Program = _module(row).program_of(row, seed)
    return program


def run_of(row: Mapping[str, str], lance: type[Any]) -> type[Any]:
    """The class that runs it."""
    return lance if format_of(row) == "lance" else _module(row).Run


def _module(row: Mapping[str, str]) -> Any:
    # Not at the top: what is planted must be there before anything of ours is imported.
    return importlib.import_module(f"tests.campaigns.pairs.{format_of(row)}")
