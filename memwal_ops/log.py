"""Set up logging: structlog on stderr, as text on a terminal and as JSON lines otherwise.

Stdout is for results. Every event is redacted before it is rendered, so that a
credential that reached a log call by mistake does not reach the log. Events of other libraries
from WARNING on are logged in the same way; their less severe events quote whole requests and are dropped.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from memwal_ops.text import printable

_UNREDACTED_TYPES = (bool, int, float, type(None))


class LastOpened:
    """What a process opened last, in a file.

    Whoever started the process reads it if a signal ended it: a library may abort on what it read.
    """

    _BYTES = 1024
    _file: int | None = None

    @classmethod
    def write_to(cls, file: int) -> None:
        """Begin to write to a file descriptor."""
        cls._file = file

    @classmethod
    def note(cls, what: str) -> None:
        """Replace what the file has; nothing, if there is none."""
        if cls._file is not None:
            os.pwrite(cls._file, what.encode(errors="replace")[: cls._BYTES].ljust(cls._BYTES, b"\0"), 0)

    @classmethod
    def read(cls, file: int) -> str:
        """What another process wrote."""
        return os.pread(file, cls._BYTES, 0).rstrip(b"\0").decode(errors="replace")


class _ToStructlog(logging.Handler):
    """A handler that forwards records of the standard library's loggers (botocore, warnings) to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log the record as an event with its logger's name."""
        import structlog  # noqa: PLC0415 - see configure()

        try:
            log = structlog.get_logger()
            log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)
        except Exception:  # noqa: BLE001 - a log line must not end the work that it reports
            self.handleError(record)


def configure(*, level: str = "INFO", redact: Callable[[str], str] = str) -> None:
    """Set up structlog for this process, and forward the standard library's loggers to it.

    Args:
        level: the least severe level that is shown.
        redact: masks secrets in a string; applied to every value of every event.
    """
    import structlog  # noqa: PLC0415 - not where this package is a library: it brings asyncio and rich

    def redacted(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for key, value in event.items():
            if not isinstance(value, _UNREDACTED_TYPES):
                # With the name: only the name may distinguish a secret from any other word.
                event[key] = redact(f"{key}={value}").removeprefix(f"{key}=")
        return event

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redacted,
            *([_escape_control_characters] if sys.stderr.isatty() else []),
            _renderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        # Made for every event: a progress bar replaces sys.stderr while it is shown.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(logging.WARNING))
    logging.captureWarnings(capture=True)


_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def quiet() -> Iterator[None]:
    """Give what is made within it loggers that log nothing: what it does is not done, only tried."""
    before = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(before)


class _LibraryLogger:
    """Logs to a logger of the standard library: the program that uses this package decides where that goes."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __getattr__(self, level: str) -> Callable[..., None]:
        log = getattr(self._logger, level)
        return (
            lambda *given, **values: log(  # of ``log`` the level comes before the event
                *given[:-1], " ".join(f"{key}={one!r}" for key, one in [("event", given[-1]), *values.items()])
            )
        )


def get_logger(name: str) -> Any:
    """A structlog logger if structlog is configured, else a logger of the standard library.

    Unconfigured, structlog prints everything on stdout, which belongs to the program that
    uses this package as a library.
    """
    if _QUIET.get():
        return _LibraryLogger(logging.Logger(name, logging.CRITICAL + 1))  # noqa: LOG001 - that of no other
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        return structlog.get_logger(name)
    return _LibraryLogger(logging.getLogger(name))


def _escape_control_characters(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape control characters, which would reach the terminal; the JSON renderer escapes them by itself."""
    texts = {key: value for key, value in event.items() if isinstance(value, str)}
    return {**event, **{key: printable(text, lines=key == "exception") for key, text in texts.items()}}


def _renderer() -> Any:
    import structlog  # noqa: PLC0415 - see configure()

    if not sys.stderr.isatty():
        return structlog.processors.JSONRenderer(sort_keys=True)
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    # The traceback is already redacted text; a prettier formatter would print local variables.
    return structlog.dev.ConsoleRenderer(colors=not plain, exception_formatter=structlog.dev.plain_traceback)
