"""The settings of a table by which pylance compacts it, checked before anything is written.

pylance obeys ``lance.compaction.*`` in the table's config wherever a compaction has no option of its own, and
``lance.row_lineage.*`` in each. What would lead to a table that this release refuses is refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lance.optimize import Compaction

from memwal_ops.errors import InvalidUsageError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.lance_errors import lance_errors
from memwal_ops.formats.lance.wire.feature_flags import STABLE_ROW_IDS

if TYPE_CHECKING:
    from lance.optimize import CompactionOptions

    from memwal_ops.formats.lance.table import Table

PREFIX = "lance.compaction."
_SPILL = "lance.row_lineage.spill"
_INVALID = "Invalid user input"


def refuse_settings(table: Table, options: CompactionOptions) -> None:
    """Refuse a compaction that pylance refuses by the table's settings, or that would give it an unsupported feature.

    Args:
        table: the version that is to be compacted.
        options: those of the compaction.

    Raises:
        InvalidUsageError: pylance refuses a setting or an option.
        UnsupportedFeatureError: the compaction could give the table a feature that this release does not support.
    """
    manifest, uri = table.manifest.manifest, table.location.uri
    if manifest.reader_feature_flags & STABLE_ROW_IDS and manifest.config.get(_SPILL, "").strip().lower() == "true":
        raise UnsupportedFeatureError(
            f"{uri} has the setting {_SPILL}, by which a compaction may move row ids into data files: the table would "
            "have spilled row lineage (feature flag 2048), which this release of memwal-ops does not support.",
            remedy=f'Turn it off (lance.dataset(URI).update_config({{"{_SPILL}": "false"}})), then run it again.',
        )
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
