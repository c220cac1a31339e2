"""Read the runs of this machine's service from its run history, so that a plan can tell how long a run takes."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from memwal_ops.core.bad_answers import ASKED_BY
from memwal_ops.core.past_runs import PastRun
from memwal_ops.core.prices import CURRENCY, LIST_PRICES
from memwal_ops.errors import MemwalOpsError
from memwal_ops.places import default_config_path, default_state_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memwal_ops.core.prices import Prices
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
            return self._config.prices.by_store(), self._config.prices.currency
        return LIST_PRICES, CURRENCY

    def record(self, uri: str, job: str, started: datetime, outcome: str, **details: Any) -> None:
        """Record a run that has just ended in the service's history, if there is one that this user may write."""
        if not (os.path.isfile(default_config_path()) or os.path.isdir(default_state_dir(os.environ))):
            return
        from memwal_ops.supervisor.state.history import History  # noqa: PLC0415 - see below

        with suppress(MemwalOpsError):
            if os.access(path := self._path, os.W_OK):
                with closing(History.open(path)) as history:
                    history.add(
                        uri=uri, job=job, started=started, finished=datetime.now(UTC), outcome=outcome, **details
                    )

    def answers(self, uri: str) -> Sequence[Mapping[str, Any]]:
        """How well the indexes of a table answered when the service last asked them."""
        from memwal_ops.supervisor.state.outcomes import last_answers  # noqa: PLC0415 - see below

        with suppress(MemwalOpsError):
            if (recorded := self._recorded) is not None:
                return last_answers(recorded.runs(table=uri, job=ASKED_BY, limit=_LATEST))
        return ()

    @cached_property
    def _recorded(self) -> History | None:
        from memwal_ops.supervisor.state.history import History  # noqa: PLC0415 - see below

        return History.open_to_read(self._path) if os.path.isfile(self._path) else None

    @property
    def _path(self) -> str:
        from memwal_ops.supervisor.state.directory import history_path  # noqa: PLC0415 - see below

        return history_path(self._config)

    @cached_property
    def _config(self) -> Config:
        # Imported where a plan asks: other commands need neither pydantic nor sqlite.
        from memwal_ops.supervisor.config.loader import load_settings  # noqa: PLC0415
        from memwal_ops.supervisor.config.model import Config  # noqa: PLC0415

        file = default_config_path()
        return load_settings(file).config if os.path.isfile(file) else Config.model_construct()
