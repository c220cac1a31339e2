"""Find the Java that PySpark would start, and its version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass

MIN_JAVA_VERSION = 17
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Java:
    """A Java on this machine.

    Attributes:
        path: path of the program.
        version: major version; None if it does not run or prints none.
        output: first line of ``java -version``, or why it does not run.
    """

    path: str
    version: int | None
    output: str


def find_java() -> Java | None:
    """The Java in ``JAVA_HOME``, else the one on the ``PATH``, else None. Starts it to ask its version."""
    home = os.environ.get("JAVA_HOME")
    path = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if path is None or not os.path.isfile(path):
        return None
    try:
        output = subprocess.run(  # noqa: S603 - the program that PySpark would start
            [path, "-version"], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        ).stderr
    except (OSError, subprocess.SubprocessError) as error:
        return Java(path, None, f"{path} does not run: {error}")
    number = re.search(r'version "(?:1\.)?(\d+)', output)
    return Java(path, None if number is None else int(number[1]), output.partition("\n")[0])
