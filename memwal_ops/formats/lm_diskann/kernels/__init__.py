"""Compiled code: distances, checksums, block reads, beam search, pruning, insertion and the bulk build (numba).

It is compiled when it is first called, and kept in ``NUMBA_CACHE_DIR``, beside these files, below the user's home, or in
the folder of the systemd unit or the pod, whichever is the first that can be written. Processes share it; where there is
none, each compiles for itself.
"""

from __future__ import annotations

import os
from functools import cache
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.log import get_logger

try:
    from numba.core import caching, event
except PermissionError as error:
    raise UnsupportedFeatureError(
        f"LM-DiskANN compiles code while it runs, which this system refuses its processes: {error}",
        remedy="Allow it: MemoryDenyWriteExecute=no in a systemd unit, execmem in SELinux.",
    ) from error


class _Compilations(event.Listener):  # type: ignore[misc] # numba has no types
    """Counts compilations, announces the first."""

    count = 0

    def on_start(self, event: Any) -> None:
        del event
        if not self.count:
            get_logger(__name__).info(
                "compiling_lm_diskann",
                once="for this installation and machine, about a minute",
                ahead="memwal-ops doctor --warm",
            )
        self.count += 1

    def on_end(self, event: Any) -> None:
        """Nothing."""


COMPILATIONS = _Compilations()
event.register("numba:compile", COMPILATIONS)


_load_index = caching.IndexDataCacheFile._load_index  # noqa: SLF001 - numba has no hook for it


def _load_index_or_none(file: Any) -> Any:
    """The entries of a cache; none where it names what an upgrade renamed, since numba reads it before its stamp."""
    try:
        return _load_index(file)
    except (AttributeError, ImportError, EOFError, UnpicklingError):
        return {}


caching.IndexDataCacheFile._load_index = _load_index_or_none  # noqa: SLF001 - as above


_stamp_of = caching._SourceFileBackedLocatorMixin.get_source_stamp  # noqa: SLF001 - as above


@cache
def _stamp_of_all() -> str:
    return sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()


def _stamp(locator: Any) -> Any:
    """That of all files here: what one defines is compiled into others, of which numba compares the own file alone."""
    own = Path(locator._py_file).parent == Path(__file__).parent  # noqa: SLF001 - as above
    return _stamp_of_all() if own else _stamp_of(locator)


caching._SourceFileBackedLocatorMixin.get_source_stamp = _stamp  # noqa: SLF001 - as above


class _LastLocator(caching.UserWideCacheLocator):  # type: ignore[misc] # numba has no types
    """Where units and pods may write: numba's own locators find nothing there, and then it refuses to compile."""

    def __init__(self, function: Any, file: str) -> None:
        super().__init__(function, file)
        self._cache_path = os.path.join(_last_folder(), self.get_suitable_cache_subpath(file))


def _last_folder() -> str:
    for name in ("CACHE_DIRECTORY", "STATE_DIRECTORY"):
        folder = os.environ.get(name, "").split(":")[0]
        if folder and os.access(folder, os.W_OK):
            return os.path.join(folder, "compiled")
    return _temporary_folder().name


@cache
def _temporary_folder() -> TemporaryDirectory[str]:
    """One for this process, removed when it ends."""
    return TemporaryDirectory(prefix="memwal-ops-compiled-")


caching.CacheImpl._locator_classes.append(_LastLocator)  # noqa: SLF001 - numba takes locators by no other way
