"""Write the entries of ``tables`` in a configuration file."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

from memwal_ops.storage.catalogs import is_secret_property

if TYPE_CHECKING:
    from memwal_ops.storage.catalogs import Catalog


def namespace_entry(catalog: Catalog) -> str:
    """The entry of a catalog; a secret is left to an environment variable."""
    properties = [f"{quoted(key)}: {_property(key, value)}" for key, value in catalog.properties.items()]
    path = f", path: [{', '.join(map(quoted, catalog.path))}]" if catalog.path else ""
    return f"namespace: {{impl: {catalog.impl}, properties: {{{', '.join(properties)}}}{path}}}"


def _property(key: str, value: str) -> str:
    if is_secret_property(key, value):
        return f'"${{{variable_name(key)}}}"'
    return quoted(absolute(value) if key == "root" else value)


def absolute(place: str) -> str:
    """Return a URI, or the absolute path of a local one: a service has no working directory of its own."""
    return place.rstrip("/") if "://" in place else os.path.abspath(os.path.expanduser(place))


def quoted(text: str) -> str:
    """A YAML string; ``$`` is doubled, since a configuration file substitutes variables."""
    return json.dumps(text.replace("$", "$$"), ensure_ascii=False)


def variable_name(key: str) -> str:
    """Return the name of the environment variable that a secret of this key is left to."""
    return re.sub("[^A-Z0-9]+", "_", key.upper())
