"""Generate ``memwal_ops/formats/lance/wire/_pb`` from ``protos/``; with ``--check``, say whether it is current."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos"
PACKAGE = "memwal_ops/formats/lance/wire/_pb"
HEADER = '"""Generated from protos/ by make protos; do not edit."""\n'


def build(target: Path) -> None:
    """Generate all modules below ``target``, at the package's path."""
    well_known = str(resources.files("grpc_tools") / "_proto")
    names = sorted(path.name for path in SOURCES.glob("*.proto"))
    arguments = [
        "protoc",
        # The virtual path makes generated modules import each other by their place in the package.
        f"--proto_path={PACKAGE}={SOURCES}",
        f"--proto_path={well_known}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        *(f"{PACKAGE}/{name}" for name in names),
    ]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")
    (target / PACKAGE / "__init__.py").write_text(HEADER)


def main() -> None:
    """Entry of ``make protos`` and ``make protos-check``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        build(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        fresh = {path.name: path.read_text() for path in (Path(folder) / PACKAGE).glob("*.py*")}
    present = {path.name: path.read_text() for path in (ROOT / PACKAGE).glob("*.py*")}
    stale = sorted(name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name))
    if stale:
        sys.exit(f"{', '.join(stale)} in {PACKAGE} is not what protos/ says; run make protos and commit the result")


if __name__ == "__main__":
    main()
