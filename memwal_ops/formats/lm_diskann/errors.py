"""Errors specific to index folders: a missing extra, and a second writer."""

from __future__ import annotations

from memwal_ops.errors import BusyError, ExtraMissingError

__all__ = ["ExtraMissingError", "IndexBusyError", "need_extra"]


class IndexBusyError(BusyError):
    """Another writer or job has the index, and did not release it within the wait."""


def need_extra() -> None:
    """Check that the packages of the extra are installed.

    Raises:
        ExtraMissingError: with the names of those missing.
    """
    from importlib.util import find_spec  # noqa: PLC0415 - only used here

    missing = [name for name in ("duckdb", "numba") if find_spec(name) is None]
    if missing:
        raise ExtraMissingError(
            f"LM-DiskANN index folders need packages that are not installed: {', '.join(missing)}.",
            remedy="Install memwal-ops[lm-diskann].",
        )
