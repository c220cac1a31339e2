"""Run an erasure, the same in every format, and write the certificate of it, which is verified against the table later.

A certificate lists every object of the table with its size and entity tag, and why it cannot hold a row that must be
gone. It is made by reading what the store lists; what no listing shows is named in it as not seen. Before it says that
rows are erased, all bytes that stay are searched for values of them (:mod:`memwal_ops.core.byte_scan`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from memwal_ops import errors
from memwal_ops.core import byte_scan
from memwal_ops.core.erasure import ByteScan, EraseDecision, EraseReport, RowHolder
from memwal_ops.core.quarantine import QUARANTINE_FOLDER
from memwal_ops.text import counted, paragraph
from memwal_ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memwal_ops.core.context import RunContext
    from memwal_ops.core.options import EraseOptions
    from memwal_ops.core.protocols import Table
    from memwal_ops.storage.api import ObjectMeta, Store


NOT_SEEN = (
    "earlier versions of objects, if the bucket keeps them: memwal-ops doctor URI reports it",
    "replicas and backups of the store",
    "caches of readers, and programs that have a version open",
)
"""What no command sees from here, in any format."""


@dataclass(slots=True)
class TableSurvey:
    """What a reading of the whole table found.

    Attributes:
        living: how many rows are to be deleted, and are not yet.
        holders: all that may hold rows which must be gone.
        objects: every object of the table, and why it cannot hold such a row; None: it may.
    """

    table: Any
    living: int = 0
    holders: list[RowHolder] = field(default_factory=list)
    objects: list[tuple[ObjectMeta, str | None]] = field(default_factory=list)


@dataclass(kw_only=True)
class Erasure(ABC):
    """The erasure of rows of one table, as its format does it.

    A step is safe to kill: what is left to do is found by reading the table anew, and not from a record of the run.

    Attributes:
        done: what it did, by name.
        faults: what it could not do, and that the table does not show.
        warnings: what the operator must know of the rows that were chosen.
        values: of the rows that this run has seen.
        not_seen: where no command can look.
        written_in_place: objects, or folders with a slash, that later commits write again under the same name.
    """

    options: EraseOptions
    context: RunContext
    done: Counter[str] = field(default_factory=Counter)
    faults: list[RowHolder] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    values: byte_scan.ErasedValues = field(default_factory=byte_scan.ErasedValues)
    not_seen: ClassVar[tuple[str, ...]] = NOT_SEEN
    written_in_place: ClassVar[tuple[str, ...]] = ()

    @property
    def before(self) -> datetime | None:
        """The time before which the rows were deleted; None: an expression says which they are."""
        return None

    @abstractmethod
    def survey(self) -> TableSurvey:
        """Read all that the store lists, without changes."""

    @abstractmethod
    def erase(self) -> TableSurvey:
        """Do every step that something needs, and survey what is left."""

    def scanned(self) -> byte_scan.ScanScope | None:
        """What of the newest revision is searched for ``values``; None: nothing is."""
        return None

    def scan(self) -> ByteScan | None:
        """Look for the values in every object that is listed now; None: see :meth:`scanned`."""
        if (scanned := self.scanned()) is None:
            return None
        self.context.step("search bytes")
        return byte_scan.scan_bytes(scanned, self.values)

    def count(self, name: str, number: int) -> None:
        """Add to what was done."""
        if number:
            self.done[name] += number
            self.context.figures[name] += number


def run_erasure(
    table: Any, options: EraseOptions, begin: Callable[[], Erasure], *, applied: bool
) -> EraseReport | CheckReport:
    """Plan or apply an erasure, or check a certificate, as the options say.

    Args:
        table: any revision.
        begin: checks the table and makes the erasure; not called for a check.
        applied: whether the run may change anything.

    Raises:
        OptionError: no rows are given; or the key cannot sign.
        MemwalOpsError: that of a step; what was done stays, and the next run continues.
    """
    if options.check is not None:
        return check_certificate(table.newest(), options.check)
    started = time.monotonic()
    options.require_target()
    if options.sign_with is not None:
        check_key(options.sign_with)
    erasure = begin()
    survey = erasure.erase() if applied else erasure.survey()
    holders = (*survey.holders, *erasure.faults)
    if applied and not erasure.done:  # nor will the next run do more: what has no time to wait for would wait for ever
        why = "this run could not remove it"
        holders = tuple(
            replace(holder, blocks=True, why=f"{holder.why}; {why}")
            if holder.until is None and not holder.blocks
            else holder
            for holder in holders
        )
    report = EraseReport(
        applied=applied,
        holders=holders,
        version=survey.table.revision,
        living=survey.living,
        done=dict(erasure.done),
        not_seen=erasure.not_seen,
        warnings=(*options.dangers(), *erasure.warnings),
    )
    if report.decision is EraseDecision.ERASED and (scan := erasure.scan()) is not None:
        report.byte_scan = scan
        report.holders += tuple(scan.holders)
    if report.decision is EraseDecision.ERASED:
        proven = [(meta, why) for meta, why in survey.objects if why is not None]
        if len(proven) < len(survey.objects):
            unproven = next(meta.path for meta, why in survey.objects if why is None)
            raise errors.InvariantViolatedError(f"Nothing holds such a row, and yet nothing shows that of {unproven}.")
        if options.certificate is not None:
            report.certificate = write_certificate(survey.table, options, erasure, proven, report.byte_scan)
    report.seconds = time.monotonic() - started
    return report


_KIND = "memwal-ops certificate of an erasure"
_FORMAT = 1
_SHOWN = 8
_CHANGES = ("_mem_wal_ops/", "_refs/")
_HINT_FOLDERS = ("_versions", "manifest")
_HINTS = ("version_hint.json", ".checked-commits.json")
"""Of objects without rows that are written again, or whenever a job runs: they are listed, and not compared."""


class ErasureEvidence(Protocol):
    """What a certificate states of an erasure.

    ``not_seen``: where nothing was read. ``written_in_place``: objects, or folders with a slash, that later commits
    write again under the same name.
    """

    not_seen: ClassVar[tuple[str, ...]]
    written_in_place: ClassVar[tuple[str, ...]]

    @property
    def before(self) -> datetime | None:
        """The time before which the rows were deleted; None: an expression says which they are."""


def write_certificate(
    table: Table,
    options: EraseOptions,
    erasure: ErasureEvidence,
    objects: Iterable[tuple[ObjectMeta, str]],
    scan: ByteScan | None,
) -> str:
    """Write the certificate that the options name, and return its path.

    ``objects``: every object, and why it cannot hold such a row. ``scan``: what was looked for in their bytes.

    Raises:
        InvalidUsageError: the file or the key cannot be used.
        ExtraMissingError: it is to be signed, and the library for that is not installed.
    """
    path = options.certificate
    assert path is not None  # noqa: S101 - the caller asked
    document: dict[str, Any] = {
        "kind": _KIND,
        "format": _FORMAT,
        "uri": table.location.address,
        "table_format": table.format.name,
        "revision": table.revision,
        "made": datetime.now(UTC).isoformat(timespec="microseconds"),
        "memwal_ops": __version__,
        "where_sha256": None if options.where is None else hashlib.sha256(options.where.encode()).hexdigest(),
        "deleted_before": None if erasure.before is None else erasure.before.isoformat(),
        "objects": [_entry(table.store, meta, why) for meta, why in sorted(objects, key=lambda pair: pair[0].path)],
        "byte_scan": None if scan is None else scan.to_json(),
        "written_in_place": [*erasure.written_in_place],
        "not_seen": [*erasure.not_seen],
    }
    if options.sign_with is not None:
        document["signature"] = _sign(_signed_bytes(document), options.sign_with)
    _write(path, json.dumps(document, indent=1).encode() + b"\n")
    return path


def uri_of(path: str) -> str:
    """The table that a certificate is about. Raises ``CertificateError``: the file is none."""
    return str(_read(path)["uri"])


def _entry(store: Store, meta: ObjectMeta, why: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": meta.path, "bytes": meta.size, "e_tag": meta.e_tag}
    if meta.e_tag is None:
        entry["sha256"] = hashlib.sha256(store.get(meta.path)).hexdigest()
    return {**entry, "written": meta.last_modified.isoformat(timespec="microseconds"), "why": why}


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The report of ``erase --check``; ``decision`` is valid or changed.

    ``signed_by``: the fingerprint of the key that signed it; None: it is not signed.
    """

    path: str
    document: dict[str, Any]
    signed_by: str | None
    same: int
    gone: int
    added: int
    wrong: tuple[str, ...]

    @property
    def decision(self) -> str:
        """The outcome in one word."""
        return "changed" if self.wrong else "valid"

    @property
    def exit_code(self) -> int:
        """64 if the table is not as the certificate states."""
        return errors.CertificateError.exit_code if self.wrong else 0

    def to_json(self) -> dict[str, Any]:
        """The document of ``erase --check --json``."""
        return {
            "decision": self.decision,
            "certificate": self.path,
            "uri": self.document["uri"],
            "made": self.document["made"],
            "revision": self.document["revision"],
            "signed_by": self.signed_by,
            "objects": {"same": self.same, "gone": self.gone, "added": self.added},
            "wrong": list(self.wrong[:100]),
            "not_seen": list(self.document["not_seen"]),
        }

    def describe(self) -> str:
        """The report as text for people."""
        signed = "not signed" if self.signed_by is None else f"signed by the key {self.signed_by}"
        lines = [
            paragraph(
                f"{self.decision}: {self.path} of {self.document['made']} on {self.document['uri']}, {signed}. "
                f"{counted(self.same, 'object')} as it states, {self.gone:,} gone since, {self.added:,} written since."
            )
        ]
        lines += [paragraph(f"CHANGED: {why}", hanging="  ") for why in self.wrong[:_SHOWN]]
        if len(self.wrong) > _SHOWN:
            lines.append(f"and {len(self.wrong) - _SHOWN:,} more; see --json.")
        lines.append(paragraph(f"Not seen from here: {'; '.join(self.document['not_seen'])}.", hanging="  "))
        return "\n".join(lines)


