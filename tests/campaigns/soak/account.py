"""What happened in a soak: one file of lines that every process adds to, and the page that is made of it."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path


def note(folder: str, job: str, outcome: str, **numbers: int) -> None:
    """Say how one run of a job ended; one write, so that lines of several processes do not mix."""
    line = json.dumps({"job": job, "outcome": outcome, **numbers}) + "\n"
    handle = os.open(Path(folder) / "outcomes.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


@dataclass
class Account:
    """All that a page tells of one soak.

    Attributes:
        outcomes: per job how often its runs ended in which way.
        kills: per kind of process.
        peaks: per kind of process the most resident memory that was seen, in MiB.
    """

    name: str
    seconds: float = 0.0
    rows: int = 0
    rows_at_end: int = 0
    puts: int = 0
    deletes: int = 0
    uncertain: int = 0
    claims: int = 0
    fenced: int = 0
    versions: int = 0
    generations: int = 0
    objects_deleted: int = 0
    objects_left: int = 0
    bytes_left: int = 0
    unverified: int = 0
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kills: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0

    def take_notes(self, folder: str) -> None:
        """Add up what the processes said."""
        path = Path(folder) / "outcomes.jsonl"
        for text in path.read_text().split("\n")[:-1] if path.exists() else ():
            line = json.loads(text)
            self.outcomes[line["job"]][line["outcome"]] += 1
            self.objects_deleted += line.get("deleted", 0)

    def seen(self, kind: str, resident: int) -> None:
        """Another look at a process."""
        self.peaks[kind] = max(self.peaks[kind], resident >> 20)

    def page(self) -> str:
        """As Markdown."""
        rows = [
            ("time", f"{self.seconds / 60:.1f} min"),
            ("rows written, and acknowledged", f"{self.rows:,}"),
            ("puts and deletes acknowledged", f"{self.puts:,} and {self.deletes:,}"),
            ("operations cut off before an acknowledgement", f"{self.uncertain:,}"),
            ("rows that stand at the end", f"{self.rows_at_end:,}"),
            ("processes killed with SIGKILL", f"{self.kills.total():,}: {_counted(self.kills)}"),
            ("times a region was claimed; a writer that woke was fenced", f"{self.claims:,}; {self.fenced:,}"),
            ("versions committed", f"{self.versions:,}"),
            ("generations merged", f"{self.generations:,}"),
            ("objects deleted by gc runs that were not killed", f"{self.objects_deleted:,}"),
            ("objects left at the end", f"{self.objects_left:,}, {self.bytes_left / (1 << 20):.1f} MiB"),
            ("files of killed commits that pylance's clean-up took at the end", f"{self.unverified:,}"),
        ]
        if self.requests:
            rows += [
                ("requests through the proxy", f"{self.requests:,}"),
                ("faults", f"{self.faults.total():,}: {_counted(self.faults)}"),
            ]
        rows.append(("peak memory (MiB)", _counted(self.peaks)))
        lines = [f"| {self.name} | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]
        lines += ["", "| job | how its runs ended |", "|---|---|"]
        lines += [f"| {job} | {_counted(counter)} |" for job, counter in sorted(self.outcomes.items())]
        return "\n".join(lines)


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{what} {number:,}" for what, number in counter.most_common())
