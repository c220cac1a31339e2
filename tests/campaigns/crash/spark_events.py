"""What a process with Spark in it says of its own on stderr, where Java writes, too."""

from __future__ import annotations

import json
from typing import Any


def files_left(stderr: str) -> list[dict[str, Any]]:
    """The events of files that were left; what another thread, or Java, prints may stand on the same line."""
    found = []
    for line in stderr.splitlines():
        at = line.find('"event": "files_left"')
        if at >= 0:
            found.append(json.JSONDecoder().raw_decode(line[line.rindex("{", 0, at) :])[0])
    return found
