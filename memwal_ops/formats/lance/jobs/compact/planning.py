"""Plan a compaction: the policy chooses groups of fragments, pylance makes a task of each.

pylance's own planner joins all neighbors below the target each time. It is asked for one group at once, with all other
fragments excluded and the rows of the group as its target, so that a group becomes one fragment.

Settings are checked before anything is written. pylance obeys ``lance.compaction.*`` in the table's config wherever a
compaction has no option of its own, and ``lance.row_lineage.*`` in each. What would lead to a table that this release
refuses is refused here.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from lance.file import LanceFileReader
from lance.optimize import Compaction

from memwal_ops.core.figures import polled_options
from memwal_ops.errors import InvalidUsageError, MemwalOpsError, StorageError, UnsupportedFeatureError
from memwal_ops.formats.lance.files.datasets import lance_errors, lance_options as storage_options
from memwal_ops.formats.lance.files.version_files import DATA_FOLDER
from memwal_ops.formats.lance.indexes.base_indexes import base_indexes, coverage, covered_by
from memwal_ops.formats.lance.indexes.index_faults import last_written
from memwal_ops.formats.lance.jobs.catchup.tiers import bytes_of
from memwal_ops.formats.lance.jobs.compact.corrections import left_behind, unchecked_segments
from memwal_ops.formats.lance.options import (
    DEFAULT_DELETED_FRACTION,
    DEFAULT_TARGET_BYTES,
    DEFAULT_TARGET_ROWS,
    CompactOptions,
)
from memwal_ops.formats.lance.policy import FragmentSize, Group, Policy
from memwal_ops.formats.lance.wire.version_manifest import MIXED_FILE_VERSIONS, STABLE_ROW_IDS, moved_later
from memwal_ops.text import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    import lance
    from lance.optimize import CompactionOptions, CompactionTask

    from memwal_ops.formats.lance.table import Table
    from memwal_ops.formats.lance.wire._pb import table_pb2


PREFIX = "lance.compaction."
_VERSION = f"{PREFIX}data_storage_version"
_SPILL = "lance.row_lineage.spill"
# The first release that opens a table with data files of several versions.
_OPENS_MIXED = 12
_INVALID = "Invalid user input"


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that compactions obey, and its source: ``option``; ``table``: its config; or ``default``."""

    value: float
    source: str

    def to_json(self) -> dict[str, Any]:
        """The entry of ``settings``."""
        return {"value": self.value, "from": self.source}


