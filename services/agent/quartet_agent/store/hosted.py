"""The stores of a node: one for each model and KV layout that its engines have, with equal parts of the memory."""

from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from quartet_agent.store.adapter import StoreAdapter
from quartet_agent.store.memory import StoreMemory
from quartet_agent.worker import HostedWorker, WorkerFacts
from quartet_bus.catalogue import WHERE
from quartet_bus.config.check import ConfigError
from quartet_bus.config.schema import KvSection
from quartet_bus.messages import Role
from quartet_core.heartbeat import MAX_WORKERS
from quartet_core.pairing import EXPORT, IMPORT, PAGE, RESERVE


def host_stores(
    node: str, workers: Sequence[HostedWorker], config: KvSection, loop: AbstractEventLoop,
    now_ms: Callable[[], float], random: Random,
) -> list[HostedWorker]:  # fmt: skip
    """The stores beside ``workers``, their ordinals behind theirs; none without ``[kv] store_bytes``.

    Only engines that can be paged get one. Raises ``ConfigError`` for so few bytes that a store would not have a block,
    or for more workers and stores than a node may have.
    """
    beside: dict[tuple[object, ...], WorkerFacts] = {}
    for worker in workers:
        facts = worker.facts
        if worker.adapter.pages is not None and PAGE in facts.capabilities:
            beside.setdefault((facts.model, facts.precision, facts.engine, facts.layout), facts)
    if not config.store_bytes or not beside:
        return []
    if len(workers) + len(beside) > MAX_WORKERS:
        allowed = f"a node has at most {MAX_WORKERS} workers and stores"
        raise ConfigError(WHERE, "kv.store_bytes", config.store_bytes, allowed)
    share = config.store_bytes // len(beside)
    stores: list[HostedWorker] = []
    for facts in beside.values():
        block_bytes = facts.layout.block_tokens * facts.layout.bytes_per_token
        total = share // block_bytes
        if not total:
            least = f"must be at least {block_bytes * len(beside)}: a block of {facts.model} is {block_bytes} bytes"
            raise ConfigError(WHERE, "kv.store_bytes", config.store_bytes, least)
        memory = StoreMemory(total, facts.layout.block_tokens, now_ms, stands_in=facts.engine == "simulated")
        own = replace(
            facts, gpus=(), kv_tokens=total * facts.layout.block_tokens, capabilities=(EXPORT, IMPORT, RESERVE, PAGE),
            adapters=(), step_ms=0.0, watts_per_gpu=0.0, root="", numa=-1,
        )  # fmt: skip
        ordinal = len(workers) + len(stores)
        adapter = StoreAdapter(memory, loop)
        stores.append(HostedWorker(node, ordinal, random.randrange(1, 1 << 16), own, adapter, Role.STORE))
    return stores
