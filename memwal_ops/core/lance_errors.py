"""pylance's untyped errors, told apart in one place.

pylance raises ``OSError``, ``ValueError`` and ``RuntimeError`` with text (landmine 6), and a Rust
panic arrives as a ``BaseException``. Which text means what is
:mod:`memwal_ops.storage.errors`' business, since the same texts come from the object stores below.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError
from memwal_ops.storage.errors import translate

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_panic(error: BaseException) -> bool:
    """Whether a Rust panic came through the binding; it is no ``Exception`` and must not end the process."""
    return type(error).__name__ == "PanicException"


_CONFLICT = re.compile(
    r"commit conflict|preempted by concurrent|too many concurrent writers|incompatible with concurrent", re.IGNORECASE
)


def is_commit_conflict(error: BaseException) -> bool:
    """Whether pylance lost a race for the next version: nothing of its transaction is visible."""
    return _CONFLICT.search(str(error)) is not None


@contextmanager
def lance_errors(action: str, path: str) -> Iterator[None]:
    """Turn whatever pylance raises inside into our own errors, the original kept as cause."""
    try:
        yield
    except MemwalOpsError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise translate(error, path=path, action=action) from error
