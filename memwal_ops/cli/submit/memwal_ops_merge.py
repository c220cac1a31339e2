"""The program for ``spark-submit``: runs ``memwal-ops merge --engine spark`` with the given arguments.

::

    spark-submit --master yarn "$(python -m memwal_ops.cli.submit)" s3://bucket/table.lance --json
"""

from __future__ import annotations

import sys

from memwal_ops.cli.main import main

if __name__ == "__main__":
    main(["merge", *sys.argv[1:], "--engine", "spark"])
