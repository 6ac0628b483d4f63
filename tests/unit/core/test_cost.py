"""Money and energy: what is counted, at which price, and that nothing is lost when a ledger is full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet_core.catalogue import UnknownProfile, builtin
from quartet_core.cost import OTHER, CostLedger

HARDWARE = builtin().hardware


def test_an_hour_of_one_h100_costs_its_price_and_its_energy_whether_busy_or_idle():
    ledger = CostLedger(HARDWARE)
    ledger.add("llama-3.1-8b", "H100_SXM5", busy_gpu_s=1800, output_tokens=1_000_000, prompt_tokens=3_000_000)
    ledger.add("llama-3.1-8b", "H100_SXM5", idle_gpu_s=1800)
    (row,) = ledger.rows()
    assert row.usd == pytest.approx(3.5)
    assert row.busy_usd == pytest.approx(1.75)
    assert row.usd_per_million_output == pytest.approx(3.5)
    assert row.busy_usd_per_million_output == pytest.approx(1.75)
    assert row.usd_per_million_total == pytest.approx(3.5 / 4)
    assert row.energy_j == pytest.approx(1800 * 700 + 1800 * 70)
    assert row.utilisation == pytest.approx(0.5)


def test_before_the_first_token_there_is_no_price_per_token():
    ledger = CostLedger(HARDWARE)
    ledger.add("m", "L40S_PCIE", requests=1)
    (row,) = ledger.rows()
    assert row.usd_per_million_output is None
    assert row.usd_per_million_total is None
    assert row.busy_usd_per_million_output is None
    assert row.utilisation is None


def test_tenants_models_and_classes_are_told_apart_and_add_up_over_tenants():
    ledger = CostLedger(HARDWARE)
    ledger.add("a", "L40S_PCIE", tenant="t1", busy_gpu_s=1, output_tokens=10)
    ledger.add("a", "L40S_PCIE", tenant="t2", busy_gpu_s=2, output_tokens=20)
    ledger.add("a", "L40S_PCIE", idle_gpu_s=5)
    ledger.add("a", "H100_SXM5", tenant="t1", busy_gpu_s=4, output_tokens=40)
    assert [(row.tenant, row.hardware) for row in ledger.rows()] == [
        ("", "L40S_PCIE"),
        ("t1", "H100_SXM5"),
        ("t1", "L40S_PCIE"),
        ("t2", "L40S_PCIE"),
    ]
    h100, l40s = ledger.by_model_and_class()
    assert (h100.hardware, h100.output_tokens) == ("H100_SXM5", 40)
    assert (l40s.output_tokens, l40s.busy_gpu_s, l40s.idle_gpu_s, l40s.tenant) == (30, 3, 5, "")
    assert l40s.usd == pytest.approx(8 / 3600)


additions = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.sampled_from(["x", "y", "z"]),
        st.sampled_from(["H100_SXM5", "L40S_PCIE"]),
        st.integers(0, 1000),
    ),
    max_size=60,
)


@given(additions, st.integers(1, 6))
def test_a_full_ledger_stays_bounded_and_loses_no_token(history, max_rows):
    ledger = CostLedger(HARDWARE, max_rows=max_rows)
    for tenant, model, hardware, output_tokens in history:
        ledger.add(model, hardware, tenant=tenant, output_tokens=output_tokens)
    rows = ledger.rows()
    assert len(rows) <= max_rows + 2
    for hardware in ("H100_SXM5", "L40S_PCIE"):
        assert sum(row.output_tokens for row in rows if row.hardware == hardware) == sum(
            entry[3] for entry in history if entry[2] == hardware
        )
    if len({entry[:3] for entry in history}) > max_rows:
        assert any(row.tenant == row.model == OTHER for row in rows)


def test_a_class_without_a_price_and_a_negative_amount_are_refused():
    ledger = CostLedger(HARDWARE)
    with pytest.raises(UnknownProfile):
        ledger.add("m", "TPU", output_tokens=1)
    with pytest.raises(ValueError, match="grow"):
        ledger.add("m", "L40S_PCIE", output_tokens=-1)
    assert ledger.rows() == []
