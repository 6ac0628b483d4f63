"""From ``[agent]``'s engines to this node's workers: what each is, from the catalogue, and what runs behind it."""

from asyncio import AbstractEventLoop
from collections.abc import Callable
from random import Random

from quartet_agent.engines.base import EngineAdapter
from quartet_agent.engines.dialect import DIALECTS
from quartet_agent.engines.events import sources_in
from quartet_agent.engines.served import Log, ServedAdapter
from quartet_agent.engines.simulated import SimulatedAdapter
from quartet_agent.worker import HostedWorker, WorkerFacts
from quartet_bus.catalogue import WHERE
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import Config, EngineSection
from quartet_bus.messages import KvLayout, Role
from quartet_core.catalogue import Catalogue
from quartet_core.filters import EMBEDDINGS
from quartet_core.heartbeat import MAX_WORKERS
from quartet_core.pairing import EXPORT, IMPORT, OVERLAP, PAGE, RESERVE, handshake_of
from quartet_core.profile import Profile
from quartet_sim.engine import SimulatedEngine

_CAPABILITIES = (EXPORT, IMPORT, RESERVE)

_SERVERS_ONLY = (
    "url",
    "served_model",
    "api_key",
    "api_key_file",
    "kv_replay",
    "kv_connector",
    "kv_pages",
    "adapter_paths",
)
"""Keys that mean nothing to a simulated engine."""


def host_workers(
    config: Config,
    catalogue: Catalogue,
    node: str,
    random: Random,
    loop: AbstractEventLoop,
    now_ms: Callable[[], float],
    wall_s: Callable[[], float],
    congested: Callable[[], bool],
    log: Log,
) -> list[HostedWorker]:
    """The workers of ``[agent]``, ordinals in the order of the file; ``catalogue`` was loaded for this ``config``.

    Raises ``ConfigError``, naming the engine's key, for a model that leaves no memory for KV, or too many workers.
    """
    workers: list[HostedWorker] = []
    for index, section in enumerate(config.agent.engines):
        key = f"agent.engines[{index}]"
        simulated = section.kind == "simulated"
        number, named = (section.count, "count") if simulated else (section.data_parallel, "data_parallel")
        for replica in range(number):
            if len(workers) == MAX_WORKERS:
                raise ConfigError(WHERE, f"{key}.{named}", number, f"a node has at most {MAX_WORKERS} workers")
            first_gpu = section.first_gpu + replica * section.tp
            facts = _facts(config, catalogue, section, key, first_gpu)
            adapter: EngineAdapter
            if simulated:
                engine = _simulated(config, catalogue, section, key, facts)
                adapter = SimulatedAdapter(engine, loop, now_ms, wall_s, overlap=section.overlap)
            else:
                _check_server(section, key)
                adapter = ServedAdapter(
                    section, config.models[section.model], DIALECTS[section.kind],
                    _profile(config, catalogue, section), facts.kv_tokens, now_ms, congested, log,
                    rank=replica if number > 1 else None,
                    paging=config.kv.pool,
                )  # fmt: skip
            incarnation = random.randrange(1, 1 << 16)
            workers.append(HostedWorker(node, len(workers), incarnation, facts, adapter, Role(section.role)))
    return workers


def _check_server(section: EngineSection, key: str) -> None:
    if not section.url:
        raise ConfigError(WHERE, f"{key}.url", section.url, f"an engine of kind {section.kind} is at http://host:port")
    if section.count != 1:
        raise ConfigError(WHERE, f"{key}.count", section.count, "must be 1: one table for each server")
    for name in section.adapter_paths:
        if name not in section.adapters:
            raise ConfigError(WHERE, f"{key}.adapter_paths", name, f"must be one of adapters: {section.adapters}")
    if section.data_parallel > 1 and not DIALECTS[section.kind].rank_header:
        raise ConfigError(
            WHERE, f"{key}.data_parallel", section.data_parallel, f"engines of kind {section.kind} have no ranks"
        )
    if section.data_parallel > 1 and section.kv_events not in ("auto", "off"):
        told = len(sources_in(section.kv_events, section.kv_replay))
        if told != section.data_parallel:
            raise ConfigError(
                WHERE, f"{key}.kv_events", section.kv_events,
                f"must have one endpoint for each of the {section.data_parallel} ranks, not {told}",
            )  # fmt: skip
    if section.kv_connector and section.kind != "vllm":
        raise ConfigError(WHERE, f"{key}.kv_connector", section.kv_connector, "only engines of kind vllm have one")
    if section.kv_pages and section.kind != "vllm":
        raise ConfigError(WHERE, f"{key}.kv_pages", section.kv_pages, "only engines of kind vllm have pages")
    if section.kv_pages and section.kv_connector:
        raise ConfigError(
            WHERE, f"{key}.kv_pages", section.kv_pages, "an engine has pages or a kv_connector of its own, not both"
        )