def check_certificate(table: Table, path: str) -> CheckReport:
    """Verify a certificate's signature, and compare the table with what it states.

    An object that is gone holds nothing. One that was written since has other rows: it must be younger than the
    certificate, or it was put back. Raises ``CertificateError``: it is none, or its signature is not that of its text.
    """
    document = _read(path)
    signed_by = _verify(path, document)
    stated = {str(entry["path"]): entry for entry in document["objects"]}
    made = datetime.fromisoformat(document["made"])
    in_place = tuple(document.get("written_in_place", ()))
    wrong = []
    if table.location.address != document["uri"]:
        wrong.append(f"it is about {document['uri']}, and this is {table.location.address}")
    if table.revision < int(document["revision"]):
        wrong.append(f"the table is at revision {table.revision}, and was at {document['revision']}: it was made again")
    same = added = 0
    for meta in table.store.list():
        known = stated.pop(meta.path, None)
        if known is not None and (_changes(meta.path) or _is_same(table.store, meta, known)):
            same += 1
        elif known is not None and meta.last_modified > made and meta.path.startswith(in_place):
            added += 1
        elif known is not None:
            wrong.append(f"{meta.path} is another object than the one that was read")
        elif meta.last_modified < made and not _changes(meta.path):
            wrong.append(f"{meta.path} is not in the certificate, and is older than it: it was put there since")
        else:
            added += 1
    return CheckReport(path, document, signed_by, same, len(stated), added, tuple(wrong))


