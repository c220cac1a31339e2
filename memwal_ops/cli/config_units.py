"""``memwal-ops config systemd``, ``cron`` and ``kubernetes``: what runs a configuration, from the installed package.

Each is a file of ``systemd/`` or ``configs/``, which the package brings, with the configuration's paths and limits.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import yaml

import memwal_ops
from memwal_ops.cli.options import config_argument
from memwal_ops.cli.printing import echo, written_file
from memwal_ops.errors import InvalidUsageError
from memwal_ops.storage.locations import split_query
from memwal_ops.storage.options import is_secret_key
from memwal_ops.supervisor.config.effective import Settings
from memwal_ops.supervisor.config.loader import load_settings
from memwal_ops.supervisor.config.model import HttpConfig
from memwal_ops.version import __version__

_PROGRAM = "/opt/memwal-ops/bin/memwal-ops"
_CONFIG = "/etc/memwal-ops/config.yaml"
_PORT = HttpConfig().port
_IN_POD = "/var/lib/memwal-ops"
# Running steps finish within stop_grace; then leases are released.
_AFTER_GRACE = 30
# What the supervisor itself needs, beside its workers.
_SUPERVISOR_BYTES = 512 << 20
# Places that systemd hides.
_HOMES = tuple(f"/{name}/" for name in ("home", "root", "run/user"))
_TEMPORARY = ("/tmp/", "/var/tmp/")  # noqa: S108 - names only
_WILD = re.compile(r"[*?\[]")

_output = click.option("-o", "--output", metavar="FILE", help="Write it to FILE instead of stdout.")
_force = click.option("--force", is_flag=True, help="Replace FILE if it exists.")
_user = click.option("--user", metavar="NAME", help="The user that runs it.")


@click.command(short_help="Print the systemd unit of a configuration.")
@config_argument
@_user
@_output
@_force
def systemd(file: str, user: str | None, output: str | None, *, force: bool) -> int:
    """Print the unit of a service that runs the configuration FILE.

    It names this installation, the file, and how long the service may take to stop. It is hardened: with tables on
    local files it runs as their owner, or --user, and sees their folders; else as a user of its own.

    \b
    Examples:
      memwal-ops config systemd /etc/memwal-ops/config.yaml
      memwal-ops config systemd memwal.yaml --output /etc/systemd/system/memwal-ops.service

    Exit codes: 0 printed or written; 2 the unit exists; 50 the configuration is invalid.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    settings = load_settings(file)
    _check_lines(settings)
    _print(_unit(settings, user), output, force=force)
    return 0


