"""The merge job: land flushed generations in the base table, in order, atomically with progress.

``plan`` only reads. ``apply`` works pass by pass and plans again from the newest version before
each one, because between two passes everything may have moved: another merger, a writer's flush,
a schema change. A pass is one base version; killed anywhere, the next run reads the progress and
goes on.
"""

from __future__ import annotations

import random
import time
import uuid
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from memwal_ops.core.backlog import Backlog, Blocked, read_backlog
from memwal_ops.core.commit import CommitLostError, CommitNote, check_committable
from memwal_ops.engines.api import BlockedRegionsError, Engine, MergePass, PassResult, StageProgress
from memwal_ops.engines.local import LocalEngine
from memwal_ops.engines.spark import SparkEngine
from memwal_ops.engines.spark.environment import why_not
from memwal_ops.engines.spark.session import session
from memwal_ops.errors import CommitConflictError, InvalidUsageError, ObjectNotFoundError, RegionsBlockedError
from memwal_ops.log import get_logger
from memwal_ops.storage.probe import probe_conditional_writes
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from uuid import UUID

    from memwal_ops.core.generations import GenerationRef
    from memwal_ops.core.table import Table

DEFAULT_MAX_BYTES = 1 << 30
"""Budget of one pass of the local engine, in bytes; its memory follows it."""
SPARK_MAX_BYTES = 1 << 40
"""The same for Spark, whose memory per executor follows the size of a generation instead."""
DEFAULT_SPARK_ABOVE = 64 << 30
"""A backlog above that many bytes is merged on Spark by ``auto``, where Spark can run: below, one machine is faster."""
# Each lost race halves the next pass, so that a merger beside busy writers gets shorter and
# shorter targets to hit; after this many in a row it gives up.
MAX_LOST_RACES = 12
_BACKOFF_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """What a user may ask of a merge.

    Attributes:
        regions: only these; empty for all.
        engine: ``local``, ``spark`` or ``auto``.
        max_bytes: budget of one pass in bytes, by the region manifests' accounting; None: the engine's default.
        max_generations: at most this many generations in one pass.
        master: where Spark runs, as ``spark-submit`` takes it; None: as configured, else this machine.
        spark_above: backlog in bytes above which ``auto`` takes Spark.
    """

    regions: tuple[UUID, ...] = ()
    engine: str = "auto"
    max_bytes: int | None = None
    max_generations: int | None = None
    master: str | None = None
    spark_above: int = DEFAULT_SPARK_ABOVE

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes <= 0:
            raise InvalidUsageError(f"--max-bytes must be above 0, not {self.max_bytes}.")
        if self.max_generations is not None and self.max_generations <= 0:
            raise InvalidUsageError(f"--max-generations must be above 0, not {self.max_generations}.")
        if self.spark_above < 0:
            raise InvalidUsageError(f"--spark-above must not be below 0, but is {self.spark_above}.")
        if self.engine not in {"local", "spark", "auto"}:
            raise InvalidUsageError(f"There is no engine {self.engine!r}; use local, spark or auto.")
        if self.master is not None and self.engine == "local":
            raise InvalidUsageError("--master is where Spark runs; it has no meaning with --engine local.")


@dataclass(frozen=True, slots=True)
class MergePlan:
    """What a merge would do now, as far as it can be known without reading a generation."""

    passes: tuple[MergePass, ...]
    blocked: tuple[Blocked, ...]
    backlog: Backlog


