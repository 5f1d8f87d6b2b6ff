"""Dashboard, alerts, compose file and systemd's unit: what they name is there."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmjax.cli.serve import serve_parser
from tests.reference.metrics import collector

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
METRIC = re.compile(r"\b((?:vllm|llmjax):\w+)\b(?:\{([^}]*)\})?")
GROUPS = re.compile(r"\bby \(([^)]*)\)")


def samples() -> dict[str, set[str]]:
    """The labels of every sample that a server shows, by name."""
    found: dict[str, set[str]] = {}
    for metric in collector().collect():
        for sample in metric.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions() -> Iterator[str]:
    board = json.loads((MONITORING / "grafana" / "llmjax.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query")
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def unknown(expression: str, known: dict[str, set[str]]) -> list[str]:
    """Names and labels of an expression that no server shows."""
    wrong = []
    used = METRIC.findall(expression)
    for name, labels in used:
        if name not in known:
            wrong.append(name)
            continue
        asked = re.findall(r"(\w+)\s*[=!]~?", labels)
        wrong += [f"{name}{{{label}}}" for label in asked if label not in known[name]]
    for grouped in GROUPS.findall(expression):
        labels = [label.strip() for label in grouped.split(",")]
        wrong += [label for label in labels if used and not any(label in known.get(name, ()) for name, _ in used)]
    return wrong


def test_dashboard_and_alerts_read_metrics_that_a_server_has() -> None:
    known, read = samples(), list(expressions())
    assert len(read) > 30 and sum(bool(METRIC.search(expression)) for expression in read) > 30
    assert [wrong for expression in read for wrong in unknown(expression, known)] == []


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("rate(vllm:generation_tokens[1m])", ["vllm:generation_tokens"]),
        ('vllm:num_requests_running{modle="a"}', ["vllm:num_requests_running{modle}"]),
        ("sum by (reasn) (vllm:admission_rejections_total)", ["reasn"]),
        ("sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m]))", []),
    ],
)
def test_a_metric_that_is_not_there_is_found(expression: str, wrong: list[str]) -> None:
    assert unknown(expression, samples()) == wrong


def test_alerts_say_what_to_do() -> None:
    (group,) = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    flags = serve_parser().flags()
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "action"} == rule["annotations"].keys()
        assert {*re.findall(r"--[a-z][a-z-]+", rule["annotations"]["action"])} <= flags


def test_the_compose_file_brings_all_three_together() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
    (scrape,) = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    assert target.partition(":")[0] in services and services["llmjax"]["ports"] == ["127.0.0.1:8000:8000"]
    (source,) = yaml.safe_load(
        (MONITORING / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    assert source["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((MONITORING / "grafana" / "provisioning" / "dashboards" / "llmjax.yaml").read_text())
    path = folder["providers"][0]["options"]["path"]
    assert any(volume.split(":")[1].startswith(path) for volume in services["grafana"]["volumes"])
    words = [word.replace("${LLMJAX_CONFIG:-smollm2}", "smollm2") for word in services["llmjax"]["command"]]
    assert serve_parser().parse(words).config == "smollm2"


def test_the_unit_starts_a_server_and_waits_for_its_end() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "llmjax.service")
    program, serve, *flags = shlex.split(unit["Service"]["ExecStart"])
    assert (program.rpartition("/")[2], serve) == ("llmjax", "serve")
    assert serve_parser().parse(flags).config == "/etc/llmjax.yaml"
    assert unit["Service"]["Environment"] == f"HOME=/var/cache/{unit['Service']['CacheDirectory']}"
    assert int(unit["Service"]["TimeoutStopSec"]) > 30 + 5  # --shutdown-timeout
