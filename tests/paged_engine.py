"""A wire engine with Quartet's connector in it: its real scheduler's side, socket and shared memory, on made-up KV.

The KV of a block is made from all tokens up to it, so that a block with another's KV is found: ``wrong`` counts them.
As a process: ``python tests/paged_engine.py SOCKET BLOCKS`` serves, and prints its URL.
"""

import asyncio
import hashlib
import sys
import time
import uuid
from pathlib import Path

from wire_engine import WireEngine

from quartet_connector import page
from quartet_connector.contents import Root, token_bytes
from quartet_connector.engine import Request
from quartet_connector.host import ArenaMemory, PageHost
from quartet_connector.layout import PageLayout
from quartet_connector.scheduling import PageScheduler

KV_BYTES = 512


def kv_of(salt, tokens):
    """What a block holds that ends a prompt's ``tokens``."""
    return hashlib.blake2b(salt.encode() + token_bytes(tokens), digest_size=64).digest() * (KV_BYTES // 64)


class Blocks:
    """As ``EngineBlocks``: numbered blocks, those that nobody uses in the order in which they are given out."""

    def __init__(self, total):
        self.total = total
        self.kv = [b""] * total
        self.refs = [0] * total
        self.names = [None] * total
        self.cached = {}
        self.free = list(range(total))

    def fill(self):
        idle = sum(1 for block in self.free if self.names[block] is not None)
        return len(self.free) - idle, idle

    def find(self, hash_):
        return self.cached.get(hash_)

    def users(self, block):
        return self.refs[block]

    def hold(self, blocks):
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
            self.refs[block] += 1

    def let_go(self, blocks):
        for block in blocks:
            self.refs[block] -= 1
            if not self.refs[block]:
                self.free.insert(0 if self.names[block] is None else len(self.free), block)

    def evict(self, block):
        self.hold([block])
        self._forget(block)
        self.let_go([block])

    def next_evicted(self, limit):
        return [self.names[block] for block in self.free[:limit] if self.names[block] is not None]

    def take(self):
        """An empty block, in use; what was in it is gone."""
        block = self.free.pop(0)
        self._forget(block)
        self.refs[block] = 1
        return block

    def name(self, block, hash_):
        if hash_ not in self.cached:
            self.names[block] = hash_
            self.cached[hash_] = block

    def _forget(self, block):
        if self.names[block] is not None:
            del self.cached[self.names[block]]
            self.names[block] = None


class PagedEngine(WireEngine):
    """A server with ``blocks`` of KV and an arena of ``slots``; ``dtype`` is a part of its layout."""

    def __init__(self, socket, *, blocks=64, slots=64, dtype="bf16", spill=True, **fields):
        super().__init__("vllm", events=False, **fields)
        self.socket, self.total, self.slots, self.dtype, self.spill = str(socket), blocks, slots, dtype, spill
        self.wrong = self.asked = 0
        self.fails = ""  # why copies cannot be made
        self.host = None

    async def start(self):
        await super().start()
        self.blocks = Blocks(self.total)
        self.layout = PageLayout(self.block, KV_BYTES, self.dtype, ("1",), 1, "fake 1", "m", "w")
        self.memory = ArenaMemory(self.slots * self.layout.slot_bytes)
        self.host = PageHost(self.socket, self.memory.fd)
        self.pages = PageScheduler(
            self.layout, self.slots, self.memory.view, self.blocks, uuid.uuid4().hex, lambda: time.monotonic() * 1e3,
            self.host.tell, ahead=64 if self.spill else 0,
        )  # fmt: skip
        self.host.start(self.pages)

    async def stop(self):
        await super().stop()
        if self.host is not None:
            self.host.close()

    async def read(self, tokens, body, rank=0):
        """As ``WireEngine.read``, in a step as vLLM's scheduler makes it."""
        salt, size, blocks = body.get("cache_salt", ""), self.block, self.blocks
        self.asked += 1
        self.steps += 1
        prefixes = [tokens[:end] for end in range(size, len(tokens) + 1, size)]
        names = [hashlib.sha256(salt.encode() + b"|" + token_bytes(prefix)).digest() for prefix in prefixes]
        request = Request(str(self.asked), Root(salt), tokens, names)
        most = (len(tokens) - 1) // size
        cached = []
        while len(cached) < most and (block := blocks.find(names[len(cached)])) is not None:
            cached.append(block)
        external = self.pages.matched(request, len(cached) * size)
        blocks.hold(cached)
        mine = cached + [blocks.take() for _ in names[len(cached) :]]
        self.pages.allocated(request, mine, external)
        computed = len(cached) + (0 if self.fails else external // size)
        for block, name in zip(mine, names, strict=True):
            blocks.name(block, name)
        self.step(idle=False, then=lambda: self.compute(salt, mine, prefixes, computed))
        self.wrong += sum(blocks.kv[block] != kv_of(salt, prefix) for block, prefix in zip(mine, prefixes, strict=True))
        self.pages.finished(request, len(tokens))
        blocks.let_go(list(reversed(mine)))
        self.step(idle=True)
        while self.pages.wanted:
            self.step(idle=True)
        self.queries += len(tokens)
        self.hits += len(cached) * size
        return len(cached) * size + external

    def compute(self, salt, mine, prefixes, first):
        for block, prefix in list(zip(mine, prefixes, strict=True))[first:]:
            self.blocks.kv[block] = kv_of(salt, prefix)

    def step(self, *, idle, then=lambda: None):
        copies = self.pages.step(idle=idle)
        begin = page.header_bytes(self.block)
        slot_bytes = self.layout.slot_bytes
        for block, slot in copies.loads if not self.fails else ():
            self.blocks.kv[block] = bytes(self.memory.view[slot * slot_bytes + begin : (slot + 1) * slot_bytes])
        then()
        for block, slot in copies.saves if not self.fails else ():
            self.memory.view[slot * slot_bytes + begin : (slot + 1) * slot_bytes] = self.blocks.kv[block]
        if copies.loads or copies.saves:
            self.pages.copied(copies.job, self.fails)


async def main():
    engine = PagedEngine(Path(sys.argv[1]), blocks=int(sys.argv[2]))
    async with engine:
        print(engine.url, flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main())
