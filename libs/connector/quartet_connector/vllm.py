"""The connector that vLLM loads: ``--kv-transfer-config`` with ``kv_connector_module_path = "quartet_connector.vllm"``.

What vLLM's interface allows, and what not, is in docs/engines.md. Written against vLLM 0.32; whatever is not as it is
there turns pages off, with a reason in the log and for the agent, and the engine goes on without.
"""

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from quartet_connector.contents import Root
from quartet_connector.copying import ArenaCopier
from quartet_connector.engine import Copies, Request
from quartet_connector.host import ArenaMemory, PageHost
from quartet_connector.identity import NoPages, layout_of
from quartet_connector.layout import PageLayout
from quartet_connector.scheduling import PageScheduler

log = logging.getLogger("vllm.quartet_connector")

DEFAULT_ARENA_BYTES = 4 << 30
_MOST_AHEAD = 1024


class PageCopies(KVConnectorMetadata):
    """What the workers copy in this step, and where the arena is."""

    def __init__(self, path: str, size_bytes: int, copies: Copies) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.copies = copies


class PagesCopied(KVConnectorWorkerMetadata):
    """Steps whose copies a worker made, with why not where it could not."""

    def __init__(self, jobs: dict[int, str]) -> None:
        self.jobs = jobs

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """As the base has it: a step went wrong if it did anywhere."""
        assert isinstance(other, PagesCopied)
        return PagesCopied({job: self.jobs.get(job) or other.jobs.get(job, "") for job in {*self.jobs, *other.jobs}})


