"""NVIDIA's cards as their driver knows them, through NVML's own binding (``nvidia-ml-py``), which is optional.

Every call may take long or never come back when a driver is ill: nothing here may be called from an event loop.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec import Struct

from quartet_core.readings import GpuReading, Reason
from quartet_host.pci import PcieLink

T = TypeVar("T")

EXTRA: Final = "nvidia-ml-py is not installed (pip install 'quartet-agent[nvml]')"

_KB_PER_GB = 1e6
_MAX_NVLINKS = 18
"""NVLinks that are asked for: an H100 has 18 (``NVML_NVLINK_MAX_LINKS`` of today's binding is 36)."""

# The bits of nvmlClocksEventReasons; fixed by NVML's interface, and not named alike in all versions of the binding.
_REASONS: Final = {
    0x001: Reason.IDLE,
    0x002: Reason.CLOCKS_SETTING,
    0x004: Reason.SW_POWER_CAP,
    0x008: Reason.HW_SLOWDOWN,
    0x010: Reason.SYNC_BOOST,
    0x020: Reason.SW_THERMAL,
    0x040: Reason.HW_THERMAL,
    0x080: Reason.HW_POWER_BRAKE,
    0x100: Reason.DISPLAY,
}


class NvmlMissing(Exception):
    """There is no NVML to ask; the text is one line that says what is missing."""


class NvmlCard(Struct, frozen=True, kw_only=True):
    """What does not change about a card. ``address`` is its PCI address as sysfs spells it."""

    index: int
    name: str = ""
    uuid: str = ""
    address: str = ""
    id: str = ""
    memory_bytes: int | None = None
    power_limit_w: float | None = None
    link: PcieLink = PcieLink()
    nvlinks: int = 0
    nvlink_version: int | None = None


def binding() -> Any:
    """The binding's module, which is typed by nobody. Raises ``NvmlMissing`` when it is not installed."""
    try:
        import pynvml  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        raise NvmlMissing(EXTRA) from None
    return pynvml


class Nvml:
    """One session with the driver. ``module`` is ``binding()``. Raises ``NvmlMissing`` when there is no driver."""

    def __init__(self, module: Any) -> None:
        self._nvml = module
        self._troubles: dict[str, None] = {}
        try:
            module.nvmlInit()
        except module.NVMLError as error:
            raise NvmlMissing(f"NVML does not answer: {error}") from None
        self._handles: dict[int, Any] = {}
        self._addresses: dict[int, str] = {}
        for index in range(self._ask("count", module.nvmlDeviceGetCount) or 0):
            handle = self._ask(f"gpu {index}", module.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                self._handles[index] = handle
                pci = self._ask(f"gpu {index}", module.nvmlDeviceGetPciInfo, handle)
                self._addresses[index] = "" if pci is None else pci_address(_text(pci.busId))

    def close(self) -> None:
        """End the session; a driver that is gone already is no error."""
        self._ask("shutdown", self._nvml.nvmlShutdown)

    @property
    def driver_version(self) -> str:
        """The driver's version, "" when it does not say."""
        return _text(self._ask("driver", self._nvml.nvmlSystemGetDriverVersion))

    def take_trouble(self) -> str:
        """What could not be read since the last call, at most five of it; "" when all could, or is not supported."""
        told = list(self._troubles)
        self._troubles.clear()
        return "; ".join(told[:5]) + (f"; and {len(told) - 5} more" if len(told) > 5 else "")

    def cards(self) -> list[NvmlCard]:
        """All cards that answer, by index."""
        return [self._card(index, handle) for index, handle in self._handles.items()]

    def read(self) -> list[GpuReading]:
        """How all cards are just now: some 40 ms a card, for NVML counts PCIe bytes over 20 ms in each direction."""
        return [self._read(index, handle) for index, handle in self._handles.items()]

    def _card(self, index: int, handle: Any) -> NvmlCard:
        nvml, where = self._nvml, f"gpu {index}"
        pci = self._ask(where, nvml.nvmlDeviceGetPciInfo, handle)
        memory = self._ask(where, nvml.nvmlDeviceGetMemoryInfo, handle)
        limit_mw = self._ask(where, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        active = [link for link in range(_MAX_NVLINKS) if self._ask(where, nvml.nvmlDeviceGetNvLinkState, handle, link)]
        return NvmlCard(
            index=index,
            name=_text(self._ask(where, nvml.nvmlDeviceGetName, handle)),
            uuid=_text(self._ask(where, nvml.nvmlDeviceGetUUID, handle)),
            address=self._addresses[index],
            id="" if pci is None else f"{pci.pciDeviceId & 0xFFFF:04x}:{pci.pciDeviceId >> 16:04x}",
            memory_bytes=None if memory is None else int(memory.total),
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            link=PcieLink(
                self._ask(where, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
                self._ask(where, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
                self._ask(where, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
                self._ask(where, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            ),
            nvlinks=len(active),
            nvlink_version=self._ask(where, nvml.nvmlDeviceGetNvLinkVersion, handle, active[0]) if active else None,
        )

    def _read(self, index: int, handle: Any) -> GpuReading:
        nvml, where = self._nvml, f"gpu {index}"
        power_mw = self._ask(where, nvml.nvmlDeviceGetPowerUsage, handle)
        limit_mw = self._ask(where, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        use = self._ask(where, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(where, nvml.nvmlDeviceGetMemoryInfo, handle)
        bits = self._ask(where, nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if bits is None:  # what drivers before 535 call it
            bits = self._ask(where, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        rx_kb, tx_kb = (
            self._ask(where, nvml.nvmlDeviceGetPcieThroughput, handle, counter)
            for counter in (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
        )
        slowdown = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return GpuReading(
            index=index,
            address=self._addresses[index],
            temperature_c=self._ask(where, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=self._ask(where, nvml.nvmlDeviceGetTemperatureThreshold, handle, slowdown),
            power_w=None if power_mw is None else power_mw / 1e3,
            power_limit_w=None if limit_mw is None else limit_mw / 1e3,
            sm_mhz=self._ask(where, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            sm_max_mhz=self._ask(where, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask(where, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            busy_share=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            reasons=None if bits is None else tuple(reason for bit, reason in _REASONS.items() if bits & bit),
            pcie_rx_gb_per_s=None if rx_kb is None else rx_kb / _KB_PER_GB,
            pcie_tx_gb_per_s=None if tx_kb is None else tx_kb / _KB_PER_GB,
            pcie_gen=self._ask(where, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_width=self._ask(where, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            replays=self._ask(where, nvml.nvmlDeviceGetPcieReplayCounter, handle),
        )

    def _ask(self, where: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """What ``call`` returns; None when it cannot say. Not supported is an answer, anything else is trouble."""
        nvml = self._nvml
        unable = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            if error.value not in unable:
                self._troubles[f"{where}: {error}"] = None
            return None


def pci_address(bus_id: str) -> str:
    """NVML's PCI address as sysfs spells it: it has a domain of eight digits and capitals."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{rest}"


def _text(value: Any) -> str:
    """Text of the binding, bytes in structures and in its older versions."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
