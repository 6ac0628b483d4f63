from pathlib import Path

import msgspec
import pytest

from quartet_bus import catalogue
from quartet_bus.config.load import ConfigError, load
from quartet_cli.fleet.launch import Fleet
from quartet_cli.fleet.layout import NODES, FleetOptions, here, open_doors, parts_of, ring_path, shipped

OPTIONS = FleetOptions(ports="any", routers=2, gateways=2, policy="round-robin")


@pytest.fixture
def doors():
    return open_doors(OPTIONS)


def test_every_process_has_a_name_and_a_port_of_its_own(doors):
    parts = parts_of(OPTIONS, doors)
    assert [part.name for part in parts] == [
        *("collector", "router-0", "router-1", "predictor", "coordinator", "admin", "gateway", "gateway-1"),
        *(f"agent-{node}" for node in NODES),
    ]
    ports = [part.http_port for part in parts]
    ports += [doors.nats, doors.gateway, doors.admin, doors.coordinator, doors.predictor]
    assert len(set(ports)) == len(ports)


def test_what_is_written_for_a_run_is_read_back_by_every_node(doors, tmp_path):
    written = tmp_path / "here.toml"
    written.write_text(here(doors, "nats://127.0.0.1:1", tmp_path, OPTIONS))
    for node in NODES:
        config = load([shipped("fleet"), written, shipped(node)], env={})
        catalogue.load(config)
        assert config.agent.node == node
        assert config.nats.url == "nats://127.0.0.1:1"
        assert config.router.policy == "round-robin"
        assert config.gateway.listen == f"127.0.0.1:{doors.gateway}"
        assert config.gateway.reuse_port
        assert config.admin.grpc == doors.admin_address
        assert config.fleet.port == doors.beats
        assert config.fleet.ring_path == str(ring_path(tmp_path))


def test_a_path_with_quotes_survives_being_written(doors, tmp_path):
    odd = tmp_path / 'a "quoted" \\ path'
    odd.mkdir()
    written = odd / "here.toml"
    written.write_text(here(doors, "nats://x", odd, OPTIONS))
    assert load([written], env={}).fleet.ring_path == str(odd / "fleet.ring")


def test_the_fleet_is_three_nodes_of_eight_cards_with_each_gpu_used_once():
    for node in NODES:
        engines = load([shipped("fleet"), shipped(node)], env={}).agent.engines
        gpus = [
            gpu for engine in engines for gpu in range(engine.first_gpu, engine.first_gpu + engine.count * engine.tp)
        ]
        assert sorted(gpus) == list(range(8))
        assert {engine.hardware for engine in engines} == {"H100_SXM5" if node.startswith("h100") else "L40S_PCIE"}


def test_with_a_broker_of_somebody_elses_no_port_is_kept_for_one():
    assert open_doors(FleetOptions(ports="any", nats_url="nats://elsewhere:4222")).nats == 0


def test_default_ports_are_those_of_the_schema_when_they_are_free(monkeypatch):
    claimed: dict[str, int] = {}

    def claim(port: int, whose: str) -> int:
        claimed[whose] = port
        return port

    monkeypatch.setattr("quartet_cli.fleet.layout.claim_tcp", claim)
    monkeypatch.setattr("quartet_cli.fleet.layout.claim_udp", claim)
    doors = open_doors(FleetOptions())
    assert (doors.nats, doors.gateway, doors.admin, doors.beats) == (4222, 8080, 7450, 7447)
    assert sorted(claimed.values()) == sorted([4222, 8080, 7450, 7451, 7452, 7447])


def test_options_are_what_they_are_said_to_be_by_default():
    assert msgspec.structs.asdict(FleetOptions()) == {
        "directory": None,
        "keep": False,
        "nats_url": "",
        "ports": "default",
        "routers": 1,
        "gateways": 1,
        "policy": "finish-time",
        "configs": (),
    }
    assert all(isinstance(shipped(node), Path) and shipped(node).is_file() for node in NODES)


async def test_a_wrong_value_is_told_even_where_the_fleet_has_its_own(tmp_path):
    wrong = tmp_path / "mine.toml"
    wrong.write_text("[nats]\nurl = 4222\n")
    options = FleetOptions(directory=tmp_path / "run", ports="any", configs=(wrong,))
    with pytest.raises(ConfigError, match=r"mine\.toml.*nats\.url"):
        async with Fleet(options, lambda parts, waiting: None):
            pass
    assert not (tmp_path / "run").exists()
