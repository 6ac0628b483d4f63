"""What docker-compose.yml says of services, images and configuration is so, as far as it can be told without Docker."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from quartet_bus.config.load import load

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}


def test_every_service_of_the_house_is_deployed_from_its_own_image():
    built = {service["build"]["args"]["SERVICE"] for service in OURS.values()}
    assert built == {path.parent.name for path in ROOT.glob("services/*/pyproject.toml")}
    assert {service["build"]["dockerfile"] for service in OURS.values()} == {"deploy/docker/Dockerfile"}
    assert (ROOT / "deploy/docker/Dockerfile").exists()


@pytest.mark.parametrize("name", OURS)
def test_the_configuration_of_each_service_is_valid(name):
    command = OURS[name]["command"]
    files = [argument.replace("/etc/quartet", str(ROOT / "deploy/compose")) for argument in command[1::2]]
    assert command[::2] == ["--config"] * len(files)
    config = load(files, {f"{key}": str(value) for key, value in OURS[name].get("environment", {}).items()})
    assert config.nats.url == "nats://nats:4222"
    if OURS[name]["build"]["args"]["SERVICE"] == "agent":
        assert f"agent-{config.agent.node}" == name == config.kv.listen.partition(":")[0]


def test_services_are_named_as_the_configuration_calls_them():
    hosts = set(COMPOSE["services"])
    config = tomllib.loads((ROOT / "deploy/compose/quartet.toml").read_text())
    named = [*config["fleet"]["targets"], config["kv"]["grpc"], config["prefetch"]["grpc"]]
    assert {address.partition(":")[0] for address in named} <= hosts


@pytest.mark.parametrize("project", sorted(ROOT.glob("services/*/pyproject.toml")), ids=lambda path: path.parent.name)
def test_the_image_starts_the_command_that_the_distribution_installs(project):
    scripts = tomllib.loads(project.read_text())["project"]["scripts"]
    expected = "quartet-" + project.parent.name.replace("_", "-")
    assert list(scripts) == [expected]
    assert scripts[expected] == f"quartet_{project.parent.name}.__main__:main"


def test_every_requirement_is_pinned_exactly_and_says_no_address():
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-tokenizer.txt"):
        for line in (ROOT / name).read_text().splitlines():
            text = line.partition("#")[0].strip()
            if text and not text.startswith("-r "):
                assert re.fullmatch(r"[a-z0-9-]+==[0-9.]+", text), line
