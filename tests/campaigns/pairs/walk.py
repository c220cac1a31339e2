"""Walk the covering array; a row that fails is reduced, and printed as a program that runs alone.

``python -m tests.campaigns.pairs.walk``, or ``make pairs``: PAIRS_SEED chooses the array and its histories,
PAIRS_ROWS how many of its rows are run: the first ones, which cover most (0: all, then those of three dimensions).
PAIRS_SHORT=1: shorter histories, and all answers after each fourth step alone. What each row came to is a line of
``build/pairs/SEED.jsonl``; with numbers as arguments, these rows alone are run. PAIRS_DAMAGE=every: a file of each kind
of a namespace or index folder is damaged in each way, at the end of each row, which is minutes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.campaigns.pairs.covering import covering
from tests.campaigns.pairs.dimensions import LANCE, LANCE_RULES, MODELS, PLAINS, REMOTE, REMOTE_PAIRS, THREES
from tests.campaigns.pairs.rows import format_of, program_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MOST_LINES = 30


@dataclass
class Outcome:
    """What a row came to.

    Attributes:
        kind: empty where all was right; the same for the same fault.
        text: what was wrong.
        step: the last that began, with its source.
        seconds: of the processor.
        harm: how a file was damaged.
        refused: steps of writers that pylance refused.
    """

    kind: str = ""
    text: str = ""
    step: str = "start"
    source: str = ""
    seconds: float = 0.0
    harm: str = ""
    refused: list[str] = field(default_factory=list)

    @property
    def fault(self) -> str:
        """The kind without what differs between two rows with one fault."""
        return self.kind.split(":")[0]


class Process:
    """Runs rows in another process; a new one follows one that ended by a signal.

    Args:
        planted: the name of a bug in it.
    """

    def __init__(self, planted: str = "") -> None:
        self._process: subprocess.Popen[str] | None = None
        self._environment = {**os.environ, "RUST_LOG": "off", "PAIRS_PLANTED": planted}

    def run(self, row: Mapping[str, str], seed: str, kept: list[int] | None = None) -> Outcome:
        """Run a row; ``kept``: these of its steps alone."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.campaigns.pairs.process"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=self._environment,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"row": row, "seed": seed, "kept": kept}) + "\n")
        self._process.stdin.flush()
        outcome = Outcome()
        for line in self._process.stdout:
            told = json.loads(line)
            if "step" in told:
                outcome.step, outcome.source = told["step"], told["source"]
                outcome.harm = told.get("harm", outcome.harm)
            elif "refused" in told:
                outcome.refused.append(f"{told['refused']}: {told['by']}")
            else:
                outcome.kind, outcome.text, outcome.seconds = told["kind"], told["text"], told["seconds"]
                return outcome
        outcome.text = f"exit {self._process.wait()}"
        self.close()
        outcome.kind = f"{outcome.step.partition(' with ')[0]} ends by a signal"
        return outcome

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            with self._process:  # waits, and closes its pipes
                pass
            self._process = None


def rows(seed: int) -> Iterator[dict[str, str]]:
    """The arrays of two dimensions each, of Lance tables first; those on S3; then that of three dimensions."""
    for name in MODELS:
        yield from pairs(seed, name)
    yield from remote(seed)
    yield from threes(seed)


def pairs(seed: int, name: str) -> Iterator[dict[str, str]]:
    """Of a format: every two values are together."""
    model, rules = MODELS[name]
    for row in covering(model, rules, seed):
        yield {name: row[name] for name in model}


def threes(seed: int) -> Iterator[dict[str, str]]:
    """Of Lance tables: every three values of THREES are together; the other dimensions are drawn by the seed."""
    return _drawn(LANCE, THREES, seed, THREES)


def remote(seed: int) -> Iterator[dict[str, str]]:
    """Of Lance tables on S3: every two values of REMOTE_PAIRS are together."""
    return _drawn(REMOTE, REMOTE_PAIRS, seed)


