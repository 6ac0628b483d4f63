"""A mirror of an engine's prefix cache, kept by its KV events, that tells which rungs of the ladder the engine holds.

An engine names blocks by hashes of its own; routers ask by rungs. So each block's tokens climb the ladder behind those
of the block before it, and a rung is held as long as every block up to it is cached: a hole in the middle hides what
is behind it until it is filled again, because engines reuse whole prefixes only.

Where a block is larger than the ladder's 64 tokens, rungs within it are held with it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from quartet_core.kv_events import BlockHash, Cleared, KvEvent, Removed, Stored
from quartet_core.ladder import Ladder, token_bytes

MAX_BLOCKS: Final = 2_000_000
"""Blocks that a mirror keeps at most; an engine with more is not what its events say, and the mirror begins anew."""

_MAX_LADDERS: Final = 4096
"""Ladders kept for blocks where prompts parted, some 0.7 kB each; any other is climbed again when it is needed."""

_NO_PREFIX: Final = ("sliding", "mamba", "cross", "chunked", "encoder")
"""Words in the kinds of KV groups that hold no whole prefix. A mirror follows the first group that does."""

SaltOf = Callable[[str, str], bytes | None]
"""(cache salt, adapter) of an engine's blocks → the ladder's salt; None when it is nobody's that a router asks for."""


class _Block:
    """One block of the engine's cache. ``held`` counts its copies by medium; none at all is a hole.

    vLLM does not merge equal blocks that were computed side by side: each is said to be stored, and each removed.

    ``rooted``: it and all blocks before it are held. ``rungs`` are those that it completes.
    """

    __slots__ = ("children", "data", "held", "key", "ladder", "parent", "root_salt", "rooted", "rungs")

    def __init__(self, key: BlockHash, parent: "_Block | None", data: bytes, root_salt: bytes) -> None:
        self.key = key
        self.parent = parent
        self.data = data
        self.root_salt = root_salt
        self.held: dict[str, int] = {}
        self.children: list[_Block] = []
        self.rooted = False
        self.rungs: tuple[int, ...] = ()
        self.ladder: Ladder | None = None


