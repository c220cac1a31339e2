"""``make release-check``: a step that fails and a figure that is worse are named; what passed is not run again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import figures
from memwal_ops.version import __version__
from tools import release_check
from tools.release_check import Step

ROOT = Path(__file__).parents[3]


def step(name: str, code: str, words: str = "") -> Step:
    return Step(name, (sys.executable, "-c", f"print({words!r})\n{code}"), f"what {name} is for")


@pytest.fixture
def steps(tmp_path: Path) -> list[Step]:
    """The second fails until a file ``fixed`` is there; each notes that it ran."""
    ran = f"open({str(tmp_path / 'ran')!r}, 'a').write"
    fixed = f"import os, sys; {ran}('b'); sys.exit(3 * (not os.path.exists({str(tmp_path / 'fixed')!r})))"
    return [
        step("a", f"{ran}('a')", "fine"),
        step("b", fixed, "a|b is wrong\nmake: *** [b] Error 3"),
        step("c", f"{ran}('c')"),
    ]


@pytest.fixture
def check(steps: list[Step], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release_check, "_git", lambda *words: "c0ffee\n" if words[0] == "rev-parse" else "")

    def run(*words: str) -> tuple[int, str, str]:
        (tmp_path / "ran").write_text("")
        code = release_check.main(words, steps, tmp_path)
        return code, (tmp_path / "ran").read_text(), (tmp_path / "release-check.md").read_text()

    return run


def test_a_step_that_fails_is_named_and_stops_no_other(check, tmp_path: Path) -> None:
    code, ran, page = check()
    assert (code, ran) == (1, "abc")
    assert "| b: what b is for | failed | 0.0 | a\\|b is wrong |" in page
    assert "| a: what a is for | passed | 0.0 | fine |" in page
    assert (tmp_path / "release-check/b.log").read_text().startswith("a|b is wrong")
    # what passed on this commit is not run again
    (tmp_path / "fixed").touch()
    code, ran, page = check()
    assert (code, ran) == (0, "b")
    assert page.count("| passed |") == 3


def test_a_step_does_not_get_the_words_of_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``make release-check ONLY=mutate`` is no ``make mutate ONLY=mutate``, which names a module."""
    monkeypatch.setattr(release_check, "_git", lambda *_: "c0ffee")
    monkeypatch.setenv("MAKEFLAGS", " -- ONLY=mutate")
    monkeypatch.setenv("ONLY", "mutate")
    monkeypatch.setenv("PYTEST_ARGS", "-n 3")
    code = "import os; assert not {'MAKEFLAGS', 'ONLY'} & os.environ.keys() and os.environ['PYTEST_ARGS'] == '-n 3'"
    assert release_check.main(["--only", "mutate"], [step("mutate", code)], tmp_path) == 0


def test_parts_of_the_list(check, tmp_path: Path) -> None:
    code, ran, page = check("--only", "a")
    assert (code, ran, page.count("| not run |")) == (0, "a", 2)
    code, ran, page = check("--from", "b", "--skip", "b=no store here")
    assert (code, ran) == (0, "c")
    assert "| b: what b is for | skipped |  | no store here |" in page
    assert check("--only", "b")[:2] == (1, "b")
    with pytest.raises(SystemExit):
        check("--skip", "b")


@pytest.mark.parametrize(("rev", "status"), [("another\n", ""), ("c0ffee\n", " M tools/dist.py\n")])
def test_other_code_is_checked_anew(check, monkeypatch: pytest.MonkeyPatch, rev: str, status: str) -> None:
    assert check("--only", "a")[1] == "a"
    monkeypatch.setattr(release_check, "_git", lambda *words: rev if words[0] == "rev-parse" else status)
    assert check()[1] == "abc"


def test_tests_that_all_were_skipped_checked_nothing(steps: list[Step], check) -> None:
    steps[0] = step("a", "", "== 24 skipped, 9000 deselected in 3.10s ==")
    steps[2] = step("c", "", "== 3 passed, 24 skipped in 3.10s ==")
    _code, _ran, page = check()
    assert "| a: what a is for | failed | 0.0 | == 24 skipped" in page
    assert "| c: what c is for | passed |" in page


