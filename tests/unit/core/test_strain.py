"""When heat, power and a full PCIe link show in a worker's word."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.readings import GpuReading, Reason, pcie_gb_per_s, rate_per_s
from quartet_core.strain import SLOWED, GpuStrain, Latch, StrainLimits

LIMITS = StrainLimits()
FINE = GpuReading(
    index=0, temperature_c=60.0, slowdown_c=89.0, sm_mhz=1980.0, sm_max_mhz=1980.0, reasons=(),
    pcie_rx_gb_per_s=1.0, pcie_tx_gb_per_s=1.0, pcie_gen=5, pcie_width=16, replays=0,
)  # fmt: skip


def but(**fields) -> GpuReading:
    return msgspec.structs.replace(FINE, **fields)


def fed(*readings: GpuReading) -> GpuStrain:
    strain = GpuStrain(LIMITS)
    for reading in readings:
        strain.feed(reading, 1.0)
    return strain


@given(
    st.integers(1, 5), st.integers(1, 5),
    st.lists(st.sampled_from(["high", "low", "between"]), max_size=60),
)  # fmt: skip
def test_a_latch_is_what_its_last_full_row_was(raise_after, clear_after, readings):
    latch, expected, row = Latch(raise_after, clear_after), False, 0
    for reading in readings:
        row = row + 1 if reading == ("low" if expected else "high") else 0
        changed = row == (clear_after if expected else raise_after)
        if changed:
            expected, row = not expected, 0
        assert latch.feed(high=reading == "high", low=reading == "low") is changed
        assert latch.raised is expected


@pytest.mark.parametrize("reason", sorted(SLOWED))
def test_a_card_that_its_hardware_slows_is_throttled_after_three_readings(reason):
    slowed = but(reasons=(reason,))
    assert not fed(slowed, slowed).throttled
    assert fed(slowed, slowed, slowed).throttled
    assert not fed(slowed, slowed, FINE, slowed, slowed).throttled


def test_a_power_cap_counts_only_when_it_costs_a_quarter_of_the_clock():
    assert not fed(*[but(reasons=(Reason.SW_POWER_CAP,), sm_mhz=1600.0)] * 9).throttled
    assert fed(*[but(reasons=(Reason.SW_POWER_CAP,), sm_mhz=1400.0)] * 9).throttled
    assert not fed(*[but(reasons=(Reason.SW_POWER_CAP,), sm_mhz=None)] * 9).throttled


def test_low_clocks_of_an_idle_card_are_no_throttling():
    assert not fed(*[but(reasons=(Reason.IDLE,), sm_mhz=345.0)] * 9).throttled


def test_a_card_comes_back_when_it_is_cool_not_when_the_reason_is_gone():
    strain = fed(*[but(reasons=(Reason.HW_THERMAL,), temperature_c=90.0)] * 3)
    for _ in range(20):
        strain.feed(but(temperature_c=86.0), 1.0)
    assert strain.throttled
    for _ in range(5):
        strain.feed(but(temperature_c=84.0), 1.0)
    assert not strain.throttled


def test_a_full_link_in_either_direction_is_congested_until_it_is_half_empty():
    capacity = pcie_gb_per_s(5, 16)
    for field in ("pcie_rx_gb_per_s", "pcie_tx_gb_per_s"):
        strain = fed(*[but(**{field: 0.8 * capacity})] * 3)
        assert strain.congested
        for _ in range(20):
            strain.feed(but(**{field: 0.65 * capacity}), 1.0)
        assert strain.congested
        for _ in range(5):
            strain.feed(but(**{field: 0.5 * capacity}), 1.0)
        assert not strain.congested


def test_the_same_rate_fills_a_narrower_link():
    rate = 24.0
    assert not fed(*[but(pcie_rx_gb_per_s=rate, pcie_gen=5)] * 3).congested
    assert fed(*[but(pcie_rx_gb_per_s=rate, pcie_gen=4)] * 3).congested
    assert fed(*[but(pcie_rx_gb_per_s=rate, pcie_gen=5, pcie_width=8)] * 3).congested


def test_a_link_that_sends_much_again_is_congested_however_empty_it_is():
    strain = fed(*[but(replays=20 * second) for second in range(4)])
    assert strain.congested
    assert strain.replays_per_s == 20.0


def test_a_counter_that_begins_anew_says_nothing():
    strain = fed(but(replays=1_000_000), but(replays=3))
    assert strain.replays_per_s is None
    assert rate_per_s(5, 5, 0.0) is None
    assert rate_per_s(None, 5, 1.0) is None


def test_what_is_not_known_raises_nothing_and_clears_nothing():
    blind = GpuReading(index=0)
    assert not fed(*[blind] * 9).throttled
    strain = fed(*[but(reasons=(Reason.HW_SLOWDOWN,), pcie_rx_gb_per_s=60.0)] * 3)
    for _ in range(30):
        assert not strain.feed(blind, 1.0)
    assert (strain.throttled, strain.congested) == (True, True)


@pytest.mark.parametrize(("gen", "width"), [(None, 16), (4, None), (0, 16), (9, 16), (4, 0)])
def test_a_link_of_unknown_size_has_no_capacity(gen, width):
    assert pcie_gb_per_s(gen, width) is None


def test_capacities_are_as_pci_sig_has_them():
    assert [pcie_gb_per_s(gen, 16) for gen in (3, 4, 5, 6)] == pytest.approx([15.75, 31.5, 63.0, 121.0], rel=2e-3)
