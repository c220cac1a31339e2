"""Write every candidate of a plan to a file as JSON lines, atomically."""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memwal_ops.core.options import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@contextmanager
def plan_file(path: str | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that writes one document as a line; without a path it does nothing.

    The file appears when the block ends, or not at all if the block raises.

    Raises:
        OptionError: the folder cannot be written.
    """
    if path is None:
        yield lambda _: None
        return
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise OptionError(f"{{plan_file}} {path} cannot be written: {error}.", "plan_file") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            yield lambda document: print(json.dumps(document), file=file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
