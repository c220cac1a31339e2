"""Check whether Spark can run on this machine: PySpark, pandas and Java, and their versions."""

from __future__ import annotations

import importlib.metadata
import os
import re

from memwal_ops.errors import SparkUnavailableError
from memwal_ops.java import MIN_JAVA_VERSION, find_java

_OLDEST_PYSPARK = (4, 1)
_NEXT_PYSPARK = (5,)
_OLDEST_PANDAS = (2, 2)


def check_environment() -> str:
    """Check PySpark, pandas and Java on this machine, and return which were found; does not start Spark.

    Raises:
        SparkUnavailableError: one of them is missing or of an unsupported version.
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
        # PySpark's Arrow functions import it, although no row of ours passes through it.
        version = "not installed" if pandas is None else _text(pandas)
        raise SparkUnavailableError(
            f"pandas is {version}; PySpark's Arrow functions need 2.2 or later.",
            remedy="pip install 'memwal-ops[spark]', here and on the executors, or use --engine local.",
        )
    return f"PySpark {_text(pyspark)}, pandas {_text(pandas)}, {_check_java()}"


def why_not() -> str | None:
    """The error message of :func:`check_environment`, or None if Spark can run."""
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


def _check_java() -> str:
    java, home = find_java(), os.environ.get("JAVA_HOME")
    install = "Install Java 17 or later and set JAVA_HOME, or use --engine local."
    if java is None:
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "JAVA_HOME is not set"
        raise SparkUnavailableError(f"Java was not found: {where}.", remedy=install)
    if java.version is None:
        raise SparkUnavailableError(f"{java.path} -version prints no version: {java.output}", remedy=install)
    if java.version < MIN_JAVA_VERSION:
        raise SparkUnavailableError(f"{java.path} is Java {java.version}; Spark needs 17 or later.", remedy=install)
    return f"Java {java.version} ({java.path})"
