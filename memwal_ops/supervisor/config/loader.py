"""Load a configuration file into settings, or report all its problems at once, each with its line and a fix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from memwal_ops.core import registry
from memwal_ops.errors import InvalidConfigError, JobPluginError
from memwal_ops.supervisor.config import document
from memwal_ops.supervisor.config.effective import Settings
from memwal_ops.supervisor.config.model import Config, HttpConfig
from memwal_ops.supervisor.config.resolver import Resolver

# Values are validated again after the invalid ones are removed, which others may have needed.
_ROUNDS = 5


def _place_of(problem: document.Problem) -> tuple[int, str]:
    return problem.line or 0, document.place_text(problem.place) if problem.place else ""


class ConfigProblemsError(InvalidConfigError):
    """An invalid configuration file, with all its problems."""

    def __init__(self, path: str, problems: Iterable[document.Problem]) -> None:
        self.problems = tuple(sorted(problems, key=_place_of))
        first = self.problems[0]
        line = "" if first.line is None else f":{first.line}"
        more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
        where = f"{document.place_text(first.place)}: " if first.place else ""
        super().__init__(
            f"{path}{line}: {where}{first.message}{more}", remedy=f"{first.fix} {InvalidConfigError.remedy}"
        )


def load_settings(path: str, environ: Mapping[str, str] | None = None) -> Settings:
    """Read, validate and resolve a file. Sends no request to any store.

    Raises:
        ConfigProblemsError: the file is invalid; with every problem that can be found at once.
        JobPluginError: a registered job cannot be used.
    """
    parsed = document.read_document(path, environ)
    if parsed.problems and parsed.data is None:
        raise ConfigProblemsError(path, parsed.problems)
    registry.all_job_specs()  # raises if any of them cannot be loaded
    config, removed = _validated(parsed)
    known = {
        name: {job: spec for job, spec in registry.job_specs(name).items() if not spec.by_hand}
        for name in registry.formats()
    }
    # Resolved also after errors of types, to report all problems at once.
    first = len(parsed.problems)
    settings = Resolver(parsed, config, known).resolve()
    later = parsed.problems[first:]
    # A problem at the path of a removed value may only be due to the removal.
    parsed.problems[first:] = [
        problem for problem in later if not any(place[: len(problem.place)] == problem.place for place in removed)
    ]
    if parsed.problems:
        raise ConfigProblemsError(path, parsed.problems)
    return settings


def http_of(path: str, environ: Mapping[str, str] | None = None) -> HttpConfig:
    """Return where the service of a file listens, also if the rest of it is invalid; the defaults, if that is, too."""
    data = document.read_document(path, environ).data
    try:
        return HttpConfig.model_validate((data.get("http") if isinstance(data, dict) else None) or {})
    except ValidationError:
        return HttpConfig()


def _validated(parsed: document.Document) -> tuple[Config, list[document.Place]]:
    """Return the configuration without values of a wrong type, and their paths. Raises if nothing valid is left."""
    data = parsed.data
    removed: list[document.Place] = []
    for _ in range(_ROUNDS):
        try:
            return Config.model_validate(data), removed
        except ValidationError as error:
            errors = error.errors(include_url=False)
            parsed.problems += [
                document.explained(parsed, details)
                for details in errors
                if not any(place[: len(details["loc"])] == details["loc"] for place in removed)
            ]
            data, removed_now = document.without_invalid(data, [details["loc"] for details in errors])
            removed += removed_now
            if not removed_now:
                break
    raise ConfigProblemsError(parsed.path, parsed.problems)


__all__ = ["ConfigProblemsError", "JobPluginError", "http_of", "load_settings"]
