"""The group of all commands. Those of the supervisor and of other packages are imported when they are called.

Otherwise every command would wait for the imports of all others: a merge by hand needs no scheduler and no HTTP server.
"""

from __future__ import annotations

import importlib
import signal
from collections.abc import Mapping
from importlib.metadata import EntryPoint

import click

from memwal_ops.cli.job_command import job_command
from memwal_ops.core.registry import job_entries, load_spec
from memwal_ops.errors import JobPluginError

_LAZY = {
    "check": ("memwal_ops.cli.check:check", "One line and an exit code from 0 to 3, for Nagios."),
    "config": ("memwal_ops.cli.config:config", "Write and check configurations; print their units."),
    "cost": ("memwal_ops.cli.plan:cost", "Show what maintenance cost, and what it achieved."),
    "demo": ("memwal_ops.cli.demo:demo", "Make a table, maintain it, and prove that nothing was lost."),
    "doctor": ("memwal_ops.cli.doctor:doctor", "Check this machine, and a store, before a job fails."),
    "export-support": (
        "memwal_ops.cli.doctor:export_support",
        "Write a table's metadata, without values, into a file.",
    ),
    "history": ("memwal_ops.cli.history:history", "Show what the supervisor did, and how each run ended."),
    "hold": ("memwal_ops.cli.hold:hold", "Keep a base version for a long-running reader."),
    "init": ("memwal_ops.cli.init:init", "Prepare a table for the jobs of its format."),
    "lease": ("memwal_ops.cli.lease:lease", "Show or break the leases of supervisors on a table."),
    "notify": ("memwal_ops.cli.service:notify", "Send a test message to the targets of notifications."),
    "plan": ("memwal_ops.cli.plan:plan", "Show what the service would run next, and at what cost."),
    "probe": ("memwal_ops.cli.doctor:probe", "Test a store's conditional writes and its clock."),
    "report": ("memwal_ops.cli.report:report", "Write one HTML page about a table, with its history."),
    "run": ("memwal_ops.cli.run:run", "Maintain the tables of a configuration file, until stopped."),
    "scan": ("memwal_ops.cli.scan:scan", "Show what tables need, and the configuration that does it."),
    "service": ("memwal_ops.cli.service:service", "Act on a running service: run, retry, cancel, pause."),
    "status": ("memwal_ops.cli.status:status", "Show all tables of a configuration: what is behind, and why."),
}
"""Commands that are not jobs: where each is, and its line in the help of the group, which imports none of them."""


_SECTIONS = {
    "Look": ("demo", "scan", "inspect", "verify", "why", "report", "doctor", "probe"),
    "Maintain": ("maintain", "merge", "catchup", "compact", "snapshot", "expire", "gc", "erase", "hold"),
    "Repair and change": ("repair", "adopt", "init", "migrate", "export-support"),
    "Run a service": ("config", "run", "service", "status", "plan", "history", "cost", "check", "notify", "lease"),
}
"""The commands in the help of the group, by what a person wants; those of other packages follow."""


class Commands(click.Group):
    """The commands that were added, those of the supervisor, and one for each registered job."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, sorted."""
        return sorted({*super().list_commands(ctx), *_LAZY, *self._job_entries()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name; a package cannot replace a built-in one."""
        known = super().get_command(ctx, cmd_name)
        if known is not None:
            return known
        if cmd_name in _LAZY:
            module, _, name = _LAZY[cmd_name][0].partition(":")
            command = getattr(importlib.import_module(module), name)
            assert isinstance(command, click.Command)  # noqa: S101 - built in
            return command
        entries = self._job_entries().get(cmd_name)
        return None if entries is None else _job_command(cmd_name, entries)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all commands in sections, with their short help; that of jobs comes from their specs."""
        rows = {}
        for name in self.list_commands(ctx):
            if name in _LAZY:
                rows[name] = _LAZY[name][1]
            elif (command := self.get_command(ctx, name)) is not None:
                rows[name] = command.get_short_help_str(formatter.width)
        width = max(map(len, rows))
        others = [name for name in rows if not any(name in names for names in _SECTIONS.values())]
        for title, names in {**_SECTIONS, "Other packages": others}.items():
            if listed := [(name.ljust(width), rows[name]) for name in names if name in rows]:
                with formatter.section(title):
                    formatter.write_dl(listed)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Ignore SIGHUP before ``run`` starts: a reload that comes too early must not end the service."""
        if args[:1] == ["run"]:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return super().resolve_command(ctx, args)

    def _job_entries(self) -> Mapping[str, Mapping[str, EntryPoint]]:
        entries: dict[str, dict[str, EntryPoint]] = {}
        for entry in job_entries():
            scope, _, name = entry.name.partition(".")
            if name and name not in {*self.commands, *_LAZY}:
                entries.setdefault(name, {})[scope] = entry
        return entries


def _job_command(name: str, entries: Mapping[str, EntryPoint]) -> click.Command | None:
    """Return a job's command. One that cannot be imported fails only when it is called."""
    try:
        specs = {scope: load_spec(entry) for scope, entry in entries.items()}
    except JobPluginError as error:
        return _broken(name, error)
    shown = {scope: spec for scope, spec in specs.items() if spec.command is None}
    return job_command(name, shown) if shown else None


def _broken(name: str, error: JobPluginError) -> click.Command:
    @click.command(
        name,
        short_help="(cannot be used: call it to see why)",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def broken() -> None:
        raise error

    return broken
