"""A placement as text for the engines: commands and files that can be pasted, with what they cannot say as comments.

Option names are those of the versions named in ``engines``.
"""

from collections.abc import Sequence
from typing import Final

from quartet_sim.partition.engines import TENSORRT_LLM, VLLM, EngineRules
from quartet_sim.partition.placement import Limits, Placement, Stage

_MODEL: Final = "MODEL"
_KV_TYPES: Final = {2: "auto", 1: "fp8"}


def unrunnable(placement: Placement, rules: EngineRules) -> list[str]:
    """What of ``placement`` the engine refuses; empty when it runs it."""
    stages = placement.stages
    found: list[str] = []
    if rules.uniform_tp and len({stage.tp for stage in stages}) > 1:
        degrees = ", ".join(str(stage.tp) for stage in stages)
        found.append(f"stages have TP degrees {degrees}: {rules.name} has one for all")
    if not rules.mixed_precision and len({stage.precision for stage in stages}) > 1:
        found.append(f"stages have several precisions: {rules.name} takes one")
    nodes = [stage.node for stage in stages]
    runs = [node for i, node in enumerate(nodes) if i == 0 or nodes[i - 1] != node]
    if rules.whole_nodes_in_line and len(runs) != len(set(runs)):
        found.append(f"the pipeline returns to a node it left: {rules.name} sorts ranks by node")
    return found


