"""``memwal-ops config check``: explain a configuration file before anything runs by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.options import json_output
from memwal_ops.cli.text import counted
from memwal_ops.errors import InvalidConfigError
from memwal_ops.storage.redaction import redact
from memwal_ops.supervisor.config import ConfigProblemsError, default_config_path, load_settings
from memwal_ops.supervisor.config_file import Problem, place_text
from memwal_ops.supervisor.settings import DEFAULT

if TYPE_CHECKING:
    from memwal_ops.supervisor.settings import Settings


@click.group(short_help="Check a configuration file of the supervisor.")
def config() -> None:
    """Look at configuration files of memwal-ops run."""


@config.command(short_help="Explain every error, or show what holds and why.")
@click.argument("file", default=default_config_path)
@json_output
def check(file: str, as_json: bool) -> int:
    """Check FILE: explain every error with its line and a fix, or print every value that holds with its source.

    What is neither given nor has a default is left out, but with --json.

    Sources: default (the job's own), fleet (defaults and the keys beside it), table (its own entry), env (made
    from an environment variable). Secrets are masked. No store is asked.

    Exit codes: 0 the file is good; 50 it is not; 51 an installed job cannot be used.
    """
    try:
        settings = load_settings(file)
    except ConfigProblemsError as error:
        click.echo(json.dumps(_invalid(file, error), indent=2) if as_json else describe_problems(file, error.problems))
        return InvalidConfigError.exit_code
    click.echo(json.dumps(_valid(settings), indent=2) if as_json else describe(settings))
    return 0


def _invalid(file: str, error: ConfigProblemsError) -> dict[str, object]:
    problems = [_shown(problem) for problem in error.problems]
    return {"decision": "invalid", "file": file, "problems": problems, "warnings": [], "effective": [], "jobs": []}


def _valid(settings: Settings) -> dict[str, object]:
    return {
        "decision": "valid",
        "file": settings.path,
        "problems": [],
        "warnings": [_shown(problem) for problem in settings.warnings],
        "effective": [{"key": key, "value": value, **source.to_json()} for key, value, source in settings.effective()],
        "jobs": sorted({name for table in settings.tables for name, job in table.jobs.items() if job.enabled}),
    }


def _shown(problem: Problem) -> dict[str, object]:
    return {key: redact(value) if isinstance(value, str) else value for key, value in problem.to_json().items()}


def describe_problems(file: str, problems: tuple[Problem, ...], *, mark: str = "error") -> str:
    """Each problem as a compiler tells it: file, line, what is wrong, and what to do."""
    lines = []
    for problem in problems:
        line = "" if problem.line is None else f":{problem.line}"
        where = f"{place_text(problem.place)}: " if problem.place else ""
        lines += [redact(f"{file}{line}: {mark}: {where}{problem.message}"), redact(f"    {problem.fix}")]
    if mark == "error":
        lines.append(f"invalid: {counted(len(problems), 'error')}.")
    return "\n".join(lines)


def describe(settings: Settings) -> str:
    """What holds, one value a line, with its source behind it; without defaults that are empty."""
    values = settings.effective()
    lines = [
        f"{key}: {_value(value)}  # {source}"
        for key, value, source in values
        if source is not DEFAULT or value not in (None, [])
    ]
    hidden = len(values) - len(lines)
    if settings.warnings:
        lines.append(describe_problems(settings.path, settings.warnings, mark="warning"))
    entries = counted(len(settings.tables), "entry", "entries")
    lines.append(f"valid: {entries} in tables. {hidden} keys are not given and have no default (--json shows them).")
    return "\n".join(lines)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
