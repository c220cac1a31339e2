"""No secret leaves the process: not on stdout or stderr, not in logs, errors or JSON, at no level."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from memwal_ops.core import run
from memwal_ops.errors import StorageError
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.run_cli import Outcome, run_here, run_process
from tests.support.s3_server import options_for
from tests.support.tables.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

# The documented examples, no real ones; one with characters that URLs and JSON write differently.
KEY_ID = "AKIAIOSFODNN7EXAMPLE"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "IQoJb3JpZ2luX2VjEXAMPLE//////////wEaCXVzLWVhc3QtMSJHMEUCIQ=="
FORMS = [KEY_ID, SECRET, TOKEN, SECRET.replace("/", "%2F"), SECRET.replace("/", "\\/"), TOKEN.replace("/", "%2F")]
CREDENTIALS = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET, "aws_session_token": TOKEN}


def given(options: dict[str, str]) -> list[str]:
    return [word for key, value in options.items() for word in ("--storage-option", f"{key}={value}")]


def assert_kept(*outcomes: Outcome) -> None:
    for outcome in outcomes:
        for form in FORMS:
            assert form not in outcome.out
            assert form not in outcome.err


@pytest.fixture
def remote(s3_bucket: str, s3_options: dict[str, str]) -> str:
    table = Workload(4, regions=2, base_rows=30).create(f"s3://{s3_bucket}/t.lance", s3_options).step(5)
    table.close()
    return table.uri


@pytest.mark.sampled(1)
@pytest.mark.s3
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
def test_options_of_commands_that_end_well(
    remote: str, s3_endpoint: str, capfd: pytest.CaptureFixture[str], as_json: list[str]
) -> None:
    options = given({**options_for(s3_endpoint), **CREDENTIALS})
    for command in (["inspect", remote], ["merge", remote, "--dry-run"], ["merge", remote]):
        outcome = run_here(capfd, "--log-level", "debug", *command, *as_json, *options)
        assert outcome.code == 0, outcome.err
        assert_kept(outcome)


@pytest.mark.long
@pytest.mark.s3
def test_secrets_of_the_environment(remote: str, s3_endpoint: str) -> None:
    """Lance's own log is the user's to switch on; credentials are in neither."""
    place = {key: value for key, value in options_for(s3_endpoint).items() if "key" not in key}
    secrets = {name.upper(): value for name, value in CREDENTIALS.items()}
    for command in ("verify", "merge"):  # inspect reads without pylance
        outcome = run_process(
            "--log-level", "debug", command, remote, "--json", *given(place), LANCE_LOG="debug", **secrets
        )
        assert outcome.code == 0, outcome.err
        assert "lance::events" in outcome.err
        assert_kept(outcome)


@pytest.mark.sampled(1)
@pytest.mark.s3
@pytest.mark.parametrize(
    ("status", "code", "exit_code"),
    [
        (403, "SignatureDoesNotMatch", 21),
        (400, "ExpiredToken", 21),
        (400, "SomethingNew", 20),
        (403, "AccessDenied", 21),
    ],
)
def test_refusals_that_quote_the_request(
    remote: str, s3_endpoint: str, capfd: pytest.CaptureFixture[str], status: int, code: str, exit_code: int
) -> None:
    with FaultyProxy(s3_endpoint) as proxy:
        said = (
            f"{code}</Code><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId><StringToSign>{SECRET}</StringToSign><Code>{code}"
        )
        proxy.faults = [Fault(method, ".", "before", status, said, 10**9) for method in ("GET", "HEAD", "PUT", "POST")]
        options = given({**options_for(proxy.endpoint), **CREDENTIALS})
        text = run_here(capfd, "--log-level", "debug", "inspect", remote, *options)
        as_json = run_here(capfd, "--log-level", "debug", "merge", remote, "--json", *options)
    assert (text.code, as_json.code) == (exit_code, exit_code), text.err
    assert as_json.document["error"]["exit_code"] == exit_code
    assert_kept(text, as_json)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "https"])
@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_credentials_in_the_uri(capfd: pytest.CaptureFixture[str], scheme: str, command: str) -> None:
    uri = f"{scheme}://{KEY_ID}:{SECRET.replace('/', '%2F')}@bucket/t.lance"
    for as_json in ([], ["--json"]):
        outcome = run_here(capfd, "--log-level", "debug", command, uri, *as_json)
        assert outcome.code == 2
        assert_kept(outcome)


@pytest.mark.parametrize(
    "arguments",
    [
        [SECRET],
        [f"={SECRET}"],
        [f"aws_secret_access_key={SECRET}", "--storage-option", f"aws_secret_access_key={TOKEN}"],
        [f"aws_secret_access_key={SECRET}", "--storage-option", f"secret_access_key={TOKEN}"],
        [f"no_such_option_secret={SECRET}", *given(CREDENTIALS)],
        [f"allow_http={SECRET}", *given(CREDENTIALS)],
        [f"aws_secret_access_key={SECRET}", "--no-such-flag"],
        [f"aws_secret_access_key={SECRET}", "--region", "no-uuid"],
    ],
    ids=["no key", "empty key", "twice", "two spellings", "unknown", "no boolean", "unknown flag", "bad region"],
)
def test_bad_options(capfd: pytest.CaptureFixture[str], no_aws_environment: None, arguments: list[str]) -> None:
    endpoint = given({"aws_endpoint": "http://127.0.0.1:9", "aws_region": "eu-west-1"})
    for as_json in ([], ["--json"]):
        outcome = run_here(capfd, "merge", "s3://bucket/t.lance", *endpoint, "--storage-option", *arguments, *as_json)
        assert outcome.code == 2, outcome.err
        if as_json:
            assert outcome.document["error"]["reason"] == "invalid_usage"
        assert_kept(outcome)


@pytest.mark.parametrize("raised", [StorageError, RuntimeError], ids=["expected", "unexpected"])
def test_an_error_that_carries_an_option(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[Exception]
) -> None:
    """A client library puts what it was given into its message: the value is known, so it is masked."""
    real = run.open_table

    def fail(uri: str, options: dict[str, str], **named: str) -> object:
        try:
            return real(uri, options, **named)
        except Exception as error:
            raise raised(f"cannot use {options} ({options['aws_secret_access_key']})") from error

    monkeypatch.setattr(run, "open_table", fail)
    outcome = run_here(capfd, "inspect", str(tmp_path / "none"), "--json", *given(CREDENTIALS))
    assert outcome.code == (20 if raised is StorageError else 1)
    assert outcome.document["error"]["message"]
    assert_kept(outcome)
    for line in outcome.err.splitlines():
        if line.startswith("{"):
            assert json.loads(line)["event"] == "unexpected_error"
