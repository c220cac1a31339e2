"""Decode, verify and encode WAL fragments of both dialects.

``wiki``: one JSON document; its checksum is XXH64 over compact JSON of ``deletes`` and ``vectors`` with sorted keys.
``native``: ``0x01`` and positional MessagePack, or the JSON of the first releases; its checksum is XXH3-64 over
compact JSON of both lists. Neither covers ``id``.

Checksums are of JSON text with numbers as serde_json writes them. They have the shortest digits that round-trip;
integers get ``.0``; the exponent form starts where serde_json (with zmij) starts it, which differs between single and
double precision, and has a plus sign.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from memwal_ops.errors import InvalidFormatError, import_extra

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

msgpack = import_extra("msgpack", "zeppelin", "Zeppelin namespaces")
# Decimal exponents of numbers that are written without an exponent.
_SINGLE = range(-6, 13)
_DOUBLE = range(-5, 16)
# Within these bounds Arrow's text has no exponent either.
_PLAIN = (1e-4, 1e9)


def vector_texts(values: NDArray[np.float32]) -> list[str]:
    """Each row of single-precision numbers as a JSON list."""
    rows, width = values.shape
    if not width:
        return ["[]"] * rows
    flat = np.ascontiguousarray(values).reshape(-1)
    texts = pc.cast(pa.array(flat), pa.string())
    whole = pc.invert(pc.match_substring(texts, "."))
    texts = pc.if_else(whole, pc.binary_join_element_wise(texts, ".0", ""), texts)
    size = np.abs(flat)
    exponential = np.flatnonzero(((size < _PLAIN[0]) & (size != 0)) | (size >= _PLAIN[1]) | ~np.isfinite(flat))
    if len(exponential):
        # str(float32) also writes the shortest digits.
        fixed = np.array(texts.to_pylist(), dtype=object)
        fixed[exponential] = [single_text(value) for value in flat[exponential]]
        texts = pa.array(fixed, pa.string())
    lists = pa.ListArray.from_arrays(pa.array(np.arange(0, len(flat) + 1, width, dtype=np.int32)), texts)
    return [f"[{row}]" for row in pc.binary_join(lists, ",").to_pylist()]


def single_text(value: np.float32) -> str:
    """One number of single precision."""
    return _serde(str(value), _SINGLE) if np.isfinite(value) else "null"


def double_text(value: float) -> str:
    """One number of double precision."""
    return _serde(repr(value), _DOUBLE) if math.isfinite(value) else "null"


def json_text(value: Any, in_order: Callable[[Iterable[str]], list[str]] = sorted) -> str:
    """A JSON value: keys sorted by their bytes, or in another order; no spaces, non-ASCII characters unescaped."""
    if isinstance(value, float):
        return double_text(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(key)}:{json_text(value[key], in_order)}" for key in in_order(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(json_text(item, in_order) for item in value) + "]"
    return _quoted(value)


def compact_json(value: Any) -> bytes:
    """A JSON value of another program as an object: lone surrogates are escaped, numbers that are not finite null."""
    form = partial(json.dumps, separators=(",", ":"), allow_nan=False)
    try:
        return form(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return form(value, ensure_ascii=True).encode()
    except ValueError:
        return compact_json(finite(value))


def finite(value: Any) -> Any:
    """A JSON value with null in place of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def joined(parts: Sequence[str]) -> str:
    """A JSON list of texts."""
    return f"[{','.join(parts)}]"


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _serde(text: str, fixed: range) -> str:
    """A number's text in serde's notation; its digits do not change."""
    sign, text = ("-", text[1:]) if text.startswith("-") else ("", text)
    mantissa, _, power = text.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return f"{sign}0.0"
    # digits[0] . digits[1:] times ten to this.
    exponent = int(power or 0) + len(whole) - 1 - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0") or "0"
    if exponent not in fixed:
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{tail}e{exponent:+d}" if exponent > 0 else f"{sign}{digits[0]}{tail}e{exponent}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    digits = digits.ljust(exponent + 1, "0")
    return f"{sign}{digits[: exponent + 1]}.{digits[exponent + 1 :] or '0'}"


