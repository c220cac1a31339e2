"""Write the file of ``-o FILE``: as a whole, and only over an earlier one of the same kind."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from memwal_ops.errors import InvalidUsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_HEAD_BYTES = 1024


def check_replaceable(path: str, is_ours: Callable[[bytes], bool], what: str) -> None:
    """Refuse a path at which there is something else than an earlier file of this kind.

    Args:
        path: of the file.
        is_ours: whether a file with these first bytes may be replaced.
        what: its kind, with an article.

    Raises:
        InvalidUsageError: it must not be replaced.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise InvalidUsageError(f"{path} cannot be read: {error.strerror}.", remedy="Give another -o.") from error
    if not is_ours(head):
        raise InvalidUsageError(
            f"{path} exists and is not {what} of memwal-ops; it was not changed.",
            remedy="Give another -o, or --force to replace it.",
        )


@contextmanager
def written_file(path: str) -> Iterator[IO[bytes]]:
    """A file that appears under its name when the block ends well: a reader never sees a part of it.

    Raises:
        InvalidUsageError: it cannot be written.
    """
    folder = os.path.dirname(os.path.abspath(path))
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)[:100]}.", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(temporary, 0o666 & ~umask)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise InvalidUsageError(f"{path} cannot be written: {error.strerror}.", remedy="Give another -o.") from error