@click.command(short_help="Print the line for cron of a configuration.")
@config_argument
@_user
@click.option(
    "--mailto", metavar="ADDRESS", default="root", show_default=True, help="Who gets the report of a failure."
)
@_output
@_force
def cron(file: str, user: str | None, mailto: str, output: str | None, *, force: bool) -> int:
    """Print a file for /etc/cron.d that runs what is due by the configuration FILE, every five minutes.

    A run that is still there is not started twice. The report is mailed if the exit code is not 0.

    \b
    Examples:
      memwal-ops config cron /etc/memwal-ops/config.yaml
      memwal-ops config cron memwal.yaml --user lance --output /etc/cron.d/memwal-ops

    Exit codes: 0 printed or written; 2 the file exists; 50 the configuration is invalid.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    settings = load_settings(file)
    _check_lines(settings)
    _print(_cron(settings, user, mailto), output, force=force)
    return 0


@click.command(short_help="Print the Kubernetes manifests of a configuration.")
@config_argument
@click.option(
    "--image", metavar="IMAGE", help="The container image, for example registry.example.com/memwal-ops:0.1.0."
)
@click.option("--cronjob", is_flag=True, help="A CronJob each quarter of an hour, instead of a Deployment.")
@_output
@_force
def kubernetes(file: str, image: str | None, output: str | None, *, cronjob: bool, force: bool) -> int:
    """Print the manifests that run the configuration FILE: it becomes a ConfigMap, secrets stay in a Secret.

    The limit of memory is that of all pools. With fleet: in FILE, it is a StatefulSet of three members. Refused is what
    would not work in a pod: an address that its probes cannot reach, another state_dir than the volume, and secrets in
    plain text.

    \b
    Examples:
      memwal-ops config kubernetes memwal.yaml --image registry.example.com/memwal-ops:0.1.0
      memwal-ops config kubernetes memwal.yaml --cronjob --output memwal-ops.yaml

    Exit codes: 0 printed or written; 2 refused, or the output exists; 50 the configuration is invalid.
    """  # noqa: D301 - click keeps the lines of a block that begins so
    settings = load_settings(file, {**os.environ, **_POD})
    _check_pod(settings, served=not cronjob)
    if local := local_places(settings):
        echo(
            f"These are on local files: mount a volume there, and let user 10001 write it: {', '.join(local)}.",
            err=True,
        )
    text = _manifests(settings, image or f"registry.example.com/memwal-ops:{__version__}", cronjob=cronjob)
    _print(text.replace("configs/kubernetes/supervisor.yaml", shlex.quote(output or "FILE")), output, force=force)
    return 0


# The pod's own address, and the folder of its volume.
_POD = {"MEMWAL_OPS_HOST": "0.0.0.0", "MEMWAL_OPS_STATE": _IN_POD, "STATE_DIRECTORY": _IN_POD}  # noqa: S104


def _print(text: str, output: str | None, *, force: bool) -> None:
    """Print a file, or write it. Raises ``InvalidUsageError``: it exists, or cannot be written."""
    if output is None:
        echo(text.rstrip("\n"))
        return
    if not force and os.path.lexists(output):
        raise InvalidUsageError(
            f"{output} exists; it was not changed.", remedy="Give another --output, or --force to replace it."
        )
    with written_file(output) as file:
        file.write(text.encode())
    echo(f"{output} is written.")


def _check_lines(settings: Settings) -> None:
    """Refuse paths with line breaks: what follows one would be a line of its own. Raises ``InvalidUsageError``."""
    for path in (os.path.abspath(settings.path), *local_places(settings), settings.config.state_dir or ""):
        if any(ord(character) < ord(" ") for character in path):
            raise InvalidUsageError(f"The path {path!r} has a control character.", remedy="Rename the file or folder.")


def _template(name: str) -> str:
    return (Path(memwal_ops.__file__).parent / name).read_text(encoding="utf-8")


def _replaced(text: str, pattern: str, new: str | Callable[[re.Match[str]], str]) -> str:
    """Replace all that matches in a file of the package; it must be there."""
    made, count = re.subn(pattern, new if callable(new) else lambda _: new, text, flags=re.MULTILINE)
    assert count, pattern  # noqa: S101 - the file is ours, and tests print every one
    return made


def program() -> str:
    """Return the path of this installation's command."""
    here = os.path.join(os.path.dirname(sys.executable), "memwal-ops")
    return here if os.path.exists(here) else _PROGRAM


def _unit(settings: Settings, user: str | None) -> str:
    text = _template("systemd/memwal-ops.service")
    file, local = os.path.abspath(settings.path), local_places(settings)
    written = [*local, *([settings.config.state_dir] if settings.config.state_dir else [])]
    text = text.replace(_CONFIG, file)
    text = _replaced(text, r"^# Tables on local files: .*\n", "")
    text = _replaced(text, r"^ExecStart=.*", f"ExecStart={_word(program())} run --config {_word(file)}")
    grace = int(settings.config.stop_grace.total_seconds()) + _AFTER_GRACE
    text = _replaced(text, r"^TimeoutStopSec=.*", f"TimeoutStopSec={grace}")
    owner = user or (_owner(local[0]) if local else None)
    if owner is not None:
        text = _replaced(text, r"^DynamicUser=yes", f"DynamicUser=no\nUser={owner}")
    if paths := [place for place in dict.fromkeys(written) if place != _IN_POD]:
        words = " ".join(_word(f"-{place}", command=False) for place in paths)
        text = _replaced(text, r"^ProtectSystem=strict", f"ProtectSystem=strict\nReadWritePaths={words}")
    if _below(written, _HOMES):
        text = _replaced(text, r"^ProtectHome=yes", "ProtectHome=no")
    elif _below([program(), sys.base_prefix, file], _HOMES):
        text = _replaced(text, r"^ProtectHome=yes", "ProtectHome=read-only")
    if _below([*written, file, program()], _TEMPORARY):
        text = _replaced(text, r"^PrivateTmp=yes", "PrivateTmp=no")
    return text


