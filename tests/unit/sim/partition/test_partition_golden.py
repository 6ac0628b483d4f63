"""Three cuts written down: whoever changes times, memory or search sees here what that changes."""

from unit.sim.partition.questions import asked

from quartet_sim.partition import explain
from quartet_sim.partition.machines import parse_nodes
from quartet_sim.partition.search import best
from quartet_sim.partition.timing import Workload

WORK = Workload(prompt_tokens=1024, output_tokens=256, concurrency=16, max_model_len=8192)


def cut(placement):
    return [
        (stage.hardware, stage.tp, stage.precision, stage.first_layer, stage.end_layer) for stage in placement.stages
    ]


def test_a_70b_in_bf16_over_an_h100_and_two_l40s_fills_all_three():
    """141 GB of weights in 164 GB: memory decides, and the H100, which could take more layers, is full."""
    question = asked("llama-3.1-70b", parse_nodes("1xH100_SXM5,2xL40S_PCIE"), WORK, precisions=("bf16",))
    found = best(question)
    assert cut(found) == [
        ("L40S_PCIE", 1, "bf16", 0, 20),
        ("L40S_PCIE", 1, "bf16", 20, 41),
        ("H100_SXM5", 1, "bf16", 41, 80),
    ]
    assert found.loss_hundredths == 0
    assert explain.binding(question, found)[0].limit in {"memory", "quality"}


def test_a_405b_over_eight_h100_and_l40s_leaves_the_slow_cards_out():
    """In FP8 it fits the H100s; a stage on L40S would be the slowest of all."""
    found = best(asked("llama-3.1-405b", parse_nodes("8xH100_SXM5,4xL40S_PCIE"), WORK))
    assert cut(found) == [("H100_SXM5", 8, "fp8", 0, 126)]
    assert found.loss_hundredths == 19


def test_a_405b_in_bf16_over_sixteen_h100_is_two_stages_of_eight_the_one_with_the_head_shorter():
    found = best(asked("llama-3.1-405b", parse_nodes("8xH100_SXM5,8xH100_SXM5"), WORK, precisions=("bf16",)))
    assert [(stage.tp, stage.layers) for stage in found.stages] == [(8, 64), (8, 62)]


def test_a_405b_with_long_contexts_over_eight_h100_and_l40s_uses_both():
    """A million tokens of KV do not fit beside the weights: some layers go to the L40S, in 4 bits."""
    work = Workload(prompt_tokens=16384, output_tokens=512, concurrency=28, max_model_len=32768)
    question = asked("llama-3.1-405b", parse_nodes("8xH100_SXM5,8xL40S_PCIE"), work)
    found = best(question)
    assert {stage.hardware for stage in found.stages} == {"H100_SXM5", "L40S_PCIE"}
    assert all(stage.precision == "fp8" for stage in found.stages if stage.hardware == "H100_SXM5")


def test_a_405b_fits_nowhere_on_two_l40s():
    question = asked("llama-3.1-405b", parse_nodes("2xL40S_PCIE"), WORK)
    assert best(question) is None
    assert any(each.limit == "memory" and "more than" in each.text for each in explain.obstacles(question))
