"""Change the code that decides what is deleted or committed, and report which changes no test notices (make mutate).

mutmut makes the changes and runs the tests. Its settings are in pyproject.toml: ``[tool.mutmut]`` for all modules,
``[tool.memwal-ops.mutate]`` with the tests of each module. ``build/mutation/MODULE.json`` has the outcome of each
mutant, ``MODULE.txt`` the counts, and the diff of each mutant that no test killed.

Usage: python -m tools.mutate [--sample N] [--least PERCENT] [--again] [MODULE ...]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from mutmut.__main__ import _run
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import get_mutant_name

if TYPE_CHECKING:
    from collections.abc import Mapping

REPORTS = Path("build/mutation")
KILLED = {"killed", "timeout"}


def modules() -> dict[str, list[str]]:
    """The modules to mutate, as paths, with the tests of each."""
    with Path("pyproject.toml").open("rb") as file:
        found: dict[str, list[str]] = tomllib.load(file)["tool"]["memwal-ops"]["mutate"]
    return found


def mutate(path: str, tests: list[str], sample: int | None, *, again: bool) -> str:
    """Run the tests against mutants of a module, and write its report; return the counts as one line.

    Args:
        path: the module.
        tests: files and folders of tests.
        sample: how many mutants; None: all.
        again: only those that no test killed the last time; the others keep their outcome.
    """
    shutil.rmtree("mutants", ignore_errors=True)
    config().only_mutate = [path]
    config().pytest_add_cli_args_test_selection = tests
    report = REPORTS / Path(path).stem
    made = [
        get_mutant_name(Path(path), name) for name in mutate_file_contents(path, Path(path).read_text()).mutant_names
    ]
    # Those with the smallest hashes: the same ones in every run, evenly over the module.
    chosen = sorted(made, key=lambda name: hashlib.sha256(name.encode()).digest())[:sample]
    statuses: dict[str, str] = json.loads(report.with_suffix(".json").read_text()) if again else {}
    if again:
        chosen = [name for name in made if name in statuses and statuses[name] not in KILLED]
    if chosen:
        _run(chosen, 1)
        outcomes = SourceFileMutationData(path=path)
        outcomes.load()
        statuses |= {name: status_by_exit_code[outcomes.exit_code_by_key[name]] for name in chosen}
    counts = ", ".join(f"{number} {status}" for status, number in sorted(Counter(statuses.values()).items()))
    line = f"{path}: {len(statuses)} of {len(made)} mutants: {counts}"
    REPORTS.mkdir(parents=True, exist_ok=True)
    report.with_suffix(".json").write_text(json.dumps(statuses, indent=1))
    survivors = [(name, status) for name, status in sorted(statuses.items()) if status not in KILLED]
    diffs = [f"{name}: {status}\n{get_diff_for_mutant(name, path=path)}" for name, status in survivors]
    report.with_suffix(".txt").write_text("\n\n".join([line, *diffs]) + "\n")
    return line


def main() -> int:
    """Mutate the modules that are named, or all; each in a process of its own, since mutmut's state is global."""
    parser = argparse.ArgumentParser(description="Report which changes of the deciding code no test notices.")
    parser.add_argument("--sample", type=int, metavar="N", help="at most N mutants of each module")
    parser.add_argument("--least", type=int, default=0, metavar="PERCENT", help="fail if fewer of a module are killed")
    parser.add_argument("--again", action="store_true", help="only those that no test killed the last time")
    parser.add_argument("module", nargs="*", help="file name without .py; all if none is given")
    args = parser.parse_args()
    chosen = {path: tests for path, tests in modules().items() if not args.module or Path(path).stem in args.module}
    if not chosen:
        parser.error(f"no such module: {' '.join(args.module)}")
    if len(chosen) == 1:
        (path, tests), *_ = chosen.items()
        print(mutate(path, tests, args.sample, again=args.again))
        return int(not are_noticed(json.loads((REPORTS / f"{Path(path).stem}.json").read_text()), args.least))
    options = [*([f"--sample={args.sample}"] if args.sample else []), *(["--again"] if args.again else [])]
    command = [sys.executable, "-m", "tools.mutate", f"--least={args.least}", *options]
    failed = [path for path in chosen if subprocess.run([*command, Path(path).stem], check=False).returncode]
    print(f"{len(chosen)} modules; too few mutants are killed of: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def are_noticed(statuses: Mapping[str, str], least: int) -> bool:
    """Whether at least that percentage of the mutants was killed."""
    return sum(status in KILLED for status in statuses.values()) * 100 >= least * len(statuses)


if __name__ == "__main__":
    sys.exit(main())
