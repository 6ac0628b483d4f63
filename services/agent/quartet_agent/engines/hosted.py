"""From ``[agent]``'s engines to this node's workers: what each is, from the catalogue, and what runs behind it."""

from asyncio import AbstractEventLoop
from collections.abc import Callable
from random import Random

from quartet_agent.engines.simulated import SimulatedAdapter
from quartet_agent.worker import HostedWorker, WorkerFacts
from quartet_bus.catalogue import WHERE
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import Config, EngineSection
from quartet_bus.messages import KvLayout, Role
from quartet_core.catalogue import Catalogue
from quartet_core.filters import EMBEDDINGS
from quartet_core.heartbeat import MAX_WORKERS
from quartet_sim.engine import SimulatedEngine

_CAPABILITIES = ("export", "import", "reserve")


def host_workers(
    config: Config,
    catalogue: Catalogue,
    node: str,
    random: Random,
    loop: AbstractEventLoop,
    now_ms: Callable[[], float],
    wall_s: Callable[[], float],
) -> list[HostedWorker]:
    """The workers of ``[agent]``, ordinals in the order of the file; ``catalogue`` was loaded for this ``config``.

    Raises ``ConfigError``, naming the engine's key, for a model that leaves no memory for KV, or too many workers.
    """
    workers: list[HostedWorker] = []
    for index, section in enumerate(config.agent.engines):
        key = f"agent.engines[{index}]"
        for replica in range(section.count):
            if len(workers) == MAX_WORKERS:
                raise ConfigError(WHERE, f"{key}.count", section.count, f"a node has at most {MAX_WORKERS} workers")
            first_gpu = section.first_gpu + replica * section.tp
            facts, engine = _simulated(config, catalogue, section, key, first_gpu)
            workers.append(
                HostedWorker(
                    node,
                    len(workers),
                    random.randrange(1, 1 << 16),
                    facts,
                    SimulatedAdapter(engine, loop, now_ms, wall_s),
                    Role(section.role),
                )
            )
    return workers


def _simulated(
    config: Config, catalogue: Catalogue, section: EngineSection, key: str, first_gpu: int
) -> tuple[WorkerFacts, SimulatedEngine]:
    spec = catalogue.model(config.models[section.model].spec)
    hardware = catalogue.hardware_class(section.hardware)
    profile = catalogue.profile(section.hardware, spec.name, section.precision, section.tp)
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
    if section.max_batch > section.chunk_tokens:
        raise ConfigError(
            WHERE, f"{key}.max_batch", section.max_batch, f"must be at most chunk_tokens, {section.chunk_tokens}"
        )
    layout = KvLayout(
        block_tokens=spec.block_tokens,
        bytes_per_token=spec.kv_bytes_per_token,
        precision="bf16",
        revision=spec.name,
        tp=section.tp,
    )
    card = next((gpu for gpu in config.agent.gpus if gpu.index == first_gpu), None)
    facts = WorkerFacts(
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
        capabilities=(*_CAPABILITIES, EMBEDDINGS) if section.embeddings else _CAPABILITIES,
        adapters=section.adapters,
        step_ms=profile.weight_read_ms * section.time_scale,
        watts_per_gpu=hardware.tdp_w,
        pcie_gen=hardware.host_link.pcie_gen,
        root=section.root or (card.root if card else ""),
        numa=section.numa if section.numa >= 0 or card is None else card.numa,
    )
    engine = SimulatedEngine(
        profile,
        kv_tokens=kv_tokens,
        block_tokens=spec.block_tokens,
        chunk_tokens=section.chunk_tokens,
        max_batch=section.max_batch,
        max_context=spec.max_context,
        time_scale=section.time_scale,
    )
    return facts, engine
