"""A table with MemWAL writers, merged by the supervisor, is searched by the index that follows it.

Writers and supervisor are killed now and then. Each answer has the rows, and the distances, of the version of the table
that the index says it follows; LM_DISKANN_SECONDS=600 for ten minutes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import lance
import numpy as np
import pytest

from memwal_ops import run_job
from memwal_ops.formats.lm_diskann.source import Source
from memwal_ops.formats.lm_diskann.table import create
from memwal_ops.memwal import create_mem_wal
from tests.campaigns.lm_diskann.followed_table import DIMENSION, ROWS, SCHEMA, rows, version_of
from tests.campaigns.lm_diskann.test_searches import SECONDS, ended, start
from tests.support.lm_diskann.decoder import View
from tests.support.lm_diskann.folders import check_sound
from tests.support.seeds import CAMPAIGN_SEED

if TYPE_CHECKING:
    import subprocess

__all__ = ["ended"]

_ACTORS = "tests.campaigns.lm_diskann.followed_table"


def configuration(uri: str, folder: str, path: Path) -> str:
    path.write_text(f"""
state_dir: {path.parent}/state
http: {{enabled: false}}
defaults: {{poll: 1s}}
tables:
  - uri: {uri}
    name: rows
    jobs: {{merge: {{when: generations >= 1}}, expire: {{enabled: false}}}}
  - uri: {folder}
    name: index
    jobs:
      catchup: {{when: versions_behind >= 1}}
      merge: {{when: delta_bytes >= 100000}}
      compact: {{schedule: 5s}}
      gc: {{apply: true, schedule: 5s}}
""")
    return str(path)


@pytest.mark.long
@pytest.mark.timeout(1800 + 3 * SECONDS)
def test_answers_are_those_of_the_followed_version(
    folder: str, tmp_path: Path, ended: list[subprocess.Popen[Any]]
) -> None:
    random, uri = np.random.default_rng(1 + CAMPAIGN_SEED), str(tmp_path / "rows.lance")
    lance.write_dataset(rows(np.arange(ROWS), random), uri, schema=SCHEMA)
    create_mem_wal(uri)
    create(folder, dimension=DIMENSION, R=32, L=100, follows=Source(uri, "vec", "id"))
    assert run_job(folder, "catchup").exit_code == 0
    regions = [str(uuid4())[:-1] + parity for parity in "01"]
    config, log = configuration(uri, folder, tmp_path / "memwal.yaml"), tmp_path / "searches"

    def begin(what: int) -> subprocess.Popen[Any]:
        if what == len(regions):
            process = start(tmp_path / "supervisor", "memwal_ops", "run", "--config", config)
        else:
            seed = str(random.integers(1 << 30))
            process = start(tmp_path / f"writer-{what}", _ACTORS, "write", uri, regions[what], seed)
        ended.append(process)
        return process

    actors = [begin(what) for what in range(3)]
    searcher = start(log, _ACTORS, "search", uri, folder, "1")
    ended.append(searcher)
    until, kills, followed = time.monotonic() + SECONDS, 0, 0
    while time.monotonic() < until or len(versions(log)) < 4:
        time.sleep(random.uniform(3, 8))
        assert searcher.poll() is None, log.read_text()
        what = int(random.choice([0, 1, 2], p=[0.4, 0.4, 0.2]))
        if what == len(regions):
            # On a busy machine it would be killed before it got anywhere, again and again.
            if len(versions(log)) == followed:
                continue
            followed = len(versions(log))
        assert actors[what].poll() is None, "\n".join(path.read_text()[-3000:] for path in tmp_path.glob("writer-*"))
        actors[what].kill()
        actors[what].wait()
        actors[what] = begin(what)
        kills += 1
    for actor in actors[:2]:
        actor.kill()
    actors[2].send_signal(signal.SIGTERM)
    actors[2].wait(600)
    assert searcher.poll() is None, log.read_text()
    for place, name in ((uri, "merge"), (folder, "catchup"), (folder, "merge")):
        assert run_job(place, name).exit_code == 0
    check_sound(folder)
    view = View(folder)
    ids, vectors = version_of(uri, lance.dataset(uri).version)
    assert view.followed == lance.dataset(uri).version
    assert view.live_rows() == {int(one): tuple(vec.tolist()) for one, vec in zip(ids, vectors, strict=True)}
    print(f"{kills} kills, {log.read_text().splitlines()[-1]} searches, version")  # noqa: T201 - for the note


def versions(log: Path) -> set[int]:
    """The versions that answers came from so far."""
    whole = log.read_text().rpartition("\n")[0].splitlines() if os.path.exists(log) else []
    return {int(line.split()[1]) for line in whole if len(line.split()) == 2}