@dataclass(frozen=True, slots=True)
class PassReport:
    """One pass for a report; ``result`` is None in a dry run."""

    merge_pass: MergePass
    result: PassResult | None

    def to_json(self) -> dict[str, object]:
        """The ``passes`` entry of a report."""
        result = self.result
        return {
            "regions": {str(region_id): list(span) for region_id, span in self.merge_pass.regions.items()},
            "rows_read": None if result is None else result.rows_read,
            "rows_upserted": None if result is None else result.rows_upserted,
            "rows_deleted": None if result is None else result.rows_deleted,
            "bytes_read": None if result is None else result.bytes_read,
            "version": None if result is None else result.version,
            "use_index": None if result is None else result.use_index,
            "seconds": None if result is None else round(result.seconds, 6),
            "phases": None if result is None else dict(result.phases),
            "metrics": None if result is None else dict(result.metrics),
        }


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did. ``decision`` is one of merged, nothing_to_merge, blocked, superseded, dry_run.

    ``engine_reason`` says why that engine was taken; ``fell_back`` whether it is local because Spark cannot run here.
    """

    decision: str
    run_id: str
    engine: str
    passes: tuple[PassReport, ...]
    blocked: tuple[Blocked, ...]
    backlog_after: Backlog
    version: int
    lost_races: int
    seconds: float
    engine_reason: str = ""
    fell_back: bool = False

    @property
    def exit_code(self) -> int:
        """What the command exits with; a dry run has nothing to complain of."""
        return RegionsBlockedError.exit_code if self.decision == "blocked" else 0

    def to_json(self) -> dict[str, object]:
        """The document of ``merge --json``."""
        return {
            "decision": self.decision,
            "passes": [one.to_json() for one in self.passes],
            "blocked": [one.to_json() for one in self.blocked],
            "backlog_after": self.backlog_after.to_json(),
            "seconds": round(self.seconds, 6),
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "version": self.version,
            "lost_races": self.lost_races,
            "run_id": self.run_id,
        }


@dataclass(slots=True)
class _Limits:
    """How far a run may go in each region: to what was flushed when it began, and not past a fault.

    Without the first, a merge beside a live writer would never end.
    """

    last: dict[UUID, int]
    blocked: dict[UUID, Blocked] = field(default_factory=dict)

    def block(self, fault: Blocked) -> None:
        known = self.blocked.get(fault.region_id)
        if known is None or (known.generation or 0) > (fault.generation or 0):
            self.blocked[fault.region_id] = fault
        before = 0 if fault.generation is None else fault.generation - 1
        self.last[fault.region_id] = min(self.last.get(fault.region_id, before), before)

    def select(self, pending: Iterable[GenerationRef]) -> list[GenerationRef]:
        return [ref for ref in pending if ref.generation <= self.last.get(ref.region_id, 0)]


def plan(table: Table, options: MergeOptions) -> MergePlan:
    """What :func:`apply` would do on this version; reads region manifests only.

    Raises:
        InvalidUsageError: a region that the table does not have.
        UnsupportedFeatureError: a table on which the merge could not commit.
    """
    backlog = read_backlog(table, _wanted(table, options))
    waiting = list(backlog.pending)
    if waiting:
        check_committable(table)
    passes = []
    sized = _sized(options, choose_engine(options, backlog).name)
    while waiting:
        merge_pass = _next_pass(waiting, sized)
        passes.append(merge_pass)
        waiting = waiting[len(merge_pass.generations) :]
    return MergePlan(tuple(passes), backlog.blocked, backlog)


def dry_run(table: Table, options: MergeOptions) -> MergeReport:
    """The report of a merge that does nothing: decision ``dry_run``, passes without results."""
    started = time.monotonic()
    planned = plan(table, options)
    choice = choose_engine(options, planned.backlog)
    return MergeReport(
        decision="dry_run",
        run_id=str(uuid.uuid4()),
        engine=choice.name,
        engine_reason=choice.reason,
        fell_back=choice.fell_back,
        passes=tuple(PassReport(one, None) for one in planned.passes),
        blocked=planned.blocked,
        backlog_after=planned.backlog,
        version=table.version,
        lost_races=0,
        seconds=time.monotonic() - started,
    )


def apply(
    table: Table,
    options: MergeOptions,
    *,
    engine: Engine | None = None,
    on_rows: Callable[[int], None] = lambda _: None,
    on_pass: Callable[[PassReport], None] = lambda _: None,
    on_stage: Callable[[StageProgress], None] | None = None,
) -> MergeReport:
    """Merge everything that was flushed when the call began (S0-156 to S0-168).

    Args:
        table: any version of the table; the newest is read before each pass.
        options: see :class:`MergeOptions`.
        engine: instead of the one that ``options.engine`` names.
        on_rows: called as generation rows are dealt with, for a progress bar.
        on_pass: called after each pass that landed.
        on_stage: called as stages on Spark go on, for the same.

    Returns:
        The report; blocked regions are in it, the others are merged.

    Raises:
        CommitConflictError: too many races for the next version were lost in a row.
        CommitStateUnknownError: the store lost the answer to a commit; run it again.
        MemwalOpsError: any other refusal; what earlier passes landed stays landed.
    """
    started = time.monotonic()
    wanted = _wanted(table, options)
    backlog = read_backlog(table, wanted)
    choice = EngineChoice(engine.name, "given by the caller") if engine else choose_engine(options, backlog)
    if backlog.pending:
        check_committable(table)
        probe_conditional_writes(table.store)
    sized = _sized(options, choice.name)
    # Spark is started for work, and not to find out that there is none.
    with (
        _running(choice, options, on_stage, needed=bool(backlog.pending))
        if engine is None
        else nullcontext(engine) as one
    ):
        return _merge_all(table, sized, one, choice, backlog, started, on_rows, on_pass)


def _merge_all(
    table: Table,
    options: MergeOptions,
    engine: Engine,
    choice: EngineChoice,
    backlog: Backlog,
    started: float,
    on_rows: Callable[[int], None],
    on_pass: Callable[[PassReport], None],
) -> MergeReport:
    log = get_logger(__name__)
    note = CommitNote(job="merge", run_id=str(uuid.uuid4()), release=__version__)
    wanted = _wanted(table, options)
    limits = _Limits({ref.region_id: ref.generation for ref in backlog.pending})
    had_work = bool(backlog.pending)
    done: list[PassReport] = []
    lost_in_a_row = lost_races = 0
    while True:
        for fault in backlog.blocked:
            limits.block(fault)
        waiting = limits.select(backlog.pending)
        if not waiting:
            break
        merge_pass = _next_pass(waiting, _shrunk(options, lost_in_a_row))
        try:
            result = engine.run(table, merge_pass, note, on_rows)
        except BlockedRegionsError as error:
            table = table.newest()
            _block(limits, error, table.index.merged_generations)
        except (CommitLostError, ObjectNotFoundError) as error:
            newest = table.newest()
            if isinstance(error, ObjectNotFoundError) and newest.version == table.version:
                raise  # not a file of an old version that was cleaned up under our feet
            lost_in_a_row += 1
            lost_races += 1
            log.info("commit_lost", table=table.location.uri, version=table.version + 1, attempt=lost_in_a_row)
            if lost_in_a_row > MAX_LOST_RACES:
                raise CommitConflictError(
                    f"Lost {lost_in_a_row} races in a row for the next version of {table.location.uri}; "
                    f"{len(done)} passes landed before."
                ) from error
            time.sleep(random.uniform(0, _BACKOFF_SECONDS * 2 ** min(lost_in_a_row, 6)))  # noqa: S311 - jitter
            table = table.newest()
        else:
            lost_in_a_row = 0
            done.append(PassReport(merge_pass, result))
            on_pass(done[-1])
            log.info("pass_merged", table=table.location.uri, version=result.version, rows=result.rows_upserted)
            table = table.newest()
        backlog = read_backlog(table, wanted)
    blocked = tuple(limits.blocked[region_id] for region_id in sorted(limits.blocked))
    return MergeReport(
        decision=_decide(merged=bool(done), blocked=bool(blocked), had_work=had_work),
        run_id=note.run_id,
        engine=choice.name,
        engine_reason=choice.reason,
        fell_back=choice.fell_back,
        passes=tuple(done),
        blocked=blocked,
        backlog_after=backlog,
        version=table.version,
        lost_races=lost_races,
        seconds=time.monotonic() - started,
    )


def _decide(*, merged: bool, blocked: bool, had_work: bool) -> str:
    if blocked:
        return "blocked"
    if merged:
        return "merged"
    return "superseded" if had_work else "nothing_to_merge"


def _wanted(table: Table, options: MergeOptions) -> tuple[UUID, ...] | None:
    if not options.regions:
        return None
    unknown = sorted(set(options.regions) - set(table.regions.region_ids))
    if unknown:
        raise InvalidUsageError(
            f"{table.location.uri} has no region {', '.join(map(str, unknown))}.",
            remedy="memwal-ops inspect URI lists the regions.",
        )
    return tuple(dict.fromkeys(options.regions))


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine, and why; ``fell_back`` where Spark would have been taken and cannot run."""

    name: str
    reason: str
    fell_back: bool = False


