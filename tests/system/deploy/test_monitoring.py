"""configs/prometheus and configs/grafana: they name metrics, labels and values that a running service really has."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import lance
import numpy as np
import promql_parser as promql
import pyarrow as pa
import pytest
import yaml

from tests.support.runbook import commands, shell
from tests.support.service import Running, service
from tests.support.tables.plain import PlainTable
from tests.support.tables.workload import Workload
from tests.support.waiting import PATIENCE
from tests.system.deploy.promql import JOB_NAME, Scrape, metrics, selectors

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "configs/prometheus"
RULES = PROMETHEUS / "memwal-ops.rules.yaml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((ROOT / "configs/grafana/memwal-ops.json").read_text())
PANELS = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
# What Grafana puts in; any value that parses.
VARIABLES = {"$__rate_interval": "5m", "$instance": ".*", "$table": ".*", "$job": ".*"}
# Metrics that the dashboard leaves out on purpose, and why.
NOT_SHOWN: dict[str, str] = {
    "memwal_ops_backlog_wal_fragments": "a service without a Zeppelin namespace does not have it",
    "memwal_ops_merged_elsewhere": "its value is a release of Lance, on tables that another program merges, too",
    "memwal_ops_merged_fragments_total": "the rows of these fragments are in the panel of merged rows",
}
# Of those that Grafana knows.
UNITS = {"none", "short", "s", "bytes", "Bps", "cps", "percentunit"}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt install prometheus)"
)


def expanded(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def panel_expressions() -> list[tuple[str, str]]:
    """Title and expression of every panel, and of every variable that is asked for."""
    found = [(panel["title"], expanded(target["expr"])) for panel in GRAPHS for target in panel["targets"]]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert asked is not None
            assert variable["definition"] == variable["query"]["query"]
            found.append((variable["name"], f"count by ({asked[2]}) ({expanded(asked[1])})"))
    return found


@cache
def documented() -> frozenset[str]:
    return frozenset(re.findall(r"^\| `(memwal_ops_\w+)`", (ROOT / "docs/http.md").read_text(), re.MULTILINE))


def what_is_wrong(running: Running) -> tuple[Scrape, list[tuple[str, str]]]:
    """A scrape, and what alerts and panels name that it does not have."""
    scrape = Scrape.of(running.get("/metrics"))
    wrong = [(rule["alert"], why) for rule in ALERTS for why in scrape.wrong(rule["expr"])]
    wrong += [(title, why) for title, expression in panel_expressions() for why in scrape.wrong(expression)]
    return scrape, wrong


@pytest.mark.long
def test_what_is_named_exists_in_the_scrape_of_a_running_service(tmp_path: Path) -> None:
    """All jobs are known, so that all is looked at; only merges run. A plain table has figures of its own."""
    plain = PlainTable(str(tmp_path / "plain.lance")).create()
    vectors = pa.table({"v": pa.array(np.eye(64, dtype=np.float32).tolist(), pa.list_(pa.float32(), 64))})
    lance.write_dataset(vectors, str(tmp_path / "v.lance")).create_index("v", "IVF_FLAT", name="v", num_partitions=1)
    table = Workload(1, regions=1, base_rows=20).create(str(tmp_path / "t.lance"))
    table.put([1, 2])
    table.flush()
    never = ", ".join(
        f"{job}: {{schedule: null, when: generations > 1000000}}"
        for job in ("catchup", "compact", "snapshot", "expire", "gc", "maintain", "verify")
    )
    config = tmp_path / "c.yaml"
    config.write_text(
        f"state_dir: {tmp_path}/state-c\nhttp: {{port: 0}}\n"
        "notify: {targets: [{name: ops, type: webhook, url: 'http://127.0.0.1:1/'}]}\n"
        "events: {queue: 'http://127.0.0.1:1/123456789012/q', region: eu-west-1, "
        "storage_options: {aws_access_key_id: k, aws_secret_access_key: s}}\n"
        f"budget: {{cpu: 1h}}\nfleet: {{uri: {tmp_path}/ops, name: one, heartbeat: 1s}}\n"
        f"tables:\n- {{uri: {table.uri}, poll: 1s, expect_writes_within: 1h, "
        f"jobs: {{merge: {{schedule: 1s}}, {never}}}}}\n"
        f"- {{uri: {plain.uri}, poll: 1s, erase: {{within: 30d}}, jobs: {{expire: {{}}}}}}\n"
        f"- {{uri: {tmp_path}/v.lance, poll: 1s}}\n"
    )
    with service(config) as running:
        # Each table's first look and first run bring figures of their own, in whatever order they come to an end.
        scrape, wrong = what_is_wrong(running)
        ends = time.monotonic() + PATIENCE
        while wrong and time.monotonic() < ends:
            time.sleep(0.2)
            scrape, wrong = what_is_wrong(running)
    assert wrong == []
    for rule in ALERTS:
        # The first selector is what the alert's labels come from; of an alternative, each has its own.
        sides = selectors(rule["expr"]) if re.search(r"\bor\b", rule["expr"]) else selectors(rule["expr"])[:1]
        labels = {label for side in sides for label in scrape.of_metric(side.name)}
        for text in (*rule["annotations"].values(), *rule["labels"].values()):
            assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels, text
    for panel in GRAPHS:
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
            (first, *_) = selectors(expanded(target["expr"]))
            assert named <= scrape.of_metric(first.name), target
    # Planted: what is not there is found, in whatever way it is named.
    for expression, why in (
        ("memwal_ops_blocked_region > 0", "no metric memwal_ops_blocked_region"),
        ('memwal_ops_running_seconds{task="merge"}', "memwal_ops_running_seconds has no label task"),
        ('memwal_ops_runs_total{outcome="hanged"}', "memwal_ops_runs_total has no outcome=hanged"),
        ("sum by (table) (memwal_ops_ready)", "memwal_ops_ready has no label table"),
        (
            "memwal_ops_versions > on (table, region) memwal_ops_fragments",
            "memwal_ops_versions has no label region",
        ),
        ('memwal_ops_ready{job="memwal"}', "memwal_ops_ready has no job=memwal"),
    ):
        assert why in scrape.wrong(expression), expression


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for _, expression in panel_expressions()
        for name in metrics(promql.parse(expression))
    }
    assert {name for name in documented() if name not in shown} == set(NOT_SHOWN)
    assert shown <= documented() | {"ALERTS"}


def test_the_dashboard_is_sound() -> None:
    assert (DASHBOARD["uid"], DASHBOARD["schemaVersion"]) == ("memwal-ops", 39)
    assert "id" not in DASHBOARD, "the number under which one Grafana stored it"
    assert "__inputs" not in DASHBOARD, "it asks for its data source by a variable"
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert {"datasource", "table", "job"} <= variables.keys()
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert all(one["datasource"] == DATASOURCE for one in variables.values() if one["type"] == "query")
    ids = [panel["id"] for panel in PANELS]
    assert len(ids) == len(set(ids))
    titles = [panel["title"] for panel in GRAPHS]
    assert all(panel["title"] for panel in PANELS)
    assert len(titles) == len(set(titles)) + titles.count("Blocked regions") - 1, "as a figure, and over time"
    rows = [panel["title"] for panel in PANELS if panel["type"] == "row"]
    assert rows == [
        "Overview", "Backlog", "Runs", "Indexes and snapshots", "Garbage", "Service", "Tables and cost",
        "Fleet, budget and erase",
    ]  # fmt: skip
    for panel in GRAPHS:
        assert panel["description"], panel["title"]
        assert panel["datasource"] == DATASOURCE
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"])
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0
        if panel["type"] != "table":
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    used = set(re.findall(r"\$(?!__|labels)\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == variables.keys()


def test_panels_do_not_overlap() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in PANELS]
    for title, place in places:
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24, title
        assert place["h"] > 0, title
    for (one, a), (other, b) in itertools.combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (one, other)


def test_units_are_those_of_the_metrics() -> None:
    """Seconds are shown as seconds, bytes as bytes, and nothing else is."""
    for panel in GRAPHS:
        if panel["type"] == "table":
            continue
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            expression = expanded(target["expr"])
            name = selectors(expression)[0].name
            counted = expression.startswith("count(") or "schedule_seconds" in expression
            if "_bytes" in name:
                assert unit == ("Bps" if expression.startswith("sum by (table) (rate(") else "bytes"), panel["title"]
            elif "_seconds" in name and not counted:
                assert unit == ("percentunit" if "_sum" in name else "s"), panel["title"]
            else:
                assert unit not in {"s", "bytes", "Bps"}, panel["title"]


def test_every_alert_is_whole() -> None:
    names = [rule["alert"] for rule in ALERTS]
    assert len(names) == len(set(names)) > 13
    for rule in ALERTS:
        assert re.fullmatch(r"MemwalOps[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook_url", "first_command"}
        assert rule["annotations"]["runbook_url"] == f"runbooks/alerts/{rule['alert']}.md"
        assert len(re.sub(r"{{.*?}}", "", rule["annotations"]["summary"])) < 80
    # A comment before each, which says why the figures are what they are.
    assert len(re.findall(r"^      # .*\n(?:      # .*\n)*      - alert: ", RULES.read_text(), re.MULTILINE)) == len(
        names
    )


def test_every_alert_has_a_unit_test() -> None:
    cases = yaml.safe_load((PROMETHEUS / "memwal-ops.test.yaml").read_text())
    healthy, *faults = cases["tests"]
    assert healthy["name"].startswith("a healthy service")
    assert all(one["exp_samples"] == [] for one in healthy["promql_expr_test"])
    given = {series for one in healthy["input_series"] for series in metrics(promql.parse(one["series"]))}
    asked = {name for rule in ALERTS for name in metrics(promql.parse(rule["expr"]))}
    assert asked <= given, "a healthy series for whatever an alert looks at"
    fired: set[str] = set()
    for case in faults:
        tests = case["promql_expr_test"]
        fires = set(re.findall(r'alertname[="]+(\w+)', json.dumps(tests).replace("\\", "")))
        fires |= {one["alertname"] for one in case.get("alert_rule_test", []) if one["exp_alerts"]}
        fired |= fires
        silent = [one for one in (*tests, *case.get("alert_rule_test", [])) if not one.get("exp_samples")]
        assert silent or len(tests) == 1, "not yet, or not for what looks like it"
    assert fired == {rule["alert"] for rule in ALERTS}


def test_the_scrape_keeps_our_label_job() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    assert (scrape["job_name"], scrape["honor_labels"]) == (JOB_NAME, True)
    assert config["rule_files"] == [RULES.name]
    assert {matcher.value for rule in ALERTS for one in selectors(rule["expr"]) if one.name == "up"
            for matcher in one.matchers.matchers} == {JOB_NAME}  # fmt: skip


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yaml"),
        ("check", "rules", "memwal-ops.rules.yaml"),
        ("test", "rules", "memwal-ops.test.yaml"),
    ],
    ids=" ".join,
)
def test_promtool(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def steps() -> list[str]:
    """What docs/monitoring.md has an operator type to watch the service."""
    text = (ROOT / "docs/monitoring.md").read_text()
    for path in re.findall(r"\]\(\.\./([^)]+)\)", text):
        assert (ROOT / path).exists(), path
    return commands(text)


def test_the_steps_of_the_docs_install_what_is_here(tmp_path: Path) -> None:
    """All but those that need the servers themselves."""
    done = 0
    for line in steps():
        if line.startswith(("sudo cp ", "sudo sed ", "echo ")):
            here = line.removeprefix("sudo ").replace("/etc/prometheus/", f"{tmp_path}/")
            here = here.replace("> dashboard.json", f"> {tmp_path}/dashboard.json")
            assert shell(f"cd {ROOT} && {here}") == (0, ""), line
            done += 1
    assert done == 4
    assert json.loads((tmp_path / "dashboard.json").read_text())["dashboard"] == DASHBOARD
    installed = yaml.safe_load((tmp_path / RULES.name).read_text())
    urls = [rule["annotations"]["runbook_url"] for group in installed["groups"] for rule in group["rules"]]
    assert all(re.fullmatch(r"https://[^ ]+/runbooks/alerts/\w+\.md", url) for url in urls)
    for line in steps():
        if line.startswith("promtool query"):
            promql.parse(re.findall(r"'(.+)'$", line)[0])
    if shutil.which("promtool") is not None:
        (check,) = [line for line in steps() if line.startswith("promtool check")]
        code, said = shell(check.replace("/etc/prometheus/", f"{tmp_path}/"))
        assert (code, said.count("SUCCESS")) == (0, 3), said


@needs_promtool
def test_promtool_would_tell(tmp_path: Path) -> None:
    """An alert with another threshold fails its unit test."""
    text = RULES.read_text()
    planted = text.replace("expr: memwal_ops_blocked_regions > 0", "expr: memwal_ops_blocked_regions > 2")
    assert planted != text
    (tmp_path / RULES.name).write_text(planted)
    cases: dict[str, Any] = yaml.safe_load((PROMETHEUS / "memwal-ops.test.yaml").read_text())
    cases["tests"] = [case for case in cases["tests"] if case["name"] == "MemwalOpsMergeBlocked"]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(cases))
    done = subprocess.run(["promtool", "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 1
