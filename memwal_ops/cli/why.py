"""``memwal-ops why``: all reasons that something is kept or may go."""

from __future__ import annotations

import json

import click

from memwal_ops.cli.gc import gc_options
from memwal_ops.cli.options import json_output, storage_options
from memwal_ops.cli.text import counted, paragraph, size_text
from memwal_ops.core.table import open_table
from memwal_ops.jobs import gc as gc_job
from memwal_ops.jobs import why as job
from memwal_ops.jobs.collectables import Verdict

_VERDICTS = {Verdict.DELETE: "may go", Verdict.HELD: "is kept", Verdict.UNKNOWN: "is unknown, and kept"}


@click.command(short_help="Say why something is still here, or may go.")
@click.argument("uri")
@click.argument("target", metavar="PATH_OR_REGION[/GENERATION]")
@gc_options
@storage_options
@json_output
def why(
    uri: str,
    target: str,
    careful: gc_job.GcOptions,
    storage_options: dict[str, str],
    as_json: bool,
) -> int:
    """Say of a region, a generation or a file of the table at URI why it is still here, or may go. Changes nothing.

    Each line is one condition of its deletion: + is met, - is not, and says by what or by whom. gc deletes
    what meets all of them.

    Exit codes: 0; 25 nothing stands there; any other code: see the README.
    """
    explanation = job.explain(open_table(uri, storage_options), target, careful)
    click.echo(json.dumps(explanation.to_json(), indent=2) if as_json else describe(explanation))
    return 0


def describe(explanation: job.Explanation) -> str:
    """The reasons for a person."""
    return "\n\n".join(_reason(one) for one in explanation.reasons)


def _reason(reason: job.Reason) -> str:
    item = reason.item
    verdict = _VERDICTS[item.verdict]
    name = (
        item.path
        if reason.items == 1
        else f"{item.path} and {counted(reason.items - 1, 'more like it', 'more like it')}"
    )
    lines = [f"{name} ({size_text(reason.bytes)}) {verdict}:"]
    lines += [paragraph(f"{'+' if gate.met else '-'} {gate.text}", indent="  ", hanging="  ") for gate in item.gates]
    return "\n".join(lines)
