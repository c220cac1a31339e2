"""Errors specific to index folders: a missing extra, a second writer, no node ids left."""

from __future__ import annotations

from memwal_ops.errors import BusyError, ExtraMissingError, UnsupportedFeatureError

__all__ = ["ExtraMissingError", "IdsExhaustedError", "IndexBusyError", "need_extra"]


class IndexBusyError(BusyError):
    """Another writer or job has the index, and did not release it within the wait."""


class IdsExhaustedError(UnsupportedFeatureError):
    """All node ids are used up; they are never reused."""

    remedy = "Build a new index from the existing rows."


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
