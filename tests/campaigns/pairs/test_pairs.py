"""Rows of the covering array, the seed's first ones; and that the walk finds, reduces and prints what it must."""

from __future__ import annotations

import ast
import http.client
import importlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from email.utils import parsedate_to_datetime
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

from memwal_ops.core.job import JobSpec
from tests.campaigns.pairs import damage, planted
from tests.campaigns.pairs.covering import covering
from tests.campaigns.pairs.dimensions import LANCE, LANCE_RULES, MODELS, PLAINS, THREES
from tests.campaigns.pairs.walk import MOST_LINES, Process, pairs, reduced, remote, script, threes
from tests.support.s3_buckets import Server
from tests.support.s3_server import s3_client
from tests.support.seeds import CAMPAIGN_SEED, env_number

if TYPE_CHECKING:
    from collections.abc import Iterator

Headers = dict[str, str]
Told = tuple[Any, ...]
#: What listings and refusals tell, and both must tell alike.
COMPARED = {"Key", "Prefix", "Size", "ETag", "IsTruncated", "KeyCount", "Code"}
SEED, ROWS = env_number("PAIRS_SEED", CAMPAIGN_SEED), env_number("PAIRS_ROWS", 40)
PLACE = Path(__file__).parent
FOUND = json.loads((PLACE / "found.json").read_text())
PUBLIC = {
    "memwal_ops", "memwal_ops.memwal", "memwal_ops.legacy", "memwal_ops.errors", "memwal_ops.cli.main",
    "memwal_ops.formats",
}  # fmt: skip
#: What runs of each hundred rows: the other formats have fewer, and those of three dimensions are many.
SHARES = {"lance": 66, "zeppelin": 12, "lm_diskann": 7, "remote": 3, "threes": 12}


