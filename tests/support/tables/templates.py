"""Tables that are made once in a process, and copied for each test that begins with one."""

from __future__ import annotations

import atexit
import copy
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.support.tables.damage import copy_table


class Made(Protocol):
    """A table without open writers, and what a test knows of it."""

    uri: str


T = TypeVar("T", bound=Made)


@cache
def _template(make: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
    folder = tempfile.mkdtemp(prefix="memwal-ops-template-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make(f"{folder}/t.lance", *arguments)


def copy_of(make: Callable[..., T], uri: str, *arguments: object) -> T:
    """What ``make(uri, *arguments)`` makes; its files are as old as those that were made."""
    template = _template(make, arguments)
    made: T = copy.deepcopy(template)
    made.uri = copy_table(template.uri, uri)
    for path in Path(template.uri).rglob("*"):
        shutil.copystat(path, Path(uri, path.relative_to(template.uri)))
    return made
