"""Readings: what one look at a host's cards and NICs found. Taken about once a second; none of it is in the word.

A value that a card or driver does not tell is None, never 0: rules must be able to see that they do not know.
"""

from enum import StrEnum
from typing import Final

from msgspec import Struct


class Reason(StrEnum):
    """Why a card's clocks are not what they could be, as NVML's ``nvmlClocksEventReasons`` has it."""

    IDLE = "idle"
    CLOCKS_SETTING = "clocks_setting"
    SW_POWER_CAP = "sw_power_cap"
    HW_SLOWDOWN = "hw_slowdown"
    SYNC_BOOST = "sync_boost"
    SW_THERMAL = "sw_thermal"
    HW_THERMAL = "hw_thermal"
    HW_POWER_BRAKE = "hw_power_brake"
    DISPLAY = "display"


class GpuReading(Struct, frozen=True, kw_only=True):
    """One card at one moment. ``address`` is its PCI address, "" where there is none.

    ``slowdown_c`` is the temperature at which its hardware slows it down. PCIe rates are decimal GB/s as the card's own
    counters have them; ``pcie_gen`` and ``pcie_width`` are the link's just now (an idle link may have fallen to Gen1).
    ``replays`` counts PCIe packets that had to be sent again, since the driver was loaded.
    """

    index: int
    address: str = ""
    temperature_c: float | None = None
    slowdown_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_mhz: float | None = None
    sm_max_mhz: float | None = None
    memory_mhz: float | None = None
    busy_share: float | None = None
    memory_used_bytes: int | None = None
    reasons: tuple[Reason, ...] | None = None
    pcie_rx_gb_per_s: float | None = None
    pcie_tx_gb_per_s: float | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None
    replays: int | None = None


class NicReading(Struct, frozen=True, kw_only=True):
    """One NIC at one moment. Counters run since it was started, and may begin anew; ``gbit_per_s`` is its link's."""

    name: str
    rx_bytes: int
    tx_bytes: int
    rx_dropped: int = 0
    errors: int = 0
    gbit_per_s: float | None = None


class HostReading(Struct, frozen=True, kw_only=True):
    """One look at the whole host. ``trouble`` says which values could not be read, "" when all could."""

    gpus: tuple[GpuReading, ...] = ()
    nics: tuple[NicReading, ...] = ()
    trouble: str = ""


_LANE_GB_PER_S: Final = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""What one lane carries one way: the line rate (PCI-SIG: 2.5, 5, 8, 16, 32, 64 GT/s) times its encoding (8b/10b up to
Gen2, 128b/130b up to Gen5, 242 bytes of 256 in Gen6)."""


def pcie_gb_per_s(gen: int | None, width: int | None) -> float | None:
    """What a PCIe link of this generation and width carries one way, packet headers included; None when not known."""
    lane = _LANE_GB_PER_S.get(gen or 0)
    return None if lane is None or not width else lane * width


def rate_per_s(before: int | None, after: int | None, seconds: float) -> float | None:
    """How fast a counter rose; None when either end is not known, no time passed, or the counter began anew."""
    if before is None or after is None or seconds <= 0.0 or after < before:
        return None
    return (after - before) / seconds
