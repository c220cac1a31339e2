"""``memwal-ops notify``: try the targets of notifications."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from memwal_ops.cli.config_option import config_option
from memwal_ops.cli.options import json_output
from memwal_ops.cli.printing import echo_result
from memwal_ops.core.holds import user_at_host
from memwal_ops.errors import InvalidUsageError
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.notify import Change, Found, Message, NotificationError, send
from memwal_ops.text import counted

if TYPE_CHECKING:
    from memwal_ops.supervisor.config.model import TargetConfig

_NOT_DELIVERED = 1
_EXAMPLE = Found(
    "example",
    "warning",
    "This is a test of notifications; nothing is wrong.",
    "Nothing.",
    "runbooks/README.md",
)


@click.command(short_help="Send a test message to the targets of notifications.")
@config_option
@click.option("--test", is_flag=True, help="Send the message; without it, the targets are only listed.")
@click.option("--target", "names", multiple=True, metavar="NAME", help="Only this one (repeatable).")
@json_output
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
    message = Message(user_at_host(), (config.link or "").rstrip("/"), sent, (Change("new", _EXAMPLE),), test=True)
    results = [_result(target, message, test=test) for target in chosen]
    failed = sum(one["error"] is not None for one in results)
    document = {"decision": "sent" if test else "listed", "targets": results}
    lines = [
        f"{one['name']}: {one['type']}: {one['error'] or ('delivered' if test else 'not tried')}" for one in results
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
