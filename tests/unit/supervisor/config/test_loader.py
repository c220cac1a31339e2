"""Configuration files: every error with its line and a fix, every value with its source, no secret shown."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import yaml
from hypothesis import example, given, strategies as st

from memwal_ops.supervisor.config.document import place_text
from memwal_ops.supervisor.config.loader import ConfigProblemsError, load_settings
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from memwal_ops.supervisor.config.effective import Settings

ROOT = Path(__file__).parents[4]
TABLE = "tables:\n  - uri: /data/t.lance\n"
JOBS = TABLE + "    jobs:\n      "


def load(path: Path, text: str, **environ: str) -> Settings:
    file = path / "config.yaml"
    file.write_text(text)
    return load_settings(str(file), environ)


def problems(path: Path, text: str, **environ: str) -> list[tuple[int | None, str, str]]:
    with pytest.raises(ConfigProblemsError) as raised:
        load(path, text, **environ)
    assert all(one.fix for one in raised.value.problems)
    return [(one.line, place_text(one.place), f"{one.message} {one.fix}") for one in raised.value.problems]


WRONG = [
    ("htp: {}\n" + TABLE, 1, "htp", "Did you mean http?"),
    (TABLE + "http:\n  prt: 3\n", 4, "http.prt", "Did you mean port?"),
    (TABLE + "http:\n  port: seven\n", 4, "http.port", "whole number"),
    (TABLE + "http:\n  port: 70000\n", 4, "http.port", "65535"),
    (TABLE + "pools:\n  merge: {workers: 0}\n", 4, "pools.merge.workers", "greater than or equal to 1"),
    (TABLE + "stop_grace: 60\n", 3, "stop_grace", "no unit"),
    (TABLE + "    jobs: {merge: {schedule: 5}}\n", 3, "tables[0].jobs.merge.schedule", "for example 5m"),
    (TABLE + "log_level: loud\n", 3, "log_level", "'debug', 'info'"),
    (TABLE + "leases: {ttl: 1s}\n", 3, "leases.ttl", "greater"),
    (TABLE + "    labels: {'a b': c}\n", 3, "tables[0].labels", "pattern"),
    (TABLE + "    labels: {team: 7}\n", 3, "tables[0].labels.team", "string"),
    (TABLE + "fleet: {name: a}\n", 3, "fleet.uri", "missing"),
    (TABLE + "fleet: {uri: ops}\n", 3, "fleet.uri", "not an absolute path"),
    (TABLE + "fleet: {uri: /ops, name: a/b}\n", 3, "fleet.name", "pattern"),
    (TABLE + "fleet: {uri: /ops, heartbeat: 0s}\n", 3, "fleet.heartbeat", "greater"),
    (TABLE + "events: {queue: q}\n", 3, "events", "neither the URL nor the ARN of a queue"),
    (TABLE + "events: {queue: 'arn:aws:sqs:eu-west-1:123456789012:q.fifo'}\n", 3, "events", "FIFO"),
    (TABLE + "events: {queue: 'https://sqs.eu-west-1.amazonaws.com/1/q', endpoint: x}\n", 3, "events.endpoint", "mat"),
    (TABLE + "fleet: {uri: /ops*}\n", 3, "fleet.uri", "is not a folder"),
    (TABLE + "fleet: {uri: /ops}\nleases: {enabled: false}\n", 4, "leases.enabled", "needs leases"),
    ("fleet: {uri: /lake/ops}\ntables:\n  - pattern: /lake/*\n", 1, "fleet.uri", "taken for a table"),
    (TABLE + "leases: {enabled: perhaps}\n", 3, "leases.enabled", "true or false"),
    (TABLE + "leases: {enabled: 'no'}\n", 3, "leases.enabled", "true or false"),
    (TABLE + "leases: {enabled: 0}\n", 3, "leases.enabled", "true or false"),
    (JOBS + "gc: {apply: 'no'}\n", 4, "tables[0].jobs.gc.apply", "true or false"),
    (JOBS + "gc: {apply: 1}\n", 4, "tables[0].jobs.gc.apply", "true or false"),
    (JOBS + "gc: {options: {allow_unsafe: 'no'}}\n", 4, "tables[0].jobs.gc.options.allow_unsafe", "True or False"),
    (JOBS + "maintain: {options: {apply: 1}}\n", 4, "tables[0].jobs.maintain.options.apply", "True or False"),
    (TABLE + "http: {}\nhttp: {}\n", 4, "http", "given twice"),
    (TABLE + "version: 2\n", 3, "version", "1"),
    ("tables: []\n", 1, "tables", "at least one"),
    ("tables: 3\n", 1, "tables", "list"),
    ("http: {}\n", 1, "tables", "missing"),
    ("tables:\n  - {}\n", 2, "tables[0]", "either uri or pattern or database"),
    ("tables:\n  - {uri: /t, database: /d}\n", 2, "tables[0]", "either uri or pattern or database"),
    ("tables:\n  - {database: /d/*}\n", 2, "tables[0].database", "wildcard"),
    ("tables:\n  - {database: d}\n", 2, "tables[0].database", "not an absolute path"),
    ("tables:\n  - uri: data/t.lance\n", 2, "tables[0].uri", "absolute"),
    ("tables:\n  - uri: s4://b/t.lance\n", 2, "tables[0].uri", "one of abfs, abfss, az, azure"),
    ("tables:\n  - uri: /data/*.lance\n", 2, "tables[0].uri", "pattern"),
    ("tables:\n  - pattern: /data/t.lance\n", 2, "tables[0].pattern", "uri instead"),
    ("tables:\n  - pattern: /data/**/t.lance\n", 2, "tables[0].pattern", "for each level"),
    (TABLE + "  - uri: /other/t.lance\n", 3, "tables[1]", "Give one of them a name"),
    (TABLE + "  - uri: /data/t.lance/\n    name: again\n", 3, "tables[1]", "more than once"),
    (JOBS + "merg: {}\n", 4, "tables[0].jobs.merg", "Did you mean merge?"),
    (JOBS + "merge: {scedule: 5m}\n", 4, "tables[0].jobs.merge.scedule", "Did you mean schedule?"),
    (JOBS + "merge: {schedule: soon}\n", 4, "tables[0].jobs.merge.schedule.every", "not a duration"),
    (JOBS + "merge: {schedule: '* * * *'}\n", 4, "tables[0].jobs.merge.schedule", "five fields"),
    (JOBS + "merge: {schedule: '0 0 31 2 *'}\n", 4, "tables[0].jobs.merge.schedule", "never fires"),
    (JOBS + "merge: {schedule: {}}\n", 4, "tables[0].jobs.merge.schedule", "either every or cron"),
    (JOBS + "merge: {schedule: null, when: null}\n", 4, "tables[0].jobs.merge.schedule", "never run"),
    (JOBS + "merge: {when: generatons > 1}\n", 4, "tables[0].jobs.merge.when", "did you mean generations"),
    (JOBS + "merge: {windows: ['25:00-26:00']}\n", 4, "tables[0].jobs.merge.windows[0]", "not a time of day"),
    (JOBS + "merge: {options: {max_byte: 1}}\n", 4, "tables[0].jobs.merge.options.max_byte", "mean max_bytes"),
    (JOBS + "merge: {options: {max_bytes: 1x}}\n", 4, "tables[0].jobs.merge.options.max_bytes", "not a size"),
    (JOBS + "merge: {options: {max_bytes: 0}}\n", 4, "tables[0].jobs.merge.options", "max_bytes must be at least 1"),
    (JOBS + "gc: {options: {reader_grace: 1s}}\n", 4, "tables[0].jobs.gc.options", "allow_unsafe"),
    (JOBS + "catchup: {options: {rebuild: true}}\n", 4, "tables[0].jobs.catchup.options", "in each run of a service"),
    (JOBS + "maintain: {options: {merge: {max_byts: 1}}}\n", 4, "tables[0].jobs.maintain", "max_byts"),
    (JOBS + "merge: {budget: {per: 1d}}\n", 4, "tables[0].jobs.merge.budget.time", "missing"),
    (JOBS + "merge: {heartbeat_url: 'ftp://x'}\n", 4, "tables[0].jobs.merge.heartbeat_url", "http"),
    (TABLE + "heartbeat: {url: 'https://x/{tabel}'}\n", 3, "heartbeat.url", "{table}"),
    (TABLE + "    timezone: Mars/Phobos\n", 3, "tables[0].timezone", "no time zone"),
    (
        TABLE + "    storage_options: {aws_region: '${REGION}'}\n",
        3,
        "tables[0].storage_options.aws_region",
        "REGION is not set",
    ),
    (TABLE + "state_dir: ${}\n", 3, "state_dir", "not a valid variable reference"),
    ("tables: [\n", 2, "", "not valid YAML"),
    ("a: b: c\n", 1, "", "not valid YAML"),
    ("tables: " + "[" * 100_000, None, "", "not valid YAML: maximum recursion depth"),
    ("", 1, "", "empty"),
    ("a: &a [*a]\n", None, "", "contains itself"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "place", "says"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_what_is_wrong_is_reported_with_its_line(tmp_path: Path, text: str, line: int, place: str, says: str) -> None:
    found = problems(tmp_path, text)
    assert any(
        one_line == line and one_place.startswith(place) and says in message for one_line, one_place, message in found
    ), found


def test_everything_at_once(tmp_path: Path) -> None:
    text = "defaults:\n  pol: 3s\n  jobs:\n    merge: {shedule: 5m}\ntables:\n  - uri: /t\n    naem: x\n"
    assert [line for line, _, _ in problems(tmp_path, text)] == [2, 4, 7]


MANY = """\
log_level: loud
defaults:
  jobs:
    merge: {when: generatons > 1, budget: {per: 1d}, timeout: soon}
    compost: {}
