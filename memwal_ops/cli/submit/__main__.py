"""Print the path of the program for ``spark-submit``."""

from __future__ import annotations

import os

from memwal_ops.cli.printing import echo

if __name__ == "__main__":
    echo(os.path.join(os.path.dirname(os.path.abspath(__file__)), "memwal_ops_merge.py"))
