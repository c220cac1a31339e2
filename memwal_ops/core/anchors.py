"""Verify before each deletion that the table is still the one that the plan was made from.

A plan is tied to an anchor: an object that is never rewritten, and that is removed only with its table or when its
revision expires. Objects are deleted only while the anchor is unchanged.

Timeline of the loss that this prevents: gc lists a table; the table is removed and created again at the same URI by
the same steps, with the same file names; gc continues with its listing and deletes the new table's files. A restored
backup has the same effect: objects that were deletable are needed again.

A revision's number and file names do not identify a table; the anchor's size, modification time and entity tag do. If
the anchor is gone, an expiry cannot be distinguished from a new table, and nothing more is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import TableReplacedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from memwal_ops.storage.api import DeleteReport, ObjectMeta, Store


@dataclass(frozen=True, slots=True)
class Anchor:
    """An object by which a plan is valid: for as long as it is unchanged.

    Attributes:
        what: a description of the object, for messages.
        meta: the object's metadata, from a HEAD request.
    """

    what: str
    meta: ObjectMeta

    def check(self, store: Store) -> None:
        """Verify that the object is unchanged. One HEAD request.

        If it is, everything that was read since the anchor was made belongs to the same table.

        Raises:
            TableReplacedError: the object is gone or was replaced.
        """
        if _identity(anchor_at(store, self.meta.path, self.what).meta) != _identity(self.meta):
            raise TableReplacedError(
                f"{self.what} is not the same object as before: the table was recreated or restored."
            )


def anchor_at(store: Store, path: str, what: str) -> Anchor:
    """Return an anchor for the object at ``path``. One HEAD request.

    The caller compares the object's content with what it read before: a HEAD alone does not identify the table.

    Raises:
        TableReplacedError: the object does not exist.
    """
    meta = store.head(path)
    if meta is None:
        raise TableReplacedError(
            f"{what} does not exist any more: it was expired, or the table was recreated or restored."
        )
    return Anchor(what, meta)


def delete_proven(store: Store, paths: Sequence[str], anchors: Iterable[Anchor]) -> DeleteReport:
    """Delete one batch of objects that a plan found deletable, after checking the plan's anchors.

    Every deletion of an object that other processes may refer to is made here. (A run's own files that were never
    published have unique names and need no proof.)

    Raises:
        TableReplacedError: an anchor has changed; nothing was deleted.
    """
    for anchor in anchors:
        anchor.check(store)
    return store.delete_many(paths)


def _identity(meta: ObjectMeta) -> tuple[int, float, str | None]:
    # Some servers quote the entity tag in one response and not in the next.
    tag = None if meta.e_tag is None else meta.e_tag.strip('"')
    return (meta.size, meta.last_modified.timestamp(), tag)
