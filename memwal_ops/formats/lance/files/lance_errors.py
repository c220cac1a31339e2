"""Translate pylance's untyped errors.

pylance raises ``OSError``, ``ValueError`` and ``RuntimeError`` with text, and a Rust
panic as a ``BaseException``. The texts are classified by
:mod:`memwal_ops.storage.errors`, since the object stores have the same ones.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError
from memwal_ops.log import LastOpened
from memwal_ops.storage.errors import translate

if TYPE_CHECKING:
    from collections.abc import Iterator


def is_panic(error: BaseException) -> bool:
    """Whether it is a Rust panic, which is not an ``Exception`` and must not end the process."""
    return type(error).__name__ == "PanicException"


_CONFLICT = re.compile(
    r"commit conflict|preempted by concurrent|too many concurrent writers|incompatible with concurrent", re.IGNORECASE
)


def is_commit_conflict(error: BaseException) -> bool:
    """Whether it is a commit conflict of pylance: nothing of its transaction is visible."""
    return _CONFLICT.search(str(error)) is not None


@contextmanager
def lance_errors(action: str, path: str) -> Iterator[None]:
    """Translate every error of pylance in the block to a ``MemwalOpsError``, with the original as its cause."""
    LastOpened.note(f"{action} {path}")
    try:
        yield
    except MemwalOpsError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise translate(error, path=path, action=action) from error
