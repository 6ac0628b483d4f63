"""An HGX host's PCI tree and NICs, read from a sysfs that a test wrote."""

import json
import tomllib

import pytest
from host_tree import BRIDGES, CONNECTX, GPU_CLASS, H100, NIC_CLASS, SysTree, hgx

from quartet_bus.config.load import load
from quartet_cli.__main__ import main
from quartet_core.catalogue import builtin
from quartet_host import sysfs
from quartet_host.host import look
from quartet_host.nics import nics, read
from quartet_host.pci import Distance, devices, distance


@pytest.fixture
def tree(tmp_path):
    return hgx(tmp_path)


def ran(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ending:
        main(list(arguments))
    return ending.value.code


def test_eight_cards_are_found_with_their_class_and_link_and_the_console_is_none(tree):
    host = look(builtin(), None, tree.root)
    assert [gpu.index for gpu in host.gpus] == list(range(8))
    assert {gpu.hardware for gpu in host.gpus} == {"H100_SXM5"}
    assert {(gpu.link.max_gen, gpu.link.max_width, gpu.link.narrowed) for gpu in host.gpus} == {(5, 16, False)}
    assert [gpu.device.numa for gpu in host.gpus] == [0] * 4 + [1] * 4
    assert host.nvswitches == 4
    assert [(node.number, node.cpus) for node in host.numa] == [(0, "0-55,112-167"), (1, "56-111,168-223")]
    assert host.remarks == ()


def test_the_root_complex_that_card_and_nic_share_is_found_by_the_pci_path(tree):
    host = look(builtin(), None, tree.root)
    assert [gpu.device.root for gpu in host.gpus] == [bridge for bridge in BRIDGES for _ in range(2)]
    beside = [[nic.name for nic in host.neighbours(gpu)] for gpu in host.gpus]
    assert beside == [[f"ens{number}", f"mlx5_{2 * number}/1"] for number in range(4) for _ in range(2)]


def test_distances_are_switch_root_numa_and_system(tree):
    tree.device("pci0000:15/0000:15:02.0/0000:2a:00.0", CONNECTX, NIC_CLASS)
    found = devices(tree.root)
    gpus = [device for device in found.values() if device.is_gpu]
    assert distance(gpus[0], gpus[1]) is Distance.SWITCH
    assert distance(gpus[0], found["0000:2a:00.0"]) is Distance.ROOT
    assert distance(gpus[0], gpus[2]) is Distance.NUMA
    assert distance(gpus[0], gpus[4]) is Distance.SYSTEM


def test_nics_have_their_speed_and_what_rdma_they_speak(tree):
    found = {nic.name: nic for nic in nics(tree.root)}
    assert sorted(found) == ["eno1", *(f"ens{n}" for n in range(4)), *(f"mlx5_{n}/1" for n in (0, 2, 4, 6))]
    told = [(found[name].gbit_per_s, found[name].rdma, found[name].link_class) for name in ("eno1", "ens1", "mlx5_2/1")]
    assert told == [(None, "", "TCP"), (200.0, "mlx5_3", "RDMA_ROCE"), (400.0, "mlx5_2", "RDMA_IB")]
    assert [found[name].up for name in ("eno1", "ens1", "mlx5_2/1")] == [False, True, True]


def test_bytes_of_a_roce_nic_are_the_kernels_and_the_rdma_ports_together(tree):
    found = {nic.name: nic for nic in nics(tree.root)}
    roce, infiniband, plain = (read(found[name], tree.root) for name in ("ens0", "mlx5_0/1", "eno1"))
    assert (roce.rx_bytes, roce.tx_bytes) == (1000 + 4 * 500, 2000 + 4 * 700)
    assert (infiniband.rx_bytes, infiniband.tx_bytes) == (4 * 500, 4 * 700)
    assert (plain.rx_bytes, plain.tx_bytes) == (1000, 2000)
    assert (roce.rx_dropped, roce.errors, infiniband.errors) == (7, 19, 8)


def test_missing_lanes_and_unknown_cards_are_remarked_on(tmp_path):
    tree = SysTree(tmp_path)
    tree.device("pci0000:15/0000:15:01.0/0000:16:00.0", H100, GPU_CLASS, width=8)
    tree.device("pci0000:15/0000:15:02.0/0000:17:00.0", "10de:ffff", GPU_CLASS, speed="Unknown", width=255)
    host = look(builtin(), None, tree.root)
    assert [gpu.hardware for gpu in host.gpus] == ["H100_SXM5", ""]
    assert (host.gpus[1].link.gen, host.gpus[1].link.width) == (None, None)
    assert any("runs on 8 of 16 PCIe lanes" in remark for remark in host.remarks)
    assert any("no hardware class has PCI id 10de:ffff" in remark for remark in host.remarks)


def test_a_host_without_anything_says_so(tmp_path):
    host = look(builtin(), None, tmp_path)
    assert (host.gpus, host.nics, host.numa) == ((), (), ())
    assert host.remarks == ("no NVIDIA GPU on this host",)


def test_files_that_cannot_be_read_or_are_no_numbers_are_not_known(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "words").write_bytes(b"\xff not a number")
    assert sysfs.text(tmp_path / "folder") == sysfs.text(tmp_path / "none") == ""
    assert sysfs.number(tmp_path / "words") is None
    assert sysfs.names(tmp_path / "words") == []


def test_detect_writes_a_configuration_that_loads(tree, tmp_path, capsys):
    assert ran("detect", "--toml", "--node", "h1", "--sysfs", str(tree.root)) == 0
    file = tmp_path / "host.toml"
    file.write_text(capsys.readouterr().out)
    agent = load([file], {}).agent
    assert (agent.node, agent.fabrics) == ("h1", ("RDMA_IB", "RDMA_ROCE", "TCP"))
    assert [(gpu.hardware, gpu.root, gpu.pcie_gen, gpu.pcie_width) for gpu in agent.gpus] == [
        ("H100_SXM5", bridge, 5, 16) for bridge in BRIDGES for _ in range(2)
    ]
    assert {nic.name: nic.root for nic in agent.nics}["ens2"] == BRIDGES[2]
    # the engines it proposes, once somebody says which model they serve
    lines = [line.removeprefix("# ") for line in file.read_text().splitlines() if line.startswith("# ")]
    proposed = "\n".join(lines[lines.index("[[agent.engines]]") :])
    assert tomllib.loads(proposed)["agent"]["engines"][0] | {"model": ""} == {
        "kind": "simulated", "model": "", "hardware": "H100_SXM5", "tp": 1, "count": 8, "first_gpu": 0,
    }  # fmt: skip


def test_detect_prints_json_with_each_cards_neighbours(tree, capsys):
    assert ran("detect", "--json", "--sysfs", str(tree.root)) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"][5]["neighbours"] == ["ens2", "mlx5_4/1"]
    assert told["gpus"][5]["device"]["numa"] == 1


def test_detect_prints_tables(tree, capsys):
    assert ran("detect", "--sysfs", str(tree.root)) == 0
    printed = capsys.readouterr().out
    for expected in ("H100_SXM5", "Gen5 x16", "pci0000:97", "mlx5_5 (RoCE)", "56-111,168-223", "4 NVSwitches"):
        assert expected in printed


def test_detect_refuses_a_folder_that_is_no_sysfs(tmp_path, capsys):
    assert ran("detect", "--sysfs", str(tmp_path / "nowhere")) == 2
    assert "is no sysfs" in capsys.readouterr().err


def test_detect_on_this_host_comes_to_an_end_whatever_there_is(capsys):
    assert ran("detect", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)) >= {"node", "gpus", "nics", "numa", "remarks"}
