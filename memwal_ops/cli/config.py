"""``memwal-ops config``: write configuration files, check them, and print the units that run them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import click

import memwal_ops
from memwal_ops.cli import config_units, printing
from memwal_ops.cli.config_init import init
from memwal_ops.cli.options import config_argument, json_output
from memwal_ops.errors import InvalidConfigError, InvalidUsageError
from memwal_ops.storage.options import redact
from memwal_ops.supervisor.config.document import Problem, place_text
from memwal_ops.supervisor.config.effective import DEFAULT, Settings
from memwal_ops.supervisor.config.loader import ConfigProblemsError, load_settings
from memwal_ops.text import counted, printable

_BROUGHT = ("configs", "systemd")
_MORE = (init, config_units.systemd, config_units.cron, config_units.kubernetes)


@click.group(short_help="Write and check configurations; print their units.")
def config() -> None:
    """Write and check configuration files of memwal-ops run, and write the units and manifests that run them."""


for _command in _MORE:
    config.add_command(_command)


@config.command(short_help="Explain every error, or show the effective configuration.")
@config_argument
@json_output
def check(file: str, as_json: bool) -> int:
    """Check FILE: explain every error with its line and a fix, or print the effective configuration.

    That has each value with its source; keys without a value are left out, except with --json.

    Sources: default (the job's own), fleet (defaults and other top-level keys), table (its own entry), env (from an
    environment variable). Secrets are masked. No store is accessed.

    \b
    Examples:
      memwal-ops config check memwal.yaml
      memwal-ops config check /etc/memwal-ops/config.yaml --json

    Exit codes: 0 the file is valid; 50 it is not; 51 an installed job cannot be used.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    try:
        settings = load_settings(file)
    except ConfigProblemsError as error:
        printing.echo_result(_invalid(file, error), describe_problems(file, error.problems), as_json=as_json)
        return InvalidConfigError.exit_code
    printing.echo_result(_valid(settings), describe(settings), as_json=as_json)
    return 0


@config.command(short_help="List example files, units and alert rules, or copy them.")
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Copy them into this folder. An existing file with other content is never replaced.",
)
@json_output
def files(folder: Path | None, as_json: bool) -> int:
    """List the files that the package brings for an installation, or copy them with --to.

    Examples of configurations, systemd units, lines for cron, manifests for Kubernetes, an Airflow DAG, alert rules for
    Prometheus, and a Grafana dashboard. docs/install.md and docs/monitoring.md use them by these names.

    \b
    Examples:
      memwal-ops config files
      memwal-ops config files --to .

    Exit codes: 0 done; 2 the folder has other files of these names, nothing was copied.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    brought = _brought()
    if folder is not None:
        _copy(brought, folder)
    document = {
        "decision": "listed" if folder is None else "copied",
        "folder": None if folder is None else str(folder),
        "files": [*brought],
    }
    names = [name if folder is None else str(folder / name) for name in brought]
    printing.echo_result(document, "\n".join(names), as_json=as_json)
    return 0


def _brought() -> Mapping[str, bytes]:
    """Return the content of each file by its name below the package, sorted."""
    root = Path(memwal_ops.__file__).parent
    paths = (Path(folder, name) for top in _BROUGHT for folder, _, names in os.walk(root / top) for name in names)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(paths) if path.suffix != ".pyc"}


def _copy(brought: Mapping[str, bytes], folder: Path) -> None:
    """Write all files, or none if one of them would replace another. Raises ``InvalidUsageError``."""
    try:
        present = {name: (folder / name).read_bytes() for name in brought if (folder / name).exists()}
        if other := [name for name, content in present.items() if content != brought[name]]:
            raise InvalidUsageError(
                f"{folder} has other files of these names; nothing was copied: {', '.join(other)}.",
                remedy="Give another --to, and compare the files.",
            )
        for name in brought.keys() - present.keys():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(brought[name])
    except OSError as error:
        raise InvalidUsageError(f"{folder} cannot be written: {error}.", remedy="Give another --to.") from error


def _invalid(file: str, error: ConfigProblemsError) -> dict[str, object]:
    problems = [_shown(problem) for problem in error.problems]
    rest = {"decision": "invalid", "file": file, "problems": problems, "warnings": [], "effective": [], "jobs": []}
    return {**printing.error_document(error), **rest}


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
    """Return the problems as a compiler prints them: file, line, the error, and the fix; above errors their number."""
    lines = [f"invalid: {counted(len(problems), 'error')}."] if mark == "error" else []
    for problem in problems:
        line = "" if problem.line is None else f":{problem.line}"
        where = f"{place_text(problem.place)}: " if problem.place else ""
        message = f"{file}{line}: {mark}: {where}{problem.message}"
        lines += [printable(redact(message)), f"    {printable(redact(problem.fix))}"]
    return "\n".join(lines)


def describe(settings: Settings) -> str:
    """Return the verdict, warnings, and the effective configuration: one value per line; without empty defaults."""
    values = settings.effective()
    lines = [
        f"{key}: {value if isinstance(value, str) else json.dumps(value)}  # {source}"
        for key, value, source in values
        if source is not DEFAULT or value not in (None, [])
    ]
    hidden = len(values) - len(lines)
    entries = counted(len(settings.tables), "entry", "entries")
    verdict = f"valid: {entries} in tables. {hidden} keys are not given and have no default (--json shows them)."
    warnings = [describe_problems(settings.path, settings.warnings, mark="warning")] if settings.warnings else []
    return "\n".join([verdict, *warnings, *lines])