def _changes(path: str) -> bool:
    kept = path.startswith(f"{QUARANTINE_FOLDER}/")
    folder = path.rpartition("/")[0].rpartition("/")[2]
    return (path.startswith(_CHANGES) and not kept) or (folder in _HINT_FOLDERS and path.endswith(_HINTS))


def _is_same(store: Store, meta: ObjectMeta, known: dict[str, Any]) -> bool:
    if meta.size != known["bytes"]:
        return False
    if known["e_tag"] is not None:
        return bool(meta.e_tag == known["e_tag"])
    return hashlib.sha256(store.get(meta.path)).hexdigest() == str(known["sha256"])


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            document = json.load(file)
    except OSError as error:
        raise errors.InvalidUsageError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise errors.CertificateError(f"{path} is not a certificate of an erasure: {error}.") from error
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise errors.CertificateError(f"{path} is not a certificate of an erasure.")
    if document.get("format") != _FORMAT:
        raise errors.UnsupportedFeatureError(
            f"{path} has format {document.get('format')}, and this release reads {_FORMAT}.",
            remedy="Check it by the release that wrote it, or a later one.",
        )
    return document


def _write(path: str, data: bytes) -> None:
    try:
        handle, temporary = tempfile.mkstemp(dir=os.path.dirname(os.path.abspath(path)), prefix=".certificate.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise errors.InvalidUsageError(
            f"{path} cannot be written: {error.strerror}.", remedy="Give another file; nothing is undone by that."
        ) from error


