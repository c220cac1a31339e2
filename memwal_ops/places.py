"""Where a service has its configuration and its state, unless told otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping


def default_config_path() -> str:
    """Return the file that commands read by default."""
    return os.environ.get("MEMWAL_OPS_CONFIG") or "/etc/memwal-ops/config.yaml"


def default_state_dir(environ: Mapping[str, str], *, unit: str = "/var/lib/memwal-ops") -> str:
    """Return the state folder where none is configured: systemd's, else the user's, else our ``unit``'s, if any.

    A service that starts gives no unit: another user's files in its folder would stop the unit's service.
    """
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    home = os.path.join(environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "memwal-ops")
    return given or (unit if not os.path.isdir(home) and os.access(unit, os.R_OK | os.X_OK) else home)
