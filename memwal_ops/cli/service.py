"""``memwal-ops service`` and ``notify``: act on a running service, and try the targets of its notifications."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from memwal_ops.cli import options
from memwal_ops.cli.printing import echo_result
from memwal_ops.core.holds import user_at_host
from memwal_ops.errors import InvalidUsageError
from memwal_ops.supervisor.config.loader import http_of, load_settings
from memwal_ops.supervisor.config.model import TargetConfig
from memwal_ops.supervisor.http.access import read_tokens, token_file_of
from memwal_ops.supervisor.http.client import ServiceClient, target
from memwal_ops.supervisor.notify import FindingChange, Message, NotificationError, TableFinding, send
from memwal_ops.text import counted, duration_text

_NOT_DELIVERED = 1
_EXAMPLE = TableFinding(
    "example", "warning", "This is a test of notifications; nothing is wrong.", "Nothing.", "runbooks/README.md"
)


@click.command(short_help="Send a test message to the targets of notifications.")
@options.config_option
@click.option("--test", is_flag=True, help="Send the message; without it, the targets are only listed.")
@click.option("--target", "names", multiple=True, metavar="NAME", help="Only this one (repeatable).")
@options.json_output
def notify(file: str, names: tuple[str, ...], *, test: bool, as_json: bool) -> int:
    """List the targets of notify in the configuration, or send each a test message with --test.

    The service itself is not asked, and what it has sent or will send does not change. docs/monitoring.md has what a
    message looks like, and how a webhook verifies its signature.

    \b
    Examples:
      memwal-ops notify --config memwal.yaml
      memwal-ops notify --config memwal.yaml --test --target ops

    Exit codes: 0 listed, or all delivered; 1 one was not; 2 there is no such target; 50 the file is invalid.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    config = load_settings(file).config.notify
    known = {target.name: target for target in config.targets}
    if unknown := [name for name in names if name not in known]:
        raise InvalidUsageError(f"There is no target {unknown[0]}.", remedy=f"Those of {file}: {', '.join(known)}.")
    if not known:
        raise InvalidUsageError(f"{file} has no targets.", remedy="docs/configuration.md, notifications, has examples.")
    chosen = [known[name] for name in names or known]
    sent = datetime.now(UTC).isoformat(timespec="seconds")
    message = Message(
        user_at_host(), (config.link or "").rstrip("/"), sent, (FindingChange("new", _EXAMPLE),), test=True
    )
    results = [_result(target, message, test=test) for target in chosen]
    failed = sum(result["error"] is not None for result in results)
    document = {"decision": "sent" if test else "listed", "targets": results}
    lines = [
        f"{result['name']}: {result['type']}: {result['error'] or ('delivered' if test else 'not tried')}"
        for result in results
    ]
    if test and not failed:
        lines.append(f"{counted(len(results), 'message')} delivered.")
    echo_result(document, "\n".join(lines), as_json=as_json)
    return _NOT_DELIVERED if failed else 0


def _result(target: TargetConfig, message: Message, *, test: bool) -> dict[str, str | None]:
    error = None
    if test:
        try:
            send(target, message)
        except NotificationError as failed:
            error = str(failed)
    return {"name": target.name, "type": target.type, "level": target.level, "error": error}


_EXAMPLES = """

    \b
    Examples:
      memwal-ops service {0}
      memwal-ops service {1}

    Exit codes: 0; 2 the service does not respond, or refuses it, with its reason.
    """


@click.group(short_help="Act on a running service: run, plan, retry, cancel, pause, hold.")
def service() -> None:
    """Act on the service of a configuration while it runs, by a token of http.token_file that may operate.

    retry, pause, resume: without --table on all tables, without --job on all jobs of one. docs/http.md has the tokens.
    """


