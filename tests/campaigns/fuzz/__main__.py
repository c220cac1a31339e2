"""``python -m tests.campaigns.fuzz``: the long run, or one input again."""

from __future__ import annotations

import argparse
import ast
import os
import secrets
import sys
import time

from tests.campaigns.fuzz.decoders import DECODERS
from tests.campaigns.fuzz.harness import Failure, fuzz


def plan(inputs: int, only: list[str] | None = None) -> dict[str, int]:
    """How many inputs each decoder gets."""
    wanted = only or list(DECODERS)
    shares = sum(DECODERS[name].share for name in wanted)
    return {name: max(1, round(inputs * DECODERS[name].share / shares)) for name in wanted}


def is_native(failure: Failure) -> bool:
    """Whether it happened in a native library, past anything that can be checked before."""
    return failure.ended and bool(DECODERS[failure.decoder].native)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=int(os.environ.get("FUZZ_INPUTS") or 1_000_000))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("FUZZ_SEED") or secrets.randbelow(2**32)))
    parser.add_argument("--decoder", action="append", choices=sorted(DECODERS))
    parser.add_argument("--replay", nargs=2, metavar=("DECODER", "LITERAL"), help="one input, as a Python literal")
    options = parser.parse_args()
    if options.replay:
        name, literal = options.replay
        print(DECODERS[name].run(ast.literal_eval(literal)))
        return 0
    again = f"FUZZ_SEED={options.seed} FUZZ_INPUTS={options.inputs} make fuzz"
    print(f"{options.inputs:,} inputs, seed {options.seed} (again: {again})", flush=True)
    started = time.monotonic()
    rates, failures = fuzz(plan(options.inputs, options.decoder), options.seed, jobs=os.cpu_count() or 2)
    for rate in sorted(rates, key=lambda one: one.decoder):
        print(rate)
    total = sum(rate.inputs for rate in rates)
    seconds = time.monotonic() - started
    ours = [failure for failure in failures if not is_native(failure)]
    print(f"{total:,} inputs in {seconds:.0f} s: {total / seconds:,.0f}/s; {len(ours)} failures")
    for name in sorted({failure.decoder for failure in failures if is_native(failure)}):
        count = sum(failure.decoder == name for failure in failures if is_native(failure))
        print(f"known: {name} stood still or ended its process {count} times: {DECODERS[name].native}")
    for failure in ours:
        print(f"\n{failure}")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
