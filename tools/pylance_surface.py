"""Print what the installed pylance offers, as JSON: its release, its public names with signatures, the flags it opens.

Run by :mod:`tools.next_pylance` in two environments, whose results are compared.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa

from memwal_ops.formats.lance.files.version_files import version_path
from memwal_ops.formats.lance.wire.names import NamingScheme
from memwal_ops.formats.lance.wire.version_manifest import decode_version_manifest, encode_version_manifest

_BITS = 24
_OF = ("LanceDataset", "LanceFragment", "LanceOperation", "MergeInsertBuilder")


def surface() -> dict[str, Any]:
    """The release, the signature of each public name of pylance, and the feature flags with which it opens a table."""
    return {"release": lance.__version__, "names": dict(sorted(_names().items())), "flags": _flags()}


def _names() -> dict[str, str]:
    found = {name: _signature(getattr(lance, name)) for name in dir(lance) if not name.startswith("_")}
    for kind in _OF:
        holder = getattr(lance, kind, None)
        found |= {f"{kind}.{name}": _signature(getattr(holder, name)) for name in dir(holder) if name[0] != "_"}
    return found


def _signature(value: object) -> str:
    if not callable(value):
        return type(value).__name__
    try:
        return f"({', '.join(inspect.signature(value).parameters)})"
    except (TypeError, ValueError):
        return "()"


def _flags() -> list[int]:
    """The single feature flags, of readers and writers, with which it opens a table."""
    opened = []
    with tempfile.TemporaryDirectory() as folder:
        uri = f"{folder}/t.lance"
        lance.write_dataset(pa.table({"id": [1]}), uri)
        path = Path(uri, version_path(1, NamingScheme.V2))
        data = path.read_bytes()
        for bit in range(_BITS):
            version = decode_version_manifest(data)
            version.manifest.reader_feature_flags |= 1 << bit
            version.manifest.writer_feature_flags |= 1 << bit
            path.write_bytes(encode_version_manifest(version))
            try:
                lance.dataset(uri)
            except Exception:  # noqa: BLE001 - pylance's errors have no classes
                continue
            opened.append(1 << bit)
    return opened


if __name__ == "__main__":
    print(json.dumps(surface()))
