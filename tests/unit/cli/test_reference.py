"""The page of the commands has them all; a citation of statements is read as what it names."""

from __future__ import annotations

from pathlib import Path

from memwal_ops.cli.main import cli
from tools import requirements
from tools.build_docs import page, unfollowed, unknown_commands


def test_the_reference_has_every_command() -> None:
    text = page()
    with cli.make_context("memwal-ops", ["inspect", "x"]) as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            assert command is not None
            inner = getattr(command, "commands", None)
            for path in [f"{name} {one}" for one in inner] if inner else [name]:
                assert f"\n### {path}\n" in text, path


def test_a_citation_of_a_range_is_each_number_in_it(tmp_path) -> None:
    file = tmp_path / "module.py"
    file.write_text('"""Reads S0-050 to S0-053, and S3-013."""')
    assert requirements.citations(file) == {"S0-050", "S0-051", "S0-052", "S0-053", "S3-013"}


def test_a_page_whose_commands_no_test_runs_is_named(tmp_path: Path) -> None:
    pages = {"runbooks/one.md": "one", "runbooks/errors/20-storage.md": "20", "docs/two.md": "two", "docs/prose.md": ""}
    for name, text in pages.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"```sh\nmemwal-ops inspect {text}\n```\n" if text else "Only words.\n")
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test_names.py").write_text('assert "two.md"')
    assert [*unfollowed(tmp_path)] == ["docs/two.md", "runbooks/errors/20-storage.md", "runbooks/one.md"]
    (tests / "test_drills.py").write_text('def test_20_storage(drill: Drill):\n    with Page("one.md"): ...\n')
    assert [*unfollowed(tmp_path)] == ["docs/two.md"], "a name alone runs nothing"


def test_a_remedy_that_names_no_command_is_named(tmp_path: Path) -> None:
    right = "memwal-ops gc URI --apply. memwal-ops writes it. Run memwal-ops fleet status first."
    (tmp_path / "a.py").write_text(f'TEXT = """{right} memwal-ops mend URI, or memwal-ops gc URI --hard."""')
    assert [*unknown_commands(tmp_path)] == ["a.py: memwal-ops mend URI", "a.py: memwal-ops gc URI --hard"]