def test_what_a_commit_lacks_to_become_a_release() -> None:
    files = [f"figures-{__version__}.json"], [f"fleet-of-{__version__}.tar.gz"]
    changelog = f"# Changelog\n\n## Unreleased\n\n## {__version__} - 2026-12-01\n\n- Jobs.\n\n## 0.0.1\n\n- Nothing.\n"
    assert release_check.faults_of_tree("", changelog, *files) == []
    assert release_check.faults_of_tree(" M README.md\n", changelog, *files) == ["not all is committed"]
    for text in (changelog.replace(__version__, "0.0.9"), changelog.replace("- Jobs.\n", "")):
        (fault,) = release_check.faults_of_tree("", text, *files)
        assert fault.startswith(f"CHANGELOG.md has no section {__version__}")
    assert len(release_check.faults_of_tree("", changelog, [], [])) == 2


def test_each_step_is_a_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for one in release_check.STEPS:
        if one.command[0] == "make":
            assert f"\n{one.command[1]}:" in makefile, one.name


def test_a_figure_that_is_worse_by_a_fifth_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    then = {"requests: merge": 30.0, "requests: poll": 2.0, "merge / floor: processor": 1.25}
    (tmp_path / "figures-0.0.9.json").write_text(json.dumps({"release": "0.0.9", "figures": then}))
    against = ["figures", "--against", str(tmp_path / "figures-0.0.9.json"), "--out", str(tmp_path / "now.json")]
    monkeypatch.setattr(sys, "argv", against)

    def of(**changed: float) -> tuple[int, str]:
        now = {**then, **{name.replace("_", " "): value for name, value in changed.items()}}
        monkeypatch.setattr(figures, "measure", lambda: now)
        return figures.main(), capsys.readouterr().out.splitlines()[-1]

    assert of() == (0, "3 figures, none worse by more than 15% than those of figures-0.0.9.json")
    assert of(**{"requests: merge": 36.0}) == (1, "worse by more than 15%: requests: merge +20% (30, now 36)")
    assert of(**{"merge / floor: processor": 1.5})[1].endswith("merge / floor: processor +20% (1.25, now 1.5)")
    assert of(**{"requests: poll": 4.0, "merge / floor: processor": 1.4})[0] == 0, "two ticks of a clock, and 12 %"
    assert of(**{"requests: poll": 5.0})[0] == 1
    assert json.loads((tmp_path / "now.json").read_text())["figures"]["requests: poll"] == 5.0
    assert figures.regressions(then, {"requests: poll": 1.0, "requests: merge": 1.0}) == [
        "merge / floor: processor is not measured"
    ]


def test_the_last_release_is_the_one_before_this(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("0.1.0", "0.9.0", "0.10.0"):
        (tmp_path / f"figures-{release}.json").touch()
    monkeypatch.setattr(figures, "__version__", "0.10.0")
    assert figures.newest(tmp_path).name == "figures-0.9.0.json"
    monkeypatch.setattr(figures, "__version__", "0.1.0")
    assert figures.newest(tmp_path).name == "figures-0.1.0.json"


def test_the_figures_of_this_release_are_kept() -> None:
    kept = json.loads((ROOT / "benchmarks" / f"figures-{__version__}.json").read_text())
    assert kept["release"] == __version__
    assert {name.partition(":")[0] for name in kept["figures"]} >= {"requests", "merge / floor"}


def test_a_sample_of_mutants_that_few_tests_notice_is_a_failure() -> None:
    pytest.importorskip("mutmut", reason="mutmut is not installed: make mutate")
    from tools.mutate import are_noticed

    statuses = {"a": "killed", "b": "timeout", "c": "survived", "d": "no tests"}
    assert are_noticed(statuses, 50)
    assert not are_noticed({**statuses, "e": "survived"}, 50)
    assert are_noticed({}, 50)
