"""Merge the layers of one job on one table: the table's own entry over the defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memwal_ops.core.options import Options, describe
from memwal_ops.supervisor.config.effective import DEFAULT, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.core.job import JobSpec
    from memwal_ops.supervisor.config.document import Document, Place
    from memwal_ops.supervisor.config.model import Config, JobConfig


def option_names(options: type[Options]) -> list[str]:
    """Return the names of the options of a class."""
    return [option.name for option in describe(options)]


class Layers:
    """The values of one job on one table in the file. The table's own entry comes before the defaults.

    An option or trigger that only the job of that name in another format has is ignored here, if it is in the
    defaults or in an entry of unknown format: it is meant for tables of the other format.

    Args:
        others: the specs of that name in other formats.
        known: whether the entry is known to be of this format.
    """

    def __init__(
        self, document: Document, job: JobSpec, others: Iterable[JobSpec], config: Config, number: int, *, known: bool
    ) -> None:
        self._document = document
        self._job = job
        name = job.name
        own = {*option_names(job.options)}
        self._foreign = {option for other in others for option in option_names(other.options)} - own
        self._strict = ("table",) if known else ()
        table_jobs, fleet_jobs = config.tables[number].jobs, config.defaults.jobs
        everywhere: list[tuple[str, Place, JobConfig | None]] = [
            ("table", ("tables", number, "jobs", name), table_jobs.get(name)),
            ("fleet", ("defaults", "jobs", name), fleet_jobs.get(name)),
        ]
        self._layers = [(layer, place, given) for layer, place, given in everywhere if given is not None]
        self.sources: dict[str, Source] = {}
        self.named = config.tables[number].uri is not None and name in table_jobs

    @property
    def mentioned(self) -> bool:
        """Whether the file names the job at all."""
        return bool(self._layers)

    def get(self, key: str, default: Any, foreign: Callable[[Any], bool] = lambda _: False) -> tuple[Any, Place | None]:
        """Return a value and its path, None for the default. ``foreign`` returns whether it is for other formats."""
        for layer, place, given in self._layers:
            if key in given.model_fields_set:
                if layer not in self._strict and foreign(getattr(given, key)):
                    continue
                where = (*place, key)
                self.sources[key] = Source(layer, self._document.line(where), self._document.variables.get(where, ()))
                return getattr(given, key), where
        self.sources[key] = DEFAULT
        return default, None

    def options(self) -> dict[str, Any]:
        """Return the options of both layers, merged by key over those that the job has by default."""
        merged = dict(self._job.named_options if self.mentioned else self._job.unnamed_options)
        self.sources |= {f"options.{key}": DEFAULT for key in merged}
        for layer, place, given in reversed(self._layers):
            for key, value in given.options.items():
                if layer not in self._strict and key in self._foreign:
                    continue
                where = (*place, "options", key)
                merged[key] = value
                self.sources[f"options.{key}"] = Source(
                    layer, self._document.line(where), self._document.variables.get(where, ())
                )
        return merged

    def option_place(self, key: str) -> Place:
        """Return the path of an effective option."""
        for _, place, given in self._layers:
            if key in given.options:
                return (*place, "options", key)
        return self.place("options") or ()

    def place(self, key: str) -> Place | None:
        """Return the path of a key, else of the job."""
        for _, place, given in self._layers:
            if key in given.model_fields_set:
                return (*place, key)
        return self._layers[0][1] if self._layers else None
