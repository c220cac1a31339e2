"""List the licenses of what is installed with memwal-ops, and its software bill of materials (CycloneDX)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

# Without an obligation beyond their own text. Names as pip-licenses prints them: SPDX, or the classifier's.
_PERMISSIVE = re.compile(
    r"Apache-2\.0|Apache Software License|Apache License 2\.0|MIT|MIT License|BSD-[23]-Clause|3-Clause BSD License|"
    r"0BSD|PSF-2\.0|Python Software Foundation License|Zlib|CC0-1\.0|ISC|ISC License \(ISCL\)|BSD License|Unlicense"
)


def faults_of_licenses(rows: Iterable[Mapping[str, str]], notice: str) -> list[str]:
    """Return the packages whose license is not permissive, and that NOTICE does not name.

    Args:
        rows: ``Name`` and ``License``, as pip-licenses lists them.
        notice: the text of NOTICE.
    """
    return [
        f"{row['Name']} has the license {row['License']}: name it in NOTICE, or do without it"
        for row in rows
        if not is_permissive(row["License"]) and not re.search(rf"^  {re.escape(row['Name'])},", notice, re.MULTILINE)
    ]


def is_permissive(expression: str) -> bool:
    """Whether a license expression asks for nothing but its own text: each part of AND, and one of OR."""
    parts = re.split(r" AND |; ", expression.strip("()"))
    return all(any(_PERMISSIVE.fullmatch(one.strip("() ")) for one in part.split(" OR ")) for part in parts)


def licenses(python: str, notice: str, out: Path, name: str) -> None:
    """Write ``licenses.md`` and ``NAME.cdx.json`` about the environment of an interpreter.

    Raises:
        SystemExit: a license is neither permissive nor named in NOTICE.
    """
    listed = subprocess.run(
        [sys.executable, "-m", "piplicenses", "--python", python, "--from=mixed", "--format=json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(listed.stdout)
    faults = faults_of_licenses(rows, notice)
    if faults:
        sys.exit("\n".join(faults))
    lines = ["| package | version | license |", "|---|---|---|"]
    lines += [f"| {row['Name']} | {row['Version']} | {row['License']} |" for row in rows]
    (out / "licenses.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    bill = out / f"{name}.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--short-PURLs"]
    made = subprocess.run([*command, python], check=True, capture_output=True, text=True)
    bill.write_text(json.dumps(_without_places(json.loads(made.stdout)), indent=1) + "\n", encoding="utf-8")
    print(f"{len(rows)} packages: {out / 'licenses.md'}, {bill}")


def _without_places(document: dict[str, Any]) -> dict[str, Any]:
    """Leave out from which folder of this machine a package was installed."""
    for component in document["components"]:
        references = component.get("externalReferences", [])
        component["externalReferences"] = [one for one in references if not one["url"].startswith("file:")]
    return document
