"""The command line: commands, their output for people and scripts, and their exit codes."""

from __future__ import annotations

import sys


def _import_structlog() -> None:
    """Import structlog without rich, which it takes along for tracebacks that no command prints: a third of --help."""
    if sys.modules.keys().isdisjoint({"structlog", "rich"}):
        sys.modules["rich"] = None  # type: ignore[assignment]
        try:
            import structlog  # noqa: F401, PLC0415 - before rich can be imported again
        finally:
            del sys.modules["rich"]


_import_structlog()
