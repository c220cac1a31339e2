"""Resolve which branch of a table a location is, and the table's root.

A branch is the folder ``tree/NAME`` of its table (a name may contain slashes), with versions, data files and regions
of its own. What keeps its versions is elsewhere: tags and branches are in ``_refs/`` of the root, child branches
are folders beside it. So a job that opened a branch by its path reads both below the root.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from memwal_ops.core.protocols import TableBranch
from memwal_ops.errors import InvalidUsageError, ObjectNotFoundError, TableCorruptError
from memwal_ops.storage.export_file import NotExportedError
from memwal_ops.storage.locations import BRANCHES_FOLDER, LOCAL, split_query
from memwal_ops.storage.objects import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

REFS_FOLDER = "_refs"


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of a table, or main.

    Attributes:
        name: its name; None: main.
        root: the root of its table, to be read only; of main, the table's own store.
    """

    name: str | None
    root: Store

    @property
    def folder(self) -> str:
        """Its folder below the root; empty: the root itself."""
        return branch_folder(self.name)


def branch_folder(name: str | None) -> str:
    """The folder of a branch below the root; empty for main."""
    return "" if name is None else f"{BRANCHES_FOLDER}/{name}"


def list_branches(root: Store) -> tuple[TableBranch, ...]:
    """The branches of a table, ascending by name. A listing, and one request for each.

    Raises:
        TableCorruptError: the record of one does not decode.
    """
    branches = []
    for meta in root.list(f"{REFS_FOLDER}/branches"):
        name = unquote(meta.path.rpartition("/")[2].removesuffix(".json"))
        try:
            record = json.loads(root.get(meta.path))
            created = datetime.fromtimestamp(int(record["createAt"]), UTC)
            branches.append(TableBranch(name, record["parentBranch"], int(record["parentVersion"]), created))
        except ObjectNotFoundError:
            continue  # deleted since it was listed
        except (ValueError, KeyError, TypeError, OverflowError, OSError) as error:
            raise TableCorruptError(f"{meta.path}, the record of a branch, cannot be read: {error!r}.") from error
    return tuple(sorted(branches, key=lambda branch: branch.name))


def list_tags(root: Store) -> Mapping[str, tuple[str | None, int]]:
    """By the name of each tag of a table its branch and version. A listing, and one request for each.

    Raises:
        TableCorruptError: the record of one does not decode.
        StorageError: the store failed.
    """
    tags: dict[str, tuple[str | None, int]] = {}
    for meta in root.list(f"{REFS_FOLDER}/tags"):
        try:
            record = json.loads(root.get(meta.path))
            tags[unquote(meta.path.rpartition("/")[2].removesuffix(".json"))] = (
                record["branch"],
                int(record["version"]),
            )
        except ObjectNotFoundError:
            continue  # deleted since it was listed
        except (ValueError, KeyError, TypeError) as error:
            raise TableCorruptError(f"{meta.path}, the record of a tag, cannot be read: {error!r}.") from error
    return tags


def branch_location(location: Location, own: str | None, name: str | None) -> Location:
    """The location of another branch of a table; ``own``: the branch that is opened, None: main.

    Raises:
        InvalidUsageError: the root of the table is not known.
    """
    root = location if own is None else _root(location, own)
    if name is None:
        return root
    uri, query = split_query(root.uri)
    return replace(root, uri=f"{uri}/{branch_folder(name)}{query}", catalog=None)


def resolve_branch(location: Location, store: Store, name: str | None) -> Branch:
    """The branch at a location, by the name that its newest version records. No request is made.

    Raises:
        InvalidUsageError: its path does not end with ``tree/NAME``, so that the root is unknown.
        NotExportedError: it is read from an export, which has no more than the branch's folder.
    """
    if name is None:
        return Branch(None, store)
    if location.files is not None:
        raise NotExportedError(f"The tags and branches of {location.uri} are in its table's root, not in the export.")
    return Branch(name, open_store(_root(location, name)))


def _root(location: Location, name: str) -> Location:
    ending, (uri, query) = f"/{branch_folder(name)}", split_query(location.uri)
    if location.scheme not in LOCAL and not uri.endswith(ending) and unquote(uri).endswith(ending):
        scheme, _, path = unquote(uri).partition("://")
        uri = f"{scheme}://{quote(path)}"
    if not uri.endswith(ending):
        raise InvalidUsageError(
            f"{location.uri} is branch {name} of a table, and its tags and child branches are in the table's root, "
            f"which this path does not show: it does not end with {ending}.",
            remedy=f"Open the branch by its own path, TABLE{ending}. To keep a copy, clone it deeply: the files and "
            "tags of a copied folder stay in the table that it was copied from.",
        )
    return replace(location, uri=f"{uri.removesuffix(ending)}{query}", catalog=None)
