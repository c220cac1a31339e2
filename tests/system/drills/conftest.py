"""The drill of the page that a test is named for, and a table on S3 behind a proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.faulty_proxy import FaultyProxy
from tests.support.s3_server import ACCESS_KEY, REGION, SECRET_KEY
from tests.system.drills.drill import ERRORS, Drill
from tests.system.drills.error_pages import Page
from tests.system.drills.tables import with_generations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.tables.workload import Workload


@pytest.fixture
def drill(
    request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Drill]:
    """For ``test_03_table_not_found``: runbooks/errors/03-table_not_found.md, which the test follows to its end."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-", 1)
    made = Drill(Page(ERRORS / f"{name}.md"), capfd, monkeypatch)
    yield made
    assert made.followed, "commands of the page were left out"


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_endpoint) as running:
        yield running


@pytest.fixture
def remote(
    drill: Drill, proxy: FaultyProxy, s3_bucket: str, s3_options: dict[str, str], no_aws_environment: None
) -> Workload:
    """A table with two generations, nothing merged; the environment, which workers inherit, leads through the proxy."""
    made = with_generations(f"s3://{s3_bucket}/t.lance", s3_options)
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_REGION": REGION}
    drill.given(URI=made.uri, REGION=made.regions[0], AWS_ENDPOINT_URL=proxy.endpoint, **keys)
    return made