class QuartetConnector(KVConnectorBase_V1, SupportsHMA):
    """Pages of this engine, for the Quartet agent beside it. ``kv_connector_extra_config``:

    ``socket``: path of the Unix socket where the agent connects; ``arena_bytes``: host memory for pages;
    ``spill``: whether what the engine evicts is saved before (default true).
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._pages: PageScheduler | None = None
        self._host: PageHost | None = None
        self._memory: ArenaMemory | None = None
        self._copier: ArenaCopier | None = None
        self._done: dict[int, str] = {}
        self._bad_blocks: set[int] = set()
        self._layout: PageLayout | None = None
        try:
            self._layout = layout_of(vllm_config, kv_cache_config)
        except NoPages as error:
            log.error("Quartet keeps no pages of this engine: %s", error)

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """As the base has it: the engine's cache can be looked into from now on."""
        if self._layout is None:
            return
        extra = self._kv_transfer_config.kv_connector_extra_config
        layout = self._layout
        slots = int(extra.get("arena_bytes", DEFAULT_ARENA_BYTES)) // layout.slot_bytes
        path = str(extra.get("socket", ""))
        try:
            if not path or slots < 1:
                raise NoPages(f"socket {path!r}, and an arena of {slots} pages of {layout.slot_bytes} bytes")
            memory = ArenaMemory(slots * layout.slot_bytes)
            host = PageHost(path, memory.fd)
            pages = PageScheduler(
                layout, slots, memory.view, VllmBlocks(gpu_block_pool), uuid.uuid4().hex,
                lambda: time.monotonic() * 1e3, host.tell, ahead=self._ahead() if extra.get("spill", True) else 0,
            )  # fmt: skip
            host.start(pages)
        except (OSError, NoPages) as error:
            log.error("Quartet keeps no pages of this engine: %s", error)
            return
        self._memory, self._host, self._pages = memory, host, pages
        log.info("Quartet pages: %d slots of %d bytes, agent at %s", slots, layout.slot_bytes, path)

    def _ahead(self) -> int:
        """Blocks to look ahead at: what two steps can take."""
        assert self._layout is not None
        most = int(self._vllm_config.scheduler_config.max_num_batched_tokens)
        return min(_MOST_AHEAD, 2 * most // self._layout.block_tokens + 1)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """As the base has it. Pages are loaded within the step, so never asynchronously."""
        if self._pages is None:
            return 0, False
        return self._pages.matched(_request(request), num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As the base has it."""
        if self._pages is not None:
            self._pages.allocated(_request(request), blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """As the base has it: the step is scheduled."""
        if self._pages is None or self._memory is None:
            return PageCopies("", 0, Copies(0, [], []))
        copies = self._pages.step(idle=not scheduler_output.total_num_scheduled_tokens)
        return PageCopies(self._memory.path, self._memory.size_bytes, copies)

    def update_connector_output(self, connector_output: Any) -> None:
        """As the base has it: the workers are through with a step."""
        copied = connector_output.kv_connector_worker_meta
        if self._pages is not None and isinstance(copied, PagesCopied):
            for job, failed in copied.jobs.items():
                self._pages.copied(job, failed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As the base has it. Its blocks can be freed: whatever is wanted of them is read while they are cached."""
        if self._pages is not None:
            self._pages.finished(_request(request), min(request.num_computed_tokens, request.num_tokens - 1))
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished``."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """As the base has it: weights were changed in place, or somebody wants an empty cache."""
        return self._pages.reset() if self._pages is not None else None

    def has_pending_push_work(self) -> bool:
        """As the base has it: the agent asked for what takes a step. (vLLM looks only while it steps.)"""
        return self._pages is not None and self._pages.wanted

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As the base has it."""
        if self._layout is not None:
            self._copier = ArenaCopier(self._layout, kv_caches, self._kv_cache_config)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As the base has it: loads of this step."""
        meta = self._connector_metadata
        if isinstance(meta, PageCopies) and meta.copies.loads:
            failed = self._copy(meta, meta.copies.loads, load=True)
            if failed:
                self._bad_blocks.update(block for block, _ in meta.copies.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """As the base has it: nothing is left to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """As the base has it: pages are saved whole, after the pass."""

    def wait_for_save(self) -> None:
        """As the base has it: saves of this step, and the word that it is done."""
        meta = self._connector_metadata
        if not isinstance(meta, PageCopies) or not (meta.copies.loads or meta.copies.saves):
            return
        self._done.setdefault(meta.copies.job, "")
        if meta.copies.saves:
            self._copy(meta, meta.copies.saves, load=False)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """As the base has it."""
        if not self._done:
            return None
        done, self._done = self._done, {}
        return PagesCopied(done)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As the base has it."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def shutdown(self) -> None:
        """As the base has it."""
        if self._host is not None:
            self._host.close()

    def _copy(self, meta: PageCopies, pairs: Sequence[tuple[int, int]], *, load: bool) -> str:
        """Copy, and return why that was not possible, "" when it was."""
        failed = ""
        try:
            if self._copier is None:
                raise NoPages("the worker has no KV caches")
            self._copier.open(meta.path, meta.size_bytes)
            if load:
                self._copier.load(pairs)
            else:
                self._copier.save(pairs)
        except (NoPages, OSError, RuntimeError) as error:
            failed = f"{type(error).__name__}: {error}"
            log.error("Quartet pages: %s", failed)
            self._done[meta.copies.job] = failed
        return failed


class VllmBlocks:
    """As ``EngineBlocks``, of vLLM's block pool; of its first and only KV group."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @property
    def total(self) -> int:
        """As ``EngineBlocks.total``: the pool's null block is none."""
        return int(self._pool.num_gpu_blocks) - 1

    def fill(self) -> tuple[int, int]:
        """As ``EngineBlocks.fill``. Referenced blocks are taken for cached ones as far as there are such: nearly all
        are, and the pool does not count the others."""
        free = int(self._pool.get_num_free_blocks())
        cached = _entries(self._pool.cached_block_hash_to_block)
        idle = min(free, max(0, cached - (self.total - free)))
        return free - idle, idle

    def find(self, hash_: bytes) -> int | None:
        """As ``EngineBlocks.find``."""
        found = self._pool.get_cached_block(hash_, [0])
        return int(found[0].block_id) if found else None

    def users(self, block: int) -> int:
        """As ``EngineBlocks.users``."""
        return int(self._pool.blocks[block].ref_cnt)

    def hold(self, blocks: Sequence[int]) -> None:
        """As ``EngineBlocks.hold``."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def let_go(self, blocks: Sequence[int]) -> None:
        """As ``EngineBlocks.let_go``."""
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])

    def evict(self, block: int) -> None:
        """As ``EngineBlocks.evict``. Held meanwhile: a block goes to the front of the queue when it is let go empty."""
        self.hold([block])
        self._pool.evict_blocks({block})
        self.let_go([block])

    def next_evicted(self, limit: int) -> list[bytes]:
        """As ``EngineBlocks.next_evicted``."""
        return [_hash_of(block.block_hash) for block in islice(self._queue(), limit) if block.block_hash is not None]

    def _queue(self) -> Iterable[Any]:
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            yield block
            block = block.next_free_block


def _entries(blocks: Any) -> int:
    """How many names the pool's map has: nearly as many as blocks are cached. It tells that in no other way."""
    return len(blocks._cache)


def _hash_of(key: bytes) -> bytes:
    """A block's hash within a key of the pool, which ends with the KV group's number."""
    return bytes(key[:-4])


def _request(request: Any) -> Request:
    """A request of vLLM's, as pages see it."""
    root: Root | None = None
    if not request.mm_features and request.prompt_embeds is None:
        lora = request.lora_request
        adapter = f"{lora.lora_name}\0{lora.lora_path}" if lora is not None else ""
        root = Root(request.cache_salt or "", adapter)
    return Request(request.request_id, root, request.all_token_ids, request.block_hashes)