def _action(name: str, short: str, text: str, *examples: str) -> Callable[[Callable[..., int]], click.Command]:

    def made(command: Callable[..., int]) -> click.Command:
        command.__doc__ = text + _EXAMPLES.format(*examples)
        for option in (
            options.json_output,
            click.option(
                "--token-file", type=options.FILE, help="The token to act with.  [default: of the configuration]"
            ),
            click.option(
                "--reason", default="", metavar="TEXT", help="Why; it is in the audit log, and in the status."
            ),
            click.option("--job", help="Only this job."),
            click.option("--table", help="Only this table, by its name."),
            options.config_option,
        ):
            command = option(command)
        return service.command(name, short_help=short)(command)

    return made


@_action(
    "run", "Run a job now.",
    "Run a job now: before others, in a closed window, beyond its budget, and out of its backoff.",
    "run --table orders --job merge", 'run --table orders --job compact --reason "after the import" --json',
)  # fmt: skip
def run(table: str | None, job: str | None, **given: Any) -> int:
    """See the decorator."""
    _require_job(table, job)
    return _act(
        "run", table, job, given, lambda done: f"queued: {done['job']} of {done['table']} runs as soon as it may."
    )


@_action(
    "retry", "End a backoff: try again now.",
    "End the backoff of what failed, and the circuit breaker of what achieved nothing: it is tried again at once.",
    "retry", "retry --table orders --job merge",
)  # fmt: skip
def retry(table: str | None, job: str | None, **given: Any) -> int:
    """See the decorator."""
    return _act("retry", table, job, given, lambda done: f"tried again: {counted(len(done['retried']), 'job')}.")


@_action(
    "cancel", "Stop the run of a job.",
    "Stop the run of a job after its current step, within a minute; called again, at once. What it published stays. "
    "A trigger may start the job again: pause it.",
    "cancel --table orders --job compact", 'cancel --table orders --job compact --reason "too much load"',
)  # fmt: skip
def cancel(table: str | None, job: str | None, **given: Any) -> int:
    """See the decorator."""
    _require_job(table, job)

    def describe(done: Mapping[str, Any]) -> str:
        when = "at once" if done["at_once"] else "after its current step"
        return f"cancelled: {done['job']} of {done['table']} stops {when}."

    return _act("cancel", table, job, given, describe)


@_action(
    "pause", "Start no more runs, for a while or until resume.",
    "Start no more runs of a job, a table or the fleet. What runs finishes, and backlogs are still read. A pause "
    "survives restarts of the service.",
    "pause --table orders --for 2h --reason migration", "pause --until 2026-11-27T06:00:00Z",
)  # fmt: skip
@click.option("--for", "span", type=options.Duration(), help="How long, for example 90m or 3d.")
@click.option("--until", metavar="TIME", help="Its end: ISO 8601, UTC unless it has an offset.")
def pause(table: str | None, job: str | None, span: timedelta | None, until: str | None, **given: Any) -> int:
    """See the decorator."""
    fields = {} if span is None else {"for": duration_text(span)}
    fields |= {} if until is None else {"until": until}

    def describe(done: Mapping[str, Any]) -> str:
        end = done["paused"]["until"]
        running = done["still_running"]
        rest = f" {counted(len(running), 'run')} finish{'es' if len(running) == 1 else ''}." if running else ""
        return f"paused: {_what(table, job)} until {'resume' if end is None else end}.{rest}"

    return _act("pause", table, job, given, describe, **fields)


@_action(
    "resume", "End a pause.",
    "End the pause of a job, a table or the fleet: of exactly that. A paused table stays so when the fleet "
    "resumes.",
    "resume --table orders", "resume",
)  # fmt: skip
def resume(table: str | None, job: str | None, **given: Any) -> int:
    """See the decorator."""
    return _act(
        "resume", table, job, given, lambda done: f"resumed: {_what(done['resumed']['table'], done['resumed']['job'])}."
    )


