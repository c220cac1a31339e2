"""Compiled code: what doctor --warm calls once, and the line that is logged where a job compiles."""

from __future__ import annotations

import pickle
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
from numba.core import caching, event

from memwal_ops.formats import lm_diskann
from memwal_ops.formats.lm_diskann import kernels
from memwal_ops.formats.lm_diskann.jobs.init import warm

# Called for a node that loses its last link by the commit that deletes its target, and by repair of unreached ones.
RARE = {"touch", "attach"}


@pytest.mark.long
def test_warming_calls_everything_that_searches_and_jobs_call() -> None:
    """A cache is filled by calls: what is not called here would be compiled by somebody's first catchup."""
    warm()
    assert warm() == 0
    uncalled = {
        name
        for module in pkgutil.iter_modules(lm_diskann.__path__)
        for name, function in vars(import_module(f"{lm_diskann.__name__}.{module.name}")).items()
        if hasattr(function, "targetoptions") and not function.signatures
    }
    assert uncalled <= RARE


def test_the_first_compilation_of_a_process_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[dict[str, str]] = []
    monkeypatch.setattr(kernels, "get_logger", lambda _: SimpleNamespace(info=lambda _, **line: lines.append(line)))
    monkeypatch.setattr(kernels.COMPILATIONS, "count", 0)
    for _ in range(2):
        with event.trigger_event("numba:compile"):
            pass
    assert [line["ahead"] for line in lines] == ["memwal-ops doctor --warm"]
    assert kernels.COMPILATIONS.count == 2


class _Gone:
    """A class that an upgrade renames."""


def test_a_cache_that_names_what_was_renamed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = caching.IndexDataCacheFile(str(tmp_path), "kernel", ("stamp", 1))
    Path(tmp_path, "kernel.nbi").write_bytes(pickle.dumps(numba.__version__) + pickle.dumps((("old", 1), {_Gone: "1"})))
    monkeypatch.delattr(sys.modules[__name__], "_Gone")
    assert file.load("signature") is None, "it is compiled, and the cache written anew"


def test_a_change_of_one_file_compiles_its_callers_in_others_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade that changes distances.py alone would keep the machine code of inserting.py, which has the old one."""

    def stamps() -> list[str]:
        kernels._stamp_of_all.cache_clear()
        paths = sorted(Path(kernels.__file__).parent.glob("*.py"))
        return [caching.InTreeCacheLocator(stamps, str(path)).get_source_stamp() for path in paths]

    before, read = stamps(), Path.read_bytes
    elsewhere = caching.InTreeCacheLocator(stamps, caching.__file__)
    other = elsewhere.get_source_stamp()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == "distances.py"))
    after = stamps()
    kernels._stamp_of_all.cache_clear()
    assert all(one != now for one, now in zip(before, after, strict=True))
    assert caching.InTreeCacheLocator(stamps, caching.__file__).get_source_stamp() == other, (
        "other packages keep theirs"
    )
