"""Shapes, machines, precisions, times and texts: each says what it must, and refuses what it cannot read."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from unit.sim.partition.questions import CATALOGUE, TABLE, asked, shapes, workloads

from quartet_core.catalogue import ModelSpec
from quartet_sim.partition import accuracy, explain, machines, precision, settings
from quartet_sim.partition.engines import ANY, TENSORRT_LLM, VLLM
from quartet_sim.partition.machines import Node, WrongMachines, hop, parse_nodes, pools_of
from quartet_sim.partition.placement import Cut, Limits, place
from quartet_sim.partition.precision import assignments, lesser
from quartet_sim.partition.search import best
from quartet_sim.partition.shape import UnknownShape, shape_of
from quartet_sim.partition.timing import Cards, Workload, all_reduce_gb_per_s, stage_memory, stage_times

SMALL = Workload(prompt_tokens=1024, output_tokens=256, concurrency=16, max_model_len=8192)


@pytest.mark.parametrize("name", sorted(CATALOGUE.models))
def test_the_weights_of_a_models_layers_and_tables_are_those_of_the_catalogue(name):
    spec = CATALOGUE.model(name)
    shape = shape_of(spec)
    whole = shape.layers * shape.layer_weights * 2 + 2 * shape.table_bytes
    assert whole == pytest.approx(spec.weights("bf16"), rel=0.002)
    in_fp8 = shape.layers * shape.layer_weights + 2 * shape.table_bytes
    assert in_fp8 == pytest.approx(spec.weights("fp8"), rel=0.01)
    assert shape.layers * shape.kv_layer_bytes == spec.kv_bytes_per_token


def test_a_model_whose_layers_nobody_described_is_refused_with_the_keys_that_are_missing():
    spec = ModelSpec(name="x", layers=2, kv_heads=1, head_dim=64, weight_bytes={"bf16": 1}, max_context=8, hidden=64)
    with pytest.raises(UnknownShape, match=r"\[models\.x\] lacks heads, intermediate, vocab"):
        shape_of(spec)


def test_stage_times_are_near_the_profiles_timed_with_todays_kernels():
    rows = [row for row in accuracy.accuracy(CATALOGUE, TABLE) if row.kernels]
    assert len(rows) >= 10
    assert all(abs(row.step_pct) <= 15 for row in rows)
    # L40S at TP 4 is an outlier of its own: one host's all-reduce over PCIe
    assert all(abs(row.prefill_pct) <= 10 or (row.hardware, row.tp) == ("L40S_PCIE", 4) for row in rows)


@given(shapes, workloads, st.sampled_from(["H100_SXM5", "L40S_PCIE"]), st.sampled_from([1, 2, 4]), st.integers(1, 5))
def test_more_layers_take_longer_and_need_more(shape, work, hardware, tp, layers):
    cards = Cards(hardware=CATALOGUE.hardware_class(hardware), tp=tp, precision=TABLE.precisions["fp8"])
    ends = {"first": False, "last": False}

    def of(count):
        memory = stage_memory(shape, cards, work, count, **ends, kv_bytes_per_element=2, utilisation=0.9)
        times = stage_times(shape, cards, work, count, 8, **ends, way_in=None, kv_bytes_per_element=2)
        return memory.used, times.request_ms, times.step_ms, times.prefill_ms

    assert all(more > fewer for fewer, more in zip(of(layers), of(layers + 1), strict=True))
    parts = stage_times(shape, cards, work, layers, 8, **ends, way_in=None, kv_bytes_per_element=2)
    assert sum(parts.parts_ms.values()) == pytest.approx(parts.request_ms)


def test_all_reduces_are_as_measured_and_fall_between():
    assert all_reduce_gb_per_s("nvlink", 2) == pytest.approx(316)
    assert all_reduce_gb_per_s("nvlink", 8) == pytest.approx(199)
    assert 199 < all_reduce_gb_per_s("nvlink", 4) < 316
    assert all_reduce_gb_per_s("pcie", 4) == pytest.approx(3.7)


def test_machines_are_read_from_a_line_or_a_file():
    assert parse_nodes("1xH100_SXM5+2xL40S_PCIE,4xA100", "ib") == (
        Node("n0", {"H100_SXM5": 1, "L40S_PCIE": 2}, "ib"),
        Node("n1", {"A100": 4}, "ib"),
    )
    text = '[[nodes]]\nname = "a"\ncards = { H100_SXM5 = 8 }\nrdma = "ib"\nnic_gb_per_s = 45\n'
    assert machines.decode_nodes(text) == (Node("a", {"H100_SXM5": 8}, "ib", 45),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100_SXM5", "cannot read 'H100_SXM5'; it is COUNTxCLASS"),
        ("1xH100_SXM5,,", "cannot read ''"),
        ("0xH100_SXM5", "0 cards of H100_SXM5; at least 1"),
        ("65xH100_SXM5", "65 cards; from 1 to 64"),
    ],
)
def test_machines_that_cannot_be_are_refused_with_what_can(text, message):
    with pytest.raises(WrongMachines) as refused:
        pools_of(parse_nodes(text), CATALOGUE)
    assert message in str(refused.value)


def test_a_file_of_machines_with_a_wrong_key_names_it():
    with pytest.raises(WrongMachines, match="colour"):
        machines.decode_nodes('[[nodes]]\nname = "a"\ncards = { L40 = 1 }\ncolour = 1\n')
    with pytest.raises(WrongMachines, match="two nodes are called 'a'"):
        pools_of((Node("a", {"L40": 1}), Node("a", {"L40": 1})), CATALOGUE)


def test_the_way_between_cards_is_nvlink_before_pcie_before_the_network():
    h100, l40s = CATALOGUE.hardware_class("H100_SXM5"), CATALOGUE.hardware_class("L40S_PCIE")
    pools = pools_of(parse_nodes("2xH100_SXM5+2xL40S_PCIE,2xL40S_PCIE"), CATALOGUE)
    within = hop(pools[0].place(1), pools[0].place(1))
    beside = hop(pools[0].place(1), pools[1].place(1))
    across = hop(pools[0].place(1), pools[2].place(1))
    assert (within.path, beside.path, across.path) == ("NVLINK", "PCIE_P2P", "RDMA_ROCE")
    assert within.ms(1e6) < beside.ms(1e6) < across.ms(1e6)
    assert across.gb_per_s == l40s.host_link.gb_per_s  # however fast the network is
    assert h100.gpu_link.kind == "nvlink"


def test_aggressive_quantization_is_for_the_lesser_cards_and_bits_never_fall_as_cards_get_better():
    classes = {name: CATALOGUE.hardware_class(name) for name in ("H100_SXM5", "L40S_PCIE", "A100")}
    assert lesser(classes) == {"L40S_PCIE", "A100"}
    found = assignments(classes, TABLE, ("bf16", "fp8", "int4"), mixed=True, aggressive_on=lesser(classes))
    assert {"L40S_PCIE": "int4", "A100": "int4", "H100_SXM5": "fp8"} in found
    for each in found:
        assert each["A100"] != "fp8", "it cannot compute in FP8"
        assert each["H100_SXM5"] != "int4"
        bits = [TABLE.precisions[each[name]].bits for name in ("L40S_PCIE", "A100", "H100_SXM5")]
        assert bits == sorted(bits)
    one = assignments(classes, TABLE, ("bf16", "fp8", "int4"), mixed=False, aggressive_on=lesser(classes))
    assert one == [dict.fromkeys(("L40S_PCIE", "A100", "H100_SXM5"), "bf16")]


def test_every_loss_that_ships_says_who_measured_it_and_an_operators_own_replaces_it():
    for model, losses in TABLE.losses.items():
        assert model in CATALOGUE.models
        for name, loss in losses.items():
            assert TABLE.precisions[name].bits < 16
            assert loss.source
            assert loss.loss_hundredths > 0
    own = TABLE.with_losses("qwen3-32b", {"fp8": 0.25})
    assert own.loss("qwen3-32b", "fp8").loss_hundredths == 25
    assert own.loss("qwen3-32b", "bf16").loss_hundredths == 0
    assert own.loss("qwen3-32b", "int4") is None
    with pytest.raises(ValueError, match="no precision 'fp3' to lose quality by; one of fp8, int4"):
        TABLE.with_losses("qwen3-32b", {"fp3": 1})
    with pytest.raises(ValueError, match="not from 0 to 100"):
        TABLE.with_losses("qwen3-32b", {"fp8": -1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1"),
        ({"max_model_len": 1000}, "longer than max_model_len"),
    ],
)
def test_a_workload_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Workload(**{"prompt_tokens": 1024, "output_tokens": 256, "concurrency": 4, "max_model_len": 4096} | changes)


def test_cuts_that_are_no_partition_of_the_layers_are_refused():
    question = asked("llama-3.1-8b", parse_nodes("1xH100_SXM5"), SMALL)
    with pytest.raises(ValueError, match="are not 32 layers"):
        place(question.shape, question.pools, [Cut(0, 1, "bf16", 31)], SMALL, TABLE, Limits())
    with pytest.raises(ValueError, match="2 cards of H100_SXM5 on n0, which has 1"):
        place(question.shape, question.pools, [Cut(0, 2, "bf16", 32)], SMALL, TABLE, Limits())


def placed(groups, nodes, limits=None, model="llama-3.1-70b"):
    question = asked(model, nodes, SMALL, engine="any")
    return place(question.shape, question.pools, [Cut(*each) for each in groups], SMALL, TABLE, limits or Limits())


def test_vllm_is_told_the_cut_in_its_own_words():
    nodes = parse_nodes("1xH100_SXM5,2xL40S_PCIE")
    made = placed([(1, 1, "int4", 20), (1, 1, "int4", 20), (0, 1, "fp8", 40)], nodes)
    text = settings.vllm(made, Limits(kv_bytes_per_element=1))
    assert "export VLLM_PP_LAYER_PARTITION=20,20,40\n" in text
    for option in ("--pipeline-parallel-size 3", "--tensor-parallel-size 1", "--max-model-len 8192",
                   "--distributed-executor-backend ray", "--kv-cache-dtype fp8", "--gpu-memory-utilization 0.9",
                   "--quantization compressed-tensors"):  # fmt: skip
        assert option in text
    recipe = yaml.safe_load(text.split("<<'END'\n")[1].split("END")[0])["quant_stage"]["quant_modifiers"]
    assert recipe["GPTQModifier"]["scheme"] == "W4A16"
    assert "(0|1|2" in recipe["GPTQModifier"]["targets"][0]
    assert "|39)" in recipe["GPTQModifier"]["targets"][0]
    assert "(40|41" in recipe["QuantizationModifier"]["targets"][0]


def test_on_one_node_vllm_needs_no_cluster_and_sees_the_cards_in_the_order_of_the_stages():
    made = placed([(1, 1, "fp8", 20), (0, 1, "fp8", 60)], parse_nodes("2xH100_SXM5+1xL40S_PCIE"))
    text = settings.vllm(made, Limits())
    assert "CUDA_VISIBLE_DEVICES=2,0" in text
    assert "--distributed-executor-backend mp" in text
    assert "--quantization fp8" in text
    assert "recipe" not in text


def test_ranks_that_ray_would_sort_otherwise_are_warned_of():
    nodes = parse_nodes("1xL40S_PCIE,2xL40S_PCIE,1xL40S_PCIE")
    groups = [(0, 1, "fp8", 20), (1, 1, "fp8", 20), (1, 1, "fp8", 20), (2, 1, "fp8", 20)]
    assert "NOT the stages' order" in settings.vllm(placed(groups, nodes), Limits())
    in_order = [(0, 1, "fp8", 20), (2, 1, "fp8", 20), (1, 1, "fp8", 40)]
    assert "NOT the stages' order" not in settings.vllm(placed(in_order, nodes), Limits())


def test_cards_that_ray_would_sort_within_a_node_are_warned_of():
    nodes = parse_nodes("1xH100_SXM5+1xL40S_PCIE,1xL40S_PCIE")
    swapped = placed([(1, 1, "fp8", 20), (0, 1, "fp8", 50), (2, 1, "fp8", 10)], nodes)
    assert "renumber those of n0" in settings.vllm(swapped, Limits())
    in_order = placed([(0, 1, "fp8", 50), (1, 1, "fp8", 20), (2, 1, "fp8", 10)], nodes)
    assert "renumber" not in settings.vllm(in_order, Limits())


def test_tensorrt_llm_gets_a_file_that_is_yaml_and_a_share_of_what_is_free():
    made = placed([(0, 1, "fp8", 50), (1, 1, "fp8", 30)], parse_nodes("1xH100_SXM5,1xL40S_PCIE"))
    text = settings.tensorrt_llm(made, Limits())
    written = yaml.safe_load(text.split("<<'END'\n")[1].split("\nEND")[0])
    assert written["pp_partition"] == [50, 30]
    assert written["pipeline_parallel_size"] == 2
    assert written["max_seq_len"] == 8192
    share = written["kv_cache_config"]["free_gpu_memory_fraction"]
    for stage in made.stages:
        memory = stage.memory
        free = memory.limit / 0.9 - memory.weights
        assert memory.kv <= share * free + 0.01 * free, "the KV that is planned fits the share"
        assert memory.weights + memory.activations + memory.runtime + share * free <= memory.limit + 0.01 * free


def test_what_an_engine_cannot_run_is_refused_by_its_text():
    nodes = parse_nodes("1xH100_SXM5,2xL40S_PCIE")
    unequal = placed([(0, 1, "fp8", 60), (1, 2, "fp8", 20)], nodes)
    with pytest.raises(ValueError, match="TP degrees 1, 2: vllm has one for all"):
        settings.vllm(unequal, Limits())
    mixed = placed([(0, 1, "fp8", 60), (1, 1, "int4", 20)], nodes)
    assert not settings.unrunnable(mixed, VLLM)
    with pytest.raises(ValueError, match="several precisions: tensorrt-llm takes one"):
        settings.tensorrt_llm(mixed, Limits())
    back = placed([(1, 1, "fp8", 10), (0, 1, "fp8", 60), (1, 1, "fp8", 10)], nodes)
    assert "returns to a node it left" in settings.unrunnable(back, VLLM)[0]
    assert settings.unrunnable(back, TENSORRT_LLM)
    assert not settings.unrunnable(back, ANY)


def test_a_placement_says_what_binds_it_and_the_claim_holds():
    question = asked("llama-3.1-70b", parse_nodes("1xH100_SXM5,2xL40S_PCIE"), SMALL)
    found = best(question)
    reasons = explain.binding(question, found)
    assert {"quality", "memory", "engine"} <= {each.limit for each in reasons}
    by_engine = next(each for each in reasons if each.limit == "engine")
    free = best(asked("llama-3.1-70b", parse_nodes("1xH100_SXM5,2xL40S_PCIE"), SMALL, engine="any"))
    assert by_engine.gain_pct == pytest.approx(100 * (free.rate_per_s / found.rate_per_s - 1))
    assert "the slowest stage" in reasons[-1].text


def test_a_model_that_fits_nowhere_says_how_far_it_is_from_fitting():
    question = asked("llama-3.1-405b", parse_nodes("2xL40S_PCIE"), SMALL)
    assert best(question) is None
    texts = [each.text for each in explain.obstacles(question)]
    assert any("215.5 GB" in text and "more than the 79.0 GB" in text for text in texts)


def test_a_model_that_only_lacks_room_for_kv_is_told_how_long_sequences_may_be():
    work = Workload(prompt_tokens=1024, output_tokens=256, concurrency=256, max_model_len=131072)
    question = asked("llama-3.1-70b", parse_nodes("1xH100_SXM5"), work, precisions=("fp8",))
    assert best(question) is None
    texts = {each.limit: each.text for each in explain.obstacles(question)}
    assert "one request at a time of up to" in texts["kv"]


def test_alternatives_are_what_the_same_question_gives_elsewhere():
    question = asked("llama-3.1-70b", parse_nodes("1xH100_SXM5,2xL40S_PCIE"), SMALL)
    others = {each.choice: each for each in explain.alternatives(question)}
    assert others["without L40S_PCIE"].stages == 0  # the 70B in FP8 leaves one H100 no room for this KV
    assert others["--engine tensorrt-llm"].loss_hundredths == pytest.approx(13)
    assert others["--precisions bf16"].loss_hundredths == 0


def test_precision_table_reads_as_shipped():
    assert precision.builtin().precisions["int4"].aggressive
    assert not precision.builtin().precisions["fp8"].aggressive
