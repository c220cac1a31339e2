"""Logging: structlog, always on stderr; for people on a terminal, JSON lines for machines.

Stdout belongs to results. Every event goes through a redactor before it is rendered, so that a
credential that reached a log call by mistake does not reach the log.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping


def configure(*, level: str = "INFO", redact: Callable[[str], str] = str) -> None:
    """Set structlog up for this process.

    Args:
        level: the least severe level that is shown.
        redact: takes secrets out of a text; applied to every value of every event.
    """

    def redacted(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if isinstance(value, str):
                event[key] = redact(value)
        return event

    renderer: Any = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer(sort_keys=True)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redacted,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