def _drawn(
    model: Mapping[str, Sequence[str]], names: Sequence[str], seed: int, of_three: Sequence[str] = ()
) -> Iterator[dict[str, str]]:
    """Rows that cover some dimensions; the others are drawn by the seed."""
    chance = random.Random(seed)
    rules = [rule for rule in LANCE_RULES if {*rule.about} <= {*names}]
    for row in covering({name: model[name] for name in names}, rules, seed, of_three):
        for _ in range(1_000):
            whole = {name: row.get(name) or chance.choice(values) for name, values in model.items()}
            if not any(rule.broken(whole) for rule in LANCE_RULES):
                yield whole
                break


def reduced(
    row: Mapping[str, str], seed: str, outcome: Outcome, process: Process
) -> tuple[dict[str, str], list[int], Outcome]:
    """The fewest values other than the plainest, and the fewest steps, that fail in the same way."""
    now, (_, rules) = dict(row), MODELS[format_of(row)]
    for name, plain in PLAINS[format_of(row)].items():
        tried = {**now, name: plain}
        if now.get(name, plain) == plain or any(rule.broken(tried) for rule in rules):
            continue
        found = process.run(tried, seed)
        if found.fault == outcome.fault:
            now, outcome = tried, found
    kept = [*range(len(program_of(now, seed).steps))]
    for size in (8, 4, 2, 1):
        at = len(kept) - size
        while at >= 0:
            tried_steps = kept[:at] + kept[at + size :]
            found = process.run(now, seed, tried_steps)
            if found.fault == outcome.fault:
                kept, outcome = tried_steps, found
            at -= size
    return now, kept, outcome


def script(row: Mapping[str, str], seed: str, kept: list[int], outcome: Outcome) -> str:
    """The program that shows it: run it in an empty folder, from the root of the tree in PYTHONPATH."""
    program = program_of(row, seed)
    program.steps = [program.steps[at] for at in kept]
    differs = ", ".join(f"{name} {value}" for name, value in row.items() if value != PLAINS[format_of(row)][name])
    lines = [f"# {outcome.kind}: {outcome.text.splitlines()[-1] if outcome.text else ''}"[:300], f"# {differs}"]
    text = program.text()
    if outcome.harm:
        text += f"{outcome.harm}\n{outcome.source}\n"
    return "\n".join(lines) + "\n" + text


def main() -> int:
    """Walk; print what fails, and a table of kinds at the end."""
    seed, most = int(os.environ.get("PAIRS_SEED") or 0), int(os.environ.get("PAIRS_ROWS") or 0)
    damage = os.environ.get("PAIRS_DAMAGE")
    only = {int(one) for one in sys.argv[1:]}
    folder = Path("build/pairs")
    folder.mkdir(parents=True, exist_ok=True)
    journal = folder / f"{seed}.jsonl"
    process, kinds, seconds, done = Process(), Counter[str](), 0.0, 0
    try:
        for number, row in enumerate(rows(seed)):
            if most and number >= most:
                break
            if only and number not in only:
                continue
            if damage and format_of(row) != "lance":
                row["damage"] = damage
            name = f"{seed}-{number}"
            outcome = process.run(row, name)
            seconds += outcome.seconds
            done += 1
            with journal.open("a") as lines:
                lines.write(json.dumps({"number": number, "row": row, **asdict(outcome)}) + "\n")
            if not outcome.kind:
                continue
            kinds[outcome.fault] += 1
            print(f"row {number}: {outcome.kind}\n  {outcome.text[-800:]}\n  {outcome.step}: {outcome.source}")
            if kinds[outcome.fault] == 1 and not damage:
                row, kept, outcome = reduced(row, name, outcome, process)
                text = script(row, name, kept, outcome)
                (folder / f"{name}.py").write_text(text)
                print(text, flush=True)
    finally:
        process.close()
    print(f"PAIRS_SEED={seed}: {done} rows, {seconds:.0f} s of the processor; {kinds.total()} failed: {dict(kinds)}")
    return int(bool(kinds))


if __name__ == "__main__":
    sys.exit(main())
