"""What the engine's own cache probably holds, by content: blocks of requests that have ended, and when they were used.

An engine names its blocks by hashes of its own. To find a block again for somebody who knows it by content, both names
are kept, with its tokens, for as many blocks as the engine has and some more. Whether a block is still cached, only
the engine knows: what is told here is asked of it before it is believed. Pure.
"""

from collections.abc import Iterator, Sequence
from heapq import nsmallest

from quartet_connector.contents import Root

_MOST_RETURNS = 1024


class Block:
    """One block: its content, the engine's ``hash`` of it, and its use."""

    __slots__ = ("children", "hash", "id", "parent", "root", "tokens", "used_ms", "uses")

    def __init__(self, id_: int, parent: "Block | None", hash_: bytes, tokens: bytes, root: Root | None) -> None:
        self.id = id_
        self.parent = parent
        self.hash = hash_
        self.tokens = tokens
        self.root = root
        self.children = 0
        self.used_ms = 0.0
        self.uses = 0


class Known:
    """At most ``most`` blocks; of chains' ends those go first that were unused longest."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: dict[int, Block] = {}
        self._by_hash: dict[bytes, Block] = {}
        self._ends: dict[int, Block] = {}
        self._returns_ms: list[float] = []

    def __len__(self) -> int:
        return len(self._blocks)

    def see(
        self, root: Root, ids: Sequence[int], tokens: Sequence[bytes], hashes: Sequence[bytes], now_ms: float
    ) -> None:
        """A request has ended whose full blocks were these."""
        parent: Block | None = None
        deepest: Block | None = None
        for id_, data, hash_ in zip(ids, tokens, hashes, strict=False):
            block = self._blocks.get(id_)
            if block is not None and block.tokens == data and block.parent is parent:
                deepest = block
                block.uses += 1
            else:
                if block is not None:
                    return  # another content has this id: what stands behind it cannot be told apart
                block = self._add(id_, parent, hash_, data, root if parent is None else None)
            if block.hash != hash_:
                self._rename(block, hash_)
            parent = block
        if deepest is not None and len(self._returns_ms) < _MOST_RETURNS:
            self._returns_ms.append(now_ms - deepest.used_ms)
        while parent is not None:
            parent.used_ms = now_ms
            parent = parent.parent
        self._shrink()

    def get(self, id_: int) -> Block | None:
        """The block of this content."""
        return self._blocks.get(id_)

    def by_hash(self, hash_: bytes) -> Block | None:
        """The block that the engine calls so."""
        return self._by_hash.get(hash_)

    def chain(self, id_: int) -> list[Block]:
        """A block and all before it, from the first on; [] when it is not known."""
        found: list[Block] = []
        block = self._blocks.get(id_)
        while block is not None:
            found.append(block)
            block = block.parent
        found.reverse()
        return found

    def coldest(self, limit: int) -> Iterator[Block]:
        """Chains' last blocks, the longest unused first."""
        yield from nsmallest(limit, self._ends.values(), key=lambda block: block.used_ms)

    def forget(self, block: Block) -> None:
        """It is not cached any more. One with others behind it stays known."""
        if self._blocks.get(block.id) is block and not block.children:
            self._remove(block)

    def drain_returns(self) -> list[float]:
        """For how long prefixes had been unused that were used since the last call, in ms."""
        told, self._returns_ms = self._returns_ms, []
        return told

    def clear(self) -> None:
        """The engine dropped its whole cache."""
        self._blocks.clear()
        self._by_hash.clear()
        self._ends.clear()

    # Inside

    def _add(self, id_: int, parent: Block | None, hash_: bytes, tokens: bytes, root: Root | None) -> Block:
        block = Block(id_, parent, hash_, tokens, root)
        if parent is not None:
            parent.children += 1
            self._ends.pop(parent.id, None)
        self._blocks[id_] = self._by_hash[hash_] = self._ends[id_] = block
        return block

    def _rename(self, block: Block, hash_: bytes) -> None:
        if self._by_hash.get(block.hash) is block:
            del self._by_hash[block.hash]
        block.hash = hash_
        self._by_hash[hash_] = block

    def _remove(self, block: Block) -> None:
        del self._blocks[block.id]
        del self._ends[block.id]
        if self._by_hash.get(block.hash) is block:
            del self._by_hash[block.hash]
        if block.parent is not None:
            block.parent.children -= 1
            if not block.parent.children:
                self._ends[block.parent.id] = block.parent

    def _shrink(self) -> None:
        while len(self._blocks) > self._most:
            # a tenth at a time, since looking for the oldest ends costs all of them
            for end in list(self.coldest(max(1, len(self._ends) // 10))):
                block: Block | None = end
                while block is not None and not block.children and len(self._blocks) > self._most:
                    parent = block.parent
                    self._remove(block)
                    block = parent
