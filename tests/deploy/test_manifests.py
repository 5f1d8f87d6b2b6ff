"""What deploy/ holds, as far as it can be tried without a cluster: flags, ports and probes are those of the server."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from prometheus_client import CollectorRegistry
from starlette.routing import Route

from llmjax.cli.serve import parse
from llmjax.config import ServerConfig
from llmjax.config_file import Configs
from llmjax.serve.routes.ops import ops_routes
from llmjax.version import __version__
from tests.deploy.chart import TemplateError, render

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "llmjax"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UID = 10001

# Of LeaderWorkerSet, an environment variable each (lws.sigs.k8s.io), and of the manifests themselves.
SUBSTITUTED = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "llmjax-0.llmjax.default"}

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "all": {
        "image": {"tag": "cuda"},
        "flags": ["--max-model-len", "8192", "--data-parallel-size", "2"],
        "apiKeySecret": "keys",
        "adminKeySecret": "operators",
        "huggingFaceSecret": "hub",
        "replicas": 3,
        "resources": {"limits": {"nvidia.com/gpu": 2}},
        "cache": {"accessMode": "ReadWriteMany", "storageClass": "shared"},
        "podMonitor": True,
        "nodeSelector": {"kind": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
    "without a cache": {"cache": {"enabled": False}, "shutdownSeconds": 120, "startupMinutes": 5},
}


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def chart(name: str) -> dict[str, dict[str, Any]]:
    """The chart's objects by kind."""
    found = render(CHART, release="mine", values=VALUES[name])
    return {made["kind"]: made for made in found}


def pod_specs() -> dict[str, dict[str, Any]]:
    (group, _) = documents(DEPLOY / "kubernetes" / "leaderworkerset.yaml")
    template = group["spec"]["leaderWorkerTemplate"]
    found = {f"chart, {name}": chart(name)["Deployment"]["spec"]["template"]["spec"] for name in VALUES}
    found |= {part: template[f"{part}Template"]["spec"] for part in ("leader", "worker")}
    return found


def entrypoint(target: str) -> list[str]:
    """The command of an image."""
    stage = re.search(rf"^FROM \S+ AS {target}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    assert stage is not None
    command = re.search(r"^ENTRYPOINT (\[.*\])$", stage[1], re.M)
    assert command is not None
    words: list[str] = yaml.safe_load(command[1])
    assert words[:2] == ["llmjax", "serve"]
    return words[2:]


def settings_of(args: list[str], container: dict[str, Any], target: str) -> Configs:
    """What the server makes of a container's arguments, with variables filled in as Kubernetes does."""
    variables = SUBSTITUTED | {variable["name"]: "a-word" for variable in container.get("env", [])}
    variables["ADMIN_KEY"] = "another-word"
    filled = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in args]
    return parse([*entrypoint(target), *filled])


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_serves_on_the_port_that_it_exposes(target: str) -> None:
    found = parse([*entrypoint(target), "--config", "smollm2"])
    assert (found.server.host, found.server.port) == ("0.0.0.0", 8000)
    assert found.engine.device == ("cuda" if target == "cuda" else "auto")


def test_the_image_is_no_root_and_says_whether_it_is_well() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)
    final = [stage for stage in stages if "ENTRYPOINT" in stage]
    assert len(final) == 2
    for stage in final:
        assert f"USER {UID}:{UID}" in stage and "EXPOSE 8000" in stage
        assert stage.index("USER") < stage.index("ENTRYPOINT")
        (url,) = re.findall(r"urlopen\('http://127\.0\.0\.1:8000(/\w+)'", stage)
        assert url in probe_paths()
    assert f"--uid {UID}" in DOCKERFILE and "LLMJAX_REQUIRE_KERNELS=1" in DOCKERFILE


def test_the_image_gets_what_a_wheel_is_built_from() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.partition("/")[0] for path in (*wheel["packages"], *wheel["force-include"])} <= kept
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE"} <= kept


def probe_paths() -> set[str]:
    routes = [route for route in ops_routes(CollectorRegistry()) if isinstance(route, Route)]
    return {route.path for route in routes if "GET" in (route.methods or ())}


