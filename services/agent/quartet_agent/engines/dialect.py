"""Dialects: what differs between engines that speak OpenAI's API: addresses, fields, and the names of their metrics.

Names of metrics change between versions, and a router that reads 0 for a name that is gone is worse than one that reads
nothing. So each engine has *generations* of names; which one an engine speaks is told by the names it exposes. What is
required and not there under any known name is said aloud, once, and the worker is marked degraded.

vLLM's names: current ones as exposed by 0.32.0; ``v1-early`` are 0.8 to 0.10, ``v0`` 0.4 to 0.7. SGLang's: 0.5; its
labels, and what of them is said twice, as read in the source of 0.5.23.
"""

from collections.abc import Mapping
from typing import Final, Literal

from msgspec import Struct

Quantity = Literal["running", "waiting", "kv_usage", "steps", "queries", "hits"]
"""What an agent reads of an engine: sequences running and waiting, used share of KV memory, steps so far, prompt tokens
looked up in the prefix cache and found there."""

How = Literal["sum", "mean"]


class Alias(Struct, frozen=True):
    """One quantity under one name. Shares are averaged over an engine's data-parallel ranks, all else is summed."""

    name: str
    how: How = "sum"


class Generation(Struct, frozen=True):
    """The names that versions of an engine used together. Known by ``marker``, a name that no other generation has."""

    name: str
    marker: str
    aliases: Mapping[Quantity, Alias]


class Dialect(Struct, frozen=True, kw_only=True):
    """An engine's way of speaking. An address is "" where there is none.

    ``usage``: its streams tell usage when asked to. ``salted``: it keeps prefixes apart by ``cache_salt``.
    ``abort`` is an address that ends a request by the id in its ``rid`` field. ``prefill_steps``: its steps move while
    it reads a prompt, too. ``generations`` are newest first; ``required`` must be readable, or the worker is degraded;
    ``lazy``: not before its first request, since that is what its metrics begin with. ``info`` are addresses of one
    thing, newest first.

    ``rank_label`` is the label that tells metrics of data-parallel ranks apart, ``rank_header`` has a request run on
    one of them. ``copies`` are labels of ranks that all say the same of one engine. Where a label of ``totals`` is not
    "", the sample is a part of one where it is.
    """

    name: str
    health: str
    metrics: str = ""
    version: str = ""
    events: str = ""
    info: tuple[str, ...] = ()
    abort: str = ""
    usage: bool = False
    salted: bool = False
    loads_adapters: bool = False
    prefill_steps: bool = False
    rank_label: str = ""
    rank_header: str = ""
    copies: tuple[str, ...] = ()
    totals: tuple[str, ...] = ()
    lazy: bool = False
    required: tuple[Quantity, ...] = ()
    generations: tuple[Generation, ...] = ()


_VLLM_LOAD: Final[dict[Quantity, Alias]] = {
    "running": Alias("vllm:num_requests_running"),
    "waiting": Alias("vllm:num_requests_waiting"),
    "steps": Alias("vllm:iteration_tokens_total_count"),
}

VLLM: Final = Dialect(
    name="vllm",
    health="/health",
    metrics="/metrics",
    version="/version",
    events="/kv_event_sources",
    usage=True,
    salted=True,
    loads_adapters=True,
    prefill_steps=True,
    rank_label="engine",
    rank_header="X-data-parallel-rank",
    required=("running", "waiting", "kv_usage", "steps"),
    generations=(
        Generation(
            "current",
            "vllm:kv_cache_usage_perc",
            {
                **_VLLM_LOAD,
                "kv_usage": Alias("vllm:kv_cache_usage_perc", "mean"),
                "queries": Alias("vllm:prefix_cache_queries_total"),
                "hits": Alias("vllm:prefix_cache_hits_total"),
            },
        ),
        Generation(
            "v1-early",
            "vllm:gpu_prefix_cache_queries_total",
            {
                **_VLLM_LOAD,
                "kv_usage": Alias("vllm:gpu_cache_usage_perc", "mean"),
                "queries": Alias("vllm:gpu_prefix_cache_queries_total"),
                "hits": Alias("vllm:gpu_prefix_cache_hits_total"),
            },
        ),
        Generation(
            "v0",
            "vllm:num_requests_swapped",
            {**_VLLM_LOAD, "kv_usage": Alias("vllm:gpu_cache_usage_perc", "mean")},
        ),
    ),
)

SGLANG: Final = Dialect(
    name="sglang",
    health="/health",
    metrics="/metrics",
    info=("/server_info", "/get_server_info"),
    abort="/abort_request",
    usage=True,
    salted=True,
    loads_adapters=True,
    rank_label="dp_rank",
    rank_header="X-data-parallel-rank",
    copies=("tp_rank", "pp_rank", "moe_ep_rank"),  # --enable-metrics-for-all-schedulers
    totals=("priority",),  # --enable-priority-scheduling
    lazy=True,
    required=("running", "waiting", "kv_usage", "steps"),
    generations=(
        Generation(
            "current",
            "sglang:num_running_reqs",
            {
                "running": Alias("sglang:num_running_reqs"),
                "waiting": Alias("sglang:num_queue_reqs"),
                "kv_usage": Alias("sglang:token_usage", "mean"),
                # It counts no steps; tokens generated move whenever it decodes.
                "steps": Alias("sglang:generation_tokens_total"),
                "queries": Alias("sglang:prompt_tokens_total"),
                "hits": Alias("sglang:cached_tokens_total"),
            },
        ),
    ),
)

OPENAI: Final = Dialect(name="openai", health="/v1/models")

DIALECTS: Final[Mapping[str, Dialect]] = {dialect.name: dialect for dialect in (VLLM, SGLANG, OPENAI)}