Attributes = dict[str, Any]
_Order = Callable[[Iterable[str]], list[str]]
WIKI, NATIVE = "wiki", "native"
_MESSAGE_PACK = b"\x01"
_WIKI_FIELDS = {"id", "namespace", "vectors", "deletes", "checksum", "created_at"}
_NATIVE_FIELDS = {"id", "vectors", "deletes", "checksum"}
_VECTOR_FIELDS = {"id", "values", "attributes"}
_INT64 = range(-(2**63), 2**63)
_SPACE = re.compile(r"[ \t\r\n]*")
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,]')
# Lists and maps within each other; what recurses over attributes must not end with a RecursionError.
_MAX_DEPTH = 100


class UnstorableError(InvalidFormatError):
    """A value that the format cannot store: its writer wrote it, and the object is intact."""


@dataclass(frozen=True, eq=False)
class Fragment:
    """A fragment.

    Attributes:
        id: its ULID.
        ids: of the vectors, in order; an id may repeat, and the last one counts.
        values: shape (len(ids), dimensions), float32, finite.
        deletes: ids; they apply before the vectors of the same fragment.
        namespace: wiki only, as ``created_at``, which is ISO 8601.
    """

    id: str
    ids: Sequence[str]
    values: NDArray[np.float32]
    attributes: Sequence[Attributes | None]
    deletes: Sequence[str]
    namespace: str | None = None
    created_at: str | None = None

    @property
    def dimensions(self) -> int | None:
        """None if it has no vector."""
        return self.values.shape[1] if len(self.ids) else None


def encode_fragment(fragment: Fragment, dialect: str) -> bytes:
    """The object of a fragment."""
    return _encode_wiki(fragment) if dialect == WIKI else _encode_native(fragment)


def decode_fragment(data: bytes, dialect: str) -> Fragment:
    """Decode a fragment, and verify its checksum.

    Raises:
        InvalidFormatError: foreign or truncated bytes, an unknown version, a wrong checksum, vectors of several
            lengths.
        UnstorableError: its checksum is right, and it has a value that cannot be stored.
    """
    try:
        if dialect == WIKI:
            return _decode_wiki(data)
        if data[:1] == b"{":
            return _decode_native_json(data)
        if data[:1] == _MESSAGE_PACK:
            return _decode_native(data)
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise InvalidFormatError(f"It is not a {dialect} fragment: {error!r:.200}.") from error
    raise InvalidFormatError(f"It begins with {data[:4]!r}, which is not a known version of a fragment.")


def check_id(given: object, what: str) -> str:
    """Check a vector's id. Raises ``InvalidFormatError``."""
    if not isinstance(given, str) or not given:
        raise InvalidFormatError(f"{what} {given!r:.80} is not an id: it must be a non-empty string.")
    if not _is_text(given):
        raise UnstorableError(f"{what} id {given!r:.80} has a lone surrogate, which UTF-8 cannot store.")
    return given


# -- wiki


def wiki_checksum(deletes_text: str, vectors_text: str) -> int:
    """XXH64, seed 0, over ``{"deletes":[...],"vectors":[...]}``."""
    return _xxh64(f'{{"deletes":{deletes_text},"vectors":{vectors_text}}}')


def _xxh64(text: str) -> int:
    # No object has lone surrogates; texts of fragments that have them as escapes are compared, and then refused.
    return xxhash.xxh64_intdigest(text.encode("utf-8", "surrogatepass"))


def _encode_wiki(fragment: Fragment) -> bytes:
    deletes, vectors = json_text(list(fragment.deletes)), _wiki_vectors(fragment)
    fields = {
        "checksum": str(wiki_checksum(deletes, vectors)),
        "created_at": json_text(fragment.created_at),
        "deletes": deletes,
        "id": json_text(fragment.id),
        "namespace": json_text(fragment.namespace),
        "vectors": vectors,
    }
    return ("{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}").encode()


def _wiki_vectors(fragment: Fragment) -> str:
    rows = zip(fragment.ids, vector_texts(fragment.values), fragment.attributes, strict=True)
    member = '{{"attributes":{},"id":{},"values":{}}}'.format
    return joined([member(json_text(more or {}), json_text(name), text) for name, text, more in rows])


