"""How many object-store requests a command makes: ``python -m benchmarks.requests``.

Counted at the server, so pylance's own are among them; unlike seconds, they do not depend on the
machine. Prints Markdown.
"""

from __future__ import annotations

import logging
import re
from collections import Counter

import boto3
from moto.server import ThreadedMotoServer

from benchmarks.workload import Shape, make
from memwal_ops import open_table
from memwal_ops.jobs import inspect, merge

_METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
_KEY = "bench"


class Counting(logging.Handler):
    """Counts the lines that the server writes for each request."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """One request."""
        found = re.search(r'"([A-Z]+) ', record.getMessage())
        if found is not None:
            self.counts[found[1]] += 1


def main() -> None:
    """Start a server, run the commands, print the table."""
    counting = Counting()
    logger = logging.getLogger("werkzeug")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(counting)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id=_KEY, aws_secret_access_key=_KEY
        ).create_bucket(Bucket="bench")
        options = {
            "aws_endpoint": endpoint,
            "aws_region": "us-east-1",
            "allow_http": "true",
            "aws_access_key_id": _KEY,
            "aws_secret_access_key": _KEY,
        }
        print("| command | table | " + " | ".join(_METHODS) + " | all |\n|---|---|" + "---|" * (len(_METHODS) + 1))
        for regions, generations in ((1, 1), (1, 5), (1, 20), (4, 5)):
            uri = f"s3://bench/{regions}-{generations}.lance"
            make(uri, Shape(base=20_000, regions=regions, generations=generations, rows=500), storage_options=options)
            table = f"{regions} regions x {generations} generations"
            counting.counts.clear()
            inspect.inspect(open_table(uri, options))
            _row("inspect", table, counting.counts)
            counting.counts.clear()
            merge.apply(open_table(uri, options), merge.MergeOptions())
            _row("merge", table, counting.counts)
            counting.counts.clear()
            merge.apply(open_table(uri, options), merge.MergeOptions())
            _row("merge (nothing waits)", table, counting.counts)
    finally:
        server.stop()


def _row(command: str, table: str, counts: Counter[str]) -> None:
    cells = [command, table, *(str(counts[method]) for method in _METHODS), f"**{counts.total()}**"]
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
