"""Planted bugs: each is one line of the product, as it was before outsiders found what it does, or as plausible.

``PAIRS_PLANTED=NAME`` plants one in a process that runs rows. ``python -m tests.campaigns.pairs.find_planted`` looks
for a row that finds each, and writes found.json, which the tests run.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Bug:
    """One mistake.

    Attributes:
        module: below ``memwal_ops.formats.lance``, or a whole name.
        old: the text that stands there once.
        new: what is there instead.
        row: values with which a row may find it; of another format than Lance, its name, too.
        steps: how many of the history's steps run before the damage; None: all.
    """

    module: str
    old: str
    new: str
    row: Mapping[str, str]
    steps: int | None = None

    @property
    def name(self) -> str:
        """The whole name of the module."""
        return self.module if self.module.startswith("memwal_ops") else f"memwal_ops.formats.lance.{self.module}"


_MERGE = {"layout": "region", "file": "2.1", "job": "merge"}
_COLLAPSE, _REWRITE, _LOOKUP = "engines.merge.collapse", "engines.merge.rewrite", "engines.read.lookup"
_NEAREST, _SCAN, _UNMERGED = "engines.read.nearest", "engines.read.scan", "engines.read.unmerged"
_LIVE, _FILES = "retention.live_versions", "files.named_files"
_ZEPPELIN, _FOLDERS = "memwal_ops.formats.zeppelin", "memwal_ops.formats.lm_diskann"
_COMPACTION, _READER, _ROOTS = f"{_ZEPPELIN}.compaction", f"{_ZEPPELIN}.reader", f"{_ZEPPELIN}.roots"
_WIKI = {"format": "zeppelin", "job": "merge"}
_NATIVE = {**_WIKI, "dialect": "native"}
_FOLDER = {"format": "lm_diskann", "job": "inspect"}
BUGS: dict[str, Bug] = {
    # Rows.
    "the_oldest_write_wins": Bug(_COLLAPSE, 'newest = ages[grouped.column(f"{_AGE}_max")', 'newest = ages[grouped.column(f"{_AGE}_min")', _MERGE),
    "deleted_rows_are_merged": Bug(_COLLAPSE, "is_upsert = is_winner & ~tombstones", "is_upsert = is_winner", _MERGE),
    "superseded_rows_stay": Bug(_REWRITE, "    if addresses.size == 0:\n", "    if addresses.size < 3:\n", _MERGE),
    "no_rows_are_superseded": Bug("engines.merge.locate", "addresses = np.sort(hits.column(datasets.ROW_ADDRESS).to_numpy())", "addresses = np.sort(hits.column(datasets.ROW_ADDRESS).to_numpy())[1:]", _MERGE),
    "a_deletion_takes_the_next_row": Bug(_REWRITE, "offsets = (rows & np.uint64(0xFFFF_FFFF)).tolist()", "offsets = (rows & np.uint64(0xFFFF_FFFF) ^ np.uint64(1)).tolist()", _MERGE),
    "rows_are_merged_beside_fixed_dictionaries": Bug("commit.commit", "if columns := fixed_dictionaries(table):", "if (columns := fixed_dictionaries(table)) and not columns:", {"layout": "legacy", "file": "legacy", "column": "dictionary", "job": "merge"}),
    # Answers.
    "nearest_returns_replaced_rows": Bug(_NEAREST, "        return found.filter(pa.array(~self._staleness.of_base(found)))", "        return found", _MERGE),
    "nearest_returns_deleted_rows_of_generations": Bug(_NEAREST, "return stale | ~np.isin(found", "return stale & ~np.isin(found", _MERGE),
    "get_takes_the_oldest_generation": Bug(_LOOKUP, "newest_first = region.flushed[::-1]", "newest_first = region.flushed[::1]", _MERGE),
    "get_skips_a_key_of_the_base": Bug(_LOOKUP, "some = keys.slice(start, locate.MAX_LOOKUPS)", "some = keys.slice(start + 1, locate.MAX_LOOKUPS)", _MERGE),
    "get_forgets_the_log": Bug(_LOOKUP, "if region.memory is not None and sought.num_rows:", "if region.memory is not None and not sought.num_rows:", _MERGE),
    "get_stops_at_the_first_generation": Bug(_LOOKUP, "        if not sought.num_rows:\n            continue\n        (generation,)", "        if not sought.num_rows:\n            break\n        (generation,)", _MERGE),
    "filters_of_every_type_are_believed": Bug("wire.bloom_filter", "return _HASHED.issuperset(kinds)", "return True", {"layout": "shard", "key": "large_string", "job": "inspect", "file": "2.1"}),
    "merged_generations_are_read_again": Bug(_UNMERGED, "subtract(manifest, table.index.merged_generations.get(region_id, 0))", "subtract(manifest, 0)", _MERGE),
    "logs_are_not_read": Bug(_UNMERGED, "        elif log:\n", "        elif not log:\n", _MERGE),
    "a_scan_ignores_the_filter_in_memory": Bug(_SCAN, "part.winners)), wanted, self.filter)", "part.winners)), wanted, None)", _MERGE),
    "dropped_rows_fill_results": Bug("jobs.compact.corrections", "if not manifest.reader_feature_flags & STABLE_ROW_IDS or", "if manifest.reader_feature_flags & STABLE_ROW_IDS or", {"row_ids": "stable", "vector_index": "IVF_FLAT", "deletions": "most", "job": "compact_all"}),
    # What is kept, and what is deleted.
    "tags_keep_nothing": Bug(_LIVE, "return frozenset(self._branched) | {version for branch, version in self.tags.values() if branch == self._own}", "return frozenset(self._branched)", {"holder": "tag", "job": "expire"}),
    "holds_keep_nothing": Bug(_LIVE, "for version in at | self.named()", "for version in self.named()", {"holder": "hold", "job": "expire"}),
    "deletes_are_written_as_rows": Bug("log.region_columns", "_repeat(value=True, times=keys.num_rows)", "_repeat(value=False, times=keys.num_rows)", _MERGE),
    "the_log_is_not_replayed": Bug("log.region_writer", "                self._add_entry(entry)\n", "                self._next_entry = entry.entry_id + 1\n", _MERGE),
    "a_deletion_file_of_any_size": Bug(_FILES, "                self._check_deletions(self.of)\n", "                str(self.of)\n", {"file": "2.1", "deletions": "few", "damage": "half", "job": "expire"}, steps=0),
    # Namespaces of Zeppelin.
    "deletes_of_the_log_reach_no_segment": Bug(_COMPACTION, "return frozenset(self.rows.ids) | self.deleted | self.hidden", "return frozenset(self.rows.ids) | self.hidden", _WIKI),
    "hidden_ids_are_found": Bug(_COMPACTION, "return frozenset(self.rows.ids) | self.deleted | self.hidden", "return frozenset(self.rows.ids) | self.deleted", {**_WIKI, "segments": "hidden"}),
    "attributes_of_the_rows_before": Bug(_COMPACTION, "[ids[at] for at in places], [attributes[at] for at in places]", "[ids[at] for at in places], attributes[: len(places)]", {**_WIKI, "attributes": "strings"}),
    "a_limit_before_the_distance": Bug(_READER, "if passes(more)]\n    if not kept", "if passes(more)][:k]\n    if not kept", _WIKI),
    "lists_match_as_a_whole": Bug(_READER, "map(test, value if isinstance(value, list) else [value])", "map(test, [value])", {**_NATIVE, "attributes": "lists"}),
    "texts_of_the_log_are_not_searched": Bug(_READER, "    yield log.rows\n    yield from _segment_rows(table, log, mentions)", "    yield from _segment_rows(table, log, mentions)", {**_WIKI, "attributes": "strings"}),
    "holds_keep_no_revision": Bug(_ROOTS, "for hold in holds_in_force(table.store, now) for number in hold.versions}", "for hold in () for number in hold.versions}", {**_WIKI, "holder": "hold", "job": "gc"}),
    "a_grace_is_none": Bug(_ROOTS, "elif grace and now - following.written < grace:", "elif grace and now - following.written > grace:", {**_WIKI, "holder": "reader", "job": "gc"}),
    "what_a_server_retired_is_needed": Bug(f"{_ZEPPELIN}.jobs.verify", "filter(live.__contains__, table.manifest.pending):", "(key for key in table.manifest.pending if key.startswith(tuple(table.manifest.prefixes))):", {**_NATIVE, "segments": "carried", "job": "verify"}),
    # Index folders.
    "a_row_that_is_replaced_stays": Bug(f"{_FOLDERS}.graph", "    staged.delete(row_ids)\n", "    staged.delete(row_ids[:0])\n", _FOLDER),
    "holds_keep_no_epoch": Bug(f"{_FOLDERS}.files", "for hold in holds_in_force(store, store_time(store)) for version", "for hold in () for version", {**_FOLDER, "holder": "hold", "job": "maintain_apply"}),
    "lengths_of_vectors_stay": Bug(f"{_FOLDERS}.vectors", 'astype(np.float32) if parameters.metric == "cosine" else vectors', 'astype(np.float32) if parameters.metric == "dot" else vectors', {**_FOLDER, "metric": "cosine"}),
    "a_log_may_end_early": Bug(f"{_FOLDERS}.view", "        if self.epoch < reached:\n", "        if self.epoch < 0:\n", {**_FOLDER, "damage": "half"}, steps=4),
}  # fmt: skip


class _Loader(importlib.machinery.SourceFileLoader):
    """Changes one text of a module's source."""

    bug: Bug

    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname)
        assert source is not None
        assert source.count(self.bug.old) == 1, f"{self.bug.old!r} stands {source.count(self.bug.old)} times"
        return compile(source.replace(self.bug.old, self.bug.new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self.bug = bug

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.bug.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        loader = _Loader(fullname, str(spec.origin))
        loader.bug = self.bug
        return importlib.util.spec_from_file_location(
            fullname, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )


def install(name: str | None) -> None:
    """Plant a bug in what is imported from now on."""
    if name:
        sys.meta_path.insert(0, _Finder(BUGS[name]))
