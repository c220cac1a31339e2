"""Compiled code: what doctor --warm calls once, and the line that is logged where a job compiles."""

from __future__ import annotations

import os
import pickle
import pkgutil
import subprocess
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


def _unit(tmp_path: Path, **environment: str) -> list[str]:
    """Where kernels are kept, by a process that can write neither the package nor its home."""
    program = """
import os
from numba.core import caching
caching.InTreeCacheLocator.from_function = caching.UserWideCacheLocator.from_function
from memwal_ops.formats.lm_diskann.kernels import distances
print(distances.squared._cache.cache_path, os.path.isdir(distances.squared._cache.cache_path))
"""
    nowhere = {"HOME": "/proc/none", "XDG_CACHE_HOME": "/proc/none", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True,
        env={**os.environ, **nowhere, **environment},
    )  # fmt: skip
    return done.stdout.split()


def test_a_unit_keeps_them_in_its_own_folder(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    kept, is_there = _unit(tmp_path, CACHE_DIRECTORY=str(tmp_path / "none"), STATE_DIRECTORY=f"{state}:/other")
    assert (Path(kept).parent, is_there) == (state / "compiled", "True")


def test_without_any_folder_each_process_compiles(tmp_path: Path) -> None:
    kept, is_there = _unit(tmp_path, CACHE_DIRECTORY="", STATE_DIRECTORY="")
    assert Path(kept).parent.name.startswith("memwal-ops-compiled-")
    assert is_there == "True"
    assert not list(tmp_path.glob("memwal-ops-compiled-*")), "it went with the process"


def test_a_system_without_executable_memory_is_named(folder: str) -> None:
    """As ``MemoryDenyWriteExecute`` of a unit, or SELinux, has it."""
    lm_diskann.create(folder, dimension=4).close()
    deny = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, PR_MDWE_REFUSE_EXEC_GAIN
    sys.exit(77)
os.execv(sys.executable, [sys.executable, "-m", "memwal_ops", "inspect", sys.argv[1]])
"""
    done = subprocess.run([sys.executable, "-c", deny, folder], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this kernel has no PR_SET_MDWE (Linux 6.3)")
    assert done.returncode == 8, done.stderr
    assert "MemoryDenyWriteExecute=no" in done.stderr
