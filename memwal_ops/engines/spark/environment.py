"""Whether Spark can run here at all, and a sentence that says what is missing where it cannot."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess

from memwal_ops.errors import SparkUnavailableError

_OLDEST_PYSPARK = (4, 1)
_NEXT_PYSPARK = (5,)
_OLDEST_PANDAS = (2, 2)
_OLDEST_JAVA = 17
_JAVA_SECONDS = 30


def check_environment() -> None:
    """Look at PySpark, pandas and Java on this machine; starts no Spark.

    Raises:
        SparkUnavailableError: one of them is missing or of a version that does not fit.
    """
    pyspark = _version("pyspark")
    if pyspark is None:
        raise SparkUnavailableError(
            "PySpark is not installed.", remedy="pip install 'memwal-ops[spark]', or use --engine local."
        )
    if not _OLDEST_PYSPARK <= pyspark < _NEXT_PYSPARK:
        raise SparkUnavailableError(f"PySpark is {_text(pyspark)}; 4.1 to 4.x is needed.")
    pandas = _version("pandas")
    if pandas is None or pandas < _OLDEST_PANDAS:
        # PySpark's Arrow functions import it, though no row of ours goes through it.
        said = "not installed" if pandas is None else _text(pandas)
        raise SparkUnavailableError(
            f"pandas is {said}; PySpark's Arrow functions need 2.2 or later.",
            remedy="pip install 'memwal-ops[spark]', here and on the executors, or use --engine local.",
        )
    _check_java()


def why_not() -> str | None:
    """The sentence of :func:`check_environment`, or None where Spark can run."""
    try:
        check_environment()
    except SparkUnavailableError as error:
        return str(error)
    return None


def _version(package: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    install = "Install Java 17 or later and set JAVA_HOME, or use --engine local."
    if java is None or not os.path.isfile(java):
        where = f"JAVA_HOME is {home}, where there is no bin/java" if home else "JAVA_HOME is not set"
        raise SparkUnavailableError(f"There is no Java: {where}.", remedy=install)
    try:
        said = subprocess.run(  # noqa: S603 - the program that PySpark is about to start
            [java, "-version"], capture_output=True, text=True, timeout=_JAVA_SECONDS, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SparkUnavailableError(f"{java} does not run: {error}", remedy=install) from error
    number = re.search(r'version "(?:1\.)?(\d+)', said)
    if number is None:
        raise SparkUnavailableError(f"{java} does not say which version it is.", remedy=install)
    if int(number[1]) < _OLDEST_JAVA:
        raise SparkUnavailableError(f"{java} is Java {number[1]}; Spark needs 17 or later.", remedy=install)