def choose_engine(options: MergeOptions, backlog: Backlog) -> EngineChoice:
    """The engine for a backlog; starts nothing, and looks for Spark only where it would be taken."""
    if options.engine != "auto":
        return EngineChoice(options.engine, "asked for")
    size = sum(ref.bytes or 0 for ref in backlog.pending)
    if size <= options.spark_above:
        return EngineChoice("local", f"a backlog of {size:,} bytes is not above {options.spark_above:,}")
    above = f"a backlog of {size:,} bytes is above {options.spark_above:,}"
    missing = why_not()
    if missing is not None:
        return EngineChoice("local", f"{above}, but Spark cannot run here: {missing}", fell_back=True)
    return EngineChoice("spark", above)


@contextmanager
def _running(
    choice: EngineChoice, options: MergeOptions, on_stage: Callable[[StageProgress], None] | None, *, needed: bool
) -> Iterator[Engine]:
    if choice.name == "spark" and needed:
        with session(options.master) as spark:
            yield SparkEngine(spark, on_progress=on_stage)
    else:
        yield LocalEngine()


def _sized(options: MergeOptions, engine: str) -> MergeOptions:
    default = SPARK_MAX_BYTES if engine == "spark" else DEFAULT_MAX_BYTES
    return replace(options, max_bytes=options.max_bytes or default)


