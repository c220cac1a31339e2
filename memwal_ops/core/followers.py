"""Record at a table which indexes elsewhere follow it: its erase has to know them, as they have its rows."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from memwal_ops.errors import InvalidFormatError, ObjectNotFoundError
from memwal_ops.storage.records import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memwal_ops.storage.api import Store

FOLDER = "_mem_wal_ops/followers"


@dataclass(frozen=True)
class Follower:
    """An index that follows a table.

    Attributes:
        uuid: of the index.
        folder: its local folder.
        host: the machine that wrote this.
        erased: the version of the table that it had when an erasure left no deleted row in it; 0: never.
    """

    uuid: str
    folder: str
    host: str
    erased: int = 0

    @property
    def path(self) -> str:
        """The record's path in the table."""
        return f"{FOLDER}/{self.uuid}.json"

    @property
    def is_here(self) -> bool:
        """Whether its folder is on this machine."""
        return os.path.isdir(self.folder)


def record_follower(store: Store, uuid: str, folder: str, erased: int | None = None) -> None:
    """Record an index at the table that it follows, if that is not recorded yet; or that it was erased."""
    known = next((one for one in read_followers(store) if one.uuid == uuid), None)
    kept = erased if erased is not None else 0 if known is None else known.erased
    wanted = Follower(uuid, os.path.abspath(folder), platform.node(), kept)
    if wanted != known:
        store.put(wanted.path, encode_record(asdict(wanted)))


def read_followers(store: Store) -> Iterator[Follower]:
    """The indexes that follow a table. Raises ``InvalidFormatError`` if a record cannot be read."""
    for meta in store.list(FOLDER):
        try:
            found = decode_record(store.get(meta.path), meta.path)
            one = Follower(str(found["uuid"]), str(found["folder"]), str(found["host"]), int(found["erased"]))
        except ObjectNotFoundError:
            continue  # deleted meanwhile
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidFormatError(
                f"{meta.path} is not a readable record of an index that follows the table: {error}",
                remedy="Delete it: the next catchup of the index writes it again.",
            ) from error
        yield one
