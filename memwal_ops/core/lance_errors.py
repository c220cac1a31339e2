"""pylance's untyped errors, told apart in one place.

pylance raises ``OSError``, ``ValueError`` and ``RuntimeError`` with text (landmine 6), and a Rust
panic arrives as a ``BaseException``. Only the texts that the contract tests pin are used here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from memwal_ops.errors import MemwalOpsError, ObjectNotFoundError
from memwal_ops.storage.errors import translate

if TYPE_CHECKING:
    from collections.abc import Iterator

_NOT_FOUND = ("was not found", "Not found:", "does not exist", "No such file or directory")


def is_not_found(error: BaseException) -> bool:
    """Whether pylance says that a dataset or a file of it is not there."""
    return isinstance(error, ObjectNotFoundError) or any(text in str(error) for text in _NOT_FOUND)


def is_panic(error: BaseException) -> bool:
    """Whether a Rust panic came through the binding; it is no ``Exception`` and must not end the process."""
    return type(error).__name__ == "PanicException"


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
