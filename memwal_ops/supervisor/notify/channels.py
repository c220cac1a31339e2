"""Send a message to one target: a webhook, Slack, Teams, e-mail, or any service that Apprise knows.

The standard library sends all but the last: a request signed as Standard Webhooks have it, which Apprise cannot do, two
documents for chats, and SMTP are less code than a dependency with its own seven.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import smtplib
import ssl
import time
import urllib.error
import urllib.request
import uuid
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from http.client import HTTPException
from importlib import import_module
from typing import TYPE_CHECKING, Any

from memwal_ops.errors import ExtraMissingError, MemwalOpsError
from memwal_ops.storage.redaction import remember
from memwal_ops.supervisor.requests import NoRedirects, failure_text
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memwal_ops.supervisor.config.model import TargetConfig
    from memwal_ops.supervisor.notify.message import Message

_TIMEOUT = 10.0
_WEBHOOK_SECRET = "whsec_"  # noqa: S105 - how such a secret begins
_MAX_SECRET_BYTES = 64 << 10


class NotificationError(Exception):
    """A message that was not delivered."""


def send(target: TargetConfig, message: Message) -> None:
    """Deliver a message, within some seconds.

    Raises:
        NotificationError: it was not delivered; the text has no secret.
    """
    try:
        _SENDERS[target.type](target, message)
    except NotificationError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise NotificationError(f"{target.name}: the server answered {error.code}.") from None
    except (OSError, ValueError, HTTPException, smtplib.SMTPException, MemwalOpsError) as error:
        raise NotificationError(f"{target.name}: {failure_text(error)}") from None


def signed(body: bytes, secret: str, number: str, timestamp: int) -> str:
    """Return the signature of a body, as Standard Webhooks have it (``webhook-signature``)."""
    encoded = secret.startswith(_WEBHOOK_SECRET)
    key = base64.b64decode(secret.removeprefix(_WEBHOOK_SECRET)) if encoded else secret.encode()
    digest = hmac.new(key, f"{number}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def _webhook(target: TargetConfig, message: Message) -> None:
    body, headers = json.dumps(message.document()).encode(), {}
    secret = _secret(target, "secret")
    if secret is not None:
        number, timestamp = f"msg_{uuid.uuid4().hex}", int(time.time())
        headers = {
            "webhook-id": number,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signed(body, secret, number, timestamp),
        }
    _post(target, body, headers)


def _slack(target: TargetConfig, message: Message) -> None:
    _post(target, json.dumps(message.slack()).encode())


def _teams(target: TargetConfig, message: Message) -> None:
    _post(target, json.dumps(message.teams()).encode())


def _post(target: TargetConfig, body: bytes, headers: Mapping[str, str] | None = None) -> None:
    url = _secret(target, "url") or ""
    if not url.startswith(("http://", "https://")):
        raise NotificationError(f"{target.name}: its URL is not http or https.")
    sent = {"Content-Type": "application/json", "User-Agent": f"memwal-ops/{__version__}", **(headers or {})}
    request = urllib.request.Request(url, body, sent, method="POST")  # noqa: S310 - checked above
    with _opener.open(request, timeout=_TIMEOUT) as response:
        response.read(1)


_opener = urllib.request.build_opener(NoRedirects)


def _email(target: TargetConfig, message: Message) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = message.title, target.sender, ", ".join(target.to)
    mail["Date"], mail["Message-ID"] = formatdate(), make_msgid(domain="memwal-ops")
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text())
    host, context = target.host or "", ssl.create_default_context()
    password = _secret(target, "password")
    if target.security == "tls":
        server: smtplib.SMTP = smtplib.SMTP_SSL(host, target.port or 465, timeout=_TIMEOUT, context=context)
    else:
        server = smtplib.SMTP(host, target.port or 587, timeout=_TIMEOUT)
    with server:
        if target.security == "starttls":
            server.starttls(context=context)
        if target.username is not None:
            server.login(target.username, password or "")
        server.send_message(mail)


def _apprise(target: TargetConfig, message: Message) -> None:
    try:
        apprise: Any = import_module("apprise")
    except ImportError:
        raise ExtraMissingError(
            "The package apprise is not installed.", remedy="pip install 'memwal-ops[notify]'"
        ) from None
    sender = apprise.Apprise()
    if not sender.add(_secret(target, "url")):
        raise NotificationError(f"{target.name}: Apprise does not know such a URL.")
    if not sender.notify(title=message.title, body=message.text()):
        raise NotificationError(f"{target.name}: Apprise could not deliver the message.")


_SENDERS = {"webhook": _webhook, "slack": _slack, "teams": _teams, "email": _email, "apprise": _apprise}


def _secret(target: TargetConfig, key: str) -> str | None:
    """Return a value of the configuration, or of the file that it names; read at each use, as files are renewed."""
    path: str | None = getattr(target, f"{key}_file")
    if path is None:
        value: str | None = getattr(target, key)
        return value
    try:
        with open(path, encoding="utf-8") as file:
            found = file.read(_MAX_SECRET_BYTES).strip()
    except (OSError, ValueError) as error:
        raise NotificationError(f"{target.name}: {key}_file cannot be read: {error}") from None
    remember([found])
    return found