def _profile(config: Config, catalogue: Catalogue, section: EngineSection) -> Profile:
    spec = config.models[section.model].spec
    return catalogue.profile(section.hardware, spec, section.precision, section.tp)


def _facts(config: Config, catalogue: Catalogue, section: EngineSection, key: str, first_gpu: int) -> WorkerFacts:
    spec = catalogue.model(config.models[section.model].spec)
    hardware = catalogue.hardware_class(section.hardware)
    profile = _profile(config, catalogue, section)
    kv_tokens = section.kv_tokens or catalogue.kv_capacity_tokens(
        section.hardware, spec.name, section.precision, section.tp
    )
    if kv_tokens < spec.block_tokens:
        raise ConfigError(
            WHERE, f"{key}.model", section.model, f"leaves no memory for KV on {section.tp} x {section.hardware}"
        )
    for adapter in section.adapters:
        known = config.models.get(adapter)
        if known is None or known.base != section.model:
            raise ConfigError(
                WHERE, f"{key}.adapters", adapter, f"must be a [models.{adapter}] with base = {section.model!r}"
            )
    layout = KvLayout(
        block_tokens=spec.block_tokens,
        bytes_per_token=spec.kv_bytes_per_token,
        precision="bf16",
        revision=spec.name,
        tp=section.tp,
    )
    card = next((gpu for gpu in config.agent.gpus if gpu.index == first_gpu), None)
    return WorkerFacts(
        model=section.model,
        hardware=section.hardware,
        precision=section.precision,
        tp=section.tp,
        gpus=tuple(range(first_gpu, first_gpu + section.tp)),
        kv_tokens=kv_tokens,
        max_context=spec.max_context,
        max_batch=section.max_batch,
        chunk_tokens=section.chunk_tokens,
        layout=layout,
        engine=section.kind,
        capabilities=_capabilities(section, pool=config.kv.pool),
        adapters=section.adapters,
        step_ms=profile.weight_read_ms * section.time_scale,
        watts_per_gpu=hardware.tdp_w,
        pcie_gen=hardware.host_link.pcie_gen,
        root=section.root or (card.root if card else ""),
        numa=section.numa if section.numa >= 0 or card is None else card.numa,
    )


def _capabilities(section: EngineSection, *, pool: bool) -> tuple[str, ...]:
    embeds = (EMBEDDINGS,) if section.embeddings else ()
    if section.kind == "simulated":
        return (*_CAPABILITIES, *((OVERLAP,) if section.overlap else ()), *((PAGE,) if pool else ()), *embeds)
    return (handshake_of(section.kv_connector), *embeds) if section.kv_connector else embeds


def _simulated(
    config: Config, catalogue: Catalogue, section: EngineSection, key: str, facts: WorkerFacts
) -> SimulatedEngine:
    if section.max_batch > section.chunk_tokens:
        raise ConfigError(
            WHERE, f"{key}.max_batch", section.max_batch, f"must be at most chunk_tokens, {section.chunk_tokens}"
        )
    if section.data_parallel > 1:
        raise ConfigError(WHERE, f"{key}.data_parallel", section.data_parallel, "simulated engines have a count")
    for name in _SERVERS_ONLY:
        if value := getattr(section, name):
            raise ConfigError(WHERE, f"{key}.{name}", value, "a simulated engine is no server")
    return SimulatedEngine(
        _profile(config, catalogue, section),
        kv_tokens=facts.kv_tokens,
        block_tokens=facts.layout.block_tokens,
        chunk_tokens=section.chunk_tokens,
        max_batch=section.max_batch,
        max_context=facts.max_context,
        time_scale=section.time_scale,
    )
