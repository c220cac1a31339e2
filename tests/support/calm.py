"""The product without threads and without second tries: what happens is the same each time, and half as dear.

For harnesses that run thousands of jobs on local files. A local store needs no second try, and no link
leads out of a folder that a test has made itself; that the jobs bear threads is for tests without this.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from memwal_ops.storage import errors
from memwal_ops.storage.local import LocalObjectStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@contextmanager
def calm() -> Iterator[None]:
    """Work like that for as long as it lasts; may be entered again within itself."""
    with ExitStack() as stack:
        for module in [one for name, one in sys.modules.items() if name.startswith("memwal_ops.")]:
            if getattr(module, "ThreadPoolExecutor", None) is ThreadPoolExecutor:
                stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", OneAfterTheOther))
        stack.enter_context(mock.patch.object(errors, "call", _once))
        stack.enter_context(mock.patch.object(LocalObjectStore, "_refuse_links", lambda *_: None))
        yield


def _once(attempt: Callable[[], Any], *, path: str, action: str, policy: object) -> Any:
    try:
        return attempt()
    except Exception as error:
        raise errors.translate(error, path=path, action=action) from error


class OneAfterTheOther:
    """A thread pool without threads."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> OneAfterTheOther:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        """As a pool: all are begun, and an error shows where its result is asked for."""
        outcomes: list[tuple[Any, BaseException | None]] = []
        for arguments in zip(*iterables, strict=False):
            try:
                outcomes.append((function(*arguments), None))
            except BaseException as error:
                outcomes.append((None, error))

        def results() -> Iterator[Any]:
            for result, error in outcomes:
                if error is not None:
                    raise error
                yield result

        return results()
