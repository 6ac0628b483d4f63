"""The search finds what trying every cut finds, and whatever it finds keeps what must be kept."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.sim.partition.brute import every_cut
from unit.sim.partition.questions import asked, big_layers, questions

from quartet_sim.partition.engines import ANY
from quartet_sim.partition.machines import Node, parse_nodes
from quartet_sim.partition.placement import Limits, decode, encode
from quartet_sim.partition.question import TooManyWays
from quartet_sim.partition.search import best
from quartet_sim.partition.settings import unrunnable
from quartet_sim.partition.timing import Workload


def passage_ms(placement):
    steps = sum(stage.times.step_ms + stage.times.link_step_ms for stage in placement.stages)
    return placement.ttft_ms + placement.workload.output_tokens * steps


@settings(deadline=None, max_examples=80)
@given(questions)
def test_no_cut_at_all_is_better_than_the_one_found(question):
    found = best(question)
    everything = list(every_cut(question))
    if found is None:
        assert not everything
        return
    fastest = max(placement.rate_per_s for placement in everything)
    assert found.rate_per_s == pytest.approx(fastest, rel=1e-6)
    as_fast = [placement for placement in everything if placement.rate_per_s >= fastest * (1 - 1e-9)]
    least = min(placement.loss_hundredths for placement in as_fast)
    assert found.loss_hundredths == pytest.approx(least, abs=1e-9)
    soonest = min(passage_ms(p) for p in as_fast if p.loss_hundredths <= least + 1e-9)
    assert passage_ms(found) <= soonest * (1 + 1e-6)


@settings(deadline=None, max_examples=80)
@given(questions)
def test_what_is_found_keeps_memory_quality_and_every_layer_once(question):
    found = best(question)
    if found is None:
        return
    assert [layer for stage in found.stages for layer in range(stage.first_layer, stage.end_layer)] == list(
        range(question.shape.layers)
    )
    assert [stage.embedding for stage in found.stages] == [i == 0 for i in range(len(found.stages))]
    assert [stage.head for stage in found.stages][::-1] == [i == 0 for i in range(len(found.stages))]
    for stage in found.stages:
        assert stage.memory.used <= stage.memory.limit
        assert len({gpu.split(":")[0] for gpu in stage.gpus}) == 1, "a tensor-parallel group stays in its node"
    gpus = [gpu for stage in found.stages for gpu in stage.gpus]
    assert len(set(gpus)) == len(gpus)
    assert found.kv_tokens >= question.work.kv_tokens
    assert found.loss_hundredths <= question.limits.budget_hundredths + 1e-9
    assert not unrunnable(found, question.rules)
    bits = {stage.hardware: question.table.precisions[stage.precision].bits for stage in found.stages}
    for stage in found.stages:
        assert question.table.precisions[stage.precision].bits == bits[stage.hardware], "one precision per class"
        if question.table.precisions[stage.precision].aggressive:
            assert stage.hardware in question.aggressive_on
    assert decode(encode(found)) == found


@settings(deadline=None, max_examples=60)
@given(questions, st.sampled_from(["memory", "quality", "links", "engine"]))
def test_a_limit_less_never_makes_it_slower(question, limit):
    tight = best(question)
    if tight is None:
        return
    changes = {
        "memory": {"utilisation": 0.95},
        "quality": {"budget_hundredths": 10_000},
        "links": {"links_free": True},
        "engine": {},
    }[limit]
    loose = msgspec.structs.replace(question, limits=msgspec.structs.replace(question.limits, **changes))
    if limit == "engine":
        loose = msgspec.structs.replace(question, rules=ANY)
    found = best(loose)
    assert found is not None
    assert found.rate_per_s >= tight.rate_per_s * (1 - 1e-6)


def test_slow_links_keep_stages_that_talk_on_one_node():
    """Two nodes of two L40S, and a model that needs three of the four cards: the pipeline crosses nodes once."""
    work = Workload(prompt_tokens=4096, output_tokens=64, concurrency=8, max_model_len=8192)
    machines = (Node("a", {"L40S_PCIE": 2}), Node("b", {"L40S_PCIE": 2}))
    found = best(asked("llama-3.1-70b", machines, work, engine="any", precisions=("fp8",)))
    crossings = [stage.way_in for stage in found.stages if stage.way_in and stage.way_in.path == "TCP"]
    assert len(crossings) <= 1


def test_a_decoding_load_gives_more_layers_to_the_cards_with_more_bandwidth():
    work = Workload(prompt_tokens=64, output_tokens=2000, concurrency=8, max_model_len=4096)
    found = best(asked("llama-3.1-70b", parse_nodes("1xH100_SXM5,2xL40S_PCIE"), work, precisions=("fp8",)))
    layers = {stage.hardware: stage.layers for stage in found.stages}
    assert layers["H100_SXM5"] > 2 * layers["L40S_PCIE"]


def test_quality_that_costs_too_much_is_not_bought():
    """With a budget that int4 on half of the layers would break, it is used on fewer, or not at all."""
    work = Workload(prompt_tokens=512, output_tokens=512, concurrency=8, max_model_len=4096)
    machines = parse_nodes("1xH100_SXM5,2xL40S_PCIE")
    for budget in (0, 13, 20, 30, 100):
        found = best(asked("llama-3.1-70b", machines, work, limits=Limits(budget_hundredths=budget)))
        if found is not None:
            assert found.loss_hundredths <= budget + 1e-9


def test_a_model_without_measured_losses_is_never_quantized_by_guess():
    work = Workload(prompt_tokens=512, output_tokens=128, concurrency=4, max_model_len=4096)
    found = best(asked("qwen2.5-7b", parse_nodes("2xL40S_PCIE"), work))
    assert {stage.precision for stage in found.stages} == {"bf16"}


def test_fewer_requests_than_stages_leave_the_pipeline_partly_empty():
    work = Workload(prompt_tokens=512, output_tokens=128, concurrency=1, max_model_len=4096)
    found = best(asked("llama-3.1-70b", parse_nodes("4xL40S_PCIE"), work, precisions=("fp8",)))
    way_ms = sum(stage.times.step_ms + stage.times.link_step_ms for stage in found.stages)
    assert found.rate_per_s == pytest.approx(1e3 / (found.ttft_ms + 128 * way_ms))


def test_more_ways_than_can_be_tried_are_refused_with_a_number():
    work = Workload(prompt_tokens=512, output_tokens=128, concurrency=8, max_model_len=4096)
    machines = parse_nodes("8xH100_SXM5,8xL40S_PCIE,8xA100,8xH200,8xL40")
    with pytest.raises(TooManyWays, match="ways to use the cards"):
        best(asked(big_layers(8), machines, work, engine="any"))
