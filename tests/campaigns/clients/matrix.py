"""The matrix: who wrote a table, who uses it, and the jobs between: ``make client-matrix``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.campaigns.clients import client as pinned
from tests.campaigns.clients.asking import ENDED, Outcomes, ask
from tests.campaigns.clients.environments import RELEASES, NoEnvironmentError, python_of, remove
from tests.campaigns.clients.expected import is_unreadable, unexpected
from tests.campaigns.clients.jobs import run_all
from tests.campaigns.clients.page import PAGE, replaced

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

RESULTS = Path(__file__).parents[3] / "build" / "client-matrix.json"
ELSEWHERE = frozenset({"bases", "bases-of-a-table", "clone"})
"""Kinds whose files are elsewhere, too: a copy of such a table shares them."""


@dataclass
class Written:
    """Tables that a release wrote, once as they were, and once after our jobs.

    Attributes:
        kinds: those that it can write.
        jobs: by kind and job, what our jobs came to.
    """

    release: str
    home: Path
    kinds: list[str] = field(default_factory=list)
    jobs: Outcomes = field(default_factory=dict)

    @property
    def before(self) -> Path:
        """As they were written."""
        return self.home / "before"

    @property
    def after(self) -> Path:
        """After our jobs."""
        return self.home / "after"

    def maintained(self) -> list[str]:
        """Where those are on which our jobs ran."""
        return [str((self.before if kind in ELSEWHERE else self.after) / f"{kind}.lance") for kind in self.kinds]


def write(release: str, home: Path, kinds: Iterable[str] = (), without: Collection[str] = ()) -> Written:
    """Let a release write tables, and run our jobs on copies of them. No kinds: all that it knows."""
    made = Written(release, home)
    made.before.mkdir(parents=True)
    python = python_of(release)
    wanted = [one for one in [*kinds] or ask(python, "kinds", made.before) if one not in without]
    outcomes = ask(python, "write", made.before, wanted)
    made.kinds = [kind for kind, steps in outcomes.items() if steps.get("write") == "ok"]
    shutil.copytree(made.before, made.after)
    for kind, uri in zip(made.kinds, made.maintained(), strict=True):
        made.jobs[kind] = run_all(uri)
        pinned.Model(uri).merged()
    return made


@dataclass
class Used:
    """What a release did with tables as they were written, and with those that our jobs had in hand.

    Attributes:
        maintained: what it did with those that it compacted itself before; only of kinds that differ.
    """

    control: Outcomes
    after: Outcomes
    home: Path
    maintained: Outcomes = field(default_factory=dict)

    def worse(self) -> list[str]:
        """Steps that it can do with a table of its own, compacted or not, and not after our jobs."""
        return [
            f"{kind} {step}: {self.after.get(kind, {}).get(step, ENDED)}"
            for kind, steps in self.control.items()
            for step, outcome in steps.items()
            if outcome == "ok" and self.after.get(kind, {}).get(step) != "ok"
            if ENDED not in steps
            if kind not in self.maintained or self.maintained[kind].get(step) == "ok"
        ]


def use(written: Written, release: str, home: Path) -> Used:
    """Let a release use copies of both."""
    home.mkdir(parents=True)
    control, after = (shutil.copytree(one, home / one.name) for one in (written.before, written.after))
    kinds = [kind for kind in written.kinds if kind not in ELSEWHERE]
    python = python_of(release)
    used = Used(ask(python, "use", control, kinds), ask(python, "use", after, kinds), home)
    if differ := sorted({one.split()[0] for one in used.worse()}):
        maintained = shutil.copytree(written.before, home / "maintained")
        used.maintained = ask(python, "use-maintained", maintained, differ)
    return used


def again(used: Used) -> tuple[Outcomes, list[str]]:
    """Our jobs on what a release went on with, and what the pinned release then does not read as it should."""
    uris = {
        kind: str(used.home / "after" / f"{kind}.lance") for kind, steps in used.after.items() if ENDED not in steps
    }
    return {kind: run_all(uri) for kind, uri in uris.items()}, pinned_reads(uris.values())


def pinned_reads(uris: Iterable[str]) -> list[str]:
    """What the pinned release misses: rows, or keys by an index."""
    mine = pinned.Pylance()
    found = []
    for uri in uris:
        model, kind = pinned.Model(uri), Path(uri).stem
        for check in () if is_unreadable(kind) else (pinned.check_rows, pinned.check_keys):
            outcome = pinned.attempt(partial(check, mine, uri, model))
            found += [f"{kind}: {outcome}"] if outcome != "ok" else []
    return found


def run(writer: str, home: Path, kinds: list[str]) -> dict[str, Any]:
    """All of it with one release that writes and goes on; what is told of it in the page."""
    written = write(writer, home / "written", kinds)
    missed = pinned_reads(written.maintained())
    used = use(written, writer, home / "used")
    jobs, wrong = again(used)
    return {
        "kinds": written.kinds,
        "faults": [
            *unexpected(written.jobs),
            *missed,
            *used.worse(),
            *unexpected(jobs),
            *wrong,
        ],
        "refused": sorted({kind for kind, outcomes in written.jobs.items() if _refused(outcomes)}),
        "own": {
            kind: sorted(step for step, outcome in steps.items() if outcome != "ok")
            for kind, steps in used.control.items()
            if any(outcome != "ok" for outcome in steps.values())
        },
    }


def _refused(outcomes: dict[str, str]) -> bool:
    return any(outcome.startswith("refused") for outcome in outcomes.values())


def main() -> int:
    """Run releases, write what they came to into the page, and remove the environments that were made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="append", choices=RELEASES, help="only this one; several times: these")
    parser.add_argument("--kind", action="append", help="only tables of this kind; several times: these")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    given = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    skipped = 0
    for release in given.release or RELEASES:
        with tempfile.TemporaryDirectory() as home:
            try:
                results[release] = run(release, Path(home), given.kind or [])
            except NoEnvironmentError as error:
                _say(f"{release}: skipped: {error}")
                skipped += 1
                continue
        for fault in results[release]["faults"]:
            _say(f"{release}: {fault}")
        found = results[release]
        _say(f"{release}: {len(found['kinds'])} kinds of tables, {len(found['faults'])} faults")
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1))
        PAGE.write_text(replaced(PAGE.read_text(), results))
    if not given.keep:
        remove()
    return int(skipped > 0 or any(one["faults"] for one in results.values()))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
