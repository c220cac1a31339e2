"""From an Airflow connection to storage options, without Airflow: nothing ignored, nothing shown."""

from __future__ import annotations

from typing import Any

import pytest

from memwal_ops.airflow.connections import check_public, secrets_of, storage_options
from memwal_ops.errors import InvalidUsageError

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


def options(kind: str = "aws", login: str | None = None, password: str | None = None, **extra: Any) -> dict[str, str]:
    return storage_options("store", kind=kind, login=login, password=password, extra=extra)


def test_aws_as_airflow_itself_reads_it() -> None:
    found = options(
        "aws",
        "AKIA",
        SECRET,
        region_name="eu-west-1",
        endpoint_url="http://127.0.0.1:9000",
        role_arn="arn:aws:iam::1:role/memwal",
        aws_session_token="TOKEN",
        profile_name="ops",
        storage_options={"allow_http": True, "connect_timeout": "5s"},
    )
    assert dict(found) == {
        "aws_access_key_id": "AKIA",
        "aws_secret_access_key": SECRET,
        "aws_session_token": "TOKEN",
        "aws_region": "eu-west-1",
        "aws_endpoint": "http://127.0.0.1:9000",
        "aws_role_arn": "arn:aws:iam::1:role/memwal",
        "aws_profile": "ops",
        "allow_http": "true",
        "connect_timeout": "5s",
    }


def test_an_empty_aws_connection_leaves_all_to_the_environment() -> None:
    assert options("aws", "", None) == {}


def test_any_other_type_holds_storage_options_in_its_extra() -> None:
    found = options("generic", google_service_account="/etc/key.json", storage_options={"timeout": 30})
    assert dict(found) == {"google_service_account": "/etc/key.json", "timeout": "30"}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"kind": "aws", "config_kwargs": {"password": SECRET}}, "config_kwargs"),
        ({"kind": "generic", "login": "me", "password": SECRET}, "login or password"),
        ({"kind": "aws", "storage_options": SECRET}, "must be an object"),
        ({"kind": "generic", "account_key": [SECRET]}, "account_key must be a string"),
    ],
)
def test_what_would_be_ignored_is_refused_and_not_quoted(given: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidUsageError, match=word) as refused:
        options(**given)
    assert "'store'" in str(refused.value)
    assert SECRET not in f"{refused.value} {refused.value.remedy}"


def test_options_show_no_secret_when_printed() -> None:
    found = options("aws", "AKIA", SECRET)
    assert SECRET not in f"{found!r} {found}"
    assert secrets_of(found) == ["AKIA", SECRET]


@pytest.mark.parametrize("key", ["aws_secret_access_key", "AWS_SESSION_TOKEN", "account_key", "sas_token"])
def test_a_secret_among_a_tasks_own_options_is_refused(key: str) -> None:
    with pytest.raises(InvalidUsageError, match=key) as refused:
        check_public({"aws_region": "eu-west-1", key: SECRET})
    assert SECRET not in str(refused.value)
    check_public({"aws_region": "eu-west-1", "allow_http": "true", "aws_endpoint": "http://127.0.0.1:9000"})
    for value in (f"http://user:{SECRET.replace('/', '%2F')}@host", f"Authorization: Bearer {SECRET}"):
        with pytest.raises(InvalidUsageError, match="aws_endpoint") as refused:
            check_public({"aws_endpoint": value})
        assert SECRET[:8] not in str(refused.value)
