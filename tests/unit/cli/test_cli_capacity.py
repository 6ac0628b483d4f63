import pytest

from quartet_bus.config.load import load
from quartet_bus.messages import Phase, RequestEvent, Role, StreamId
from quartet_cli.demo.capacity import Pool, PoolCapacity, capacities
from quartet_cli.demo.passes import engines_of
from quartet_cli.fleet.layout import shipped
from quartet_core.catalogue import builtin

PROFILE = builtin().profile("L40S_PCIE", "llama-3.1-8b", "fp8", 1)


def pool(**changes: float) -> PoolCapacity:
    values = {"max_batch": 256, "kv_tokens": 230_000, "tpot_ms": 100.0} | changes
    return PoolCapacity(PROFILE, max_batch=int(values["max_batch"]), kv_tokens=int(values["kv_tokens"]),
                        tpot_ms=values["tpot_ms"])  # fmt: skip


def end(role: Role, prompt: int = 1000, cached: int = 0, output: int = 200) -> RequestEvent:
    return RequestEvent(
        phase=Phase.END, stream=StreamId("x"), tenant="t", model="m", role=role, prompt_tokens=prompt,
        cached_tokens=cached, output_tokens=output,
    )  # fmt: skip


def test_a_token_in_a_full_batch_costs_a_fraction_of_a_step_alone():
    alone = PROFILE.step_ms_at(1, 1024)
    assert pool(max_batch=1).token_ms(1024) == pytest.approx(alone)
    assert pool().token_ms(1024) < alone / 10


def test_a_batch_is_full_where_the_target_for_time_per_token_is_reached():
    step_at_16 = PROFILE.step_ms_at(16, 1024)
    assert pool(tpot_ms=step_at_16).token_ms(1024) == pytest.approx(step_at_16 / 16)


def test_a_batch_is_full_where_the_kv_memory_is():
    assert pool(kv_tokens=8 * 1024).token_ms(1024) == pytest.approx(PROFILE.step_ms_at(8, 1024) / 8)


def test_a_target_that_cannot_be_met_leaves_a_batch_of_one():
    assert pool(tpot_ms=0.1).token_ms(1024) == pytest.approx(PROFILE.step_ms_at(1, 1024))


def test_the_halves_of_a_split_cost_what_the_whole_does():
    halves = pool().work_ms(end(Role.PREFILL, output=0)) + pool().work_ms(end(Role.DECODE))
    assert halves == pytest.approx(pool().work_ms(end(Role.BOTH)))


def test_cached_tokens_are_no_work():
    assert pool().work_ms(end(Role.BOTH, cached=900)) < pool().work_ms(end(Role.BOTH))


def test_the_demo_fleet_has_four_pools_over_its_24_cards():
    config = load([shipped("fleet")], env={})
    pools = capacities(
        builtin(),
        engines_of(()),
        {name: model.tpot_ms for name, model in config.models.items()},
        {name: model.spec for name, model in config.models.items()},
    )
    assert {pool: (capacity.workers, capacity.gpus) for pool, capacity in pools.items()} == {
        Pool("llama-70b", "H100_SXM5"): (1, 4),
        Pool("llama-8b", "H100_SXM5"): (4, 4),
        Pool("llama-70b", "L40S_PCIE"): (2, 8),
        Pool("llama-8b", "L40S_PCIE"): (8, 8),
    }
