"""Where there is no Airflow, the package can be imported, and says what it needs when an operator is asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

import memwal_ops.airflow as ours


def test_nothing_heavy_is_loaded_before_it_is_needed() -> None:
    script = (
        "import sys, memwal_ops, memwal_ops.airflow, memwal_ops.airflow.connections, memwal_ops.airflow.failures\n"
        "print(*sorted({'airflow', 'lance', 'pyarrow', 'obstore', 'boto3', 'numpy'} & set(sys.modules)))\n"
        "print(memwal_ops.open_table.__name__, memwal_ops.Table.__name__, 'lance' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "open_table Table False"]


@pytest.mark.skipif(find_spec("airflow") is not None, reason="Airflow is installed here")
@pytest.mark.parametrize("name", sorted(ours.__all__))
def test_each_class_has_its_requirements(name: str) -> None:
    with pytest.raises(ImportError, match=r"memwal_ops\.airflow needs Apache Airflow 3\.3 or later .* pip install"):
        getattr(ours, name)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="MemWalMegreOperator"):
        ours.MemWalMegreOperator  # noqa: B018