def vllm(placement: Placement, limits: Limits) -> str:
    """A ``vllm serve`` command, and the recipe of a mixed checkpoint where one is needed.

    Raises ``ValueError`` for a placement that vLLM cannot run.
    """
    _refuse(placement, VLLM)
    stages = placement.stages
    nodes = _in_line(stages)
    lines = [f"# vLLM 0.32: {placement.model} in {len(stages)} stages. Set {_MODEL} to the checkpoint."]
    if len(nodes) == 1:
        ordinals = ",".join(gpu.split(":")[1] for stage in stages for gpu in stage.gpus)
        lines.append(f"# On node {nodes[0]}; the order of the cards is that of the stages.")
        lines.append(f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={ordinals}")
        backend = "mp"
    else:
        lines += _ray(stages, nodes)
        backend = "ray"
    if len(stages) > 1:
        lines.append(f"export VLLM_PP_LAYER_PARTITION={','.join(str(stage.layers) for stage in stages)}")
    options = [
        f"--pipeline-parallel-size {len(stages)}",
        f"--tensor-parallel-size {stages[0].tp}",
        f"--distributed-executor-backend {backend}",
        f"--max-model-len {placement.workload.max_model_len}",
        f"--max-num-seqs {placement.workload.concurrency}",
        f"--gpu-memory-utilization {limits.utilisation:g}",
        f"--kv-cache-dtype {_KV_TYPES[limits.kv_bytes_per_element]}",
    ]
    precisions = {stage.precision for stage in stages}
    if precisions == {"fp8"}:
        options.append("--quantization fp8")
        lines.append(
            "# --quantization fp8 quantizes a BF16 checkpoint as it is loaded; leave it out for one that is FP8."
        )
    elif precisions != {"bf16"}:
        options.append("--quantization compressed-tensors")
    lines.append(" \\\n    ".join([f"vllm serve {_MODEL}", *options]))
    if precisions - {"bf16"} and precisions != {"fp8"}:
        lines += ["", *_recipe(stages)]
    return "\n".join(lines) + "\n"


def tensorrt_llm(placement: Placement, limits: Limits) -> str:
    """A configuration file and the command that reads it. Raises ``ValueError`` for what TensorRT-LLM cannot run."""
    _refuse(placement, TENSORRT_LLM)
    stages = placement.stages
    work = placement.workload
    precision = stages[0].precision
    kv_type = "fp8" if limits.kv_bytes_per_element == 1 else "auto"
    # it takes the share of what is free after the weights, vLLM of all
    free = min(_free_share(stage, limits) for stage in stages)
    lines = [f"# TensorRT-LLM (PyTorch backend): {placement.model} in {len(stages)} stages. Set {_MODEL}."]
    if len({stage.hardware for stage in stages}) > 1:
        lines.append("# A pipeline over unlike cards is not documented; try it before you rely on it.")
    if precision != "bf16":
        kind = {"fp8": "FP8", "int4": "INT4 (W4A16) AWQ"}[precision]
        lines.append(f"# {_MODEL} is a checkpoint quantized to {kind} with Model Optimizer.")
    lines += [
        "cat > partition.yaml <<'END'",
        "backend: pytorch",
        f"tensor_parallel_size: {stages[0].tp}",
        f"pipeline_parallel_size: {len(stages)}",
    ]
    if len(stages) > 1:
        lines.append(f"pp_partition: [{', '.join(str(stage.layers) for stage in stages)}]")
    lines += [
        f"max_seq_len: {work.max_model_len}",
        f"max_batch_size: {work.concurrency}",
        "kv_cache_config:",
        f"  dtype: {kv_type}",
        f"  free_gpu_memory_fraction: {free:.2f}",
        "END",
    ]
    nodes = _in_line(stages)
    if len(nodes) > 1:
        total = sum(stage.tp for stage in stages)
        lines.append(f"# Ranks in this order over nodes {', '.join(nodes)}:")
        lines += [f"#   rank {rank}: {gpu}" for rank, gpu in enumerate(g for stage in stages for g in stage.gpus)]
        lines.append(f"mpirun -n {total} trtllm-llmapi-launch trtllm-serve {_MODEL} --config partition.yaml")
    else:
        ordinals = ",".join(gpu.split(":")[1] for stage in stages for gpu in stage.gpus)
        lines.append(f"export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={ordinals}  # on node {nodes[0]}")
        lines.append(f"trtllm-serve {_MODEL} --config partition.yaml")
    return "\n".join(lines) + "\n"


def _refuse(placement: Placement, rules: EngineRules) -> None:
    if found := unrunnable(placement, rules):
        raise ValueError("; ".join(found))


def _in_line(stages: Sequence[Stage]) -> list[str]:
    return list(dict.fromkeys(stage.node for stage in stages))


def _ray(stages: Sequence[Stage], nodes: Sequence[str]) -> list[str]:
    """How a Ray cluster is begun so that ranks come in the stages' order."""
    counts = {node: sum(stage.tp for stage in stages if stage.node == node) for node in nodes}
    lines = [
        f"# Ray: begin it on {nodes[0]} (ray start --head) and join from {', '.join(nodes[1:])}; on each node first:"
    ]
    for node in nodes:
        ordinals = ",".join(gpu.split(":")[1] for stage in stages if stage.node == node for gpu in stage.gpus)
        lines.append(f"#   {node}: export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={ordinals}")
    for node in nodes:
        ordinals_in_line = [int(gpu.split(":")[1]) for stage in stages if stage.node == node for gpu in stage.gpus]
        if ordinals_in_line != sorted(ordinals_in_line):
            lines.append(f"# Ray sorts a node's cards by number: renumber those of {node}, and check the log.")
    followers = [counts[node] for node in nodes[1:]]
    lines.append("# Ranks are sorted: the head's first, then nodes with fewer workers, then by IP address.")
    if followers != sorted(followers):
        lines.append(
            "# That is NOT the stages' order here: name the bundles with VLLM_RAY_BUNDLE_INDICES, and check the log."
        )
    return lines


def _recipe(stages: Sequence[Stage]) -> list[str]:
    """An llm-compressor recipe for a checkpoint with a scheme for each range of layers."""
    schemes = {"fp8": "FP8_DYNAMIC", "int4": "W4A16"}
    lines = ["# The checkpoint: llm-compressor with this recipe; layers not named, and lm_head, stay in BF16."]
    lines += ["cat > recipe.yaml <<'END'", "quant_stage:", "  quant_modifiers:"]
    for precision, scheme in schemes.items():
        layers = [
            n for stage in stages if stage.precision == precision for n in range(stage.first_layer, stage.end_layer)
        ]
        if not layers:
            continue
        modifier = "GPTQModifier" if precision == "int4" else "QuantizationModifier"
        numbers = "|".join(str(n) for n in layers)
        lines += [
            f"    {modifier}:",
            f"      scheme: {scheme}",
            f"      targets: ['re:.*layers[.]({numbers})[.](self_attn|mlp)[.].*_proj$']",
        ]
    return [*lines, "END"]


def _free_share(stage: Stage, limits: Limits) -> float:
    """The share that KV may have of what the weights leave free of a card, so that the card's limit is kept."""
    memory = stage.memory
    free = memory.limit / limits.utilisation - memory.weights
    return (memory.limit - memory.used + memory.kv) / free
