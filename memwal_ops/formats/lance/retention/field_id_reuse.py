"""Determine how many versions it takes to give the id of a column to another one. Pure.

Lance gives a new column the next id after the highest of the schema and of the data files. So an id is used again only
if its column, and all with higher ids, are dropped, no data file has such an id any more, and columns are added:
each of these is a version of its own. If fewer versions are missing than that takes, the column is the same.

A file that has the key column is removed only by a version that rewrites or deletes its rows, as the key is never
dropped. All other files may go with the last of their columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_DROP_AND_ADD = 2


@dataclass(frozen=True, slots=True)
class FileIds:
    """The field ids in the data files of some versions.

    Attributes:
        with_key: the highest id in a file that has the key column too, of the version in which it is lowest; -1: none.
        highest: the highest id of each file.
    """

    with_key: int
    highest: frozenset[int]

    def joined(self, other: FileIds) -> FileIds:
        """Of the versions of both."""
        return FileIds(min(self.with_key, other.with_key), self.highest | other.highest)


def fewest_versions(field_id: int, before: FileIds, now: Collection[int]) -> int:
    """The number of versions that it takes at least until another column has a field id.

    Args:
        before: the files before the missing versions.
        now: all field ids after them.
    """
    return min(_versions(first, before, now) for first in range(field_id + 1))


def _versions(first: int, before: FileIds, now: Collection[int]) -> int:
    """The same if ``first`` is the lowest id that is given away again."""
    rewritten = before.with_key >= first
    # Ids are successive: one that is missing was given to a column that was dropped, or replaced, since.
    given = set(range(first, max(now) + 1))
    follows = first == 0 or first - 1 in now or first - 1 in before.highest
    # A change of type gives a column another id, and takes away the one that it had, in one version.
    cast = len(set(range(first)) - set(now)) >= len(given)
    return _DROP_AND_ADD + rewritten + (not (given <= set(now) and (follows or cast)))
