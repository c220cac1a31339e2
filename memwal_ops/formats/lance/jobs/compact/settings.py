"""The settings of a table by which pylance compacts it, checked before anything is written.

pylance obeys ``lance.compaction.*`` in the table's config wherever a compaction has no option of its own, and
``lance.row_lineage.*`` in each. What would lead to a table that this release refuses is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lance.optimize import Compaction

from memwal_ops.errors import InvalidUsageError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.datasets import lance_errors
from memwal_ops.formats.lance.indexes.index_faults import last_written
from memwal_ops.formats.lance.options import (
    DEFAULT_DELETED_FRACTION,
    DEFAULT_TARGET_BYTES,
    DEFAULT_TARGET_ROWS,
    CompactOptions,
)
from memwal_ops.formats.lance.policy import Policy
from memwal_ops.formats.lance.wire.version_manifest import MIXED_FILE_VERSIONS, STABLE_ROW_IDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lance.optimize import CompactionOptions

    from memwal_ops.formats.lance.table import Table

PREFIX = "lance.compaction."
_VERSION = f"{PREFIX}data_storage_version"
_SPILL = "lance.row_lineage.spill"
# The first release that opens a table with data files of several versions.
_OPENS_MIXED = 12
_INVALID = "Invalid user input"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that compactions obey.

    Attributes:
        value: the number.
        source: ``option``; ``table``: its config; or ``default``.
    """

    value: float
    source: str

    def to_json(self) -> dict[str, Any]:
        """The entry of ``settings``."""
        return {"value": self.value, "from": self.source}


def settings_of(table: Table, options: CompactOptions) -> Mapping[str, Setting]:
    """The settings of a compaction: those of the run, else the owner's in the table's config, else defaults.

    Raises:
        InvalidUsageError: a value in the table's config is not a valid number.
    """

    def chosen(name: str, key: str, read: Callable[[str], float], default: float) -> Setting:
        if (given := getattr(options, name)) is not None:
            return Setting(given, "option")
        if (text := table.manifest.manifest.config.get(PREFIX + key)) is None:
            return Setting(default, "default")
        try:
            return Setting(read(text), "table")
        except ValueError as error:
            raise _refused(table, f"{PREFIX}{key} is not a valid number: {text!r}.") from error

    factor = CompactOptions().tier_factor
    return {
        "target_rows": chosen("target_rows", "target_rows_per_fragment", _positive, DEFAULT_TARGET_ROWS),
        # A fragment may have up to twice the target size, and a file no more than the owner says.
        "target_bytes": chosen(
            "target_bytes", "max_bytes_per_file", lambda text: max(1, _positive(text) // 2), DEFAULT_TARGET_BYTES
        ),
        "tier_factor": Setting(options.tier_factor, "default" if options.tier_factor == factor else "option"),
        "deleted_fraction": chosen(
            "deleted_fraction", "materialize_deletions_threshold", float, DEFAULT_DELETED_FRACTION
        ),
    }


def policy_of(settings: Mapping[str, Setting]) -> Policy:
    """The policy of these settings."""
    return Policy(
        target_rows=int(settings["target_rows"].value),
        target_bytes=int(settings["target_bytes"].value),
        tier_factor=int(settings["tier_factor"].value),
        deleted_fraction=settings["deleted_fraction"].value,
    )


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def lance_options(settings: Mapping[str, Setting], options: CompactOptions, **more: Any) -> CompactionOptions:
    """What every plan of pylance is given."""
    chosen: CompactionOptions = {
        "target_rows_per_fragment": int(settings["target_rows"].value),
        "materialize_deletions_threshold": settings["deleted_fraction"].value,
        # Not as the table's config may say: rows of indexes would be lost (docs/upstream.md).
        "defer_index_remap": False,
    }
    if options.storage_version is not None:
        chosen["data_storage_version"] = options.storage_version
    chosen.update(more)  # type: ignore[typeddict-item]  # options of pylance by their names
    return chosen


def refuse_settings(table: Table, options: CompactOptions) -> None:
    """Refuse a compaction that pylance refuses by the table's settings, or that would give it an unsupported feature.

    Args:
        table: the version that is to be compacted.
        options: those of the run.

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
    given = lance_options(settings_of(table, options), options)
    if not options.allow_upgrade:
        _refuse_upgrade(table, given)
    everything = [fragment.id for fragment in manifest.fragments]
    try:
        with lance_errors("plan the compaction of", uri):
            Compaction.plan(table.dataset, {**given, "excluded_fragment_ids": everything})
    except StorageError as error:
        if _INVALID not in str(error):
            raise
        raise _refused(table, str(error)) from error


def _refused(table: Table, why: str) -> InvalidUsageError:
    config = table.manifest.manifest.config
    settings = ", ".join(f"{key} = {value}" for key, value in sorted(config.items()) if PREFIX in key)
    return InvalidUsageError(
        f"{why} The table's settings: {settings or 'none'}.",
        remedy="Correct the setting that the message names by lance.dataset(URI).update_config({KEY: VALUE}), or "
        "remove it by the value None.",
    )


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
