"""The page of the commands has them all; a citation of statements is read as what it names."""

from __future__ import annotations

from memwal_ops.cli.main import cli
from tools import requirements
from tools.build_docs import page


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
