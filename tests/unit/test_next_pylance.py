"""``make next-pylance``: what a release adds, drops and opens is printed, and so are the tests that fail with it."""

from __future__ import annotations

import lance

from tools.next_pylance import differences, failing
from tools.pylance_surface import surface


def test_what_differs_between_two_releases() -> None:
    pinned = {"release": "14.0.2", "names": {"write": "(data, uri)", "old": "()", "same": "(a)"}, "flags": [1, 2, 4]}
    found = {
        "release": "14.1.0",
        "names": {"write": "(data, uri, mode)", "new": "(b)", "same": "(a)"},
        "flags": [1, 2, 64],
    }
    assert [*differences(pinned, found)] == [
        "pylance 14.1.0, beside 14.0.2, which is installed",
        "new names: 1",
        "  new(b)",
        "gone names: 1",
        "  old()",
        "changed signatures: 1",
        "  write: (data, uri) -> (data, uri, mode)",
        "feature flags that it opens: 64",
        "feature flags that it does not open any more: 4",
    ]


def test_the_surface_of_the_installed_release() -> None:
    found = surface()
    assert found["release"] == lance.__version__
    assert {"write_dataset", "LanceDataset.cleanup_old_versions", "LanceOperation.Update"} <= found["names"].keys()
    assert "older_than" in found["names"]["LanceDataset.cleanup_old_versions"]
    assert {1, 4, 8, 16, 32, 256} <= {*found["flags"]}
    assert 64 not in found["flags"]
    assert "no other ones" in [*differences(found, found)][-1]


def test_failing_tests_of_a_run() -> None:
    output = "FAILED tests/a.py::test_x[1] - AssertionError: no\nERROR tests/b.py\n2 failed, 7 passed\n"
    assert failing(output) == ["tests/a.py::test_x[1]", "tests/b.py"]
