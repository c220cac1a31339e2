"""A memwal-ops command whose Spark loses a process.

``python -m tests.campaigns.crash.spark_deaths WHO WHERE ARGUMENTS...``

WHO is ``jvm`` (the driver's, which on ``local[...]`` is the executor's, too) or ``worker`` (the Python process of
every attempt). WHERE is the stage in whose task it is killed, after the task's work is done: ``check`` (the first
question to an executor), ``keys``, ``delete``, ``write``; or ``commit``: just before the driver publishes. With
``shuffle-`` before it, executors resolve the keys, not the driver; ``keys`` has no task otherwise.
"""

from __future__ import annotations

import sys
from typing import Any

import psutil

from memwal_ops.cli.main import main
from memwal_ops.core.spark import session
from memwal_ops.formats.lance.engines.spark import engine, tasks

STAGES = {
    "delete": (engine, "key_scanner"),
    "write": (engine, "group_writer"),
    "shuffle-keys": (tasks, "key_reader"),
    "shuffle-delete": (tasks, "deleter"),
    "shuffle-write": (tasks, "writer"),
}


def deadly(inner: Any, who: str) -> Any:
    """A task that does its work, and kills then."""

    def work_and_kill(batches: Any) -> Any:
        import os
        import time

        import psutil

        results = list(inner(batches))
        if results:
            if who == "worker":
                os.kill(os.getpid(), 9)
            (java,) = (one for one in psutil.Process().parents() if "java" in one.name())
            java.kill()
            time.sleep(60)
        yield from results

    return work_and_kill


def put(who: str, where: str) -> None:
    """Arrange for the death."""
    if where == "check":
        session._versions = deadly(iter, who)  # its answer does not matter
    elif where == "commit":
        commit = engine.commit_pass

        def kill_and_commit(*arguments: Any) -> int:
            (java,) = (one for one in psutil.Process().children(recursive=True) if "java" in one.name())
            java.kill()
            java.wait()
            return commit(*arguments)

        engine.commit_pass = kill_and_commit
    else:
        place, name = STAGES[where]
        made = getattr(place, name)
        setattr(place, name, lambda *given: deadly(made(*given), who))
    if where.startswith("shuffle-"):
        engine.fits = lambda *_: False


if __name__ == "__main__":
    put(sys.argv[1], sys.argv[2])
    main(sys.argv[3:])
