"""Stores that lie, refuse, or let others come in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.storage.api import DeleteReport
from memwal_ops.storage.wrapper import StoreWrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memwal_ops.storage.api import ObjectMeta


class LikeRemote(StoreWrapper):
    """Local files that are listed in order, under a root like a remote one, so that requests are saved."""

    @property
    def root(self) -> str:
        return f"remote:/{super().root}"

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectMeta]:
        return iter(sorted(super().list(prefix, after=after), key=lambda meta: meta.path.encode()))


class LyingStore(StoreWrapper):
    """The real store, but for some methods."""

    def __init__(self, store: Any, **instead: Callable[..., Any]) -> None:
        super().__init__(store)
        self._instead = instead

    def _call(self, verb: str, method: Any, /, *arguments: Any, **named: Any) -> Any:
        return self._instead.get(verb, method)(*arguments, **named)


class Beside(StoreWrapper):
    """Lets others work once: right before the first call of ``verb`` with arguments that ``when`` picks."""

    def __init__(self, store: Any, verb: str, when: Callable[..., bool], others: Callable[[], object]) -> None:
        super().__init__(store)
        self._verb, self._when, self._others = verb, when, others
        self.happened = False

    def _call(self, verb: str, method: Any, /, path: Any = "", *arguments: Any, **named: Any) -> Any:
        path = path if isinstance(path, str) else [*path]
        if verb == self._verb and not self.happened and self._when(path, *arguments):
            self.happened = True
            self._others()
        return method(path, *arguments, **named)


def beside(verb: str, part: str, others: Callable[[], object]) -> Callable[[Any], Any]:
    """Wrap a store, so that others work once, right before its first call of ``verb`` on a path with ``part``."""
    return lambda store: Beside(store, verb, lambda path, *_: part in str(path), others)


def refusing(wanted: Callable[[str], bool]) -> Callable[[Any], Any]:
    """Wrap a store, so that it does not delete some objects."""

    class Refusing(StoreWrapper):
        def delete_many(self, paths: Iterable[str]) -> DeleteReport:
            doomed = [*paths]
            locked = {path: "locked" for path in doomed if wanted(path)}
            report = self._inner.delete_many([path for path in doomed if path not in locked])
            return DeleteReport(report.deleted, {**report.failed, **locked})

    return Refusing
