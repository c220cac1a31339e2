"""The planted bugs of the campaigns stand where they are planted: a name that moved makes one a bug of nothing.

That each is found is the campaigns' to prove, which take hours; that it can be planted takes a moment.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

_CAMPAIGNS = "tests.campaigns"


def test_what_histories_replace_stands() -> None:
    registered = {
        **import_module(f"{_CAMPAIGNS}.sim.planted").BUGS,
        **import_module(f"{_CAMPAIGNS}.sim.region_planted").WRITER_BUGS,
        **import_module(f"{_CAMPAIGNS}.traces.planted").DEVIATIONS,
    }
    for bug in registered.values():
        with bug.planted() as calls:
            assert calls, bug.name
    for make, _ in import_module(f"{_CAMPAIGNS}.test_planted").FOUND_BY:
        for patch in make():
            assert patch.name in vars(patch.owner), make.__name__


@pytest.mark.parametrize("module", ["faults.test_planted", "zeppelin.planted", "lm_diskann.planted"])
def test_what_patches_replace_stands(module: str) -> None:
    functions = [one for one in vars(import_module(f"{_CAMPAIGNS}.{module}")).values() if inspect.isfunction(one)]
    bugs = [one for one in functions if list(inspect.signature(one).parameters) == ["patch"]]
    assert bugs
    for bug in bugs:
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)


def test_the_text_that_a_bug_changes_stands_once() -> None:
    for name, bug in import_module(f"{_CAMPAIGNS}.pairs.planted").BUGS.items():
        spec = find_spec(bug.name)
        assert spec is not None, name
        assert spec.origin is not None, name
        assert Path(spec.origin).read_text(encoding="utf-8").count(bug.old) == 1, name
