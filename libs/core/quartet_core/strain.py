"""Strain: heat, lack of power and a full PCIe link, from readings once a second to two bits of a worker's word.

A bit in the word may change where requests go, so it must not flicker: it takes several bad readings in a row to raise
one, more good ones to clear it, and what lies between the two limits changes nothing.
"""

from typing import Final

from msgspec import Struct

from quartet_core.readings import GpuReading, Reason, pcie_gb_per_s, rate_per_s

SLOWED: Final = frozenset({Reason.HW_SLOWDOWN, Reason.HW_THERMAL, Reason.SW_THERMAL, Reason.HW_POWER_BRAKE})
"""Reasons that mean slow whatever the clocks are. NVML's reference: a hardware slowdown cuts core clocks by a factor of
two or more (heat, an external power brake, too fast a power draw), a software thermal slowdown keeps them low until the
card is below its maximum operating temperature."""


class StrainLimits(Struct, frozen=True):
    """When a card is strained.

    ``power_clock_share``: a power cap alone is how a busy card lives; it counts when the SM clock is below this share
    of its maximum. ``cool_margin_c``: how far below its slowdown temperature a card must be to count as cool.
    ``pcie_high`` and ``pcie_low`` are shares of the link's capacity: 0.75 is 85 % of what cards were seen to take in
    (28.3 of Gen4 x16's 32 GB/s, in ``data/hardware.toml``). The rest is judged.
    """

    power_clock_share: float = 0.75
    cool_margin_c: float = 5.0
    pcie_high: float = 0.75
    pcie_low: float = 0.55
    replays_per_s: float = 10.0
    raise_readings: int = 3
    clear_readings: int = 5


class Latch:
    """A flag that is raised by ``raise_after`` high readings in a row, and cleared by ``clear_after`` low ones.

    A reading that is neither ends both rows.
    """

    __slots__ = ("_clear_after", "_raise_after", "_row", "raised")

    def __init__(self, raise_after: int, clear_after: int) -> None:
        self._raise_after = raise_after
        self._clear_after = clear_after
        self._row = 0
        self.raised = False

    def feed(self, *, high: bool, low: bool) -> bool:
        """Take one reading; return whether the flag changed by it."""
        if not (low if self.raised else high):
            self._row = 0
            return False
        self._row += 1
        if self._row < (self._clear_after if self.raised else self._raise_after):
            return False
        self._row = 0
        self.raised = not self.raised
        return True


class GpuStrain:
    """One card's two flags, and the readings that they are made of."""

    __slots__ = ("_before", "_congested", "_limits", "_throttled", "pcie_share", "replays_per_s")

    def __init__(self, limits: StrainLimits) -> None:
        self._limits = limits
        self._throttled = Latch(limits.raise_readings, limits.clear_readings)
        self._congested = Latch(limits.raise_readings, limits.clear_readings)
        self._before: GpuReading | None = None
        self.pcie_share: float | None = None
        """How full the fuller direction of its link is, 0 to 1; None when not known."""
        self.replays_per_s: float | None = None

    @property
    def throttled(self) -> bool:
        """Whether heat or lack of power slows it."""
        return self._throttled.raised

    @property
    def congested(self) -> bool:
        """Whether its PCIe link is full, or sends too much again."""
        return self._congested.raised

    def feed(self, reading: GpuReading, seconds: float) -> bool:
        """Take a reading, ``seconds`` after the last one; return whether a flag changed."""
        self._note_rates(reading, seconds)
        slowed, cool = self._heat(reading)
        full, free = self._link()
        throttled = self._throttled.feed(high=slowed, low=cool)
        congested = self._congested.feed(high=full, low=free)
        return throttled or congested

    def _note_rates(self, reading: GpuReading, seconds: float) -> None:
        capacity = pcie_gb_per_s(reading.pcie_gen, reading.pcie_width)
        rates = [rate for rate in (reading.pcie_rx_gb_per_s, reading.pcie_tx_gb_per_s) if rate is not None]
        self.pcie_share = max(rates) / capacity if rates and capacity else None
        self.replays_per_s = rate_per_s(self._before.replays if self._before else None, reading.replays, seconds)
        self._before = reading

    def _heat(self, reading: GpuReading) -> tuple[bool, bool]:
        """(slowed, surely not)."""
        if reading.reasons is None:
            return False, False
        slowed = not SLOWED.isdisjoint(reading.reasons)
        if Reason.SW_POWER_CAP in reading.reasons and reading.sm_mhz is not None and reading.sm_max_mhz:
            slowed |= reading.sm_mhz < self._limits.power_clock_share * reading.sm_max_mhz
        cool = not slowed
        if reading.temperature_c is not None and reading.slowdown_c is not None:
            cool &= reading.temperature_c <= reading.slowdown_c - self._limits.cool_margin_c
        return slowed, cool

    def _link(self) -> tuple[bool, bool]:
        """(full or failing, surely neither): what is not known raises nothing and clears nothing."""
        limits, share, replays = self._limits, self.pcie_share, self.replays_per_s
        full = (share is not None and share >= limits.pcie_high) or (
            replays is not None and replays >= limits.replays_per_s
        )
        known = share is not None or replays is not None
        free = (share is None or share <= limits.pcie_low) and (replays is None or replays < limits.replays_per_s / 2)
        return full, known and free
