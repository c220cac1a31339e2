"""Check that Spark can run here (PySpark, pandas, Java, their versions), start a session, and check every one."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memwal_ops.core.spark import stages
from memwal_ops.errors import SparkJobFailedError, SparkUnavailableError
from memwal_ops.storage.options import redact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import SparkSession


MIN_JAVA_VERSION = 17
_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Java:
    """A Java on this machine.

    ``version``: major version; None if it does not run or prints none. ``output``: first line of ``java -version``, or
    why it does not run.
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


_OLDEST_PYSPARK = (4, 1)
_NEXT_PYSPARK = (5,)
_OLDEST_PANDAS = (2, 2)


def check_environment() -> str:
    """Check PySpark, pandas and Java on this machine, and return which were found; does not start Spark.

    Raises ``SparkUnavailableError``: one of them is missing or of an unsupported version.
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


_PACKAGES = ("memwal-ops", "pylance", "pyarrow", "pandas")
# Releases that must be equal on driver and executors: executors write files that the driver commits.
_SAME = ("memwal-ops", "pylance")
_MASTER_OF_THIS_MACHINE = ("local", "spark://")
_checked: set[tuple[str, str]] = set()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress two warnings that do not concern the user.

    PySpark starts Java by fork and exec, which pylance reports as a fork; and PySpark reports pandas 3 as
    untested whenever an Arrow function is made, although no row of ours passes through pandas.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lance is not fork-safe")
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas")
        yield


@contextmanager
def session(master: str | None = None, *, app_name: str = "memwal-ops merge") -> Iterator[SparkSession]:
    """The session that is active in this process, or a new one, which is stopped at the end.

    ``master``: as for ``spark-submit``; None: that of ``spark-submit``, ``spark-defaults.conf`` or an active session,
    else every core of this machine.

    Raises:
        SparkUnavailableError: PySpark, pandas or Java is missing or of an unsupported version, or Spark does not start.
        SparkJobFailedError: its JVM was killed.
    """
    check_environment()
    from pyspark.sql import SparkSession  # noqa: PLC0415 - an extra

    with stages.between_stages():
        active = SparkSession.getActiveSession()
    if active is not None:
        if master is not None and master != active.sparkContext.master:
            raise SparkUnavailableError(
                f"A Spark session with master {active.sparkContext.master} is active in this process, not {master}.",
                remedy="Stop it first, or leave --master out.",
            )
        yield active
        return
    with quiet():
        made = _make(master, app_name)
    # Java's log would repeat our messages between our lines.
    try:
        with stages.between_stages():
            made.sparkContext.setLogLevel("ERROR")
        yield made
    finally:
        with suppress(Exception):  # its JVM is gone: code that needed it has raised
            made.stop()


def _make(master: str | None, app_name: str) -> SparkSession:
    from py4j.protocol import Py4JError  # noqa: PLC0415 - comes with PySpark
    from pyspark import SparkConf  # noqa: PLC0415 - an extra
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    conf = SparkConf()
    chosen = master or conf.get("spark.master", None) or "local[*]"
    if "PYSPARK_PYTHON" not in os.environ:
        configured = conf.get("spark.pyspark.python", None)
        on_this_machine = sys.executable if chosen.startswith(_MASTER_OF_THIS_MACHINE) else None
        if configured or on_this_machine:
            # Read when the context is made, and only from the environment. Unset, executors take the first
            # python3 of their PATH, in which our packages are not installed.
            os.environ["PYSPARK_PYTHON"] = configured or sys.executable
    builder = SparkSession.builder.appName(app_name).master(chosen).config("spark.ui.showConsoleProgress", "false")
    if chosen.startswith("local"):
        # A local session must start on a machine with a name that does not resolve.
        builder = builder.config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    try:
        return builder.getOrCreate()
    except (PySparkException, Py4JError, OSError, RuntimeError) as error:  # errors of Java are raised as Py4J's
        raise SparkUnavailableError(
            f"Spark does not start with master {chosen}: {_brief(error)}",
            remedy="See Spark's own lines above: mostly the master, a setting, or an address that does not respond. "
            "Or use --engine local.",
        ) from error


def refuse_stopped(spark: SparkSession) -> None:
    """Refuse a session that was stopped; one of Spark Connect passes, since its state is not known here.

    Raises ``SparkUnavailableError``: it is stopped.
    """
    if _is_stopped(spark):
        raise SparkUnavailableError("This Spark session is stopped.", remedy="Give a session that runs.")


def _is_stopped(spark: SparkSession) -> bool | None:
    """Whether a session was stopped, here or by Java itself; None if this process is not its driver."""
    try:
        java = spark._sc._jsc  # noqa: SLF001 - no public way
        return java is None or bool(java.sc().isStopped())
    except Exception as error:  # a stopped session in Python, and one of Spark Connect, raise other errors
        if stages.is_gone(error):
            raise SparkJobFailedError(f"Spark does not respond: {stages.brief(error)}") from error
        return None


@contextmanager
def drivers_python(spark: SparkSession) -> Iterator[bool]:
    """Have what is defined in the block run by the driver's interpreter, unless PYSPARK_PYTHON names another one.

    On a local or standalone master only: elsewhere, executors do not have its path. Without that, PySpark starts the
    first python3 of the PATH, in which our packages are not installed.

    Returns:
        Whether this process is the session's driver; if not (Spark Connect), nothing is changed.
    """
    if _is_stopped(spark) is not False:
        yield False
        return
    context = spark.sparkContext
    before = context.pythonExec
    if "PYSPARK_PYTHON" not in os.environ and context.master.startswith(_MASTER_OF_THIS_MACHINE):
        context.pythonExec = sys.executable
    try:
        yield True
    finally:
        context.pythonExec = before


@contextmanager
def our_tasks(spark: SparkSession) -> Iterator[None]:
    """Run tasks of ours in the block on any session, of the command line or of one's own.

    Raises:
        SparkUnavailableError: as :func:`check_executors`, as is the next.
        SparkJobFailedError: a process of Spark ended meanwhile.
    """
    with quiet(), drivers_python(spark):
        check_executors(spark)
        yield


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Make a session of this process the active one of this thread while the block runs.

    Spark 4.3 looks for the name of a new data source in the active session. If that has the source, Spark refuses to
    register it in another session (``DATA_SOURCE_ALREADY_EXISTS``).
    """
    sessions = spark._get_j_spark_session_class(spark._jvm)  # noqa: SLF001 - no public way
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def check_executors(spark: SparkSession) -> None:
    """Compare one executor's package versions with the driver's, once per application and interpreter.

    Raises:
        SparkUnavailableError: the session is stopped or belongs to another process; its Python cannot run our
            tasks, or has other releases of the packages that write files.
        SparkJobFailedError: a process of Spark ended meanwhile.
    """
    checked = (_application(spark), spark.sparkContext.pythonExec)
    if checked in _checked:
        return
    where = (
        "Executors need the driver's memwal-ops, pylance, pyarrow and pandas in the Python that PYSPARK_PYTHON "
        "(or spark.pyspark.python) names."
    )
    try:
        # Not by a DataFrame: until a pass needs Spark SQL, it is not started.
        versions = dict(spark.sparkContext.parallelize([0], 1).mapPartitions(_versions).collect())
    except Exception as error:
        if stages.is_crash(error):  # not caused by installed packages
            raise SparkJobFailedError(
                f"Spark failed during the check of its executors' versions: {stages.brief(error)}"
            ) from error
        raise SparkUnavailableError(f"A Python worker cannot run our tasks: {_brief(error)}", remedy=where) from error
    for package in _SAME:
        driver_version = importlib.metadata.version(package)
        if versions.get(package) != driver_version:
            raise SparkUnavailableError(
                f"Executors have {package} {versions.get(package)}, the driver has {driver_version}.", remedy=where
            )
    _checked.add(checked)


def _application(spark: SparkSession) -> str:
    """The id of a session's application, if it runs and this process is its driver."""
    if _is_stopped(spark) is False:
        with suppress(Exception):  # it may stop at any moment
            return str(spark.sparkContext.applicationId)
    raise SparkUnavailableError(
        "This Spark session is stopped, or belongs to another process (Spark Connect).",
        remedy="Give a session that runs and that was made in this process.",
    )


def _versions(_: Iterable[int]) -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        yield name, importlib.metadata.version(name)


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "Exception" in line] or lines or [type(error).__name__]
    return redact(telling[0].lstrip(": "))[:400]  # Py4J puts a colon before what Java raised
