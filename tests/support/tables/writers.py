"""pylance's writers that tests let go of are closed.

Nothing but `close` ends a writer. One that was fenced and has rows that it cannot flush tries again without a pause:
dropped, it takes a processor from all tests that follow in the same process.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lance.mem_wal import ShardWriter

_opened: list[tuple[weakref.ref[ShardWriter], Any]] = []


def closed_at_the_end(writer: ShardWriter) -> ShardWriter:
    """The same writer, which :func:`close_dropped` closes once nothing refers to it."""
    _opened.append((weakref.ref(writer), writer._raw))
    return writer


def close_dropped() -> None:
    """Close the writers that no test has any more. To close one twice does nothing; a fenced one raises, and ends."""
    dropped = [one for one in _opened if one[0]() is None]
    _opened[:] = [one for one in _opened if one[0]() is not None]
    for _, raw in dropped:
        with suppress(Exception):
            raw.close()