tables:
  - uri: /t
    poll: 3
    jobs:
      merge: {schedule: soon, options: {max_bytes: 1x, max_generations: 0, max_byte: 3, engine: flink}}
      maintain: {options: {merge: {max_bytes: 0, max_byts: 1}, gc: {max_deletes: many}}}
      gc: {windows: [3, 25:00-26:00]}
  - nonsense
  - uri: relative/u.lance
    jobs: {merge: {windows: [25:00-26:00]}, catchup: {schedule: null, when: null}}
  - name: v
    timezone: Mars/Phobos
  - uri: s4://b/w
    include: 3
    heartbeat: x
"""
SAID = [
    "log_level", "defaults.jobs.merge.when", "defaults.jobs.merge.budget.time", "defaults.jobs.merge.timeout",
    "defaults.jobs.compost", "tables[0].poll", "tables[0].jobs.merge.schedule.every",
    "tables[0].jobs.merge.options.max_bytes", "tables[0].jobs.merge.options.max_generations",
    "tables[0].jobs.merge.options.max_byte", "tables[0].jobs.merge.options.engine",
    "tables[0].jobs.maintain.options.merge.max_bytes", "tables[0].jobs.maintain.options.merge.max_byts",
    "tables[0].jobs.maintain.options.gc.max_deletes", "tables[0].jobs.gc.windows[0]", "tables[1]", "tables[2].uri",
    "tables[2].jobs.merge.windows[0]", "tables[2].jobs.catchup.schedule", "tables[3]",
    "tables[4].uri", "tables[4].include", "tables[4].heartbeat",
]  # fmt: skip


def test_no_problem_hides_another(tmp_path: Path) -> None:
    """A value of the wrong type hid everything that is only judged afterwards, and an option all after it."""
    found = problems(tmp_path, MANY)
    assert sorted(place for _, place, _ in found) == sorted(SAID)
    lines = {place: line for line, place, _ in found}
    assert (lines["tables[2].uri"], lines["tables[4].uri"], lines["tables[1]"]) == (14, 18, 13)


@pytest.mark.parametrize("wrong", ["log_level: loud\n", "http: {port: x}\n", "tables: 3\n", "pools: []\n"])
def test_no_value_is_made_up_for_an_invalid_one(tmp_path: Path, wrong: str) -> None:
    assert len(problems(tmp_path, wrong if wrong.startswith("tables") else wrong + TABLE)) == 1


def test_what_is_wrong_in_the_defaults_is_reported_once(tmp_path: Path) -> None:
    text = "defaults:\n  jobs:\n    merge: {when: nonsense}\ntables:\n  - uri: /a\n  - uri: /b\n"
    assert len(problems(tmp_path, text)) == 1


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblemsError, match="cannot be read"):
        load_settings(str(tmp_path / "none.yaml"))


LAYERS = """\
defaults:
  poll: 7s
  storage_options: {aws_region: fleet-region, aws_profile: fleet}
  jobs:
    merge:
      schedule: 5m
      options: {max_bytes: 64MiB, max_generations: 9}
