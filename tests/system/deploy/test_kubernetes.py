"""configs/kubernetes/: valid by the schemas of Kubernetes, and what they name is there: commands, paths, ports."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from memwal_ops.places import default_config_path
from memwal_ops.supervisor.config.model import Config, HttpConfig
from tests.support.run_cli import run_here

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs/kubernetes"
DOCUMENTS = [
    (file.name, document) for file in sorted(FOLDER.glob("*.yaml")) for document in yaml.safe_load_all(file.read_text())
]
OWN = [(name, document) for name, document in DOCUMENTS if "monitoring.coreos.com" not in document["apiVersion"]]
BYTES = {"Mi": 1 << 20, "Gi": 1 << 30, "MiB": 1 << 20, "GiB": 1 << 30}


def of(kind: str) -> dict[str, Any]:
    [found] = [document for _, document in DOCUMENTS if document["kind"] == kind]
    return found


def config() -> dict[str, Any]:
    return yaml.safe_load(of("ConfigMap")["data"]["config.yaml"])  # type: ignore[no-any-return]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "Deployment", of("Deployment")["spec"]["template"]
    yield "StatefulSet", of("StatefulSet")["spec"]["template"]
    yield "CronJob", of("CronJob")["spec"]["jobTemplate"]["spec"]["template"]


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()  # type: ignore[union-attr]
    return int(number) * BYTES[unit]


@pytest.mark.parametrize(("name", "document"), OWN, ids=[f"{name}-{one['kind']}" for name, one in OWN])
def test_the_schemas_of_kubernetes(name: str, document: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate: pip install .[dev]")
    release = validator.latest_version()
    validator.validate(document, release, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**document, "spce": {}}, release, strict=True)


def test_the_configuration_is_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(of("ConfigMap")["data"]["config.yaml"])
    outcome = run_here(capfd, "config", "check", str(file))
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize(("kind", "template"), list(pods()))
def test_a_pod_has_what_it_names(kind: str, template: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    spec = template["spec"]
    [container] = spec["containers"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    claimed = of("StatefulSet")["spec"]["volumeClaimTemplates"] if kind == "StatefulSet" else []
    assert mounts.keys() == {one["name"] for one in spec["volumes"]} | {one["metadata"]["name"] for one in claimed}
    for volume in spec["volumes"]:
        if "configMap" in volume:
            assert volume["configMap"]["name"] == of("ConfigMap")["metadata"]["name"]
        if "persistentVolumeClaim" in volume:
            assert volume["persistentVolumeClaim"]["claimName"] == of("PersistentVolumeClaim")["metadata"]["name"]
    assert spec["serviceAccountName"] == of("ServiceAccount")["metadata"]["name"]
    [secret] = [one["secretRef"]["name"] for one in container["envFrom"]]
    assert f"create secret generic {secret} " in (ROOT / "docs/install.md").read_text()
    assert config()["state_dir"] == mounts["state"]
    command = container["args"]
    assert command[:3] == ["run", "--config", default_config_path()]
    assert Path(command[2]).parent == Path(mounts["config"])
    assert list(of("ConfigMap")["data"]) == [Path(command[2]).name]
    assert run_here(capfd, *command, "--help").code == 0
    assert ("--once" in command) == (kind == "CronJob")


@pytest.mark.parametrize("template", [template for _, template in pods()], ids=[kind for kind, _ in pods()])
def test_a_pod_may_do_little_and_ends_in_peace(template: dict[str, Any]) -> None:
    spec = template["spec"]
    [container] = spec["containers"]
    user = re.search(r'"--uid", "(\d+)"', (ROOT / "Containerfile").read_text())
    assert user is not None
    assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == int(user[1])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert not spec["automountServiceAccountToken"]
    told = config()
    assert spec["terminationGracePeriodSeconds"] > int(told["stop_grace"].removesuffix("s"))
    pools = sum(one["workers"] * size(one["memory"]) for one in told["pools"].values())
    assert size(container["resources"]["limits"]["memory"]) >= pools + (512 << 20)


def test_ports_probes_and_labels_meet() -> None:
    template = of("Deployment")["spec"]["template"]
    [container] = template["spec"]["containers"]
    [port] = container["ports"]
    assert port["containerPort"] == config()["http"]["port"] == HttpConfig().port
    served = (ROOT / "memwal_ops/supervisor/http/routes.py").read_text()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]
        assert f'"{container[probe]["httpGet"]["path"]}"' in served
    labels = template["metadata"]["labels"]
    service, monitor = of("Service"), of("ServiceMonitor")["spec"]
    for selector in (of("Deployment")["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    # A pod of the CronJob has no pages, and is not to be asked for them.
    assert not service["spec"]["selector"].items() <= dict(pods())["CronJob"]["metadata"]["labels"].items()
    assert [one["targetPort"] for one in service["spec"]["ports"]] == [port["name"]]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    [endpoint] = monitor["endpoints"]
    assert endpoint["port"] in {one["name"] for one in service["spec"]["ports"]}
    assert f'"{endpoint["path"]}"' in served
    assert endpoint["honorLabels"], "see configs/prometheus/prometheus.yaml"
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "memwal-ops", "the alert MemwalOpsDown looks for it"


def test_the_fleet_is_three_of_the_supervisor() -> None:
    """Its pods are those of the Deployment, but for a volume of their own; the keys that it asks for are valid."""
    one, fleet = of("Deployment")["spec"], of("StatefulSet")["spec"]
    assert fleet["replicas"] == 3
    volumes = fleet["template"]["spec"].pop("volumes")
    assert volumes == [each for each in one["template"]["spec"].pop("volumes") if each["name"] != "state"]
    assert fleet["template"] == one["template"]
    assert fleet["serviceName"] == of("Service")["metadata"]["name"]
    assert of("PodDisruptionBudget")["spec"]["selector"] == fleet["selector"] == one["selector"]
    asked = re.search(r"^# {5}fleet:\n(?:# {7}.*\n)+", (FOLDER / "fleet.yaml").read_text(), re.MULTILINE)
    assert asked is not None
    document = {**config(), **yaml.safe_load(asked[0].replace("#     ", ""))}
    assert Config.model_validate(document).fleet is not None


def test_the_images_are_the_same_release() -> None:
    images = {template["spec"]["containers"][0]["image"] for _, template in pods()}
    assert [one.rpartition(":")[2] for one in images] == [version("memwal-ops")]
