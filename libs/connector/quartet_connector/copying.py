"""The worker's side of pages: bytes between an engine's KV caches and the arena, copied when a call returns."""

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import group_kernel_blocks

from quartet_connector import page
from quartet_connector.identity import NoPages, pages_of
from quartet_connector.layout import PageLayout


class ArenaCopier:
    """Copies blocks of ``kv_caches`` to slots and back, a layer at a time, whatever device they are on."""

    def __init__(self, layout: PageLayout, kv_caches: dict[str, torch.Tensor], kv_cache: Any) -> None:
        self._layout = layout
        self._why_not = ""
        self._layers: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []
        self._slots: torch.Tensor | None = None
        begin = page.header_bytes(layout.block_tokens)
        for name, page_bytes in pages_of(kv_cache).items():
            if name not in kv_caches:
                self._why_not = f"layer {name} has no KV cache"
                return
            blocks = _bytes_of(kv_caches[name], kv_cache.num_blocks)
            if blocks is None or blocks.shape[1] != page_bytes:
                self._why_not = f"the KV cache of {name} is not {kv_cache.num_blocks} pieces of {page_bytes} bytes"
                return
            self._layers.append(blocks)
            self._places.append((begin, begin + page_bytes))
            begin += page_bytes
        if begin != layout.slot_bytes:
            self._why_not = f"the layers have {begin} bytes with a header, a slot {layout.slot_bytes}"

    def open(self, path: str, size_bytes: int) -> None:
        """Have the arena's memory here; once. Raises ``NoPages`` or ``OSError`` when that cannot be."""
        if self._why_not:
            raise NoPages(self._why_not)
        if self._slots is None:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(fd, size_bytes)
            finally:
                os.close(fd)
            self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(-1, self._layout.slot_bytes)

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block, slot) from the caches to the arena."""
        blocks, slots = _indices(pairs)
        for layer, (begin, end) in zip(self._layers, self._places, strict=True):
            self._arena[:, begin:end].index_copy_(0, slots, layer.index_select(0, blocks.to(layer.device)).cpu())

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy (block, slot) from the arena to the caches."""
        blocks, slots = _indices(pairs)
        for layer, (begin, end) in zip(self._layers, self._places, strict=True):
            found = self._arena[:, begin:end].index_select(0, slots)
            layer.index_copy_(0, blocks.to(layer.device), found.to(layer.device))

    @property
    def _arena(self) -> torch.Tensor:
        if self._slots is None:
            raise NoPages("the arena is not open")
        return self._slots


def _bytes_of(cache: torch.Tensor, num_blocks: int) -> torch.Tensor | None:
    """A layer's cache as a row of bytes for each block; None when a block is not in one piece."""
    blocks = group_kernel_blocks(cache, num_blocks)
    size = blocks[0].numel()
    # In whatever order a block's own dimensions lie: it must be dense, and its parts are not looked at.
    if blocks.stride(0) < size or not _dense(blocks[0]):
        return None
    flat = torch.as_strided(blocks, (num_blocks, size), (blocks.stride(0), 1), blocks.storage_offset())
    return flat.view(torch.uint8)


def _dense(block: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _indices(pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, slots = zip(*pairs, strict=True)
    return torch.tensor(blocks, dtype=torch.long), torch.tensor(slots, dtype=torch.long)
