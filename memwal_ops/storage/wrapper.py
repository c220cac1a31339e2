"""A store that passes every call on to another one: the base of stores that count, guard or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import ParamSpec, TypeVar

from memwal_ops.storage import api

_P = ParamSpec("_P")
_R = TypeVar("_R")


class StoreWrapper:
    """Passes every call on. Subclasses override a method, or :meth:`_call`, through which all methods go."""

    def __init__(self, inner: api.Store) -> None:
        self._inner = inner

    @property
    def inner(self) -> api.Store:
        """The wrapped store."""
        return self._inner

    @property
    def root(self) -> str:
        """The wrapped store's root."""
        return self._inner.root

    @property
    def service(self) -> str | None:
        """The service of the wrapped store, see :class:`memwal_ops.storage.object_store.ObjectStore`."""
        return getattr(self._inner, "service", None)

    def mark(self) -> None:
        """Before the first commit, see :class:`memwal_ops.storage.external_manifests.ManifestEntryStore`."""
        mark = getattr(self._inner, "mark", None)
        if mark is not None:
            mark()

    def get(self, path: str) -> bytes:
        """See the interface."""
        return self._call("get", self._inner.get, path)

    def get_with_tag(self, path: str) -> tuple[bytes, str]:
        """See the interface."""
        return self._call("get_with_tag", self._inner.get_with_tag, path)

    def get_range(self, path: str, start: int, length: int) -> bytes:
        """See the interface."""
        return self._call("get_range", self._inner.get_range, path, start, length)

    def head(self, path: str) -> api.ObjectMeta | None:
        """See the interface."""
        return self._call("head", self._inner.head, path)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[api.ObjectMeta]:
        """See the interface. One call, made when the listing is asked for."""
        return self._call("list", self._inner.list, prefix, after=after)

    def list_level(self, prefix: str = "") -> api.Listing:
        """See the interface."""
        return self._call("list_level", self._inner.list_level, prefix)

    def put(self, path: str, data: bytes) -> None:
        """See the interface."""
        self._call("put", self._inner.put, path, data)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """See the interface."""
        return self._call("put_if_absent", self._inner.put_if_absent, path, data)

    def put_back(self, path: str, data: bytes) -> bool:
        """See the interface."""
        return self._call("put_back", self._inner.put_back, path, data)

    def compare_and_swap(self, path: str, data: bytes, e_tag: str) -> bool:
        """See the interface."""
        return self._call("compare_and_swap", self._inner.compare_and_swap, path, data, e_tag)

    def delete_many(self, paths: Iterable[str]) -> api.DeleteReport:
        """See the interface."""
        return self._call("delete_many", self._inner.delete_many, paths)

    def _call(self, verb: str, method: Callable[_P, _R], /, *arguments: _P.args, **named: _P.kwargs) -> _R:  # noqa: ARG002 - for subclasses
        """Make one call of the inner store; ``verb`` is the method's name."""
        return method(*arguments, **named)
