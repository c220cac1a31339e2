"""Create an index folder, or report that it exists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import InvalidUsageError, NotALanceTableError, TableNotFoundError
from memwal_ops.formats.lm_diskann.errors import need_extra
from memwal_ops.formats.lm_diskann.source import Source, read_source

if TYPE_CHECKING:
    from memwal_ops.formats.lm_diskann.options import InitOptions
    from memwal_ops.formats.lm_diskann.wire.parameters import Parameters
    from memwal_ops.storage.api import Store
    from memwal_ops.storage.locations import Location

_RESULTS = {"created": "was created", "unchanged": "exists already", "dry_run": "would be created"}


@dataclass(frozen=True)
class InitReport:
    """``decision``: created, unchanged or dry_run; ``document``: the parameters."""

    decision: str
    uri: str
    document: dict[str, Any]

    exit_code = 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``--json``."""
        return {"decision": self.decision, "uri": self.uri, **self.document}

    def describe(self) -> str:
        """The text for a terminal."""
        text = ", ".join(f"{name} {value}" for name, value in self.document.items())
        return f"The index folder {self.uri} {_RESULTS[self.decision]}: {text}."


def init(location: Location, store: Store, options: InitOptions, *, dry_run: bool) -> InitReport:
    """Create the folder if it does not exist.

    Raises:
        ExtraMissingError: the extra is not installed.
        InvalidUsageError: there is an index with other parameters, or other files; or a parameter is out of bounds.
        UnsupportedFeatureError: the folder is remote.
    """
    del store
    need_extra()
    from memwal_ops.formats.lm_diskann import creation, folders  # noqa: PLC0415 - the extra is checked first

    path = folders.local_path(location.uri)
    follows = None if options.table is None else Source(_place(options.table), str(options.column), options.key)
    wanted: dict[str, Any] = {
        "dimension": options.dimension if follows is None else follows.dimension(follows.open()),
        "metric": options.index_metric,
        "R": options.links,
        "alpha": options.alpha,
        "L": options.search_list,
        "quantizer": options.quantizer,
    }
    try:
        found = _document(folders.read_parameters(path))
    except (TableNotFoundError, NotALanceTableError):
        if not dry_run:
            creation.create(path, **wanted, follows=follows)
        return InitReport("dry_run" if dry_run else "created", path, wanted | _followed(follows))
    differ = [name for name, value in wanted.items() if found[name] != value]
    if differ:
        text = ", ".join(f"{name} is {found[name]}, not {wanted[name]}" for name in differ)
        raise InvalidUsageError(f"{path} is already an index with other parameters: {text}.")
    if read_source(path) != follows:
        raise InvalidUsageError(f"{path} is already an index, which follows {_named(read_source(path))}.")
    return InitReport("unchanged", path, wanted | _followed(follows))


def _place(table: str) -> str:
    return table if "://" in table else os.path.abspath(os.path.expanduser(table))


def _followed(follows: Source | None) -> dict[str, Any]:
    return {} if follows is None else {"table": follows.uri, "column": follows.column, "key": follows.key}


def _named(follows: Source | None) -> str:
    return "no table" if follows is None else f"column {follows.column} of {follows.uri}, key {follows.key}"


def _document(found: Parameters) -> dict[str, Any]:
    return {
        "dimension": found.dimension,
        "metric": found.metric,
        "R": found.links,
        "alpha": found.alpha,
        "L": found.search_list,
        "quantizer": found.quantizer,
    }