def _below(places: list[str], folders: tuple[str, ...]) -> bool:
    return any(f"{place}/".startswith(folders) for place in places)


def _word(text: str, *, command: bool = True) -> str:
    """A word of a unit: ``%`` begins a specifier, in a command ``$`` a variable; quoted if that is needed."""
    escaped = text.replace("%", "%%")
    escaped = escaped.replace("$", "$$") if command else escaped
    if re.search(r"[\s\"'\\;]", escaped) is None:
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'


def local_places(settings: Settings) -> list[str]:
    """Return the folders of all tables on local files; of a pattern the folder above its first wildcard."""
    folders: dict[str, None] = {}
    for table in settings.tables:
        uri = split_query(table.uri or table.pattern or "")[0].removeprefix("file://")
        if not uri.startswith(("/", "~")):
            continue
        path, wild = os.path.expanduser(uri), _WILD.search(os.path.expanduser(uri))
        folders[path.rstrip("/") if wild is None else os.path.dirname(path[: wild.start()]) or "/"] = None
    return [*folders]


def _owner(place: str) -> str:
    """The name of the user who owns a folder; if it does not exist, this process's own."""
    try:
        return pwd.getpwuid(os.stat(place).st_uid).pw_name
    except (OSError, KeyError):
        return getpass.getuser()


def _cron(settings: Settings, user: str | None, mailto: str) -> str:
    if not re.fullmatch(r"[\w.@+,-]+", mailto):
        raise InvalidUsageError(
            f"{mailto!r} is no address that cron can use.", remedy="Give one such as ops@example.com."
        )
    file, local = os.path.abspath(settings.path), local_places(settings)
    owner = user or (_owner(local[0]) if local else getpass.getuser())
    command = f"{shlex.quote(program())} run --once --config {shlex.quote(file)} --json"
    line = f'r=$(mktemp) || exit; {command} >"$r" || cat "$r"; rm -f "$r"'
    return "\n".join(
        (
            f"# Whatever is due by {file}, every five minutes. For /etc/cron.d; the sixth column is the user.",
            "# cron mails what the line prints: the report, where the exit code is not 0 (runbooks/README.md).",
            "# Secrets: environment variables in NAME=VALUE lines here (then mode 0600).",
            "",
            "SHELL=/bin/sh",
            "PATH=/usr/bin:/bin",
            f"MAILTO={mailto}",
            "",
            f"*/5 * * * *  {owner}  " + line.replace("%", "\\%"),
            "",
        )
    )


def _check_pod(settings: Settings, *, served: bool) -> None:
    """Refuse what would not work in a pod. Raises ``InvalidUsageError``: with each key, and what to write."""
    faults = [*_faults_in_pod(settings, served=served)]
    if faults:
        raise InvalidUsageError(" ".join(what for what, _ in faults), remedy=" ".join(fix for _, fix in faults))


