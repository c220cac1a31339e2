"""A request, its response, and the error that ends it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from memwal_ops.storage.redaction import redact

if TYPE_CHECKING:
    from email.message import Message

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 20


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Its path and query string as sent, its body, and the address of the client."""

    method: str
    path: str
    query: str
    headers: Message
    client: str
    body: bytes = b""
    secure: bool = False

    @property
    def kind(self) -> str:
        """The media type of the body, without parameters."""
        return str(self.headers.get("Content-Type") or "").partition(";")[0].strip().lower()

    def fields(self) -> dict[str, str]:
        """Return the fields of the body, a JSON object or a form; a null counts as not given.

        Raises:
            HttpError: it is neither, or a field is given twice or is neither text nor a number.
        """
        if not self.body:
            return {}
        if self.kind == FORM:
            return self._form()
        if self.kind != JSON:
            raise HttpError(415, f"The body must be {JSON} or {FORM}.")
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise HttpError(400, "The body is not valid JSON.") from error
        if not isinstance(document, dict):
            raise HttpError(400, "The body must be a JSON object.")
        return {name: _text(value) for name, value in document.items() if value is not None}

    def _form(self) -> dict[str, str]:
        try:
            given = parse_qs(self.body.decode("ascii"), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError as error:
            raise HttpError(400, "The form cannot be read.") from error
        if any(len(values) > 1 for values in given.values()):
            raise HttpError(400, "A field of the form is given twice.")
        return {name: values[0] for name, values in given.items() if values[0]}


def _text(value: object) -> str:
    """Return a field as text; to JSON, 1.0 is a whole number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise HttpError(400, "Each field of the body must be a text or a whole number.")
    return str(value)


@dataclass(frozen=True, slots=True)
class Response:
    """What is sent back; ``policy`` is its Content-Security-Policy. One with a ``secret`` is not compressed."""

    status: int
    kind: str
    body: bytes
    policy: str = "default-src 'none'"
    headers: tuple[tuple[str, str], ...] = ()
    secret: bool = False


class HttpError(Exception):
    """A request is refused, with this status and a sentence."""

    def __init__(self, status: int, message: str, *headers: tuple[str, str]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers

    def response(self) -> Response:
        """Return the response of a refused request."""
        return json_response(self.status, {"error": redact(str(self))}, *self.headers)


def json_response(status: int, document: object, *headers: tuple[str, str]) -> Response:
    """Return a JSON document."""
    return Response(status, JSON, json.dumps(document, indent=2, default=str).encode() + b"\n", headers=headers)


def long_json_response(document: object) -> Response:
    """Return a JSON document that may have megabytes, on one line: that takes a fifth of the time."""
    return Response(200, JSON, json.dumps(document, default=str).encode() + b"\n")