def _decode_wiki(data: bytes) -> Fragment:
    text = data.decode()
    twice: list[str] = []
    try:
        document, spans = _members(text, twice)
    except (RecursionError, ValueError) as error:
        if isinstance(error, json.JSONDecodeError) or not _is_intact(text):
            raise
        raise UnstorableError("It has lists within lists too deep, or an integer too long to be read.") from error
    missing = _WIKI_FIELDS - {"namespace", "created_at"} - document.keys()
    if missing:
        raise InvalidFormatError(f"It is not a fragment: {', '.join(sorted(missing))} is missing.")
    vectors, deletes = document["vectors"], document["deletes"]
    if not isinstance(vectors, list) or not isinstance(deletes, list):
        raise InvalidFormatError("vectors and deletes must be lists.")
    expected = document["checksum"]
    # First the text unchanged, as writers have it that write no spaces.
    own = (text[slice(*spans["deletes"])], text[slice(*spans["vectors"])])
    if not any(expected in _wiki_checksums(*texts) for texts in chain([own], _wiki_spellings(text, vectors, deletes))):
        raise InvalidFormatError(f"Its checksum is {expected!r}, which does not match its content.")
    _check_known(document, _WIKI_FIELDS, "It")
    if twice:
        raise UnstorableError(f"The member {twice[0]!r:.40} is twice in one of its objects: only one can be stored.")
    rows = []
    for vector in vectors:
        values = _wiki_values(vector)
        _check_known(vector, _VECTOR_FIELDS, f"The vector {vector.get('id')!r:.80}")
        rows.append((vector.get("id"), values, vector.get("attributes")))
    fragment = _fragment(document["id"], rows, deletes, WIKI)
    namespace, created_at = _text(document.get("namespace")), _text(document.get("created_at"))
    return replace(fragment, namespace=namespace, created_at=created_at)


def _wiki_values(entry: Any) -> list[float]:
    if not isinstance(entry, dict) or not isinstance(entry.get("values"), list):
        raise InvalidFormatError(f"{entry!r:.80} is not a vector.")
    values: list[float] = entry["values"]
    return values


def _check_known(entry: Mapping[str, Any], fields: set[str], what: str) -> None:
    """Refuse other members: the compaction would drop them. Raises ``UnstorableError``."""
    unknown = entry.keys() - fields
    if unknown:
        raise UnstorableError(f"{what} has the member {min(unknown)!r:.40}, which no segment can store.")


def _is_intact(text: str) -> bool:
    """Whether the checksum of a fragment that cannot be decoded is that of its text: without recursion, or numbers."""
    values, depth, begins, name, last = dict[str, str](), 0, 0, "", ""
    for token in _TOKENS.finditer(text):
        sign = token[0]
        if depth == 1 and sign == ":":
            name, begins = last, token.end()
        elif depth == 1 and sign in {",", "}"}:
            values[name] = text[begins : token.start()].strip()
        depth += (sign in {"[", "{"}) - (sign in {"]", "}"})
        last = sign
    deletes, vectors, checksum = (values.get(f'"{name}"', "") for name in ("deletes", "vectors", "checksum"))
    return checksum.isdecimal() and int(checksum[:20]) in _wiki_checksums(deletes, vectors)


def _wiki_checksums(deletes_text: str, vectors_text: str) -> Iterator[int]:
    """What a checksum may cover: "the serialized vectors + deletes"; the document does not say how they are joined.

    :func:`wiki_checksum`, and both in the document's own order: as members, concatenated, and as a list.
    """
    yield wiki_checksum(deletes_text, vectors_text)
    for whole in (
        f'{{"vectors":{vectors_text},"deletes":{deletes_text}}}',
        f"{vectors_text}{deletes_text}",
        f"[{vectors_text},{deletes_text}]",
    ):
        yield _xxh64(whole)


def _wiki_spellings(text: str, vectors: list[Any], deletes: list[Any]) -> Iterator[tuple[str, str]]:
    """The texts of both lists that a checksum may cover: the document does not define how numbers are written.

    First as in the file, then shortest doubles as written by Python and by serde, then shortest singles; each with
    sorted keys, and with keys in the order of the file. Python writes 1e-05, others 0.00001: with only one of them,
    valid namespaces would be blocked.
    """
    tokens = json.loads(text, parse_float=_Token, parse_int=_Token)
    orders: tuple[_Order, ...] = (sorted, list)
    for in_order in orders:
        for escaped in (False, True):
            strings = _python(ensure_ascii=escaped, sort_keys=in_order is sorted)
            yield strings(deletes), _with_tokens(tokens["vectors"], strings, in_order)
            yield strings(deletes), strings(vectors)
        yield json_text(deletes), json_text(vectors, in_order)
    try:
        singles = vector_texts(matrix([_wiki_values(vector) for vector in vectors]))
    except InvalidFormatError:
        return  # no single-precision numbers
    for in_order in orders:
        for rest in (partial(json_text, in_order=in_order), _python(ensure_ascii=False, sort_keys=in_order is sorted)):
            rows = zip(vectors, singles, strict=True)
            yield rest(deletes), joined([_members_text(row, rest, values, in_order) for row, values in rows])