@pytest.mark.parametrize("name", pod_specs())
def test_pods_run_what_the_server_knows(name: str) -> None:
    spec = pod_specs()[name]
    (container,) = spec["containers"]
    assert all(isinstance(word, str) for word in container["args"])
    found = settings_of(container["args"], container, container["image"].partition(":")[2])
    grace = spec.get("terminationGracePeriodSeconds", 30)
    assert name == "worker" or grace > found.server.shutdown_timeout + 5
    for port in container.get("ports", []):
        known = {"http": found.server.port, "ranks": found.engine.master_port}
        assert port["containerPort"] == known[port["name"]]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    for who in (spec["securityContext"], container["securityContext"]):
        assert who.get("runAsUser", UID) == UID
    assert container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("name", [name for name in pod_specs() if name != "worker"])
def test_probes_tell_loading_from_dead(name: str) -> None:
    """A start has its own probe, which ends before the others begin; a server that is well but busy is not killed."""
    (container,) = pod_specs()[name]["containers"]
    startup, alive, ready = (container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness"))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in (startup, alive, ready):
        assert probe["httpGet"]["path"] in probe_paths() and probe["httpGet"]["port"] in ports
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 30
    assert ready["failureThreshold"] == 1


def test_ranks_of_a_group_are_told_who_they_are() -> None:
    for rank, part in enumerate(("leader", "worker")):
        (container,) = pod_specs()[part]["containers"]
        variables = SUBSTITUTED | {"LWS_WORKER_INDEX": str(rank), "GROUP_SECRET": "a-word"}
        filled = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], word) for word in container["args"]]  # noqa: B023
        engine = parse([*entrypoint("cuda"), *filled]).engine
        (group, service) = documents(DEPLOY / "kubernetes" / "leaderworkerset.yaml")
        template = group["spec"]["leaderWorkerTemplate"]
        assert (engine.nnodes, engine.node_rank) == (template["size"], rank)
        assert engine.master_addr == SUBSTITUTED["LWS_LEADER_ADDRESS"] and engine.master_secret
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert engine.tensor_parallel_size == gpus * template["size"]
        labels = template[f"{part}Template"]["metadata"]["labels"]
        assert (service["spec"]["selector"].items() <= labels.items()) == (part == "leader")


