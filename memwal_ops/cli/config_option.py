"""The ``--config`` option of the supervisor's commands."""

from __future__ import annotations

import click

from memwal_ops.cli.completion import FILE
from memwal_ops.supervisor.config.loader import default_config_path

config_option = click.option(
    "--config",
    "file",
    type=FILE,
    default=default_config_path,
    metavar="FILE",
    help="The service's configuration.  [default: $MEMWAL_OPS_CONFIG or /etc/memwal-ops/config.yaml]",
)