tables:
  - uri: s3://bucket/one.lance
    storage_options:
      aws_secret_access_key: ${KEY}
      aws_region: ${REGION:-elsewhere}
    jobs:
      merge:
        when: generations >= 2
        options: {max_generations: 4}
      compact: {enabled: false}
      gc: {apply: true}
  - uri: /data/two.lance
"""


def sources(settings: Settings) -> dict[str, tuple[Any, str]]:
    return {key: (value, str(source)) for key, value, source in settings.effective()}


def test_the_nearest_layer_wins_and_is_named(tmp_path: Path) -> None:
    settings = load(tmp_path, LAYERS, KEY="very-secret-value")
    found = sources(settings)
    merge = "tables.one.jobs.merge"
    assert found[f"{merge}.options.max_bytes"] == ("64MiB", "fleet, line 7")
    assert found[f"{merge}.options.max_generations"] == (4, "table, line 16")
    assert found[f"{merge}.schedule"] == ("{every: 5m}", "fleet, line 6")
    assert found[f"{merge}.when"] == ("generations >= 2", "table, line 15")
    assert found[f"{merge}.hung_after"] == ("30m", "default")
    assert found["tables.one.storage_options.aws_secret_access_key"] == ("***", "env KEY, line 11")
    assert found["tables.one.storage_options.aws_region"] == ("elsewhere", "table, line 12")
    assert found["tables.one.storage_options.aws_profile"] == ("fleet", "fleet, line 3")
    assert found["tables.one.poll"] == ("7s", "fleet, line 2")
    assert found["tables.one.jobs.compact.enabled"] == (False, "table, line 17")
    assert found["tables.two.jobs.merge.options.max_generations"] == (9, "fleet, line 7")
    assert found["http.port"] == (9464, "default")
    one, two = settings.tables
    assert one.storage_options == {
        "aws_region": "elsewhere", "aws_profile": "fleet", "aws_secret_access_key": "very-secret-value",
    }  # fmt: skip
    assert one.poll == timedelta(seconds=7)
    assert one.jobs["gc"].enabled
    assert one.jobs["gc"].apply
    assert not two.jobs["gc"].enabled, "what deletes is off until it is named"
    assert two.jobs["compact"].enabled
    assert "very-secret-value" not in json.dumps(sources(settings))


def test_a_value_of_the_environment_is_masked_in_lists_too(tmp_path: Path) -> None:
    """And what stands in a list, or below a name, has its line in the file."""
    settings = load(
        tmp_path,
        "http: {allowed_hosts: ['${KEY}.example', other]}\n"
        "notify:\n"
        "  targets:\n"
        "    - {name: mail, type: email, host: '${KEY}', sender: ops@example.com,\n"
        "       to: ['${KEY}@example.com']}\n"
        "tables:\n"
        "  - name: many\n    pattern: s3://b/*.lance\n"
        "    exclude: ['${KEY}*']\n"
        "    labels: {team: search}\n",
        KEY="of-the-environment",
    )
    found = sources(settings)
    assert "of-the-environment" not in json.dumps(found)
    assert found["http.allowed_hosts"] == (["***.example", "other"], "fleet, line 1")
    assert found["notify.targets.mail.host"] == ("***", "env KEY, line 4")
    assert found["notify.targets.mail.to"] == (["***@example.com"], "fleet, line 5")
    assert found["notify.targets.mail.level"] == ("warning", "default")
    assert found["tables.many.exclude"] == (["****"], "table, line 9")
    assert found["tables.many.labels.team"] == ("search", "table, line 10")


def test_deleting_jobs_only_plan_by_default(tmp_path: Path) -> None:
    settings = load(tmp_path, JOBS + "gc: {}\n      expire: {apply: true}\n")
    jobs = settings.tables[0].jobs
    assert (jobs["gc"].enabled, jobs["gc"].apply) == (True, False)
    assert (jobs["expire"].enabled, jobs["expire"].apply) == (True, True)
    assert jobs["merge"].apply


def test_a_secret_in_the_file_is_warned_of(tmp_path: Path) -> None:
    settings = load(tmp_path, TABLE + "    storage_options: {aws_secret_access_key: abcdefgh}\n")
    assert [(one.line, place_text(one.place)) for one in settings.warnings] == [
        (3, "tables[0].storage_options.aws_secret_access_key")
    ]
    assert "abcdefgh" not in json.dumps(sources(settings))


def test_events_have_the_options_of_all_tables_and_need_a_table_in_s3(tmp_path: Path) -> None:
    text = (
        "events: {queue: 'https://sqs.eu-west-1.amazonaws.com/1/q', storage_options: {aws_profile: events}}\n"
        "defaults: {storage_options: {aws_profile: all, aws_region: eu-west-1}}\n"
    )
    settings = load(tmp_path, f"{text}tables: [{{database: s3://b/db}}]\n")
    assert settings.config.events is not None
    assert settings.config.events.storage_options == {"aws_profile": "events", "aws_region": "eu-west-1"}
    assert settings.warnings == ()
    (warning,) = load(tmp_path, f"{text}tables: [{{uri: /data/t.lance}}, {{uri: gs://b/u.lance}}]\n").warnings
    assert (warning.line, place_text(warning.place)) == (1, "events")
    assert warning.message.startswith("No table is in S3")


def test_booleans_may_come_from_the_environment(tmp_path: Path) -> None:
    text = JOBS + "gc: {apply: '${APPLY}', options: {allow_unsafe: '${UNSAFE:-false}'}}\n"
    (table,) = load(tmp_path, text, APPLY="true").tables
    assert table.jobs["gc"].apply is True
    assert table.jobs["gc"].options["allow_unsafe"] is False
    ((_, place, message),) = problems(tmp_path, text, APPLY="yes")
    assert (place, "true or false" in message) == ("tables[0].jobs.gc.apply", True)


def test_numbers_may_come_from_the_environment(tmp_path: Path) -> None:
    settings = load(tmp_path, TABLE + "http: {port: '${PORT}'}\nstate_dir: /a$$b/${X:-y}\n", PORT="1234")
    assert settings.config.http.port == 1234
    assert settings.config.state_dir == "/a$b/y"


@pytest.mark.parametrize("name", ["one-table.yaml", "fleet.yaml", "s3.yaml"])
def test_the_examples_are_good(name: str) -> None:
    path = ROOT / "configs" / name
    settings = load_settings(str(path), {})
    assert settings.warnings == ()
    assert path.read_text().count("#") > 5


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("schedule: 1h", "{every: 1h}"),
        ("schedule: {every: 5m, jitter: 30s}", "{every: 5m, jitter: 30s}"),
        ("schedule: '*/15 * * * *'", '{cron: "*/15 * * * *"}'),
        ("schedule: {cron: '0 3 * * *', jitter: 5m}", '{cron: "0 3 * * *", jitter: 5m}'),
        ("budget: {time: 90m}", "{time: 90m, per: 1d}"),
    ],
)
def test_what_is_shown_is_what_a_file_may_have(tmp_path: Path, given: str, shown: str) -> None:
    key = given.partition(":")[0]
    for line in (given, f"{key}: {shown}"):
        settings = load(tmp_path, f"{JOBS}merge: {{{line}}}\n")
        assert sources(settings)[f"tables.t.jobs.merge.{key}"][0] == shown


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(TABLE)
    good = run_here(capfd, "config", "check", str(file), "--json")
    assert (good.code, good.document["decision"], good.document["problems"]) == (0, "valid", [])
    assert set(good.document) == {"decision", "file", "problems", "warnings", "effective", "jobs"}
    assert {"key", "value", "layer", "line", "variables"} == set(good.document["effective"][0])
    assert good.document["jobs"] == ["catchup", "compact", "merge", "snapshot", "verify"]
    text = run_here(capfd, "config", "check", str(file))
    assert "tables.t.jobs.merge.schedule: {every: 10m, jitter: 1m}  # default" in text.out
    assert "timeout" not in text.out.replace("heartbeat.timeout", ""), "neither given, nor is there a default"
    assert "tables.t.jobs.merge.timeout" in [one["key"] for one in good.document["effective"]]
    file.write_text(TABLE + "    jobs: {merge: {when: null}}\n")
    assert "tables.t.jobs.merge.when: null  # table, line 3" in run_here(capfd, "config", "check", str(file)).out
    file.write_text(TABLE + "htp: {}\n")
    bad = run_here(capfd, "config", "check", str(file), "--json")
    assert (bad.code, bad.document["decision"]) == (50, "invalid")
    assert bad.document["problems"] == [
        {"where": "htp", "line": 3, "message": "There is no key 'htp' here.", "fix": "Did you mean http?"}
    ]
    file.write_text(TABLE + "    jobs: {compact: {target_rows: 5}}\n")
    (option,) = run_here(capfd, "config", "check", str(file), "--json").document["problems"]
    assert option["fix"].endswith("An option of the job goes below options:.")
    file.write_text(TABLE + "htp: {}\n")
    text = run_here(capfd, "config", "check", str(file))
    assert text.code == 50
    assert f"{file}:3: error: htp: There is no key 'htp' here." in text.out
    started = run_here(capfd, "run", "--config", str(file))
    assert started.code == 50
    assert f"{file}:3: htp" in started.err


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.text(alphabet="ab5m/*:{}$-. ", max_size=8),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["tables", "uri", "pattern", "jobs", "merge", "gc", "when", "schedule", "options", "windows", "defaults",
             "max_bytes", "regions", "budget", "time", "http", "port", "pools", "storage_options", "name", "x"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@hypothesis.settings(deadline=None)  # what the machine does beside this is none of its business
@given(_VALUES)
@example(["${"])  # two problems on one line: one of the whole document, one of a place in it
def test_any_document_is_settings_or_problems(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(yaml.safe_dump(document))
    try:
        load_settings(str(file), {})
    except ConfigProblemsError as error:
        assert error.problems


def test_the_longest_time_between_two_polls(tmp_path: Path) -> None:
    def longest(text: str) -> list[object]:
        path = tmp_path / "idle.yaml"
        path.write_text(text)
        return [one.idle_poll.total_seconds() for one in load_settings(str(path), {}).tables]

    assert longest("tables: [{uri: /a}, {uri: /b, poll: 2m}, {uri: /c, poll: 1h}]\n") == [300, 600, 3600]
    given = "defaults: {idle_poll: 20m}\ntables: [{uri: /a}, {uri: /b, poll: 1s, idle_poll: 1s}]\n"
    assert longest(given) == [1200, 1]
    for text, place in (
        ("defaults: {poll: 1m, idle_poll: 59s}\ntables: [{uri: /a}]\n", "defaults.idle_poll"),
        ("tables: [{uri: /a, idle_poll: 29s}]\n", "tables[0].idle_poll"),
    ):
        found = problems(tmp_path, text)
        assert [one for _, one, _ in found] == [place]
        assert "shorter than poll" in str(found)


@pytest.mark.parametrize(
    ("http", "warned"),
    [
        ("{}", []),
        ("{host: localhost}", []),
        ("{host: '::1'}", []),
        ("{host: 0.0.0.0, enabled: false}", []),
        ("{host: 0.0.0.0}", ["http.token_file", "without TLS"]),
        ("{host: ''}", ["http.token_file", "without TLS"]),
        ("{host: 10.1.2.3, token_file: /t}", ["without TLS"]),
        ("{host: ops.example.org, tls_certificate: /c, tls_key: /k}", ["http.token_file"]),
        ("{host: '::', token_file: /t, tls_certificate: /c, tls_key: /k}", []),
    ],
)
def test_a_service_that_strangers_reach_is_warned_of(tmp_path: Path, http: str, warned: list[str]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"http: {http}\ntables: [{{uri: /t}}]\n")
    found = [problem.message for problem in load_settings(str(file), {}).warnings]
    assert len(found) == len(warned)
    assert all(word in text for word, text in zip(warned, found, strict=True))


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http: {tls_key: /k}\ntables: [{uri: /t}]\n")
    with pytest.raises(ConfigProblemsError, match=r"Give both tls_certificate and tls_key"):
        load_settings(str(file), {})


ERASED = """\
defaults: {erase: {within: 20d, apply: true}}
tables:
  - uri: /data/a.lance
  - {uri: /data/b.lance, ttl: {column: created_at, keep: 90d}, erase: {within: 60d, apply: false}}
  - {uri: /data/c.lance, ttl: {column: day, keep: 1d}}