class BlockMirror:
    """The blocks of one publisher. What became held and what no longer is, is told by ``drain``.

    ``salt_of`` says which salt the router seeds its rungs with, for blocks that an engine keeps apart.
    """

    def __init__(self, salt_of: SaltOf, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._salt_of = salt_of
        self._max_blocks = max_blocks
        self._blocks: dict[BlockHash, _Block] = {}
        self._ladders = 0
        self._group: int | None = None  # the KV group that is followed
        self._changed: dict[int, int] = {}  # rung → +n became held, -n not any more, since the last drain
        self.held_blocks = 0
        """Blocks that the engine has cached, as far as is known."""
        self.orphans = 0
        """Blocks stored behind one that is not known: their prompts cannot be told."""
        self.unattributed = 0
        """Blocks kept apart by something that no request of a router's has, for example an image or a foreign salt."""
        self.overflows = 0
        """Times that there were more blocks than an engine can have."""
        self.block_tokens = 0
        """Tokens of a block, 0 before the first."""

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: KvEvent) -> None:
        """Take one event, in the order in which the engine said them."""
        match event:
            case Stored():
                self._store(event)
            case Removed():
                if event.group == self._group:
                    for key in event.hashes:
                        self._remove(key, event.medium)
            case Cleared():
                self.clear()

    def clear(self) -> None:
        """Nothing is cached any more."""
        for block in self._blocks.values():
            if block.rooted:
                self._count(block.rungs, -1)
        self._blocks.clear()
        self._ladders = 0
        self.held_blocks = 0

    def drain(self) -> tuple[list[int], list[int]]:
        """Rung hashes that became held, and that no longer are, since the last call; each as often as by a block."""
        became = [rung for rung, by in self._changed.items() for _ in range(by)]
        ended = [rung for rung, by in self._changed.items() for _ in range(-by)]
        self._changed.clear()
        return became, ended

    def held_tokens(self, rungs: Sequence[int]) -> int:
        """How many of ``rungs``, shallowest first, are held without a hole. Walks all blocks: for diagnosis only."""
        held = {rung for block in self._blocks.values() if block.rooted for rung in block.rungs}
        for count, rung in enumerate(rungs):
            if rung not in held:
                return count
        return len(rungs)

    # Inside

    def _store(self, event: Stored) -> None:
        if self._group is None and not any(word in event.attention for word in _NO_PREFIX):
            self._group = event.group
        if event.group != self._group:
            return
        self.block_tokens = event.block_tokens
        parent: _Block | None = None
        root_salt = b""
        if event.parent is not None:
            parent = self._blocks.get(event.parent)
            if parent is None:
                self.orphans += len(event.hashes)
                return
            root_salt = parent.root_salt
        try:
            data = bytes(token_bytes(event.token_ids))
        except ValueError:
            self.unattributed += len(event.hashes)
            return
        size = len(data) // len(event.hashes) if event.hashes else 0
        for index, key in enumerate(event.hashes):
            salt = self._salt(event, index, first=parent is None)
            if salt is None:
                self.unattributed += len(event.hashes) - index
                return
            if parent is None:
                root_salt = salt
            block = self._blocks.get(key)
            if block is None:
                if len(self._blocks) >= self._max_blocks:
                    self.overflows += 1
                    self.clear()
                    return
                block = self._grow(key, parent, data[index * size : (index + 1) * size], root_salt)
            self._hold(block, event.medium)
            parent = block

    def _salt(self, event: Stored, index: int, *, first: bool) -> bytes | None:
        """The salt that the block's prompt has in the ladder: only a prompt's first block names it."""
        keys = [key for key in event.keys[index] or () if key != event.adapter or not event.adapter]
        if not first:
            return None if keys else b""
        salt = event.salt
        if keys and not salt and len(keys) == 1 and isinstance(keys[0], str):
            salt, keys = keys[0], []
        elif salt in keys:
            keys.remove(salt)
        return None if keys else self._salt_of(salt, event.adapter)

    def _grow(self, key: BlockHash, parent: _Block | None, data: bytes, root_salt: bytes) -> _Block:
        block = _Block(key, parent, data, root_salt)
        ladder = self._ladder_behind(parent, root_salt)
        block.rungs = tuple(rung for _, rung in ladder.extend(data))
        block.ladder = ladder
        self._ladders += 1
        self._blocks[key] = block
        if parent is not None:
            parent.children.append(block)
        return block

    def _ladder_behind(self, parent: _Block | None, salt: bytes) -> Ladder:
        """A ladder that has climbed all blocks up to ``parent``, for a new child to go on with."""
        if parent is None:
            return Ladder(salt=salt)
        if parent.ladder is not None:
            if parent.children:
                return parent.ladder.fork()
            ladder, parent.ladder = parent.ladder, None  # the open end moves on
            self._ladders -= 1
            return ladder
        behind: list[_Block] = []
        above: _Block | None = parent
        while above is not None and above.ladder is None:
            behind.append(above)
            above = above.parent
        ladder = above.ladder.fork() if above is not None and above.ladder is not None else Ladder(salt=salt)
        for block in reversed(behind):
            ladder.extend(block.data)
        if self._ladders < _MAX_LADDERS:  # prompts part here, and will again
            parent.ladder = ladder.fork()
            self._ladders += 1
        return ladder

    def _hold(self, block: _Block, medium: str) -> None:
        if not block.held:
            self.held_blocks += 1
        block.held[medium] = block.held.get(medium, 0) + 1
        if not block.rooted and (block.parent is None or block.parent.rooted):
            self._root(block)

    def _remove(self, key: BlockHash, medium: str) -> None:
        block = self._blocks.get(key)
        if block is None or medium not in block.held:
            return
        block.held[medium] -= 1
        if block.held[medium]:
            return
        del block.held[medium]
        if block.held:
            return
        self.held_blocks -= 1
        if block.rooted:
            self._uproot(block)
        self._prune(block)

    def _root(self, block: _Block) -> None:
        """The hole before it, if there was one, is filled: it and what is behind it are held."""
        open_blocks = [block]
        while open_blocks:
            found = open_blocks.pop()
            found.rooted = True
            self._count(found.rungs, 1)
            open_blocks.extend(child for child in found.children if child.held)

    def _uproot(self, block: _Block) -> None:
        open_blocks = [block]
        while open_blocks:
            found = open_blocks.pop()
            found.rooted = False
            self._count(found.rungs, -1)
            open_blocks.extend(child for child in found.children if child.rooted)

    def _prune(self, block: _Block) -> None:
        """Forget holes that nothing is behind."""
        found: _Block | None = block
        while found is not None and not found.held and not found.children:
            del self._blocks[found.key]
            if found.ladder is not None:
                self._ladders -= 1
            parent = found.parent
            if parent is not None:
                parent.children.remove(found)
            found = parent

    def _count(self, rungs: tuple[int, ...], by: int) -> None:
        changed = self._changed
        for rung in rungs:
            total = changed.get(rung, 0) + by
            if total:
                changed[rung] = total
            else:
                changed.pop(rung, None)
