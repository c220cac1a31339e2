"""Every write of a job on a table at ``s3+ddb://``: to S3, to DynamoDB, and by pylance; a run stops at one of them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import lance
from lance.optimize import Compaction, CompactionTask

from memwal_ops.errors import StoreUnavailableError
from memwal_ops.storage.dynamodb import VersionEntries
from memwal_ops.storage.external_manifests import ManifestEntryStore
from memwal_ops.storage.object_store import ObjectStore
from tests.support.calm import calm
from tests.support.dying_store import Killed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAULTS = ("killed before", "killed after", "lost answer", "beside")
_WRITES = {"put_item", "transact_write_items"}


class DynamoPlan:
    """Counts writes, and stops at one: before or after it, as a killed process or with a lost response."""

    def __init__(self, at: int = 0, fault: str = "", others: Callable[[], object] = lambda: None) -> None:
        self.trail: list[str] = []
        self.struck = False
        self._at, self._fault, self._others = at, fault, others
        self._dead = self._busy = False

    def point(self, name: str, call: Callable[[], Any]) -> Any:
        if self._busy:
            return call()
        if self._dead:
            raise Killed
        self.trail.append(name)
        if len(self.trail) != self._at:
            return call()
        self.struck = True
        if self._fault == "beside":
            self._busy = True
            self._others()
            self._busy = False
            return call()
        if self._fault != "killed before":
            call()
        self._dead = self._fault.startswith("killed")
        raise Killed if self._dead else StoreUnavailableError("connection reset by peer")

    @contextmanager
    def active(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name in (
                (ObjectStore, "put"), (ObjectStore, "put_if_absent"), (ObjectStore, "delete_many"),
                (ManifestEntryStore, "_copy"), (VersionEntries, "_send"), (Compaction, "commit"),
                (CompactionTask, "execute"), (lance.LanceDataset, "commit"),
            ):  # fmt: skip
                stack.enter_context(mock.patch.object(owner, name, self._wrapped(owner, name)))
            stack.enter_context(calm())
            yield

    def _wrapped(self, owner: Any, name: str) -> Any:
        method = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if name == "_send" and not _WRITES & {argument for argument in arguments if isinstance(argument, str)}:
                return method(*arguments, **named)
            return self.point(f"{owner.__name__}.{name}", lambda: method(*arguments, **named))

        return (
            call if owner in {ObjectStore, ManifestEntryStore, VersionEntries, CompactionTask} else staticmethod(call)
        )