"""


def test_erase_and_ttl_of_a_table_are_options_of_the_job(tmp_path: Path) -> None:
    def jobs(text: str) -> list[tuple[bool, bool, dict[str, Any]]]:
        settings = [one.by_format["lance"]["erase"] for one in load(tmp_path, text).tables]
        return [(one.enabled, one.apply, dict(one.options)) for one in settings]

    column = {"column": "created_at", "keep": "90d"}
    assert jobs(ERASED) == [
        (True, True, {"within": "20d"}),
        (True, False, {"within": "60d", "ttl": column}),
        (True, True, {"within": "20d", "ttl": {"column": "day", "keep": "1d"}}),
    ]
    alone = "tables: [{uri: /data/a.lance, ttl: {column: created_at, keep: 90d}}]\n"
    assert jobs(alone) == [(True, False, {"ttl": column, "within": "30d"})], "it plans, until apply is given"
    [(_, place, why)] = problems(
        tmp_path, alone.replace("}}]", "}, jobs: {erase: {options: {ttl: {column: x, keep: 1d}}}}}]")
    )
    assert (place, "given twice" in why) == ("tables[0]", True)
    [(_, place, why)] = problems(tmp_path, alone.replace(", keep: 90d", ""))
    assert (place, "missing" in why) == ("tables[0].ttl.keep", True)


def test_what_no_table_names_is_resolved_once_for_all(tmp_path: Path) -> None:
    """10,000 tables of one file are as many entries, but one set of settings."""
    text = (
        "defaults: {jobs: {gc: {schedule: 2h}}}\ntables:\n"
        "  - {uri: /a, format: lance}\n  - {uri: /b, format: lance}\n"
        "  - {uri: /c, format: lance, timezone: Asia/Tokyo}\n"
        "  - uri: /d\n    format: lance\n    jobs: {gc: {schedule: 3h}}\n"
    )
    first, second, elsewhere, own = load(tmp_path, text).tables
    assert all(job is second.jobs[name] for name, job in first.jobs.items())
    assert elsewhere.jobs["gc"].zone.key == "Asia/Tokyo"
    assert own.jobs["merge"] is first.jobs["merge"]
    shown = [one.jobs["gc"].schedule for one in (first, own)]
    assert [one and one.every for one in shown] == [timedelta(hours=2), timedelta(hours=3)]
    assert (str(first.jobs["gc"].sources["schedule"]), str(own.jobs["gc"].sources["schedule"])) == (
        "fleet, line 1",
        "table, line 8",
    )
    assert (first.jobs["gc"].named, own.jobs["gc"].named) == (False, True)
