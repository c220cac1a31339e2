"""Where a service has its configuration and its state, unless told otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping


def default_config_path() -> str:
    """Return the file that commands read by default."""
    return os.environ.get("MEMWAL_OPS_CONFIG") or "/etc/memwal-ops/config.yaml"


def default_state_dir(environ: Mapping[str, str]) -> str:
    """Return the state folder where none is configured: systemd's ``STATE_DIRECTORY``, else one in the user's home."""
    given = environ.get("STATE_DIRECTORY", "").split(":")[0]
    home = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return given or os.path.join(home, "memwal-ops")
