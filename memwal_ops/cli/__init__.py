"""The command line: commands, their output for terminals and scripts, and their exit codes."""

from __future__ import annotations

import sys


def _import_structlog() -> None:
    """Import structlog without rich, which takes a third of the time of --help, and is for tracebacks only."""
    if sys.modules.keys().isdisjoint({"structlog", "rich"}):
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            import structlog  # noqa: F401, PLC0415 - before rich can be imported again
        finally:
            del sys.modules["rich"]


_import_structlog()