@_action(
    "plan", "Plan a job, which changes nothing.",
    "Let a worker of the service plan a job with the configured options: the report of a dry run, which changes and "
    "records nothing.",
    "plan --table orders --job gc", "plan --table orders --job compact --json",
)  # fmt: skip
def plan(table: str | None, job: str | None, **given: Any) -> int:
    """See the decorator."""
    _require_job(table, job)

    def describe(done: Mapping[str, Any]) -> str:
        return (
            f"{json.dumps(done['report'], indent=2)}\nplanned: {done['job']} of {done['table']}; nothing was changed."
        )

    return _act("plan", table, job, given, describe)


@_action(
    "hold", "Keep a version of a table for a while.",
    "Keep the newest version of a table, or another one, from expire and gc; or end a hold before its time.",
    "hold --table orders --for 1d --reason backup", "hold --table orders --release 3",
)  # fmt: skip
@click.option("--version", type=click.IntRange(1), help="The version to keep.  [default: the newest]")
@click.option("--for", "span", type=options.Duration(), help="How long, for example 90m or 3d.  [default: 2h]")
@click.option("--release", type=click.IntRange(1), help="End the hold with this number.")
def hold(
    table: str | None, job: str | None, version: int | None, span: timedelta | None, release: int | None, **given: Any
) -> int:
    """See the decorator."""
    if table is None or job is not None:
        raise InvalidUsageError("A hold is of a table.", remedy="Give --table, and no --job.")
    if release is not None and (version is not None or span is not None):
        raise InvalidUsageError(
            "--release ends a hold: it has no version and no length.", remedy="Leave out the others."
        )
    fields = {} if span is None else {"for": duration_text(span)}
    fields |= {} if version is None else {"version": str(version)}

    def describe(done: Mapping[str, Any]) -> str:
        held = done["hold"]
        number, ends = held["id"], held["until"]
        if release is not None:
            return f"released: hold {number} of {table}, version {held['version']}."
        return f"held: version {held['version']} of {table} until {ends}, as hold {number}."

    action = "holds" if release is None else f"holds/{release}/release"
    return _act(action, table, job, given, describe, **fields)


def _act(
    action: str,
    table: str | None,
    job: str | None,
    given: Mapping[str, Any],
    describe: Callable[[Mapping[str, Any]], str],
    **fields: str,
) -> int:
    if job is not None and table is None:
        raise InvalidUsageError("--job is that of a table.", remedy="Give --table, too.")
    http = http_of(given["file"])
    if not http.enabled or not http.port:
        raise InvalidUsageError(
            "The address of the service is not known: http.enabled is false, or http.port is 0.",
            remedy="Give the service an http.port.",
        )
    fields = {"by": user_at_host()[:100], **({"reason": given["reason"]} if given["reason"] else {}), **fields}
    client = ServiceClient(http, _token(given["token_file"], http))
    done = client.act(f"{target(table, job)}/{action}", fields)
    try:
        text = describe(done)
    except (KeyError, TypeError):
        raise InvalidUsageError(
            f"The server on {client.address} is not memwal-ops.", remedy="Correct http.host and http.port."
        ) from None
    echo_result(done, text, as_json=given["as_json"])
    return 0


def _token(file: str | None, http: Any) -> str:
    known = None if file is not None else token_file_of(http, os.environ)
    path = file if known is None else known.path
    if path is None:
        raise InvalidUsageError(
            "No token is configured, so that nothing can act on the service.",
            remedy="Write one into a file that only the service reads, and name it in http.token_file (docs/http.md).",
        )
    secrets = [secret for role, _, secret in read_tokens(path) if role == "operate"]
    if not secrets:
        raise InvalidUsageError(f"{path} has no token with the role operate.", remedy="Give another --token-file.")
    return secrets[0]


def _require_job(table: str | None, job: str | None) -> None:
    if table is None or job is None:
        raise InvalidUsageError("Give --table and --job.", remedy="memwal-ops status shows the tables and their jobs.")


def _what(table: str | None, job: str | None) -> str:
    return "all tables" if table is None else table if job is None else f"{job} of {table}"