def _members_text(entry: Mapping[str, Any], rest: Callable[[Any], str], values: str, in_order: _Order) -> str:
    parts = (f"{rest(key)}:{values if key == 'values' else rest(entry[key])}" for key in in_order(entry))
    return "{" + ",".join(parts) + "}"


def _python(*, ensure_ascii: bool, sort_keys: bool) -> Callable[[Any], str]:
    return partial(json.dumps, separators=(",", ":"), sort_keys=sort_keys, ensure_ascii=ensure_ascii)


class _Token(str):
    __slots__ = ()


def _with_tokens(value: Any, strings: Callable[[Any], str], in_order: _Order) -> str:
    if isinstance(value, _Token):
        return str(value)
    if isinstance(value, dict):
        parts = (f"{strings(key)}:{_with_tokens(value[key], strings, in_order)}" for key in in_order(value))
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_with_tokens(item, strings, in_order) for item in value) + "]"
    return strings(value)


def _members(text: str, twice: list[str]) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The members of a JSON object, and the start and end of each value's text; ``twice`` gets members that repeat."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            twice.append(next(name for name in names if names.count(name) > 1))
        return members

    decoder = json.JSONDecoder(parse_constant=_refused, object_pairs_hook=unique)
    members: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        raise InvalidFormatError(f"It begins with {text[:8]!r}, so it is not a JSON object.")
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}" or members:
        key, at = decoder.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or key in members or text[at : at + 1] != ":":
            raise InvalidFormatError(f"{key!r:.40} is not a member of a fragment, or a duplicate.")
        begins = _skip(text, at + 1)
        members[key], at = decoder.raw_decode(text, begins)
        spans[key] = (begins, at)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            break
        if text[at : at + 1] != ",":
            raise InvalidFormatError(f"It is truncated or not JSON at character {at}.")
        at = _skip(text, at + 1)
    if _skip(text, at + 1) != len(text):
        raise InvalidFormatError(f"There is extra data after its end, at character {at + 1}.")
    return members, spans


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches the empty text, too


def _refused(constant: str) -> float:
    raise UnstorableError(f"{constant} is not a JSON number.")


# -- native


def native_checksum(fragment: Fragment) -> int:
    """XXH3-64, seed 0, over ``[[[id,[values],attributes or null],...],[deletes]]``."""
    rows = zip(fragment.ids, vector_texts(fragment.values), fragment.attributes, strict=True)
    vectors = joined([f"[{json_text(name)},{text},{json_text(more)}]" for name, text, more in rows])
    return xxhash.xxh3_64_intdigest(f"[{vectors},{json_text(list(fragment.deletes))}]".encode())


def _encode_native(fragment: Fragment) -> bytes:
    packer = msgpack.Packer(autoreset=True)
    parts = [_MESSAGE_PACK, packer.pack_array_header(4), packer.pack(fragment.id)]
    parts.append(packer.pack_array_header(len(fragment.ids)))
    for name, values, more in zip(fragment.ids, fragment.values, fragment.attributes, strict=True):
        parts += [packer.pack_array_header(2 if more is None else 3), packer.pack(name), _packed(packer, values)]
        if more is not None:
            parts.append(packer.pack(more))
    parts += [packer.pack(list(fragment.deletes)), packer.pack(native_checksum(fragment))]
    return b"".join(parts)


def _packed(packer: Any, values: NDArray[np.float32]) -> bytes:
    """A list of single-precision numbers: 0xCA and four bytes, big-endian, each."""
    packed = np.empty(len(values), dtype=[("tag", "u1"), ("value", ">f4")])
    packed["tag"], packed["value"] = 0xCA, values
    header: bytes = packer.pack_array_header(len(values))
    return header + packed.tobytes()


def _decode_native(data: bytes) -> Fragment:
    document = msgpack.unpackb(memoryview(data)[1:], strict_map_key=True)
    if not isinstance(document, list) or len(document) != len(_NATIVE_FIELDS):
        raise InvalidFormatError("It is not a list of id, vectors, deletes and checksum.")
    name, vectors, deletes, checksum = document
    rows = [(vector[0], vector[1], vector[2] if len(vector) == 3 else None) for vector in vectors]  # noqa: PLR2004 - with attributes
    if any(len(vector) not in {2, 3} for vector in vectors):
        raise InvalidFormatError("A vector has neither two nor three parts.")
    return _native(name, rows, deletes, checksum)


