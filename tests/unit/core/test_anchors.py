"""Nothing is deleted from a table that may be another one than the one that was planned on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from memwal_ops.core.anchors import Anchor, anchor_at, delete_proven
from memwal_ops.errors import TableReplacedError
from memwal_ops.storage.api import DeleteReport, ObjectMeta

META = ObjectMeta("v1", 100, datetime(2026, 11, 21, tzinfo=UTC), '"tag"')


@dataclass
class MemoryStore:
    metas: dict[str, ObjectMeta | None]
    log: list[Any] = field(default_factory=list)

    def head(self, path: str) -> ObjectMeta | None:
        self.log.append(path)
        return self.metas[path]

    def delete_many(self, paths: Iterable[str]) -> DeleteReport:
        self.log.append([*paths])
        return DeleteReport(len(self.log[-1]), {})


def test_an_anchor_is_the_current_object() -> None:
    store: Any = MemoryStore({"v1": META, "v2": None})
    assert anchor_at(store, "v1", "version 1") == Anchor("version 1", META)
    with pytest.raises(TableReplacedError, match="version 2 does not exist any more"):
        anchor_at(store, "v2", "version 2")


@pytest.mark.parametrize(
    "other",
    [
        replace(META, size=101),
        replace(META, last_modified=META.last_modified + timedelta(microseconds=1000)),
        replace(META, e_tag='"other"'),
        replace(META, e_tag='"tagX"'),
        replace(META, e_tag=None),
        None,
    ],
)
def test_nothing_is_deleted_if_an_anchor_changed(other: ObjectMeta | None) -> None:
    store: Any = MemoryStore({"v1": META, "v2": other})
    anchors = [Anchor("version 1", META), Anchor("version 2", replace(META, path="v2"))]
    with pytest.raises(TableReplacedError, match="version 2"):
        delete_proven(store, ["a", "b"], anchors)
    assert store.log == ["v1", "v2"]


@pytest.mark.parametrize("same", [META, replace(META, e_tag="tag"), replace(META, path="v2")])
def test_deleted_if_every_anchor_is_the_same(same: ObjectMeta) -> None:
    """Some servers quote the entity tag in one answer and not in the next."""
    store: Any = MemoryStore({"v1": META, "v2": same})
    anchors = [Anchor("version 1", META), Anchor("version 2", replace(META, path="v2"))]
    assert delete_proven(store, ["a", "b"], anchors) == DeleteReport(2, {})
    assert store.log == ["v1", "v2", ["a", "b"]]


def test_a_store_without_entity_tags() -> None:
    bare = replace(META, e_tag=None)
    Anchor("version 1", bare).check(MemoryStore({"v1": bare}))  # type: ignore[arg-type]
    with pytest.raises(TableReplacedError, match="version 1 is not the same object"):
        Anchor("version 1", bare).check(MemoryStore({"v1": META}))  # type: ignore[arg-type]
