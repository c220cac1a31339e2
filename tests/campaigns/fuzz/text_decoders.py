"""Decoders of holds, names, locations and options, and what must be true of what they accept."""

from __future__ import annotations

import json
import zlib
from datetime import timedelta

import click

from memwal_ops import errors
from memwal_ops.cli.options import Duration
from memwal_ops.core import holds
from memwal_ops.formats.lance.jobs.gc.evidence import CandidateKind, LanceCandidate
from memwal_ops.formats.lance.jobs.why import _wanted
from memwal_ops.formats.lance.wire import names
from memwal_ops.storage import locations, options
from memwal_ops.storage.catalogs import resolve
from memwal_ops.text import parse_size
from tests.campaigns.fuzz import mutate
from tests.campaigns.fuzz.decoder import REGION, U64_MAX, decoder
from tests.campaigns.fuzz.places import WRITTEN, FewObjects

# -- holds


_HOLD = b'{"versions": [5, 6], "ttl_seconds": 7200.0, "by": "maintainer@host", "note": "nightly export"}'


@decoder(
    mutate.json_surgery, mutate.json_surgery, mutate.damage, mutate.noise, mutate.deep_json,
    seeds=[_HOLD, b'{"format": 1, %b' % _HOLD[1:], b"{}"], share=8,
    refuses=(errors.StorageError, errors.UnsupportedFeatureError),
)  # fmt: skip
def hold(data: bytes) -> object:
    """A readable hold has all its fields; an unreadable one stops deletions."""
    store = FewObjects({f"{holds.HOLDS_FOLDER}/{7:020d}.json": data})
    (found,) = holds._entries(store, holds.HOLDS_FOLDER)
    assert found.number == 7
    assert list(found.versions) == json.loads(data)["versions"]
    assert all(type(one) is int and 0 < one <= U64_MAX for one in found.versions)

    f"{found.to_json()} {found.by} {found.note} {found.until:%Y-%m-%d %H:%M} UTC".encode()
    found.in_force(WRITTEN + timedelta(hours=1))
    return found


@decoder(
    mutate.words("0" * 20, "9" * 20, "00000000000000000007", ".json", ".released", "7", "0", "²" * 20, "٣" * 20, "a/"),
    seeds=(), share=6, refuses=(errors.StorageError,),
)  # fmt: skip
def hold_name(data: bytes) -> object:
    """Whatever file stands among the holds; a new one gets a number of its own."""
    name = data.decode("utf-8", "surrogateescape")
    store = FewObjects({f"{holds.HOLDS_FOLDER}/{name}": _HOLD})
    found = holds._entries(store, holds.HOLDS_FOLDER)
    assert all(0 <= one.number < 10**20 for one in found)
    added = holds._add(store, holds.HOLDS_FOLDER, (5,), timedelta(days=36500), "")
    assert added.number not in {one.number for one in found}
    assert added in holds._entries(store, holds.HOLDS_FOLDER)
    return found


# -- names and options


@decoder(
    mutate.words(
        "01" * 32, "0" * 64, "1" * 64, "0", "1", ".binpb", ".arrow", ".lance", "_gen_", "0a1b2c3d", "7", "d",
        "18446744073709551615", "18446744073709551616", "00000000000000000007", ".manifest", "latest",
    ),
    mutate.noise, seeds=(), share=10, refuses=(errors.TableCorruptError,),
)  # fmt: skip
def file_name(data: bytes) -> object:
    """File names: what is recognised is written with the same letters."""
    name = data.decode("utf-8", "surrogateescape")
    found: list[object] = []
    if (number := names.parse_bit_reversed(name)) is not None:
        assert names.bit_reversed(number) == name
        found.append(number)
    if (version := names.parse_region_manifest_name(name)) is not None:
        assert names.region_manifest_name(version) == name
        found.append(version)
    if (entry := names.parse_wal_entry_name(name)) is not None:
        assert names.wal_entry_name(entry.entry_id, entry.suffix) == name
        found.append(entry)
    if (generation := names.parse_generation_dir(name)) is not None:
        assert f"{generation.prefix}_gen_{generation.generation}" == name
        assert generation.generation <= U64_MAX
        found.append(generation)
    if (parsed := names.parse_version_manifest_name(name)) is not None:
        assert 0 <= parsed.version <= U64_MAX
        if parsed.scheme is not None:
            assert names.version_manifest_name(parsed.version, parsed.scheme) == name
        found.append(parsed)
    assert len(found) <= 1
    names.naming_scheme([name, "7.manifest"])
    return found


_USAGE = (errors.InvalidUsageError, errors.UnsupportedFeatureError)


@decoder(
    mutate.words(
        "file://", "gs://", "az://", "memory://", "s3+ddb://", "s3://", "FILE://", "ftp://", "://", "/", "a", "b c",
        "azure://", "abfss://", "x@x.dfs.core.windows.net", "\\",
        "[", "]", "%2F", "%", "%2e%2e", "@", ":", "?", "#", "~", "~nobody", "localhost", "//", "[::1]", "\u2100",
    ),
    mutate.noise, seeds=(), share=8, refuses=_USAGE,
)  # fmt: skip
def location(data: bytes) -> object:
    """``resolve``: a place that resolves to itself, or a refusal."""
    text = data.decode("utf-8", "surrogateescape")
    if text.lower().startswith(("s3://", "s3a://")):
        text = f"gs{text[text.index(':') :]}"  # the same rules, without botocore's milliseconds
    found = resolve(text)
    assert found.uri == resolve(found.uri).uri
    assert found.scheme in locations._SCHEMES.values()
    if found.scheme == "file":
        assert found.uri.startswith("/")
        assert "\0" not in found.uri
    elif found.scheme != "memory":
        bucket, prefix = locations.bucket_and_prefix(found)
        assert bucket
        assert not any(part in {".", ".."} for part in prefix.split("/"))
    return found


@decoder(
    mutate.words("aws_region", "region", "=", "=", " ", "allow_http", "true", "\n", "\n", "AWS_REGION", "lance."),
    mutate.noise, seeds=(), share=8, refuses=_USAGE,
)  # fmt: skip
def storage_options(data: bytes) -> object:
    """Storage options, one to a line: canonical ones stay as they are, and each goes to one library at least."""
    given = options.parse_options(data.decode("utf-8", "surrogateescape").split("\n"))
    for scheme in ("s3", "gs", "file"):
        found = options.canonical(given, scheme)
        assert options.canonical(found, scheme) == found
        config, client = options.split_for_obstore(found)
        assert {*config, *client} == {key for key in found if not options.is_lance_only(key)}
        assert repr(options.redact_options(found))
    return given


@decoder(
    mutate.words("1", "9" * 400, "0", ".", "5", "GiB", "MB", " ", "h", "w", "-", str(REGION), "/", "3", "_mem_wal/"),
    mutate.noise, seeds=(), share=8, refuses=(click.BadParameter, errors.InvalidUsageError),
)  # fmt: skip
def command_line(data: bytes) -> object:
    """Sizes, spans of time, region ids and targets as users write them."""
    text = data.decode("utf-8", "surrogateescape")
    _, is_meant = _wanted(text)
    is_meant(LanceCandidate(CandidateKind.GENERATION, f"{text}/x", 0, 1, (), region_id=REGION, generation=3))
    if zlib.crc32(data) % 2:
        return Duration().convert(text, None, None)
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
