"""Makes the packages in ``plugins`` installed ones for a process: on its path, with the metadata of an install."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

PLUGINS = Path(__file__).parent / "plugins"


def install(names: list[str], folder: Path, sources: Path = PLUGINS) -> dict[str, str]:
    """What has to be in the environment of a process that sees them; ``folder`` takes their metadata."""
    paths = []
    for name in names:
        source = sources / name
        project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        lines = []
        for group, entries in project["entry-points"].items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines))
        paths.append(str(source))
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join([*paths, str(folder), *([before] if before else [])])}
