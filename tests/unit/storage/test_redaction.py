"""Secrets are masked wherever they stand; the words of messages are kept."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import memwal_ops
from memwal_ops.storage import options
from memwal_ops.storage.options import MASK, redact, remember
from memwal_ops.supervisor import config


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process had registered as secrets would be masked here."""
    monkeypatch.setattr(options, "_known", type(options._known)())


KEYS = (
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "azure_storage_account_key",
    "azure_storage_sas_token",
    "google_service_account_key",
    "header.x-api-key",
    "x-amz-security-token",
)
MADE_BY_MACHINES = st.text(string.ascii_letters + string.digits + "/+=_-.", min_size=8, max_size=80).filter(
    lambda text: len(text) > 12 or any(letter in text for letter in string.digits)
)
FORMS = (
    "{key}={value}",
    "{key} = {value} is refused",
    "?a=b&{key}={value}&c=d",
    "'{key}': '{value}'",
    '{{"{key}": "{value}"}}',
    "{key}: {value}",
    "{key}: {value}\nHost: bucket",
    "{key}: {value} is refused",
    "request with {key}: {value}, {key}: {value}",
    "Authorization: Bearer {value} of {key}",
    "authorization: token {value}",
    "https://user:{value}@host of {key}",
)
WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=12)
SENTENCES = st.lists(WORDS, min_size=2).map(" ".join).map(lambda text: f"{text[:1].upper()}{text[1:]}.")


@given(st.sampled_from(KEYS), MADE_BY_MACHINES, st.sampled_from(FORMS))
def test_what_a_key_is_followed_by_is_masked(key: str, value: str, form: str) -> None:
    if "@host" in form:
        value = value.replace("/", "%2F")
    masked = redact(form.format(key=key, value=value))
    assert MASK in masked
    assert value not in masked.replace(MASK, "\0").replace(key, "\0")


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "_known", type(options._known)())


@pytest.mark.usefixtures("forgotten")
@given(st.text(min_size=8, max_size=80), st.text(), st.text())
def test_a_registered_value_is_masked_in_any_text(value: str, before: str, after: str) -> None:
    remember([value])
    try:
        assert value not in redact(f"{before}{value}{after}").replace(MASK, "\0")
    finally:
        options._known.clear()


@given(st.sampled_from(KEYS), SENTENCES)
def test_sentences_about_a_key_are_kept(key: str, sentence: str) -> None:
    for text in (f"memwal.yaml:3: tables[0].storage_options.{key}: {sentence}", f"storage_credentials: {sentence}"):
        assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "options.aws_access_key_id: the environment variable KEY is not set",
        "storage_credentials: Cannot list 's3://bucket/table.lance'",
    ],
)
def test_words_of_messages_are_kept(text: str) -> None:
    assert redact(text) == text


def test_what_a_configuration_file_is_refused_for_keeps_its_words() -> None:
    """The path of a value, which may be a secret's, is before each of these messages."""
    broken = []
    for file in Path(config.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            text = _literal(node)
            if text[:1].isupper() and " " in text and "\n" not in text:
                message = f"storage_options.{KEYS[0]}: {text}"
                if redact(message) != message:
                    broken.append(text)
    assert broken == []


def _literal(node: ast.AST) -> str:
    """The text of a string that begins with a word; what is put into it is left out."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_no_message_of_ours_looks_like_a_secret() -> None:
    """It would be printed with a mask in place of what it says."""
    headers = re.compile(r"(Bearer|Basic) (realm=.*)?")
    masked: list[str] = []
    for path in Path(memwal_ops.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = {_literal(node) for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings}
        texts = {text for text in texts if " " in text and not headers.fullmatch(text)}
        masked += [f"{path}: {text}" for text in texts if redact(text) != text]
    assert masked == []
