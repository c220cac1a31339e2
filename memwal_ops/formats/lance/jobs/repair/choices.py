"""The choices that an operator has for findings of a Lance table without a safe fix, each with its consequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core.repair_report import Choice

if TYPE_CHECKING:
    from collections.abc import Mapping

_WAIT = Choice("Leave it as it is.", "Merges of the region stop there; its log and its generations grow.")
_REGION_BACKUP = Choice(
    "Stop the region's writer, and restore the region's folder as a whole from one backup.",
    "Rows that were acknowledged after the backup was taken are lost, unless their log entries are kept and replayed.",
)
_NEW_REGION = Choice(
    "Stop the region's writer, let it write to a new region, and leave the old folder for a later decision.",
    "The unmerged rows of the old region are not merged, and older rows of their keys stay visible.",
)
# No choice moves an unreadable generation away: until it is written again, its entry in the manifest has to keep
# blocking merges; readers could not open its intact files any more; and a restore needs the folder at its path.
_GENERATION = (
    Choice(
        "Restore the generation's folder, with all its files under the same names, from a backup or the bucket's "
        "versions; then merge.",
        "None: a generation is never rewritten, so every copy is correct.",
    ),
    Choice(
        "Leave it as it is.",
        "Its position blocks the region's merges, so that no row is skipped; readers of the region fail or miss it.",
    ),
)
_BASE = (
    Choice("Restore the file from a backup or the bucket's versions.", "None: Lance never rewrites a file."),
    Choice(
        "Return to the newest version that does not need the file: lance.dataset(URI, version=N).restore().",
        "What was committed since version N is lost to readers; merge progress is reverted with it, and generations "
        "that gc has collected since cannot be merged again. Hold version N first; run no gc and no expire.",
    ),
    Choice("Leave it as it is.", "Scans that reach the file fail. Run no gc and no expire meanwhile."),
)
_ROLLED_BACK = (
    Choice(
        "Restore the missing manifest versions from a backup or the bucket's versions.",
        "None: a manifest version is never rewritten.",
    ),
    _WAIT,
)
_SCHEMA = (
    Choice(
        "Change the base table back to the generation's columns, merge, and change them again.",
        "Readers see the old columns meanwhile.",
    ),
    _WAIT,
)
_KEYS = (
    Choice(
        "Find out which row is correct, and delete the others by row id.",
        "Readers of older versions still get all of them.",
    ),
    Choice("Leave it as it is.", "Readers get the key more than once, until a merge replaces all of its rows by one."),
)
_REPLACED = (
    Choice("memwal-ops adopt URI --as merged", "If it is another region after all, its generations are never merged."),
    Choice(
        "memwal-ops adopt URI --as unmerged",
        "If it is the old region after all, older rows of its keys may overwrite newer ones.",
    ),
    _WAIT,
)
_LOG = (
    Choice(
        "Restore the entry from a backup or the bucket's versions.", "None: an entry of the log is never rewritten."
    ),
    Choice("Leave it as it is.", "A replay stops at the entry: rows that were acknowledged above it are lost to it."),
)
_PROGRESS = (
    Choice(
        "Restore the region's folder, or the base table, so that both are of the same time.",
        "What was written to the restored part after its backup is lost.",
    ),
    _NEW_REGION,
)

CHOICES: Mapping[str, tuple[Choice, ...]] = {
    "base_file": _BASE,
    "version_emptied": (
        Choice(
            "If the rows were not deleted on purpose: hold the version before, then "
            "lance.dataset(URI, version=N).restore().",
            "What was committed since is lost to readers.",
        ),
        Choice("If they were deleted on purpose: nothing.", "None."),
    ),
    "version_manifest": (
        Choice("Restore the manifest from a backup or the bucket's versions.", "None: it is never rewritten."),
        Choice("Leave it as it is.", "Readers of that version fail; gc and expire delete nothing."),
    ),
    "version_unreadable": (
        Choice("Restore the file from a backup or the bucket's versions.", "None: Lance never rewrites a file."),
        Choice(
            "memwal-ops expire URI --apply; before it, delete the tag or branch that keeps the version, or release the "
            "hold.",
            "The version is deleted; it could not be read.",
        ),
    ),
    "transaction_file": (
        Choice("Nothing: the next commit names its own.", "A commit that began before this version fails once."),
    ),
    "tag": (
        Choice("Delete the tag.", "Its readers fail with another message."),
        Choice("Set it to a version that exists.", "Its readers get the rows of another version."),
    ),
    "maintained_index": (
        Choice("Create the index.", "A scan of the base table."),
        Choice("Initialise MemWAL without it.", "Queries of unmerged rows do not use it."),
    ),
    "generation_missing": _GENERATION,
    "generation_corrupt": _GENERATION,
    "generation": _GENERATION,
    "generation_rows": _GENERATION,
    "merged_generation_missing": (
        Choice("Restore its folder from a backup or the bucket's versions.", "None: a generation is never rewritten."),
        Choice(
            "memwal-ops catchup URI, and expire the versions that need it; then repair removes it from the list.",
            "The older versions are deleted.",
        ),
        Choice("Leave it as it is.", "Readers of those versions, or by an index that lacks its rows, fail."),
    ),
    "schema_projection": _SCHEMA,
    "region_manifest_corrupt": (
        Choice("Restore that manifest version from a backup or the bucket's versions.", "None: it is never rewritten."),
        _REGION_BACKUP,
        _WAIT,
    ),
    "region_manifest_gap": _ROLLED_BACK,
    "old_manifest": (
        Choice("Nothing: gc deletes it when newer ones are enough.", "gc keeps the region's orphans until then."),
    ),
    "snapshot": (
        _REGION_BACKUP,
        Choice(
            "If the region's manifests are right: memwal-ops snapshot URI takes another.",
            "Generations that only the old snapshot names are no longer visible to any reader.",
        ),
    ),
    "region_replaced": _REPLACED,
    "progress": _PROGRESS,
    "writer_epoch": (_REGION_BACKUP, _NEW_REGION),
    "current_generation": (_REGION_BACKUP, _NEW_REGION),
    "replay_after_wal_id": (_REGION_BACKUP, _NEW_REGION),
    "wal_gap": _LOG,
    "wal_entry": _LOG,
    "wal_epoch": (
        Choice(
            "Stop the region's writers, and find out which of them wrote the entries; then open a new region.",
            "Rows of the fenced writer were not acknowledged as durable if it followed the specification; its "
            "producers have to send them again.",
        ),
        _REGION_BACKUP,
    ),
    "null_keys": (
        Choice("Give the rows keys, or delete them.", "They count as other rows, or are deleted."),
        Choice("Leave it as it is.", "No merge can update or delete them; a generation with such rows is not merged."),
    ),
    "duplicate_keys": _KEYS,
    "shared_keys": (
        Choice(
            "Route each key to one region, and delete its rows in the other one through that region's writer.",
            "The row is deleted; memwal-ops cannot determine which of the two is newer.",
        ),
        Choice("Leave it as it is.", "Merges of both regions stop."),
    ),
}