def _signed_bytes(document: dict[str, Any]) -> bytes:
    """What is signed: the document without its signature, in one spelling."""
    text = {key: value for key, value in document.items() if key != "signature"}
    return json.dumps(text, sort_keys=True, separators=(",", ":")).encode()


def _crypto() -> Any:
    try:
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415 - an extra, only to sign
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa  # noqa: PLC0415 - see above
    except ImportError as error:
        raise errors.ExtraMissingError(
            "The library cryptography is not installed, by which certificates are signed and checked.",
            remedy="pip install 'memwal-ops[sign]'",
        ) from error
    return hashes, serialization, ec, ed25519, padding, rsa


def check_key(path: str) -> None:
    """Refuse a key that cannot sign, before any work is done.

    Raises:
        InvalidUsageError: it is no such key.
        ExtraMissingError: the library for it is not installed.
    """
    _sign(b"", path)


def _sign(data: bytes, key_file: str) -> dict[str, str]:
    hashes, serialization, ec, ed25519, padding, rsa = _crypto()
    try:
        with open(key_file, "rb") as file:
            key = serialization.load_pem_private_key(file.read(), password=None)
    except OSError as error:
        raise errors.InvalidUsageError(f"The key {key_file} cannot be read: {error.strerror}.") from error
    except (ValueError, TypeError) as error:
        raise errors.InvalidUsageError(
            f"{key_file} is not a private key without a password, as PEM: {error}."
        ) from error
    if isinstance(key, ed25519.Ed25519PrivateKey):
        value, algorithm = key.sign(data), "ed25519"
    elif isinstance(key, ec.EllipticCurvePrivateKey):
        value, algorithm = key.sign(data, ec.ECDSA(hashes.SHA256())), "ecdsa-sha256"
    elif isinstance(key, rsa.RSAPrivateKey):
        value, algorithm = key.sign(data, padding.PKCS1v15(), hashes.SHA256()), "rsa-sha256"
    else:
        raise errors.InvalidUsageError(
            f"{key_file} is a {type(key).__name__}: give an Ed25519, an ECDSA or an RSA key."
        )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return {"algorithm": algorithm, "public_key": public.decode(), "value": base64.b64encode(value).decode()}


def _verify(path: str, document: dict[str, Any]) -> str | None:
    """The fingerprint of the key that signed a certificate; None: it is not signed."""
    signature = document.get("signature")
    if signature is None:
        return None
    hashes, serialization, ec, _, padding, _ = _crypto()
    data = _signed_bytes(document)
    try:
        key = serialization.load_pem_public_key(signature["public_key"].encode())
        value = base64.b64decode(signature["value"], validate=True)
        if signature["algorithm"] == "ed25519":
            key.verify(value, data)
        elif signature["algorithm"] == "ecdsa-sha256":
            key.verify(value, data, ec.ECDSA(hashes.SHA256()))
        elif signature["algorithm"] == "rsa-sha256":
            key.verify(value, data, padding.PKCS1v15(), hashes.SHA256())
        else:
            raise ValueError("its algorithm is unknown")
        public = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    except Exception as error:
        raise errors.CertificateError(
            f"The signature of {path} is not that of its text: {type(error).__name__} {error}".rstrip() + "."
        ) from error
    return f"SHA256:{hashlib.sha256(public).hexdigest()}"
