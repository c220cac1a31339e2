"""The models in docs/models: no error, but with each planted bug."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import models

MODELS = sorted(models.FOLDER.glob("*.pml"))
CASES = [
    *((model, part, None) for model in MODELS for part in models.parts(model)),
    *((model, bug.part, bug) for model in MODELS for bug in models.bugs(model)),
]


@pytest.mark.skipif(models.missing() is not None, reason=f"needs spin: {models.missing()}")
@pytest.mark.parametrize(
    ("model", "part", "bug"),
    CASES,
    ids=lambda one: one.stem if isinstance(one, Path) else str(getattr(one, "number", one)),
)
def test_a_model(model: Path, part: str, bug: models.Bug | None) -> None:
    found = models.check(model, part, bug, short=bug is None)
    assert found.as_expected, found.steps
    if bug is None:
        assert found.states > 100_000


def test_each_model_has_bugs_a_trace_of_each_and_a_page() -> None:
    page = (models.FOLDER / "README.md").read_text()
    assert MODELS
    for model in MODELS:
        assert f"[{model.name}]({model.name})" in page
        assert len(models.bugs(model)) > 3
        for bug in models.bugs(model):
            trace = (models.TRACES / f"{model.stem}-{bug.number:02}.txt").read_text()
            assert trace.startswith(f"{model.stem}, bug {bug.number}: {bug.what}.\n\n")
            assert len(trace.splitlines()) > 4