@pytest.mark.parametrize("name", VALUES)
def test_the_charts_objects_belong_together(name: str) -> None:
    found = chart(name)
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    volumes = found["Deployment"]["spec"]["template"]["spec"]["volumes"]
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert claims == [claim["metadata"]["name"] for kind, claim in found.items() if kind == "PersistentVolumeClaim"]
    if "PodMonitor" in found:
        (endpoint,) = found["PodMonitor"]["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] in probe_paths()


def test_values_reach_the_server() -> None:
    (container,) = chart("all")["Deployment"]["spec"]["template"]["spec"]["containers"]
    found = settings_of(container["args"], container, "cuda")
    assert (found.engine.max_model_len, found.engine.data_parallel_size) == (8192, 2)
    assert found.server.api_key == ["a-word"] or found.server.api_key == ("a-word",)
    secrets = [variable["valueFrom"]["secretKeyRef"] for variable in container["env"] if "valueFrom" in variable]
    assert {"name": "operators", "key": "admin-key"} in secrets and "$(ADMIN_KEY)" in container["args"]
    assert container["image"] == "llmjax:cuda" and container["resources"] == VALUES["all"]["resources"] | {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "8Gi", "nvidia.com/gpu": 2},
    }
    (container,) = chart("without a cache")["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert settings_of(container["args"], container, "cpu").server.shutdown_timeout == 120
    assert container["startupProbe"]["failureThreshold"] == 30


def test_numbers_among_flags_reach_the_server_as_they_are() -> None:
    peers = '{"kv_connector": "TCPConnector", "kv_role": "kv_consumer", "kv_peers": ["pod-0.svc:14579"]}'
    flags = ["--kv-cache-memory-bytes", 8_000_000_000, "--max-num-seqs", 64, "--gpu-memory-utilization", 0.85]
    flags += ["--max-model-len", 1_234_567, "--served-model-name", "007", "--kv-transfer-config", peers]
    made = {one["kind"]: one for one in render(CHART, release="mine", values={"flags": flags})}
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["args"][-len(flags) :] == [str(flag) for flag in flags]
    engine = settings_of(container["args"], container, "cpu").engine
    assert (engine.kv_cache_memory_bytes, engine.max_model_len) == (8_000_000_000, 1_234_567)
    assert engine.kv_transfer is not None and engine.kv_transfer.kv_peers == ["pod-0.svc:14579"]


def test_numbers_are_written_as_helm_does(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    (tmp_path / "values.yaml").write_text("a: [8000000000, 1234567, 999999, 0.5]")
    (tmp_path / "templates" / "x.yaml").write_text("a:{{ range .Values.a }}\n- {{ . | quote }}{{ end }}")
    (made,) = render(tmp_path, release="r", values={})
    assert made["a"] == ["8e+09", "1.234567e+06", "999999", "0.5"]


def test_the_chart_is_of_this_version() -> None:
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == __version__


def test_what_a_chart_may_not_hold(tmp_path: Path) -> None:
    """The renderer of these tests knows little, and says so."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "values.yaml").write_text("a: 1")
    for text in ('{{ include "x" . }}', "{{ if .Values.a }}b", "{{ tpl .Values.a . }}"):
        (tmp_path / "templates" / "x.yaml").write_text(text)
        with pytest.raises(TemplateError):
            render(tmp_path, release="r", values={})
    with pytest.raises(TemplateError, match=r"values.yaml knows no \['replica'\]"):
        render(CHART, release="r", values={"replica": 2})


@pytest.mark.skipif(shutil.which("helm") is None, reason="needs helm")
@pytest.mark.parametrize("name", VALUES)
def test_helm_renders_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(VALUES[name]))
    command = ["helm", "template", "mine", str(CHART), "--values", str(tmp_path / "values.yaml")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = [made for made in yaml.safe_load_all(text) if made is not None]
    assert {made["kind"]: made for made in found} == chart(name)


POOL_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {"required": ["number"], "properties": {"number": {"type": "integer", "maximum": 65535}}},
        },
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {
                "name": {"type": "string"},
                "port": {"type": "object", "required": ["number"]},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}
"""What this repository uses of InferencePool v1, as its definition has it."""


def test_the_pool_is_the_charts_pods() -> None:
    pool, route = documents(DEPLOY / "kubernetes" / "inferencepool.yaml")
    assert (pool["apiVersion"], pool["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    jsonschema.validate(pool["spec"], POOL_SCHEMA)
    pods = {made["kind"]: made for made in render(CHART, release="llmjax", values={})}["Deployment"]["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    (port,) = pool["spec"]["targetPorts"]
    assert port["number"] == ServerConfig().port == pods["spec"]["containers"][0]["ports"][0]["containerPort"]
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == (pool["kind"], pool["metadata"]["name"])
    assert backend["group"] == pool["apiVersion"].partition("/")[0]


def built_in() -> Iterator[Any]:
    for name in VALUES:
        for kind, made in chart(name).items():
            if kind != "PodMonitor":
                yield pytest.param(made, id=f"{kind}, {name}")
    group, service = documents(DEPLOY / "kubernetes" / "leaderworkerset.yaml")
    yield pytest.param(service, id="Service of a group")
    for part in ("leader", "worker"):
        template = group["spec"]["leaderWorkerTemplate"][f"{part}Template"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": part}, "spec": template["spec"]}
        yield pytest.param(pod, id=f"pod of a {part}")


@pytest.mark.parametrize("made", list(built_in()))
def test_kubernetes_own_schemas(made: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(made, "1.33", strict=True)


def test_skypilot_starts_and_probes_the_server() -> None:
    (task,) = documents(DEPLOY / "skypilot.yaml")
    command = task["run"].replace("\\\n", " ")
    for name, value in {"MODEL": task["envs"]["MODEL"], "SKYPILOT_NUM_GPUS_PER_NODE": "2"}.items():
        command = command.replace(f"${name}", value)
    execute, program, serve, *flags = shlex.split(command)
    assert (execute, program.rpartition("/")[2], serve) == ("exec", "llmjax", "serve")
    found = parse(flags)
    assert found.server.port == task["resources"]["ports"] and found.server.host == "0.0.0.0"
    assert found.engine.tensor_parallel_size == 2 and found.engine.model == task["envs"]["MODEL"]
    assert task["service"]["readiness_probe"]["path"] in probe_paths()
