"""Refuse a pylance commit that would clean up versions or files that must be kept.

If a table has the setting ``lance.auto_cleanup.*``, pylance deletes old versions in each N-th
commit. It respects tags and branches, but not holds, and follows symbolic links out of the table.
Detached commits do not start it (a contract test shows that). All jobs make detached commits, except those that call
:func:`refuse_auto_cleanup`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from memwal_ops.core.holds import holds_in_force
from memwal_ops.errors import UnsupportedFeatureError
from memwal_ops.formats.lance.files.referenced_files import BASE_FOLDERS
from memwal_ops.formats.lance.files.versions import VERSIONS_FOLDER

if TYPE_CHECKING:
    from memwal_ops.formats.lance.table import Table
    from memwal_ops.storage.api import Store

_SETTING = "lance.auto_cleanup."
_REMEDY = "Turn the setting off (dataset.optimize.disable_auto_cleanup()) and let memwal-ops expire do it, or {}."


def refuse_auto_cleanup(table: Table) -> None:
    """Refuse if the next commit may clean up and there is a hold in force, or a link below the base folders.

    Raises:
        UnsupportedFeatureError: with the hold or the link.
    """
    if not any(key.startswith(_SETTING) for key in table.manifest.manifest.config):
        return
    hold = next(iter(holds_in_force(table.store, datetime.now(UTC))), None)
    if hold is not None:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has the setting lance.auto_cleanup, by which pylance may delete version "
            f"{hold.versions[0]} in this commit, and hold {hold.number} of {hold.by} keeps it.",
            remedy=_REMEDY.format("wait until the hold ends; a tag instead of it is respected"),
        )
    link = _first_link(table.store) if table.location.scheme == "file" else None
    if link is not None:
        raise UnsupportedFeatureError(
            f"{table.location.uri} has the setting lance.auto_cleanup, and pylance's clean-up deletes the files behind "
            f"the symbolic link {link}.",
            remedy=_REMEDY.format("put the files themselves into the table's folder"),
        )


def _first_link(store: Store) -> str | None:
    bases = {VERSIONS_FOLDER, *BASE_FOLDERS}
    if links := bases.intersection(store.list_level("").links):
        return min(links)
    folders = [*bases]
    while folders:
        level = store.list_level(folders.pop())
        if level.links:
            return level.links[0]
        folders += [*level.directories, *level.empty]
    return None
