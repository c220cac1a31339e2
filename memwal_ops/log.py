"""Logging: structlog, always on stderr; for people on a terminal, JSON lines for machines.

Stdout belongs to results. Every event goes through a redactor before it is rendered, so that a
credential that reached a log call by mistake does not reach the log. What other libraries log
from WARNING on takes the same way; their finer events quote whole requests and are not ours to show.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

_AS_THEY_ARE = (bool, int, float, type(None))


class _ToStructlog(logging.Handler):
    """Hands records of the standard library's loggers (botocore, warnings) to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record as an event; its logger's name goes with it."""
        try:
            log = structlog.get_logger()
            log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception:  # noqa: BLE001 - a log line must not end the work that it speaks of
            self.handleError(record)


def configure(*, level: str = "INFO", redact: Callable[[str], str] = str) -> None:
    """Set structlog up for this process, and lead the standard library's loggers into it.

    Args:
        level: the least severe level that is shown.
        redact: takes secrets out of a text; applied to every value of every event.
    """

    def redacted(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if not isinstance(value, _AS_THEY_ARE):
                # The name goes in too: it may be all that tells a secret from any other word.
                event[key] = redact(f"{key}={value}").removeprefix(f"{key}=")
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redacted,
            _renderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        # Asked for at every event: a progress bar puts itself between stderr and the terminal.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(logging.WARNING))
    logging.captureWarnings(capture=True)


def get_logger(name: str) -> Any:
    """The logger for a piece of work: the host's structlog, or the standard library's where it has none.

    structlog that nobody set up prints everything on stdout, which belongs to the program that
    uses this package as a library.
    """
    if structlog.is_configured():
        return structlog.get_logger(name)
    return structlog.wrap_logger(
        logging.getLogger(name), processors=[structlog.processors.KeyValueRenderer(key_order=["event"])]
    )


def _renderer() -> Any:
    if not sys.stderr.isatty():
        return structlog.processors.JSONRenderer(sort_keys=True)
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    # The traceback is text by then, and redacted; a prettier one would print local variables.
    return structlog.dev.ConsoleRenderer(colors=not plain, exception_formatter=structlog.dev.plain_traceback)
