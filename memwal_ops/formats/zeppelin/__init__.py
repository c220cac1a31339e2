"""Read and write Zeppelin namespaces: a small writer and a reader, for programs without a Zeppelin server.

They are used in tests and in the demo; production queries are served by a Zeppelin server. Formats, jobs and commands
are in the modules below; importing this package imports none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memwal_ops.formats.zeppelin.reader import query
    from memwal_ops.formats.zeppelin.writer import create, open_writer, replace_fragment

__all__ = ["create", "open_writer", "query", "replace_fragment"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"{__name__} has no attribute {name!r}.")
    return getattr(import_module(f"{__name__}.{'reader' if name == 'query' else 'writer'}"), name)