def settings_of(table: Table, options: CompactOptions) -> Mapping[str, Setting]:
    """The settings of a run: its own, else the owner's in the table's config, of which any may be invalid; defaults."""

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
    """Refuse what pylance refuses by the table's settings, or would give it a feature that its writers do not support.

    Raises ``InvalidUsageError``, ``UnsupportedFeatureError``.
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
    for written in last_written(table):
        if not written.ours and (written.major is None or written.major < _OPENS_MIXED):
            raise UnsupportedFeatureError(
                f"{table.location.uri} would have mixed data file versions (feature flag 256, since Lance 12) by files "
                f"of version {wanted}: {written.release} wrote version {written.version}, and could not read it "
                "any more.",
                remedy="Once no release before 12.0 uses the table: memwal-ops compact URI --allow-upgrade.",
            )


COMMIT_OPTIONS: CompactionOptions = {"defer_index_remap": False}
# Rows that are read at once have about this size, whatever their width, and what is read ahead this one.
_BATCH_BYTES = 8 << 20
_READ_AHEAD_BYTES = 64 << 20
_MAX_BATCH_ROWS = 8192
# Of files with the same columns, so many are opened; the others are taken to have the same share of dropped ones.
_SAMPLED_FILES = 4


def fragment_sizes(
    table: Table, limit: Collection[int] | None = None, demanded: Collection[int] = ()
) -> list[FragmentSize]:
    """All fragments of a version as the policy weighs them.

    ``limit``: ids of those that may be rewritten; None: all. The others are boundaries, as are those that an index
    covers which pylance could not remap, or not correctly. ``demanded``: ids of those that are rewritten in any case.
    """
    dropped, again = dropped_bytes(table), _indexed_again(table)
    segments: dict[int, list[bytes]] = defaultdict(list)
    for index in base_indexes(table).values():
        for entry in index.segments:
            for fragment_id in covered_by([entry]):
                segments[fragment_id].append(entry.uuid.uuid)
    # Covered by an index that pylance could not remap, or not correctly.
    kept = _indexed_elsewhere(table) | covered_by(moved_later(table.manifest))
    sizes = []
    for fragment in table.manifest.manifest.fragments:
        size = sum(file.file_size_bytes for file in fragment.files)
        deleted = fragment.deletion_file.num_deleted_rows
        rows = fragment.physical_rows - deleted
        if fragment.id in kept or (limit is not None and fragment.id not in limit):
            sizes.append(FragmentSize(fragment.id, rows, 0, size, (fragment.id,)))
        else:
            covered, unused = frozenset(segments.get(fragment.id, ())), min(size, dropped.get(fragment.id) or 0)
            more, forced, files = again.get(fragment.id, 0), fragment.id in demanded, len(fragment.files)
            sizes.append(FragmentSize(fragment.id, rows, deleted, size, covered, unused, files, forced, more))
    return sizes


def _indexed_again(table: Table) -> Mapping[int, int]:
    """By fragment, its share of the indexes that pylance does not move with rows."""
    shares: dict[int, int] = defaultdict(int)
    for index in left_behind(table):
        covered = [fragment for fragment in table.manifest.manifest.fragments if fragment.id in index.covered]
        rows = sum(fragment.physical_rows for fragment in covered)
        for fragment in covered:
            shares[fragment.id] += bytes_of(index.segments) * fragment.physical_rows // max(1, rows)
    return shares


def affordable(costs: Mapping[str, int], budget: int | None) -> list[str]:
    """The names, the cheapest first, whose costs are together within a budget; None: all."""
    ordered = sorted(costs, key=lambda name: (costs[name], name))
    if budget is None:
        return ordered
    totals = accumulate(costs[name] for name in ordered)
    return [name for name, total in zip(ordered, totals, strict=True) if total <= budget]


def dropped_bytes(table: Table) -> Mapping[int, int | None]:
    """About how many bytes of fragments are of columns that were dropped or overwritten; None: that cannot be read.

    Requests: two for each of 4 files that have the same columns, which are made once in a process.
    """
    fields = {field_.id for field_ in table.manifest.manifest.fields}
    shares: dict[tuple[int, ...], list[float | None]] = defaultdict(list)
    found: dict[int, int | None] = {}
    for fragment in table.manifest.manifest.fragments:
        for file in fragment.files:
            if fields.issuperset(file.fields):
                continue
            columns = zip(file.fields, file.column_indices, strict=False)
            dead = tuple(column for field, column in columns if field not in fields)
            known = shares[tuple(file.fields)]
            if len(known) < _SAMPLED_FILES:
                known.append(_share(table, file, dead))
            read = [share for share in known if share is not None]
            size = int(file.file_size_bytes * sum(read) / len(read)) if read and file.file_size_bytes else None
            before = found.get(fragment.id, 0)
            found[fragment.id] = None if size is None or before is None else before + size
    return found


def _share(table: Table, file: table_pb2.DataFile, columns: tuple[int, ...]) -> float | None:
    """The share of a data file that is of these columns; None: it cannot be read, or is elsewhere."""
    if file.HasField("base_id") or not columns:
        return None
    options = storage_options(table.location) or {}
    uri = f"{table.location.files or table.location.uri}/{DATA_FOLDER}/{file.path}"
    try:
        return _share_of_file(uri, columns, tuple(sorted(options.items())))
    except MemwalOpsError:
        return None


@lru_cache(maxsize=4096)
def _share_of_file(uri: str, columns: tuple[int, ...], options: tuple[tuple[str, str], ...]) -> float:
    with lance_errors("read the columns of", uri):
        columns_of = LanceFileReader(uri, storage_options=dict(options) or None).file_statistics().columns
    sizes = [int(column.size_bytes) for column in columns_of]
    return sum(size for at, size in enumerate(sizes) if at in columns) / max(1, sum(sizes))


@dataclass(frozen=True, slots=True)
class Debt:
    """What is due by the policy: fragments to rewrite, and how many they are ``after``; live rows; bytes.

    ``bytes_written`` includes indexes that are built again; ``dropped``: of columns that the table has no more.
    """

    fragments: int
    rows: int
    bytes_read: int
    bytes_written: int
    after: int = 0
    dropped: int = 0


def debt(groups: Collection[Group], policy: Policy) -> Debt:
    """What a compaction of the groups reads and writes."""
    every = [fragment for group in groups for fragment in group]
    return Debt(
        fragments=len(every),
        rows=sum(fragment.rows for fragment in every),
        bytes_read=_bytes(every),
        bytes_written=int(sum(fragment.live_bytes + fragment.indexed_again for fragment in every)),
        after=sum(map(policy.fragments_after, groups)),
        dropped=sum(fragment.dropped for fragment in every),
    )


def index_budget(options: CompactOptions, left: int) -> int | None:
    """Bytes of indexes that a run may build again: what is left of its budget, and half of that in any case."""
    return None if options.max_bytes is None else max(left, options.max_bytes // 2)


class Planner:
    """Plans compactions of one version, ``table``.

    Attributes:
        settings: what it obeys, by name.
        policy: the policy by these settings.
        indexed_again: names of the indexes that a run catches up, as pylance does not move them with rows.
        indexes_behind: names of such that it leaves to ``catchup``: they take more than half of its ``--max-bytes``.
        budget: what it may rewrite: its ``--max-bytes`` without what these indexes take; None: any number of bytes.
    """

    def __init__(self, table: Table, options: CompactOptions, demanded: Collection[int] = ()) -> None:
        """Read the settings; ``InvalidUsageError``: one in the table's config is not a valid number."""
        self.table, self._options, self._demanded = table, options, demanded
        self.settings = settings_of(table, options)
        numbers = {name: int(setting.value) for name, setting in self.settings.items() if name != "deleted_fraction"}
        rest = table.is_at_rest(options.rest_after)
        self.policy = Policy(**numbers, deleted_fraction=self.settings["deleted_fraction"].value, at_rest=rest)
        moved = (index for index in left_behind(table) if index.covered & table.fragment_ids)
        costs = {index.name: bytes_of(index.segments) for index in moved}
        most = options.max_bytes
        self.indexed_again = affordable(costs, index_budget(options, 0))
        self.indexes_behind = sorted(costs.keys() - self.indexed_again)
        self.budget = None if most is None else max(1, most - sum(costs[name] for name in self.indexed_again))

    @cached_property
    def _sizes(self) -> list[FragmentSize]:
        return fragment_sizes(self.table, demanded=self._demanded)

    @cached_property
    def _due(self) -> list[Group]:
        return self.policy.groups(self._sizes)

    def debt(self) -> Debt:
        """All that is due, whatever a run may rewrite."""
        later = self.policy.rounds(self.policy.after(self._sizes, self._due)) if self._due else ()
        return debt([group for groups in (self._due, *later) for group in groups], self.policy)

    def urgent(self) -> Debt:
        """What is worth a run at once."""
        return debt(self.policy.worth_a_run(self._due), self.policy)

    def next_run(self) -> Debt:
        """What a run of these options would rewrite: all that is due, or what its budget lets it begin with."""
        if self.budget is None:
            return self.debt()
        return debt(self._chosen(self.groups(), None, self.budget), self.policy)

    def groups(self, limit: Collection[int] | None = None) -> list[Group]:
        """The groups that are due, in the order of the table; those larger than ``--max-bytes`` in smaller ones.

        ``limit``: see :func:`fragment_sizes`.
        """
        every = limit is None or self.table.fragment_ids <= {*limit}
        due = self._due if every else self.policy.groups(fragment_sizes(self.table, limit, self._demanded))
        return due if self.budget is None else self._divided(due, self.budget)

    def _divided(self, due: list[Group], budget: int) -> list[Group]:
        """The groups, of less than a budget where that is possible; else of the smallest budget that joins anything."""
        smaller = budget
        while smaller // 2 < self.policy.target_bytes:
            policy = self.policy.within(smaller)
            divided = [part for group in due for part in ([group] if _bytes(group) <= budget else policy.groups(group))]
            if divided:
                return divided
            smaller *= max(2, self.policy.tier_factor)
        return due

    def _chosen(self, groups: list[Group], rows: int | None, budget: float, *, first: bool = True) -> list[Group]:
        """Due groups of a commit, up to ``rows``, at least one, and ``budget`` bytes; ``first``: else the smallest."""
        chosen: list[Group] = []
        for group in groups:
            if rows is not None:
                rows -= sum(fragment.rows for fragment in group)
            if chosen and rows is not None and rows < 0:
                break
            if _bytes(group) <= budget:
                budget -= _bytes(group)
                chosen.append(group)
        return chosen if chosen or not first or not groups else [min(groups, key=_bytes)]

    def tasks(
        self, dataset: lance.LanceDataset, limit: Collection[int], rows: int, max_bytes: int | None, *, first: bool
    ) -> list[CompactionTask]:
        """The tasks of the next commit, up to a budget of rows and bytes.

        ``limit``: ids of the fragments that may be rewritten. ``rows``: their budget; a group of more is a commit of
        its own. ``max_bytes``: the budget of bytes; None: any. ``first``: nothing was rewritten yet: one group may
        exceed the budget of bytes, if none is within it.
        """
        tasks: list[CompactionTask] = []
        budget = float("inf") if max_bytes is None else max_bytes
        for group in self._chosen(self.groups(limit), rows, budget, first=first):
            with lance_errors("plan the compaction of", self.table.location.uri):
                tasks += Compaction.plan(dataset, self._task_options(group)).tasks
        return tasks

    def _task_options(self, group: Group) -> CompactionOptions:
        chosen = {fragment.id for fragment in group}
        # pylance joins fragments below the target only, by all of their rows, also those that are deleted.
        joins = len(group) > 1
        rows = sum(fragment.rows + (fragment.deleted + 1 if joins else 0) for fragment in group)
        after = 1 if joins else self.policy.fragments_after(group)
        return lance_options(
            self.settings,
            self._options,
            target_rows_per_fragment=max(1, -(-rows // max(1, after))),
            excluded_fragment_ids=sorted(self.table.fragment_ids - chosen),
            # pylance chooses a fragment alone by its deleted rows, which it need not have.
            **({} if joins else {"materialize_deletions_threshold": -1.0}),
            **self._memory(group),
        )

    def _memory(self, group: Group) -> Mapping[str, int]:
        """Bounds of what is in memory at once, unless the table's owner set them."""
        width = max(1, _bytes(group) // max(1, sum(fragment.rows + fragment.deleted for fragment in group)))
        batch = min(_MAX_BATCH_ROWS, max(1, _BATCH_BYTES // width))
        # A buffer below the size of a batch would never be filled, and the scan would not end.
        bounds = {"batch_size": batch, "io_buffer_size": max(_READ_AHEAD_BYTES, 4 * batch * width)}
        config = self.table.manifest.manifest.config
        return {key: value for key, value in bounds.items() if PREFIX + key not in config}

    def why(self) -> str:
        """The reason why nothing is rewritten."""
        table, policy = self.table, self.policy
        fragments = table.manifest.manifest.fragments
        if not fragments:
            return "The base table has no fragments."
        tiers = f" whose sum is {policy.tier_factor} times the largest (--tier-factor)" * (policy.tier_factor != 1)
        tiers = " of which enough is new (--tier-factor)" if policy.at_rest else tiers
        reason = (
            f"In no fragment are more than {policy.deleted_fraction:.0%} deleted rows and dropped columns, or many "
            "small column files. "
            f"And no neighbours{tiers} can be joined: such have less than {policy.target_rows:,} rows and "
            f"{size_text(policy.target_bytes)}, and the same segments of the same indexes."
        )
        if _indexed_elsewhere(table):
            reason += (
                " Fragments that an index of the source of this shallow clone covers are not rewritten: "
                "build the index anew in this table: memwal-ops catchup URI --index NAME --rebuild."
            )
        if moved := {entry.name for entry in moved_later(table.manifest)}:
            reason += (
                " Fragments that were compacted with defer_index_remap are not rewritten under an index that is older: "
                "pylance would lose rows of it: build it anew, memwal-ops catchup URI --index NAME --rebuild: "
                f"{', '.join(sorted(moved))}."
            )
        return reason + _to_join_more(table, policy.target_rows)


def compaction_debt(table: Table) -> Mapping[str, float]:
    """What a compaction would rewrite; nothing if a setting of the table is invalid, which the job names."""
    with suppress(InvalidUsageError):
        planner = Planner(table, polled_options("compact", CompactOptions))
        due = planner.debt()
        return {
            "debt": due.bytes_written,
            "debt_read": due.bytes_read,
            "debt_rows": due.rows,
            "due_fragments": due.fragments,
            "urgent_fragments": planner.urgent().fragments if due.fragments else 0,
            "unchecked_segments": unchecked_segments(table),
        }
    return {}


def _to_join_more(table: Table, target_rows: int) -> str:
    if sum(fragment.physical_rows < target_rows for fragment in table.manifest.manifest.fragments) <= 1:
        return ""
    reason = ""
    indexes = base_indexes(table)
    behind = [name for name, index in indexes.items() if not coverage(index.covered, table.manifest).complete]
    split = [name for name, index in indexes.items() if len(index.segments) > 1]
    if behind:
        reason += f" To join more, run memwal-ops catchup first: not all is covered by {', '.join(behind)}."
    if split:
        several = f"there are several segments of {', '.join(split)}"
        reason += f" To join more, run memwal-ops catchup --max-segments 1: {several}."
    return reason


def _bytes(fragments: Iterable[FragmentSize]) -> int:
    return sum(fragment.bytes for fragment in fragments)


def _indexed_elsewhere(table: Table) -> frozenset[int]:
    """Fragments covered by an index whose files belong to the table that this one was cloned from (shallow clone).

    When pylance remaps such an index, it writes the new files here, and still reads them at the source: queries fail.
    """
    return covered_by(entry for entry in table.manifest.index_entries if entry.HasField("base_id"))
