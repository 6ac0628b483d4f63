"""Who holds what, exactly: the index that affinity is measured against, and prompts that know their blocks."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from sys import getsizeof
from typing import Any

from quartet_core.ladder import BLOCK_TOKENS, RUNGS, Sketch, covered_tokens


class Prompt(Sketch, frozen=True):
    """A sketch that also knows the prompt's whole blocks and how many tokens one has."""

    blocks: Any
    block_tokens: int
    output_tokens: int

    def holds_of(self, tokens: int) -> int:
        """The id of the block in which the first ``tokens`` tokens end."""
        block: int = self.blocks[(tokens - 1) // self.block_tokens]
        return block


class Workload:
    """Prompts by number, when they arrive (milliseconds, number), and which rungs end in which block."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.prompts: dict[int, Prompt] = {}
        self.rungs_in: dict[int, tuple[int, ...]] = {}

    def add(
        self,
        number: int,
        tokens: int,
        rungs: tuple[int, ...],
        blocks: Sequence[int],
        block_tokens: int,
        output_tokens: int,
    ) -> None:
        """Add a prompt. An equal block id must mean an equal prefix up to and including that block."""
        self.prompts[number] = Prompt(rungs, tokens, blocks, block_tokens, max(output_tokens, 1))
        rungs_in = self.rungs_in
        fresh = bisect_left(blocks, True, key=lambda block: block not in rungs_in)
        found: dict[int, list[int]] = {block: [] for block in blocks[fresh:]}
        for rung, depth in zip(rungs, RUNGS, strict=False):
            place = (depth * BLOCK_TOKENS - 1) // block_tokens
            if place >= fresh:
                found[blocks[place]].append(rung)
        for block, ending in found.items():
            rungs_in[block] = tuple(ending)

    @property
    def mean_output_tokens(self) -> float:
        """What a router has learned of the answers' lengths."""
        return sum(prompt.output_tokens for prompt in self.prompts.values()) / len(self.prompts)


class ExactIndex:
    """What the table is measured against: block → plane of the workers that hold it. Answers as the table does, but in
    tokens instead of rungs, to the block."""

    def __init__(self) -> None:
        self.planes: dict[int, int] = {}
        self._most_entries = 0

    @property
    def bytes(self) -> int:
        """What it takes when fullest, with the 64-bit hashes that keys would be, and planes as large as now."""
        planes = sum(map(getsizeof, self.planes.values())) / max(len(self.planes), 1)
        return int(self._most_entries * (getsizeof(1 << 63) + planes)) + getsizeof(
            dict.fromkeys(range(self._most_entries))
        )

    def turn(self, slot: int, on: Iterable[int], off: Iterable[int]) -> None:
        """A worker's blocks were cached or evicted."""
        planes, bit = self.planes, 1 << slot
        for block in on:
            planes[block] = planes.get(block, 0) | bit
        self._most_entries = max(self._most_entries, len(planes))
        for block in off:
            left = planes[block] ^ bit
            if left:
                planes[block] = left
            else:
                del planes[block]

    def deepest(self, sketch: Prompt, mask: int, **_as_the_table: int) -> list[tuple["Tokens", int]]:
        """The workers of ``mask`` by how many tokens of the prompt each holds, most first."""
        blocks, planes = sketch.blocks, self.planes
        groups = []
        beyond, left = len(blocks), mask
        while beyond and left:
            deep = bisect_left(blocks, True, 0, beyond, key=lambda block: not planes.get(block, 0) & left)
            if not deep:
                break
            found = planes[blocks[deep - 1]] & left
            groups.append((Tokens(min(deep * sketch.block_tokens, sketch.tokens)), found))
            left ^= found
            beyond = deep
        return groups


class Tokens(int):
    """A depth in tokens, where the table tells the number of a rung."""


class WatchedTable:
    """The router's table, with every answer compared with the exact index. ``options`` change how it is asked."""

    def __init__(self, table: Any, index: ExactIndex, options: dict[str, int]) -> None:
        self._table = table
        self._index = index
        self._options = options
        self.lookups = 0
        self.false_holders = 0

    def deepest(self, sketch: Prompt, mask: int, **options: int) -> list[tuple[int, int]]:
        """As the table says. A worker told deeper than it holds is a false holder."""
        groups: list[tuple[int, int]] = self._table.deepest(sketch, mask, **(options | self._options))
        self.lookups += 1
        for rung, plane in groups:
            true = self._index.planes.get(sketch.holds_of(covered_tokens(rung)), 0)
            self.false_holders += (plane & ~true).bit_count()
        return groups


class RoundedIndex:
    """The exact index, its depths rounded down to ``depths`` (tokens, rising): what another ladder would tell."""

    def __init__(self, index: ExactIndex, depths: Sequence[int]) -> None:
        self._index = index
        self._depths = depths

    def deepest(self, sketch: Prompt, mask: int, **_as_the_table: int) -> list[tuple[Tokens, int]]:
        """As the exact index, rounded."""
        rounded: dict[int, int] = {}
        for tokens, plane in self._index.deepest(sketch, mask):
            place = bisect_right(self._depths, tokens)
            if place:
                depth = self._depths[place - 1]
                rounded[depth] = rounded.get(depth, 0) | plane
        return [(Tokens(depth), plane) for depth, plane in rounded.items()]
