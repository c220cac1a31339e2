"""The models in docs/models: no error, but with each planted bug."""

from __future__ import annotations

import pytest

from tools import models

NAMES = sorted(path.stem for path in models.FOLDER.glob("*.pml"))
CASES = [(name, bug) for name in NAMES for bug in (0, *models.bugs(models.FOLDER / f"{name}.pml"))]


@pytest.mark.skipif(models.missing() is not None, reason=f"needs spin: {models.missing()}")
@pytest.mark.parametrize(("name", "bug"), CASES)
def test_a_model(name: str, bug: int) -> None:
    found = models.check(models.FOLDER / f"{name}.pml", bug)
    assert found.as_expected, found.steps
    if not bug:
        assert found.states > 1_000_000


def test_each_model_has_bugs_and_a_page() -> None:
    page = (models.FOLDER / "README.md").read_text()
    assert NAMES
    for name in NAMES:
        assert len(models.bugs(models.FOLDER / f"{name}.pml")) > 3
        assert f"[{name}.pml]({name}.pml)" in page