def _shrunk(options: MergeOptions, lost_in_a_row: int) -> MergeOptions:
    if not lost_in_a_row or options.max_bytes is None:
        return options
    return replace(options, max_bytes=max(1, options.max_bytes >> lost_in_a_row))


def _next_pass(waiting: list[GenerationRef], options: MergeOptions) -> MergePass:
    """The next generations in order, up to the budget, always at least one.

    Region by region rather than round and round: a key's versions all lie in one region, so the
    longer the run of one region, the more rows are superseded before they are ever written.
    """
    chosen: list[GenerationRef] = []
    size = 0
    budget = options.max_bytes or DEFAULT_MAX_BYTES
    for ref in waiting:
        # A release that kept no accounting leaves only a safe guess: as large as one machine's budget.
        cost = min(budget, DEFAULT_MAX_BYTES) if ref.bytes is None else ref.bytes
        if chosen and size + cost > budget:
            break
        if options.max_generations is not None and len(chosen) >= options.max_generations:
            break
        chosen.append(ref)
        size += cost
    return MergePass(tuple(chosen), budget)


def _block(limits: _Limits, error: BlockedRegionsError, merged: Mapping[UUID, int]) -> None:
    """Record faults that still stand on the newest version.

    Another merger may have merged the generation meanwhile, and a collector removed it: then
    there is nothing wrong.
    """
    for region_id, (generation, cause) in error.causes.items():
        if generation is None or merged.get(region_id, 0) < generation:
            limits.block(Blocked(region_id, generation, cause))
