"""Make a release that comes after this one, as docs/upgrading.md allows it: this package and more.

It writes a key that this release does not know into each of its records, a property into each commit, and a column
into the history of runs. With ``leases=2``, the format of its leases is a later one, as if an older release would
misread them. Processes run it by the environment that :func:`make_next` returns.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import memwal_ops

RELEASE = "0.2.0"
KEY = "added_by_the_next_release"

# Appended to modules of the package.
_MORE = {
    "storage/records.py": """
_encode = encode_record
def encode_record(document, newest=1, *, indent=None):
    return _encode({**document, KEY: {"rows": [1]}}, newest, indent=indent)
""",
    "formats/lance/commit/publication.py": """
_properties = CommitNote.properties
CommitNote.properties = lambda self: {**_properties(self), f"memwal-ops.{KEY}": "1"}
""",
    "supervisor/state/history.py": """
_open = History.open.__func__
def _open_with_more(cls, path):
    opened = _open(cls, path)
    if KEY not in [row["name"] for row in opened._read("SELECT name FROM pragma_table_info('runs')", ())]:
        opened._write(f"ALTER TABLE runs ADD COLUMN {KEY} TEXT DEFAULT 'x'", ())
    return opened
History.open = classmethod(_open_with_more)
""",
}
_LATER_LEASES = """
encode_record = lambda document: __import__("json").dumps({"format": 2, KEY: 1, **document}).encode()
_decode_any = decode_record
decode_record = lambda data, path: _decode_any(data, path, newest=2)
"""


def make_next(folder: Path, *, leases: int = 1) -> dict[str, str]:
    """Copy the package into a folder and change it; returns what the environment of its processes has in addition."""
    package = folder / "memwal_ops"
    shutil.copytree(Path(memwal_ops.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    version = package / "version.py"
    version.write_text(version.read_text().replace(f'"{memwal_ops.__version__}"', f'"{RELEASE}"'))
    for name, text in _MORE.items() if leases == 1 else [("core/leases.py", _LATER_LEASES)]:
        with (package / name).open("a") as file:
            file.write(f"\n\nKEY = {KEY!r}\n{text}")
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