def _decode_native_json(data: bytes) -> Fragment:
    document = json.loads(data, parse_constant=_refused)
    if document.keys() - _NATIVE_FIELDS or _NATIVE_FIELDS - document.keys():
        raise InvalidFormatError(f"It has the unexpected members {', '.join(sorted(document))}.")
    rows = [(entry["id"], entry["values"], entry.get("attributes")) for entry in document["vectors"]]
    fragment = _native(document["id"], rows, document["deletes"], document["checksum"])
    for vector in document["vectors"]:
        _check_known(vector, _VECTOR_FIELDS, f"The vector {vector['id']!r:.80}")
    return fragment


def _native(name: Any, rows: list[tuple[Any, Any, Any]], deletes: list[Any], checksum: Any) -> Fragment:
    fragment = _fragment(name, rows, deletes, NATIVE)
    if checksum != native_checksum(fragment):
        raise InvalidFormatError(f"Its checksum is {checksum!r}, which does not match its content.")
    return fragment


# -- both


def _fragment(name: Any, rows: list[tuple[Any, Any, Any]], deletes: list[Any], dialect: str) -> Fragment:
    return Fragment(
        id=check_id(name, "The fragment's"),
        ids=[check_id(row[0], "The vector's") for row in rows],
        values=matrix([row[1] for row in rows]),
        attributes=[check_attributes(row[2], dialect) for row in rows],
        deletes=[check_id(name, "The deleted") for name in deletes],
    )


def matrix(rows: Sequence[Sequence[float]]) -> NDArray[np.float32]:
    """Rows of numbers as one array of shape (rows, dimensions).

    Raises:
        InvalidFormatError: rows of several lengths, or empty.
        UnstorableError: a value that is not a finite single-precision number.
    """
    if not rows:
        return np.zeros((0, 0), dtype=np.float32)
    widths = {len(row) for row in rows}
    if len(widths) > 1 or not min(widths):
        raise InvalidFormatError(f"Its vectors have {sorted(widths)} dimensions.")
    try:
        with np.errstate(over="ignore"):
            wide = np.array(rows)
            narrow = wide.astype(np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnstorableError(f"A vector has a value that is not a number: {error}.") from error
    if wide.dtype.kind not in "fiu" or narrow.ndim != 2 or not np.isfinite(narrow).all():  # noqa: PLR2004 - a matrix
        raise UnstorableError("A vector has a value that is not a finite single-precision number.")
    return narrow


def check_attributes(attributes: Any, dialect: str) -> Attributes | None:
    """Check that attributes can be stored, and return them.

    Wiki: any JSON values, as the document does not limit them. Native: strings, booleans, 64-bit integers, finite
    floats, and lists of strings or of numbers: its servers read no others.

    Raises:
        InvalidFormatError: they are not a map.
        UnstorableError: a value that cannot be stored.
    """
    if attributes is None:
        return None
    if not isinstance(attributes, dict):
        raise InvalidFormatError(f"The attributes {attributes!r:.80} are not a map.")
    check = _is_json if dialect == WIKI else _is_native
    for key, value in attributes.items():
        if not isinstance(key, str) or not _is_text(key) or not check(value):
            raise UnstorableError(f"The attribute {key!r:.40} is {reprlib.repr(value):.80}, which cannot be stored.")
    return attributes


def _is_text(value: str) -> bool:
    return value.isascii() or len(value.encode("utf-8", "ignore")) == len(value.encode("utf-8", "surrogatepass"))


def _is_json(value: object, depth: int = 0) -> bool:
    if isinstance(value, list | dict) and depth == _MAX_DEPTH:
        return False
    if isinstance(value, list):
        return all(_is_json(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_text(key) and _is_json(item, depth + 1) for key, item in value.items())
    return value is None or isinstance(value, int) or _is_scalar(value)


def _is_native(value: object) -> bool:
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        return (kinds <= {str} or kinds <= {int, float}) and all(map(_is_native, value))
    if isinstance(value, int):
        return isinstance(value, bool) or value in _INT64
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    return _is_text(value) if isinstance(value, str) else isinstance(value, float) and math.isfinite(value)


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidFormatError(f"{value!r:.80} is not a string.")
    return value
