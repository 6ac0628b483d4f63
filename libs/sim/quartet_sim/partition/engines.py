"""What the engines can run of a placement: the rules that the search keeps, with where they come from.

vLLM: read in 0.32.0 (``envs.py``, ``distributed/utils.py``, ``config/parallel.py``, ``v1/core/kv_cache_utils.py``,
``v1/executor/ray_executor.py``). TensorRT-LLM: its documentation of 1.0 to 1.4.0rc4, and pull request 9003, which
brought ``pp_partition`` (November 2025).
"""

from typing import Final

from msgspec import Struct


class EngineRules(Struct, frozen=True, kw_only=True):
    """What a placement must be like. ``precisions`` are those it runs; ``refuses`` is why, for people."""

    name: str
    uniform_tp: bool
    whole_nodes_in_line: bool
    mixed_precision: bool
    precisions: tuple[str, ...]
    refuses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


VLLM: Final = EngineRules(
    name="vllm",
    uniform_tp=True,
    whole_nodes_in_line=True,
    mixed_precision=True,
    precisions=("bf16", "fp8", "int4"),
    refuses=(
        "another TP degree per stage: one --tensor-parallel-size for all (vllm-project/vllm#27239, closed)",
        "stages of one node that are not neighbours: ranks are sorted by node",
        "another memory share or KV type per stage: each is one flag",
    ),
    notes=(
        "every stage gets as many KV blocks as the one with the fewest",
        "several precisions are one compressed-tensors checkpoint whose groups name layers (the recipe)",
    ),
)

TENSORRT_LLM: Final = EngineRules(
    name="tensorrt-llm",
    uniform_tp=True,
    whole_nodes_in_line=True,
    mixed_precision=False,
    precisions=("bf16", "fp8", "int4"),
    refuses=(
        "another TP degree per stage: ranks = tp_size x pp_size",
        "tensor parallelism over unlike cards (NVIDIA/TensorRT-LLM#1491)",
        "another precision per stage: taken as not possible; no documentation says otherwise",
    ),
    notes=(
        "a pipeline over unlike cards is not documented: try it before you rely on it",
        "pp_partition is of the PyTorch backend (NVIDIA/TensorRT-LLM#9003)",
    ),
)

ANY: Final = EngineRules(
    name="any",
    uniform_tp=False,
    whole_nodes_in_line=False,
    mixed_precision=True,
    precisions=("bf16", "fp8", "int4"),
    notes=("what the cards could do; neither engine may be able to run it",),
)

ENGINES: Final = {rules.name: rules for rules in (VLLM, TENSORRT_LLM, ANY)}