def part_of(name: str) -> int:
    """How many rows of an array run; one at least, or a part of 20 rows, as CI has, would reach none on S3."""
    return max(1, ROWS * SHARES[name] // 100)


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    yield made
    made.close()


@pytest.mark.parametrize("name", SHARES)
def test_rows(process: Process, name: str) -> None:
    """Each as ``make pairs`` runs it: the first ones, which cover most; of other seeds others."""
    others = {"remote": remote, "threes": threes}
    found = others[name](SEED) if name in others else pairs(SEED, name)
    wrong = []
    for number, row in zip(range(part_of(name)), found, strict=False):
        outcome = process.run(row, f"{SEED}-{number}")
        if outcome.kind:
            wrong.append(f"PAIRS_SEED={SEED}, row {number}: {outcome.kind}: {outcome.text} at {outcome.source}; {row}")
    assert not wrong, "\n".join(wrong)


def test_every_two_values_are_together() -> None:
    """But for those that no row may have."""
    names = ["layout", "file", "row_ids", "place", "damage", "holder"]
    model = {name: LANCE[name] for name in names}
    rules = [rule for rule in LANCE_RULES if {*rule.about} <= {*names}]
    found = [*covering(model, rules, SEED)]
    assert not [row for row in found if any(rule.broken(row) for rule in rules)]
    for one, other in combinations(names, 2):
        pairs = {(row[one], row[other]) for row in found}
        of_both = [rule for rule in rules if {*rule.about} <= {one, other}]
        wanted = {
            (a, b) for a in model[one] for b in model[other]
            if not any(rule.broken({one: a, other: b}) for rule in of_both)
        }  # fmt: skip
        assert pairs == wanted


def test_every_three_values_are_together() -> None:
    """Of layouts, jobs, row ids, damages and places, in rows that are otherwise drawn by the seed."""
    found = [*threes(SEED)]
    rules = [rule for rule in LANCE_RULES if {*rule.about} <= {*THREES}]
    assert not [row for row in found if any(rule.broken(row) for rule in LANCE_RULES)]
    for names in combinations(THREES, 3):
        of_them = [rule for rule in rules if {*rule.about} <= {*names}]
        wanted = set(product(*(LANCE[name] for name in names)))
        wanted = {one for one in wanted if not any(rule.broken(dict(zip(names, one, strict=True))) for rule in of_them)}
        assert {tuple(row[name] for name in names) for row in found} == wanted


@pytest.mark.parametrize("name", MODELS)
def test_the_plainest_table_is_allowed(name: str) -> None:
    model, rules = MODELS[name]
    assert not [rule.why for rule in rules if rule.broken(PLAINS[name])]
    assert all(PLAINS[name][one] in values for one, values in model.items())
    assert all(rule.why and {*rule.about} <= {*model} for rule in rules)


def test_each_job_of_a_format_is_in_its_model(tmp_path: Path) -> None:
    """By its name, or with an option."""
    for name in MODELS:
        if name == "lance":
            continue
        specs = importlib.import_module(f"memwal_ops.formats.{name}.specs")
        jobs = {spec.name for spec in vars(specs).values() if isinstance(spec, JobSpec)}
        assert jobs <= {*MODELS[name][0]["job"]}


def test_remedies_are_found_in_what_commands_tell() -> None:
    """With the values of their options; none that is to be filled in, and each once; then those of the page."""

    def told(text: str, code: int = 0) -> list[list[str]]:
        return [*damage.remedies(text, code, "U", set())]

    assert told("memwal-ops repair URI --deep\n--apply links it again.") == [["repair", "U", "--deep", "--apply"]]
    assert told("memwal-ops catchup URI --index v_idx --rebuild. Or") == [
        ["catchup", "U", "--index", "v_idx", "--rebuild"]
    ]
    assert told("memwal-ops catchup URI --migrate-codebook v_idx NEW; memwal-ops merge /t") == [["merge", "U"]]
    assert told("", 27) == [["gc", "U", "--apply", "--json"], ["gc", "U", "--json"], ["gc", "U", "--apply"]]


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.shutdown()
    made.server_close()


def test_lines_of_pages_about_a_backup_are_filled_in() -> None:
    """Of the file that was damaged, with its folder where that went; none for another kind of file."""

    def lines(number: str, path: str) -> list[str]:
        (page,) = Path("runbooks/errors").glob(f"{number}-*.md")
        return damage.backup_lines(page.read_text(), "/t", path, "/b")

    assert lines("09", "_versions/1.manifest") == ['cp "/b/_versions/1.manifest" "/t/_versions/1.manifest"']
    assert lines("09", "data/a.lance") == []
    assert lines("13", "_mem_wal/r/g/data/x.lance") == [
        'mkdir -p "/t/_mem_wal/r/g"',
        'cp -a "/b/_mem_wal/r/g/." "/t/_mem_wal/r/g/"',
    ]
    assert lines("33", "_mem_wal/r/wal/7.arrow") == ['cp "/b/_mem_wal/r/wal/7.arrow" "/t/_mem_wal/r/wal/7.arrow"']
    assert lines("33", "_mem_wal/r/manifest/7.binpb") == []


def test_the_store_answers_as_moto_does(moto_endpoint: str, server: Server) -> None:
    """Random requests of a table's clients get the same status, headers, names and bytes; so do refused conditions."""
    chance = random.Random(SEED)
    both = [http.client.HTTPConnection(urlsplit(end).netloc) for end in (moto_endpoint, server.endpoint)]
    bucket, keys = f"/pairs-{SEED}", ["t/a", "t/b/c", "t/b/d e", "t/b/ü+%2F", "t/z&<", "u"]
    tags: dict[str, tuple[str, str]] = {}

    def told(connection: http.client.HTTPConnection, method: str, path: str, body: bytes, given: Headers) -> Told:
        connection.request(method, f"{bucket}{path}", body, given)
        got = connection.getresponse()
        content, names = got.read(), ("ETag", "Content-Range", "Content-Length")
        if content.startswith(b"<?xml"):
            nodes = [*ElementTree.fromstring(content).iter()]
            wanted = COMPARED if got.status < 300 else {"Code"}
            return got.status, {
                name: [one.text or "" for one in nodes if one.tag.rpartition("}")[2] == name] for name in wanted
            }
        headers = {one: got.headers.get(one) for one in names if got.status < 300 and method in {"GET", "HEAD", "PUT"}}
        if method == "PUT":
            headers.pop("Content-Length", None)
        assert method not in {"GET", "HEAD"} or got.status >= 300 or parsedate_to_datetime(got.headers["Last-Modified"])
        return got.status, headers, content if got.status < 300 else b""

    def ask(method: str, path: str, body: bytes = b"", /, **given: str) -> Told:
        given = {"Authorization": "AWS4-HMAC-SHA256 Credential=k/20200101/eu-west-1/s3/aws4_request", **given}
        headers = {name.replace("_", "-"): value for name, value in given.items()}
        found = [told(one, method, path, body, headers) for one in both]
        assert found[0] == found[1], (method, path, headers, CAMPAIGN_SEED)
        return found[1]

    place = b"<CreateBucketConfiguration><LocationConstraint>eu-west-1</LocationConstraint></CreateBucketConfiguration>"
    assert ask("PUT", "", place)[0] == 200
    seen = Counter[tuple[str, int]]()
    for number in range(400):
        key = chance.choice(keys)
        path, tag = f"/{quote(key)}", tags.get(key, ("", ""))[chance.randrange(2)] or '"0"'
        match kind := chance.choice(
            ["put", "put", "create", "swap", "get", "get", "head", "copy", "delete", "list", "list", "many"]
        ):
            case "put" | "create" | "swap":
                body = b"x" * chance.choice([0, 1, 9]) + str(number).encode() * chance.choice([0, 1])
                given = {"create": {"If_None_Match": "*"}, "swap": {"If_Match": tag}}.get(kind, {})
                got = ask("PUT", path, body, **given)
                if got[0] == 200:
                    tags[key] = (got[1]["ETag"], tags.get(key, ("",))[0])
            case "get" | "head":
                given = chance.choice(
                    [{}, {"Range": chance.choice(["bytes=0-0", "bytes=2-", "bytes=-4", "bytes=1-99"])}]
                )
                given |= chance.choice([{}, {}, {"If_Match": tag}])
                got = ask(kind.upper(), path, **given)
            case "copy":
                got = ask("PUT", path, x_amz_copy_source=quote(f"{bucket}/{chance.choice(keys)}"))
                tags.pop(key, None)
            case "delete":
                got = ask("DELETE", path)
            case "list":
                asked = {"list-type": "2", "prefix": chance.choice(["", "t/", "t/b/", "v"])}
                asked |= chance.choice([{}, {"delimiter": "/"}]) | chance.choice(
                    [{}, {"start-after": chance.choice(keys)}]
                )
                got = ask("GET", f"?{urlencode(asked)}")
            case "many":
                named = "".join(f"<Object><Key>{escape(one)}</Key></Object>" for one in chance.sample(keys, 2))
                got = ask("POST", "?delete=", f"<Delete>{named}</Delete>".encode())
        seen[kind, got[0]] += 1
    wanted = {("create", 412), ("swap", 200), ("swap", 412), ("swap", 404), ("get", 200), ("get", 206), ("get", 412)}
    assert wanted | {("get", 416), ("get", 404), ("copy", 404)} <= seen.keys()
    for one in both:
        one.close()


def test_the_store_takes_uploads_in_parts_and_lists_in_pages(server: Server) -> None:
    """As boto3 asks for them: names of a page and the next, and bytes of parts in their order."""
    client = s3_client(server.endpoint)
    client.create_bucket(Bucket="b", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    upload = client.create_multipart_upload(Bucket="b", Key="long")["UploadId"]
    parts = [
        {"PartNumber": number, "ETag": client.upload_part(
            Bucket="b", Key="long", UploadId=upload, PartNumber=number, Body=b"%d" % number * 3)["ETag"]}
        for number in (2, 1)
    ]  # fmt: skip
    client.complete_multipart_upload(Bucket="b", Key="long", UploadId=upload, MultipartUpload={"Parts": parts[::-1]})
    assert client.get_object(Bucket="b", Key="long")["Body"].read() == b"111222"
    for number in range(25):
        client.put_object(Bucket="b", Key=f"k{number % 5}/é {number:02}", Body=b"x")
    pages = client.get_paginator("list_objects_v2")
    for prefix, delimiter, expected in (("k", "", 25), ("k3/", "", 5), ("", "/", 6)):
        told = [
            one.get("Key") or one["Prefix"]
            for page in pages.paginate(Bucket="b", Prefix=prefix, Delimiter=delimiter, PaginationConfig={"PageSize": 3})
            for one in (*page.get("Contents", ()), *page.get("CommonPrefixes", ()))
        ]
        assert (len(told), len({*told})) == (expected, expected)
    client.close()


def test_the_oracle_shares_no_code_with_the_product() -> None:
    """It imports what a user imports, and no builder of tests that has parts of the product."""

    def imported(path: Path) -> set[str]:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        names = {one.name for node in nodes if isinstance(node, ast.Import) for one in node.names}
        return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}

    for path in PLACE.glob("*.py"):
        if path.name.startswith("test_"):
            continue
        for name in imported(path):
            assert not name.startswith("memwal_ops") or name in PUBLIC, f"{path.name} imports {name}"
            if name.startswith("tests.support."):
                of = imported(Path(name.replace(".", "/")).with_suffix(".py"))
                assert not [one for one in of if one.startswith("memwal_ops")], f"{path.name} imports {name}"
            else:
                assert not name.startswith("tests.") or name.startswith("tests.campaigns.pairs"), path.name


def test_each_planted_bug_is_one_line_of_today() -> None:
    assert FOUND.keys() == planted.BUGS.keys()
    for name, bug in planted.BUGS.items():
        path = Path(bug.name.replace(".", "/"))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert path.read_text().count(bug.old) == 1, f"{name}: {bug.old!r} in {path}"
        assert bug.new != bug.old


@pytest.mark.parametrize("name", FOUND)
def test_planted_bugs_are_found(name: str) -> None:
    """By the row that found it, whose table is right without it."""
    row, seed, steps = FOUND[name]["row"], FOUND[name]["seed"], FOUND[name].get("steps")
    process = Process(name)
    try:
        outcome = process.run(row, seed, steps)
        assert outcome.kind, f"{name} is not found by {row}"
    finally:
        process.close()


def test_a_failure_is_printed_as_a_short_program(tmp_path: Path) -> None:
    """The plainest values and fewest steps; it fails alone as it did in its row."""
    name = min(FOUND, key=lambda one: FOUND[one]["seconds"])
    process = Process(name)
    try:
        row, seed = FOUND[name]["row"], FOUND[name]["seed"]
        outcome = process.run(row, seed)
        row, kept, outcome = reduced(row, seed, outcome, process)
    finally:
        process.close()
    text = script(row, seed, kept, outcome)
    assert len(text.splitlines()) <= MOST_LINES, text
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "RUST_LOG": "off"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or outcome.kind.split()[0] in done.stderr or "memwal_ops" in done.stderr, done.stderr