def _faults_in_pod(settings: Settings, *, served: bool) -> Iterator[tuple[str, str]]:
    config, name = settings.config, settings.sources.get("fleet.name")
    hidden = config.http.host in {"127.0.0.1", "::1", "localhost"} and _added(settings) is None
    if served and config.http.enabled and hidden:
        yield (
            f"http.host is {config.http.host}, which the probes of a pod and Prometheus cannot reach.",
            f"Write {_HTTP}; the pod sets MEMWAL_OPS_HOST to 0.0.0.0.",
        )
    if served and (not config.http.enabled or config.http.port != _PORT):
        yield (
            f"The probes of the pod ask port {_PORT}.",
            f"Write http: {{enabled: true, port: {_PORT}}}, or use --cronjob.",
        )
    if served and name is not None and not name.variables:
        yield "fleet.name is the same for all pods.", "Leave it out: each member has the name of its pod."
    if config.state_dir not in {None, _IN_POD}:
        yield (
            f"state_dir is {config.state_dir}; the volume of the pod is {_IN_POD}.",
            "Leave state_dir out, or write ${MEMWAL_OPS_STATE:-...}.",
        )
    plain = [
        str(warning.place[-1])
        for warning in settings.warnings
        if warning.place and is_secret_key(str(warning.place[-1]))
    ]
    if plain:
        yield (
            f"{settings.path} has secrets in plain text, and a ConfigMap is not secret: {', '.join(plain)}.",
            "Write ${NAME}, and put NAME into the Secret memwal-ops-store.",
        )


_HTTP = "http: {host: '${MEMWAL_OPS_HOST:-127.0.0.1}'}"


def _added(settings: Settings) -> str | None:
    """The configuration with the address of a pod, if it has no key ``http``; None: it has one, or is no block."""
    text = Path(settings.path).read_text(encoding="utf-8")
    try:
        given, added = yaml.safe_load(text), yaml.safe_load(f"{text}\n{_HTTP}\n")
    except yaml.YAMLError:
        return None
    return f"{text.rstrip()}\n{_HTTP}\n" if "http" not in given and added.keys() == {*given, "http"} else None


def _manifests(settings: Settings, image: str, *, cronjob: bool) -> str:
    text = _template("configs/kubernetes/supervisor.yaml")
    head, separator, rest = text.partition("---\n")
    given = (_added(settings) or Path(settings.path).read_text(encoding="utf-8")).splitlines()
    # An indented first line would set the indentation of the block.
    indicator = "2" if next((line for line in given if line), "").startswith(" ") else ""
    head = _replaced(head, r"(?s)^  config\.yaml: \|\n.*", f"  config.yaml: |{indicator}\n")
    head += "".join(f"    {line}".rstrip() + "\n" for line in given)
    if cronjob:
        once = _template("configs/kubernetes/cronjob.yaml")
        rest = rest[: rest.index("apiVersion: apps/v1")] + once[once.index("apiVersion:") :]
    config = settings.config
    if config.fleet is not None and not cronjob:
        fleet = _template("configs/kubernetes/fleet.yaml")
        without = rest[: rest.index("# The history of runs")] + rest[rest.index("apiVersion: v1\nkind: Service\n") :]
        rest = f"{without}---\n{fleet[fleet.index('apiVersion:') :]}"
    grace = int(config.stop_grace.total_seconds()) + _AFTER_GRACE
    rest = _replaced(rest, r"terminationGracePeriodSeconds: \d+", f"terminationGracePeriodSeconds: {grace}")
    rest = _replaced(rest, r"image: \S+", f"image: {image}")
    head = _replaced(head, r"registry\.example\.com/memwal-ops:[\d.]+", image)
    rest = _replaced(rest, r"^( +)envFrom:\n", lambda match: _environment(match[1]) + match[0])
    if config.http.tls_certificate is not None:
        rest = rest.replace("port: http}", "port: http, scheme: HTTPS}")  # of the probes
    if (needed := _memory(settings)) is not None:
        rest = _replaced(rest, r"limits: \{memory: \S+\}", f"limits: {{memory: {needed >> 20}Mi}}")
    return head + separator + rest


def _environment(indent: str) -> str:
    lines = [f'{indent}  - {{name: {key}, value: "{value}"}}\n' for key, value in _POD.items()]
    return "".join([f"{indent}env:\n", *lines])


def _memory(settings: Settings) -> int | None:
    """The bytes that all workers and the supervisor may use; None: a pool has no limit."""
    pools = settings.config.pools
    sizes = [(pool.workers, pool.memory) for pool in (pools.merge, pools.build, pools.collect)]
    if any(memory is None for _, memory in sizes):
        return None
    return sum(workers * (memory or 0) for workers, memory in sizes) + _SUPERVISOR_BYTES
