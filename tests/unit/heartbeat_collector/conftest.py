"""A small fleet made by hand: inventories, words and beats as agents would send them."""

from collections.abc import Callable

import numpy as np
import pytest

from quartet_bus.messages import KvLayout, NodeInventory, WorkerInfo
from quartet_core import heartbeat, word
from quartet_core.heartbeat import Beat, BeatWorker, node_hash
from quartet_heartbeat_collector.batch import ROW_WORDS, BeatBatch, decode


def _worker(node: str, ordinal: int, incarnation: int) -> WorkerInfo:
    return WorkerInfo(
        id=f"{node}-{ordinal}",
        ordinal=ordinal,
        incarnation=incarnation,
        hardware="L40S_PCIE",
        model="llama-8b",
        precision="fp8",
        tp=1,
        gpus=(ordinal,),
        kv_tokens=100_000,
        max_context=32_768,
        max_batch=256,
        chunk_tokens=2048,
        layout=KvLayout(16, 65_536, "fp8"),
        engine="simulated",
        step_ms=10.0,
    )


@pytest.fixture(scope="session")
def inventory() -> Callable[..., NodeInventory]:
    def make(node: str, incarnation: int = 1, *, epoch: int = 0, workers=((0, 1), (1, 1))) -> NodeInventory:
        """``workers`` are (ordinal, incarnation)."""
        infos = tuple(_worker(node, ordinal, of_engine) for ordinal, of_engine in workers)
        return NodeInventory(node, incarnation, epoch, infos)

    return make


@pytest.fixture(scope="session")
def state_word() -> Callable[..., int]:
    def make(*, free_kv=15, queue=0, batch=0, drift=0, accepting=True, steps=0, epoch=0) -> int:
        return word.pack(
            free_kv=free_kv, queue=queue, batch=batch, drift=drift, accepting=accepting, steps=steps, epoch=epoch
        )

    return make


@pytest.fixture(scope="session")
def beat() -> Callable[..., Beat]:
    def make(node: str, sequence: int, *words: int, incarnation: int = 1, engine: int = 1) -> Beat:
        """A beat of workers 0, 1, … with these words, all of engine incarnation ``engine``."""
        workers = tuple(BeatWorker(ordinal, engine, word) for ordinal, word in enumerate(words))
        return Beat(node_hash(node), incarnation, sequence, sequence * 500_000 % (1 << 64), workers)

    return make


@pytest.fixture(scope="session")
def received() -> Callable[..., BeatBatch]:
    """Puts datagrams into a receiver's rows, which still hold what was there before, and decodes them."""
    rows = np.full((64, ROW_WORDS), 0xA5A5A5A5A5A5A5A5, dtype="<u8")

    def make(*datagrams: bytes) -> BeatBatch:
        lengths = np.zeros(len(datagrams), dtype=np.uint32)
        for index, datagram in enumerate(datagrams):
            fits = datagram[: ROW_WORDS * 8]
            rows[index].data.cast("B")[: len(fits)] = fits
            lengths[index] = len(fits)
        return decode(rows, lengths)

    return make


@pytest.fixture(scope="session")
def datagram() -> Callable[..., bytes]:
    return heartbeat.encode
