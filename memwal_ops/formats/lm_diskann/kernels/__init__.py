"""Compiled code: distances, checksums, block reads, beam search, pruning, insertion and the bulk build (numba).

It is compiled when it is first called, and kept beside these files or in ``NUMBA_CACHE_DIR``; where neither can be
written, below the user's home. Processes share it.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from numba.core import caching, event

from memwal_ops.log import get_logger


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
