"""The ledger of runs by hand: the service's history has what each used, and tells what the next one costs."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memwal_ops.core.answers import ASKED_BY
from memwal_ops.core.cost import CURRENCY, LIST_PRICES, Cost, Prices, describe_cost, expected_cost, spent_by
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.report import PlanReport
from memwal_ops.errors import MemwalOpsError
from memwal_ops.places import default_config_path, default_state_dir
from memwal_ops.text import paragraph

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.core.run import Run
    from memwal_ops.supervisor.config.model import Config
    from memwal_ops.supervisor.state.history import History


_LATEST = 20


class RunHistory:
    """The history of the configuration that the service's commands read by default; it may not exist."""

    def __call__(self, uri: str, job: str) -> Iterator[PastRun]:
        """The latest runs of a job on a table that succeeded, the newest first; of ``maintain``, its steps."""
        with suppress(MemwalOpsError):
            recorded = self._recorded
            for run in [] if recorded is None else recorded.runs(table=uri, limit=_LATEST):
                report = run["report"] or {}
                if run["job"] == job and run["outcome"] == "succeeded":
                    yield PastRun(run["seconds"], report, run["used"])
                steps = report.get("steps", ()) if run["job"] == "maintain" else ()
                yield from (
                    PastRun(one["seconds"], one["report"]) for one in steps if one["step"] == job and one["report"]
                )

    @property
    def prices(self) -> tuple[Mapping[str, Prices], str]:
        """The prices by store, and their currency."""
        with suppress(MemwalOpsError):
            if os.path.isfile(default_config_path()):
                return self._config.prices.by_store(), self._config.prices.currency
        return LIST_PRICES, CURRENCY

    def record(self, run: Run) -> None:
        """Record a run that acted and has just ended, if there is a service's history that this user may write."""
        if not run.acts or not _has_service():
            return
        from memwal_ops.supervisor.state.history import History  # noqa: PLC0415 - see below

        details = run.record()
        details |= {"error": details.pop("message", None), "started": run.started, "finished": datetime.now(UTC)}
        with suppress(MemwalOpsError):
            if os.access(path := self._path, os.W_OK):
                with closing(History.open(path)) as history:
                    history.add(uri=run.table.location.address, job=run.job, **details)

    def answers(self, uri: str) -> Sequence[Mapping[str, Any]]:
        """How well the indexes of a table answered when the service last asked them."""
        with suppress(MemwalOpsError):
            if (recorded := self._recorded) is not None:
                from memwal_ops.supervisor.state.outcomes import last_answers  # noqa: PLC0415 - see below

                return last_answers(recorded.runs(table=uri, job=ASKED_BY, limit=_LATEST))
        return ()

    @cached_property
    def _recorded(self) -> History | None:
        if not _has_service():
            return None
        from memwal_ops.supervisor.state.history import History  # noqa: PLC0415 - see below

        return History.open_to_read(self._path) if os.path.isfile(self._path) else None

    @property
    def _path(self) -> str:
        from memwal_ops.supervisor.state.directory import history_path  # noqa: PLC0415 - see below

        return history_path(self._config)

    @cached_property
    def _config(self) -> Config:
        # Imported where there is a service: commands elsewhere need neither pydantic nor sqlite.
        from memwal_ops.supervisor.config.loader import load_settings  # noqa: PLC0415
        from memwal_ops.supervisor.config.model import Config  # noqa: PLC0415

        file = default_config_path()
        return load_settings(file).config if os.path.isfile(file) else Config.model_construct()


def _has_service() -> bool:
    return os.path.isfile(default_config_path()) or os.path.isdir(default_state_dir(os.environ))


@dataclass(frozen=True, slots=True)
class Expected:
    """What a planned run will cost; None: nothing is to be done, or no past run shows it."""

    cost: Cost | None

    def added_to(self, output: Any) -> Any:
        """The output of a plan with it: a document, or a text."""
        if isinstance(output, dict):
            return {**output, "cost": None if self.cost is None else self.cost.to_json()}
        if self.cost is None:
            return output
        return f"{output}\n\n{paragraph(f'A run costs {describe_cost(self.cost.to_json())}.', hanging='  ')}"


def expected(history: RunHistory, run: Run) -> Expected:
    """What the run that a plan describes will cost, by the past runs on this machine."""
    work = None
    if isinstance(run.report, PlanReport) and run.spec.in_maintain:
        needs = [need for need in run.report.needs() if need.now]
        if not needs:
            return Expected(None)
        work = float(sum(need.work for need in needs if need.job == run.job)) or None
    past = spent_by(run.job, history(run.table.location.address, run.job))
    return Expected(expected_cost(past, work, *history.prices))
