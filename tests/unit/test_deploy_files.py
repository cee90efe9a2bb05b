"""The files under docs/deploy: they parse, and every setting in them is known and may be."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from epd.config import Settings, load_settings

DEPLOY = Path(__file__).resolve().parents[2] / "docs" / "deploy"


def pods() -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return [one["spec"]["template"]["spec"] for one in documents if "template" in one["spec"]]


def settings_of(pod: dict[str, Any]) -> Settings:
    (container,) = pod["containers"]
    variables = {entry["name"]: entry.get("value", "10.1.2.3") for entry in container["env"]}
    return load_settings(
        None, {k: v.replace("$(POD_IP)", variables["POD_IP"]) for k, v in variables.items()}, []
    )


def test_the_manifests_start_nodes_of_both_roles_that_the_kubelet_can_ask() -> None:
    found = {settings_of(pod).config.role: settings_of(pod).config for pod in pods()}
    assert set(found) == {"encoder", "prefill"}
    for config in found.values():
        assert config.metrics_listen == "10.1.2.3"
        assert not config.insecure
    assert all(address.endswith(":7101") for address in found["prefill"].encoders)
    assert found["encoder"].listen.endswith(":7101")


@pytest.mark.parametrize("pod", pods())
def test_the_grace_period_holds_pre_stop_and_the_drain(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    config = settings_of(pod).config
    _, pre_stop_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(pre_stop_s) + config.drain_timeout_s
    paths = {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    for name, path in paths.items():
        assert container[name]["httpGet"] == {"path": path, "port": config.metrics_port}


def test_the_unit_is_one_that_a_node_starts_with_and_systemd_outwaits_its_drain() -> None:
    text = (DEPLOY / "epd-encoder.service").read_text()
    variables = dict(line.split("=", 1) for line in re.findall(r"^Environment=(.*)$", text, re.M))
    config = load_settings(None, variables, []).config
    assert config.role == "encoder"
    stop_s = re.search(r"^TimeoutStopSec=(\d+)$", text, re.M)
    assert stop_s is not None
    assert int(stop_s[1]) > config.drain_timeout_s
    assert "RestartPreventExitStatus=2" in text


def test_the_image_has_known_settings_and_hands_signals_to_the_node() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    variables = dict(
        pair.split("=", 1) for line in re.findall(r"^ENV (.*)$", text, re.M) for pair in line.split()
    )
    assert load_settings(None, variables | {"EPD_ROLE": "encoder"}, []).config.metrics_port == 9400
    assert 'ENTRYPOINT ["epd-node"]' in text
