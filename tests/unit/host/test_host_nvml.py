"""The adapter over NVML's binding, against a thin fake of the binding's functions; no card was at hand.

That the fake has only functions that the real binding has, and that the real one is understood where there is no
driver, is checked against the real one.
"""

import threading
import types
from types import SimpleNamespace

import pynvml
import pytest
from host_tree import hgx

from quartet_core.catalogue import builtin
from quartet_core.readings import Reason
from quartet_host import nvml as nvml_module
from quartet_host.bounded import Stuck, within
from quartet_host.host import look
from quartet_host.nics import nics
from quartet_host.nvml import Nvml, NvmlMissing, binding, pci_address
from quartet_host.probe import HostProbe


class FakeError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


UNSUPPORTED, LOST = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST


def fake(cards: int = 2, **instead) -> types.SimpleNamespace:
    """A binding whose cards are H100s; ``instead`` replaces functions, an integer by raising that error."""

    def fails(value):
        def call(*_):
            raise FakeError(value)

        return call

    def clock(handle, kind):
        return {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 2619}[kind]

    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlDeviceGetCount": lambda: cards,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: b"NVIDIA H100 80GB HBM3",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(
            busId=f"00000000:{0x18 + handle:02X}:00.0".encode(), pciDeviceId=0x233010DE
        ),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=85_520_809_984, used=1 << 30),
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetPowerUsage": lambda handle: 512_345,
        "nvmlDeviceGetNvLinkState": lambda handle, link: 1,
        "nvmlDeviceGetNvLinkVersion": lambda handle, link: 7,
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 8,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=93, memory=40),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x44,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1,
        "nvmlDeviceGetPcieThroughput": lambda handle, counter: {
            pynvml.NVML_PCIE_UTIL_RX_BYTES: 12_500_000, pynvml.NVML_PCIE_UTIL_TX_BYTES: 250_000,
        }[counter],
        "nvmlDeviceGetTemperature": lambda handle, sensor: 71,
        "nvmlDeviceGetTemperatureThreshold": lambda handle, threshold: 92,
        "nvmlDeviceGetClockInfo": clock,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
        "nvmlDeviceGetPcieReplayCounter": lambda handle: 17,
    }  # fmt: skip
    functions |= {name: fails(value) if isinstance(value, int) else value for name, value in instead.items()}
    constants = {name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith("NVML_")}
    return SimpleNamespace(NVMLError=FakeError, **functions, **constants)


def test_the_fake_has_no_function_that_the_binding_has_not():
    named = [name for name in vars(fake()) if name.startswith("nvml")]
    assert [name for name in named if not callable(getattr(pynvml, name, None))] == []


def test_a_reading_is_in_our_units():
    session = Nvml(fake())
    first, second = session.read()
    assert (first.index, second.index, first.address) == (0, 1, "0000:18:00.0")
    assert (first.temperature_c, first.slowdown_c, first.power_w, first.power_limit_w) == (71, 92, 512.345, 700.0)
    assert (first.sm_mhz, first.sm_max_mhz, first.memory_mhz, first.busy_share) == (1755, 1980, 2619, 0.93)
    assert (first.pcie_rx_gb_per_s, first.pcie_tx_gb_per_s, first.replays) == (12.5, 0.25, 17)
    assert first.reasons == (Reason.SW_POWER_CAP, Reason.HW_THERMAL)
    assert session.take_trouble() == ""


def test_what_a_card_does_not_support_is_not_known_and_no_trouble():
    session = Nvml(fake(nvmlDeviceGetPcieReplayCounter=UNSUPPORTED, nvmlDeviceGetPcieThroughput=UNSUPPORTED))
    reading = session.read()[0]
    assert (reading.replays, reading.pcie_rx_gb_per_s, reading.power_w) == (None, None, 512.345)
    assert session.take_trouble() == ""


def test_a_driver_that_knows_reasons_by_their_old_name_is_asked_by_it():
    old = fake(nvmlDeviceGetCurrentClocksEventReasons=pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    assert Nvml(old).read()[0].reasons == (Reason.IDLE,)


def test_a_lost_card_is_trouble_that_is_told_once_and_the_rest_is_read():
    def temperature(handle, sensor):
        if handle == 1:
            raise FakeError(LOST)
        return 50

    session = Nvml(fake(nvmlDeviceGetTemperature=temperature))
    assert [reading.temperature_c for reading in session.read()] == [50, None]
    assert session.take_trouble() == f"gpu 1: error {LOST}"
    assert session.take_trouble() == ""


def test_cards_stand_in_the_pci_tree_by_their_address(tmp_path):
    host = look(builtin(), Nvml(fake()), hgx(tmp_path).root)
    assert [(gpu.name, gpu.hardware, gpu.device.root, gpu.nvlinks) for gpu in host.gpus] == [
        ("NVIDIA H100 80GB HBM3", "H100_SXM5", "pci0000:15", 18)
    ] * 2
    assert [nic.name for nic in host.neighbours(host.gpus[1])] == ["ens0", "mlx5_0/1"]
    assert host.driver_version == "580.95.05"
    assert any("8 of 16 PCIe lanes" in remark for remark in host.remarks)


def test_a_container_that_sees_no_sysfs_still_tells_of_its_cards(tmp_path):
    host = look(builtin(), Nvml(fake(1)), tmp_path)
    assert (host.gpus[0].hardware, host.gpus[0].device.root) == ("H100_SXM5", "")
    assert any("is not in sysfs" in remark for remark in host.remarks)


def test_the_real_binding_without_a_driver_is_one_clear_line():
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        with pytest.raises(NvmlMissing, match="NVML does not answer"):
            Nvml(binding())
    else:
        pytest.skip("this host has a driver")


def test_a_missing_binding_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(NvmlMissing) as missing:
        binding()
    assert str(missing.value) == nvml_module.EXTRA


@pytest.mark.parametrize(
    ("told", "address"),
    [("00000000:C1:00.0", "0000:c1:00.0"), ("00010000:01:00.0", "00010000:01:00.0"), ("0000:01:00.0", "0000:01:00.0")],
)
def test_addresses_are_spelled_as_sysfs_does(told, address):
    assert pci_address(told) == address


def test_the_probe_asks_a_dead_driver_again_and_reads_nics_meanwhile(tmp_path):
    tree = hgx(tmp_path)
    answers = iter([fake(nvmlInit=9), fake(nvmlInit=9), fake()])
    probe = HostProbe(nics(tree.root), tree.root, lambda: next(answers))
    first = probe.read()
    assert (first.gpus, first.trouble) == ((), "NVML does not answer: error 9")
    assert len(first.nics) == 9
    assert probe.read().trouble
    assert len(probe.read().gpus) == 2


def test_a_probe_whose_cards_are_all_lost_begins_anew(tmp_path):
    lost = fake(nvmlDeviceGetTemperature=LOST, nvmlDeviceGetPowerUsage=LOST)
    sessions = iter([lost, fake()])
    probe = HostProbe((), tmp_path, lambda: next(sessions))
    assert "gpu 0" in probe.read().trouble
    assert probe.read().trouble == ""


def test_a_call_that_never_comes_back_is_given_up():
    never = threading.Event()
    with pytest.raises(Stuck, match=r"no answer within 0.05 s"):
        within(0.05, never.wait)
    never.set()
    assert within(5.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)
