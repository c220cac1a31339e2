"""An Airflow of its own for the tests that need one: a home with a SQLite database, in a temporary folder.

Airflow reads its configuration when it is imported, so all of this happens before any test module is.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HAS_AIRFLOW = find_spec("airflow") is not None
if HAS_AIRFLOW:
    _HOME = tempfile.mkdtemp(prefix="airflow-")
    atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
    os.environ |= {
        "AIRFLOW_HOME": _HOME,
        "AIRFLOW__CORE__DAGS_FOLDER": f"{_HOME}/dags",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_HOME}/airflow.db",
    }
    os.mkdir(f"{_HOME}/dags")


@pytest.fixture(scope="session")
def airflow_database() -> None:
    """The metadata database, with its tables."""
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture
def dags(airflow_database: None) -> Iterator[Path]:
    """Airflow's folder of DAGs, empty."""
    folder = Path(os.environ["AIRFLOW__CORE__DAGS_FOLDER"])
    shutil.rmtree(folder)
    folder.mkdir()
    yield folder
