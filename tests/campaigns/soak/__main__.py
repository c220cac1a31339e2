"""``make soak``: MINUTES in all (30), on SOAK_ON (local, s3; both by halves), with SOAK_SEED (1).

Prints the page of README.md; where something is wrong, the folder of the run stays.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile

from tests.campaigns.soak.soak import Form, soak

_PLACES = ("local", "s3")


def main() -> None:
    """One soak after the other."""
    minutes = float(os.environ.get("MINUTES") or 30)
    places = [one for one in (os.environ.get("SOAK_ON") or ",".join(_PLACES)).split(",") if one]
    seed = int(os.environ.get("SOAK_SEED") or 1)
    if not set(places) <= set(_PLACES):
        sys.exit(f"SOAK_ON is one of {', '.join(_PLACES)}, or both with a comma.")
    root = tempfile.mkdtemp(prefix="soak-")
    for on in places:
        form = Form(on, 60 * minutes / len(places), seed, stable_row_ids=seed % 2 == 0)
        _say(f"{on}: {form.seconds / 60:.1f} min in {root}/{on}, seed {seed}")
        page = soak(form, f"{root}/{on}", say=_say).page()
        sys.stdout.write(f"{page}\n\n")
        sys.stdout.flush()
    shutil.rmtree(root)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
