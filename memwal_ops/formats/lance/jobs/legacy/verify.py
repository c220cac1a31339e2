"""The verify job of tables with the legacy MemWAL index: check its states against the rules, history and data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memwal_ops.core import verification
from memwal_ops.core.context import RunContext
from memwal_ops.core.options import AnswersOptions, VerificationOptions
from memwal_ops.errors import MemwalOpsError
from memwal_ops.formats.lance.answers.check import check_answers, or_plan
from memwal_ops.formats.lance.checks.base import check_files, check_references, check_version_manifests
from memwal_ops.formats.lance.checks.rows import check_values
from memwal_ops.formats.lance.jobs.verify import LanceVerifyReport, reader_of
from memwal_ops.formats.lance.legacy.index import Meanings, find_emptied, mem_wals_of, unmerged
from memwal_ops.formats.lance.legacy.mem_tables import MemTables, with_key
from memwal_ops.formats.lance.legacy.states import disorder
from memwal_ops.formats.lance.options import MergeOptions
from memwal_ops.formats.lance.wire.legacy_index import MemWal, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memwal_ops.core.answers import IndexAnswers
    from memwal_ops.core.verification import VerifyReport
    from memwal_ops.formats.lance.table import Table

_STOPS = "Merges of the region stop there."


def verified(table: Table, options: VerificationOptions, context: RunContext | None = None) -> VerifyReport:
    """Check the newest version: files, versions, states, and, if ``options.deep``, the rows that are not merged.

    Raises ``StorageError``: the store failed.
    """
    findings, rows_read = verification.Inconsistencies(options.max_findings), verification.RowsRead.NONE
    checked: dict[str, int] = {}
    answers: list[IndexAnswers] = []
    seed = None
    context = context or RunContext()
    with reader_of(table, options, context) as (reader, engine):
        if isinstance(options, AnswersOptions) and not options.checks_all:
            findings.extend(verification.missing_object(table))
        else:
            checked = _check(table, options, findings)
            if options.deep and not findings.counts["base_file"]:
                rows_read = verification.RowsRead.ALL
                findings.extend(check_values(table, reader))
        if isinstance(options, AnswersOptions) and options.asks and not findings.counts["missing_object"]:
            seed = options.seed_at(table.version)
            answers, wrong = check_answers(table, options, context, seed, reader)
            findings.extend(wrong)
    return LanceVerifyReport(table.version, findings, checked, (), rows_read, answers, seed, engine, reader.stages)


plan = apply = or_plan(verified)


def _check(table: Table, options: VerificationOptions, findings: verification.Inconsistencies) -> dict[str, int]:
    """Check all but the answers of indexes; return what was read."""
    checked = {"fragments": len(table.manifest.manifest.fragments), "MemWALs": 0}
    findings.extend(check_files(table))
    findings.extend(check_version_manifests(table, deep=options.deep))
    findings.extend(check_references(table))
    findings.extend(verification.check_own_files(table))
    if (emptied := find_emptied(table)) is not None:
        error = emptied.error("merge")
        findings.add(verification.finding_of(error, "emptied", f"version {table.version}", "Readers find no rows."))
    try:
        mem_wals = mem_wals_of(table)
    except MemwalOpsError as error:
        findings.add(verification.finding_of(error, "legacy_index", "the MemWAL index", "No job can continue."))
    else:
        checked["MemWALs"] = len(mem_wals)
        findings.extend(check_states(table, mem_wals))
        if options.deep:
            findings.extend(check_rows(table, mem_wals))
    return checked


def check_states(table: Table, mem_wals: Sequence[MemWal]) -> Iterator[verification.Inconsistency]:
    """States, owners and versions of MemWALs, by the index and the manifests alone."""
    meanings = Meanings(table)
    for region in sorted({mem_wal.id.region for mem_wal in mem_wals}):
        pending = unmerged(mem_wals, region, meanings)
        place = f"region {region!r}"
        if pending.fault is not None:
            where = f"{place}, generation {pending.fault.generation}"
            yield verification.finding_of(pending.fault.error, pending.fault.error.reason, where, _STOPS)
        elif (problem := disorder(mem_wals, region)) is not None:
            yield verification.Inconsistency(
                verification.Severity.WARNING, "mem_wal_states", place, problem,
                "A merge waits for the lower generation.",
                "Let the region's writer seal and flush it; or migrate, which replays its log.",
                "docs/legacy-memwal.md",
            )  # fmt: skip
    places: dict[str, MemWal] = {}
    for mem_wal in mem_wals:
        if mem_wal.last_updated_dataset_version > table.version:
            yield verification.Inconsistency(
                verification.Severity.WARNING, "mem_wal_version", str(mem_wal.id),
                f"Version {mem_wal.last_updated_dataset_version} changed it last, and the newest is {table.version}.",
                "It is not known what FLUSHED means.", "Give --flushed-means to merge and migrate.",
                "runbooks/errors/36-flushed_meaning_unknown.md",
            )  # fmt: skip
        if not mem_wal.owner_id and mem_wal.state is not State.MERGED:
            yield verification.Inconsistency(
                verification.Severity.WARNING, "mem_wal_owner", str(mem_wal.id), "It has no owner.",
                "Two writers may write to it at once.", "Stop its writers, and migrate.", "docs/legacy-memwal.md",
            )  # fmt: skip
        other = places.setdefault(mem_wal.wal_location, mem_wal)
        if other is not mem_wal:
            yield verification.Inconsistency(
                verification.Severity.ERROR, "wal_shared", str(mem_wal.id),
                f"It has the log of {other.id}: {mem_wal.wal_location}.",
                "A replay gives the rows of both; gc keeps the log.", "Find out which of the two wrote the entries.",
                "docs/legacy-memwal.md",
            )  # fmt: skip


def check_rows(table: Table, mem_wals: Sequence[MemWal]) -> Iterator[verification.Inconsistency]:
    """Whether the rows of each MemWAL that is not merged can be read, and fit the table."""
    options = MergeOptions(primary_key=() if table.primary_key else tuple(table.schema.names[:1]))
    meanings = Meanings(table)
    with MemTables(with_key(table, options), options) as mem_tables:
        for region in sorted({mem_wal.id.region for mem_wal in mem_wals}):
            for mem_wal in unmerged(mem_wals, region, meanings).mem_wals:
                read = mem_tables.generation if mem_wal.state is State.FLUSHED else mem_tables.drained
                try:
                    read(mem_wal)
                except MemwalOpsError as error:
                    yield verification.finding_of(error, error.reason, str(mem_wal.id), _STOPS)
