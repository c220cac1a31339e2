"""The settings of a table by which pylance compacts it, checked before anything is written.

pylance obeys ``lance.compaction.*`` in the table's config wherever a compaction has no option of its own, and
``lance.row_lineage.*`` in each. What would lead to a table that this release refuses is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lance.optimize import Compaction

from memwal_ops.errors import InvalidUsageError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.indexes.writers import last_written
from memwal_ops.formats.lance.wire.feature_flags import MIXED_FILE_VERSIONS, STABLE_ROW_IDS

if TYPE_CHECKING:
    from lance.optimize import CompactionOptions

    from memwal_ops.formats.lance.table import Table

PREFIX = "lance.compaction."
_VERSION = f"{PREFIX}data_storage_version"
_SPILL = "lance.row_lineage.spill"
# The first release that opens a table with data files of several versions.
_OPENS_MIXED = 12
_INVALID = "Invalid user input"


def refuse_settings(table: Table, options: CompactionOptions, *, allow_upgrade: bool = False) -> None:
    """Refuse a compaction that pylance refuses by the table's settings, or that would give it an unsupported feature.

    Args:
        table: the version that is to be compacted.
        options: those of the compaction.
        allow_upgrade: whether the table may get a feature that older releases, which write it, cannot read.

    Raises:
        InvalidUsageError: pylance refuses a setting or an option.
        UnsupportedFeatureError: the compaction could give the table a feature that this release does not support, or
            those do not that wrote the table.
    """
    manifest, uri = table.manifest.manifest, table.location.uri
    if manifest.reader_feature_flags & STABLE_ROW_IDS and manifest.config.get(_SPILL, "").strip().lower() == "true":
        raise UnsupportedFeatureError(
            f"{uri} has the setting {_SPILL}, by which a compaction may move row ids into data files: the table would "
            "have spilled row lineage (feature flag 2048), which this release of memwal-ops does not support.",
            remedy=f'Turn it off (lance.dataset(URI).update_config({{"{_SPILL}": "false"}})), then run it again.',
        )
    if not allow_upgrade:
        _refuse_upgrade(table, options)
    everything = [fragment.id for fragment in manifest.fragments]
    try:
        with lance_errors("plan the compaction of", uri):
            Compaction.plan(table.dataset, {**options, "excluded_fragment_ids": everything})
    except StorageError as error:
        if _INVALID not in str(error):
            raise
        settings = ", ".join(f"{key} = {value}" for key, value in sorted(manifest.config.items()) if PREFIX in key)
        raise InvalidUsageError(
            f"{error} The table's settings: {settings or 'none'}.",
            remedy="Correct the setting that the message names by lance.dataset(URI).update_config({KEY: VALUE}), or "
            "remove it by the value None.",
        ) from error


def _refuse_upgrade(table: Table, options: CompactionOptions) -> None:
    """Refuse files of another version where a release that cannot read such a table is among its last writers."""
    manifest = table.manifest.manifest
    wanted = options.get("data_storage_version") or manifest.config.get(_VERSION)
    if wanted in {None, manifest.data_format.version} or manifest.reader_feature_flags & MIXED_FILE_VERSIONS:
        return
    for one in last_written(table):
        if not one.ours and (one.major is None or one.major < _OPENS_MIXED):
            raise UnsupportedFeatureError(
                f"{table.location.uri} would have mixed data file versions (feature flag 256, since Lance 12) by files "
                f"of version {wanted}: {one.release} wrote version {one.version}, and could not read it any more.",
                remedy="Once no release before 12.0 uses the table: memwal-ops compact URI --allow-upgrade.",
            )
